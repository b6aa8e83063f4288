"""``brace probe``: parsing and messages only; nothing heavy is imported before the options have been checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from brace_rl.errors import DataError
from brace_rl.probe.options import Options, even_positions, parse_positions

if TYPE_CHECKING:
    from brace_rl.probe.run import Probe

_DEFAULTS = Options()
_PIPED_WIDTH = 170
"""Columns of text that goes to a file or a pipe, where none are known."""


@click.command("probe")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--step", type=int, help="Checkpoint that is pi.  [default: the newest]")
@click.option(
    "--behavior-step",
    type=int,
    help="Older checkpoint that is mu.  [default: the one whose age is closest to the run's max_staleness]",
)
@click.option(
    "--prefixes",
    type=click.Choice(["fresh", "rollouts"]),
    default=_DEFAULTS.prefixes,
    show_default=True,
    help="Cut new responses of mu to held-out problems, or those in the run's rollouts.jsonl.",
)
@click.option("--prompts", type=int, default=_DEFAULTS.prompts, show_default=True, help="Responses cut.")
@click.option(
    "--positions", type=int, default=len(_DEFAULTS.positions.places), show_default=True, help="Evenly spaced."
)
@click.option("--at", metavar="LIST", help="Positions instead: 0,16,64 policy tokens, or 0,0.25,0.5 of the response's.")
@click.option(
    "--continuations",
    type=int,
    default=_DEFAULTS.continuations,
    show_default=True,
    help="Per state, under each policy.",
)
@click.option("--seed", type=int, default=_DEFAULTS.seed, show_default=True, help="Of all sampling.")
@click.option("--device", help="auto, cpu, cuda or cuda:N.  [default: that of the run]")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the results.  [default: RUN/probe]")
def probe_command(run: Path, positions: int, at: str | None, out: Path | None, **options: Any) -> None:
    """Measure true values of a run's policies by playing on from states of its responses.

    From states inside responses, fresh continuations under the newest actor (pi) and an older one (mu) of RUN give
    V^pi, V^mu and b = V^pi - V^mu by position, and with the critic's V the gaps g_pi = V - V^pi and g_mu = V - V^mu.
    Needs two checkpoints (run.checkpoint_every, run.keep_checkpoints). Writes probe.json, .csv, .png, .svg and .html.
    """
    where = even_positions(positions) if at is None else parse_positions(at)
    chosen = Options(positions=where, **options)
    folder = out if out is not None else run / "probe"
    if folder.exists() and not folder.is_dir():
        raise DataError(f"--out: {folder} is a file; name a folder")
    # Progress bars of libraries would end up between the lines of ours.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from brace_rl.files import write_json_atomic, write_text_atomic
    from brace_rl.probe.drawing import draw
    from brace_rl.probe.page import render
    from brace_rl.probe.run import probe_run
    from brace_rl.probe.tables import csv_text

    with _progress() as report:
        probe = probe_run(run, chosen, report)
    write_json_atomic(folder / "probe.json", probe.to_dict())
    write_text_atomic(folder / "probe.csv", csv_text(probe))
    write_text_atomic(folder / "probe.html", render(probe))
    draw(probe, folder)
    _show(probe)
    click.echo(f"\nwritten: {folder}/probe.json, probe.csv, probe.html, probe.png, probe.svg")


def _show(probe: Probe) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from brace_rl.probe.tables import HEADS, legend, rows, title

    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPED_WIDTH)
    console.print(escape(title(probe)), highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for i, head in enumerate(HEADS):
        table.add_column(head, justify="left" if i == 0 else "right", header_style="dim")
    for row in rows(probe):
        table.add_row(*(escape(cell) for cell in row), style="bold" if row[0] == probe.overall.label else "")
    console.print()
    console.print(table)
    console.print(f"\n[dim]{escape(legend(probe))}[/]\n", highlight=False, soft_wrap=True)
    for note in probe.notes:
        console.print(f"* {escape(note)}", highlight=False, soft_wrap=True)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar per phase on standard error where that is a terminal, else a line as each phase begins and ends."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        phases: dict[str, Any] = {}

        def report(what: str, finished: int, total: int) -> None:
            if what not in phases:
                phases[what] = bar.add_task(what, total=total)
                if not console.is_terminal:
                    click.echo(f"{what}: {total} to do", err=True)
            bar.update(phases[what], completed=finished)
            if finished == total and not console.is_terminal:
                click.echo(f"{what}: {finished} of {total}", err=True)

        yield report
