"""What ``brace compare`` does: warm starts, cells, results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from brace_rl.compare.folder import CompareFolder, check_command
from brace_rl.compare.jobs import Job, Process, run_side_by_side, start_process, stopped_by_signals
from brace_rl.compare.plan import Cell, Plan, Start
from brace_rl.compare.progress import CompareProgress
from brace_rl.errors import BraceError
from brace_rl.files import write_json_atomic, write_text_atomic

Launch = Callable[[Sequence[str], Path, int], Process]
"""Starts a command with a log and an inherited descriptor."""

PIPED_WIDTH = 150
"""Columns of text that goes to a file or a pipe, where none are known."""


def launch(command: Sequence[str], log: Path, inherited: int) -> Process:
    """The :data:`Launch` that starts real processes."""
    return start_process(command, log, inherited=inherited)


def run_cells(
    plan: Plan,
    folder: CompareFolder,
    *,
    workers: int,
    retry: bool,
    launch: Launch = launch,
    console: Console | None = None,
) -> None:
    """Run what is not done yet: first the warm starts, then the cells.

    Args:
        retry: run failed cells again.

    Raises:
        BraceError: the folder is in use or cannot be written, or a warm start failed. A cell that fails is no error.
    """
    with folder.locked() as lock, stopped_by_signals():
        folder.prepare(plan.recipe)
        todo = _due(plan, folder, retry)
        progress = CompareProgress(
            total=len(plan.cells),
            already=len(plan.cells) - len(todo),
            workers=min(workers, max(1, len(todo))),
            steps=plan.steps,
            run_dir=lambda name: folder.out / "cells" / name,
            console=console,
        )
        with progress:
            _make_starts(plan, folder, todo, workers, launch, lock, progress)
            if todo and not plan.starts:
                _check_first(plan, folder, launch, lock)
            jobs = [Job(cell.name, _launcher(launch, folder, cell, lock)) for cell in todo]
            try:
                run_side_by_side(jobs, _CellWatcher(folder, todo, progress), workers=workers)
            except KeyboardInterrupt:
                progress.message("stopped; the same command goes on from here, with --report it writes what there is")
                raise
        failed = sum(folder.status(cell) == "failed" for cell in plan.cells)
        if failed:
            progress.message(
                f"{failed} of {len(plan.cells)} cells failed; they are shown as that. --retry runs them again"
            )


def write_results(plan: Plan, folder: CompareFolder, console: Console | None = None) -> None:
    """Read all cells, write every file of results and print the tables.

    Raises:
        BraceError: a file cannot be read or written.
    """
    # Here, because they load numpy and torch, which cells in other processes do not need of this one.
    from brace_rl.compare import figure, page, tables
    from brace_rl.compare.outcomes import read_comparison

    comparison = read_comparison(plan, folder)
    out = folder.out
    write_json_atomic(out / "results.json", tables.results_json(comparison))
    write_text_atomic(out / "table.csv", tables.table_csv(comparison))
    write_text_atomic(out / "table.md", tables.table_markdown(comparison))
    write_text_atomic(out / "curves.csv", tables.curves_csv(comparison))
    write_text_atomic(out / "compare.html", page.render(comparison))
    figure.draw(comparison, out)
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=PIPED_WIDTH)
    for staleness in comparison.staleness:
        rows = comparison.at(staleness)
        for heads, lines in (
            (tables.SUCCESS_HEADS, tables.success_rows(rows)),
            (tables.measure_heads(), tables.measure_rows(rows)),
            (tables.COST_HEADS, tables.cost_rows(rows)),
        ):
            _print(console, f"S = {staleness}", heads, lines)
    console.print(tables.INTERVALS, markup=False, highlight=False, soft_wrap=True)
    for note in tables.notes(comparison):
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    if comparison.missing:
        told = f"{comparison.missing} of {len(comparison.cells)} cells have not been run to their end"
        if others := folder.others(plan):
            told += f"; {out} holds {others} of other settings"
        console.print(told, markup=False, highlight=False, soft_wrap=True)
    files = "table.csv, table.md, curves.csv, results.json, compare.html, compare.png, compare.svg"
    console.print(f"written: {out}: {files}", markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class _StartWatcher:
    folder: CompareFolder
    starts: dict[str, Start]
    progress: CompareProgress

    def began(self, name: str) -> None:
        self.progress.message(f"warm start of seed {self.starts[name].seed}")

    def ended(self, name: str, exit_code: int) -> None:
        self.folder.settle_start(self.starts[name], exit_code)

    def tick(self) -> None:
        self.progress.tick()


@dataclass(frozen=True)
class _CheckWatcher:
    folder: CompareFolder

    def began(self, name: str) -> None: ...

    def ended(self, name: str, exit_code: int) -> None:
        if exit_code:
            raise BraceError(self.folder.error(name, exit_code))

    def tick(self) -> None: ...


class _CellWatcher:
    def __init__(self, folder: CompareFolder, cells: Iterable[Cell], progress: CompareProgress) -> None:
        self._folder, self._progress = folder, progress
        self._cells = {cell.name: cell for cell in cells}

    def began(self, name: str) -> None:
        self._progress.began(name, self._cells[name].label)

    def ended(self, name: str, exit_code: int) -> None:
        cell = self._cells[name]
        failure = self._folder.settle_cell(cell, exit_code)
        outcome = f"failed: {failure.error}" if failure else f"success {self._folder.success(cell):.3f}"
        self._progress.ended(name, outcome)

    def tick(self) -> None:
        self._progress.tick()


def _due(plan: Plan, folder: CompareFolder, retry: bool) -> list[Cell]:
    """The cells to run; those that finished while nobody looked on lose their checkpoints now."""
    due = []
    for cell in plan.cells:
        status = folder.status(cell)
        if status == "finished":
            folder.drop_models(cell)
        elif status != "failed" or retry:
            due.append(cell)
    return due


def _make_starts(
    plan: Plan,
    folder: CompareFolder,
    todo: Sequence[Cell],
    workers: int,
    launch: Launch,
    lock: int,
    progress: CompareProgress,
) -> None:
    """One process per seed that has cells to run and no warm-started actor yet."""
    seeds = {cell.seed for cell in todo}
    starts = {start.name: start for start in plan.starts if start.seed in seeds and not folder.has_start(start)}

    def starter(start: Start) -> Callable[[], Process]:
        return lambda: launch(folder.start_command(start), folder.log(start.name), lock)

    jobs = [Job(name, starter(start)) for name, start in starts.items()]
    run_side_by_side(jobs, _StartWatcher(folder, starts, progress), workers=workers)


def _launcher(launch: Launch, folder: CompareFolder, cell: Cell, lock: int) -> Callable[[], Process]:
    return lambda: launch(folder.cell_command(cell), folder.log(cell.name), lock)


def _check_first(plan: Plan, folder: CompareFolder, launch: Launch, lock: int) -> None:
    """Where no warm start is made, let a first look at task, data and model fail before any cell does.

    Raises:
        BraceError: what ``brace train --check`` finds wrong.
    """
    name = "check"
    job = Job(name, lambda: launch(check_command(plan, folder.recipe), folder.log(name), lock))
    run_side_by_side([job], _CheckWatcher(folder), workers=1)


def _print(console: Console, title: str, heads: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    table = Table(title=escape(title), title_justify="left", box=None, pad_edge=False)
    for i, head in enumerate(heads):
        table.add_column(escape(head), justify="left" if i == 0 else "right", header_style="dim")
    for line in lines:
        table.add_row(*(escape(cell) for cell in line))
    console.print(table)
    console.print()
