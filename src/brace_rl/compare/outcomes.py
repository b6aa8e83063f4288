"""What the cells came to, read from their run folders: every cell, the failed ones too, and one row per method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from brace_rl.compare.folder import CompareFolder, Status
from brace_rl.compare.measures import MEASURES
from brace_rl.compare.plan import Cell, Plan, actor_steps, method_parts
from brace_rl.compare.statistics import area, best, leader, mean_over_seeds, paired_difference
from brace_rl.diagnose.sums import Estimate
from brace_rl.report.run_data import RunData, Series, read_run

FAILED_RULE = (
    "A failed cell keeps the success of its last evaluation to the end, or that of its seed's start where it has none, "
    "and counts with it in every mean; one whose files cannot be read counts in none."
)
"""How the means treat cells that failed."""

WARMUP_RULE = (
    "The critic's warm-up steps train no actor. A method without a critic has none and trains its actor in every step; "
    "one with optim.critic_warmup_until may end them sooner."
)
"""Why methods with the same trainer steps may train their actors in different numbers of them."""


@dataclass(frozen=True)
class CellOutcome:
    """A cell.

    Attributes:
        error: how a failed one ended, else empty.
        damage: sentences about what is missing from its files, so that its figures are of the rest.
        evaluations: (step, success) on held-out problems.
        final: success at the end; by :data:`FAILED_RULE` of a failed cell, None of one that has not been run.
        area: mean success over the steps, likewise.
        series: course of every measure, by its key.
        seconds, tokens, steps: sums over the trainer steps, evaluations left out.
    """

    method: str
    staleness: int
    seed: int
    run: str
    status: Status
    error: str = ""
    damage: Sequence[str] = ()
    evaluations: Series = field(default_factory=list)
    final: float | None = None
    area: float | None = None
    series: Mapping[str, Series] = field(default_factory=dict)
    seconds: float = 0.0
    tokens: float = 0.0
    steps: int = 0


@dataclass(frozen=True)
class MethodRow:
    """A method at one staleness, over its seeds.

    Attributes:
        finished, failed, missing: cells; the missing ones have not been run to their end.
        damaged: of them, those whose figures are of a part of their files.
        final, area: mean over the cells that finished or failed; None without any.
        behind: mean of the leader's final success less this method's, seed by seed; None for the leader.
        is_best, is_best_area: see :func:`brace_rl.compare.statistics.best`.
        measures: by key; None where no cell has it.
        seconds_per_step, tokens_per_second, tokens_per_step: of all its cells together, so that the first two multiply
            to the third; None without a step.
        curve: success by evaluation step, over the same cells as ``final``.
        courses: mean of every measure by step, over the cells that have it there.
    """

    method: str
    staleness: int
    finished: int
    failed: int
    missing: int
    damaged: int
    final: Estimate | None
    area: Estimate | None
    behind: Estimate | None
    is_best: bool
    is_best_area: bool
    measures: Mapping[str, Estimate | None]
    seconds_per_step: float | None
    tokens_per_second: float | None
    tokens_per_step: float | None
    curve: Sequence[tuple[float, Estimate]]
    courses: Mapping[str, Series]

    @property
    def seeds(self) -> str:
        """``5 of 5`` finished."""
        return f"{self.finished} of {self.finished + self.failed + self.missing}"


@dataclass(frozen=True)
class Comparison:
    """Everything that is written.

    Attributes:
        parts: per method the settings that make it, section -> key -> value.
        actor_steps: per method the trainer steps that train its actor, as text; see :data:`WARMUP_RULE`.
        settings: those given on the command line, for all methods alike.
    """

    recipe: str
    methods: Sequence[str]
    parts: Mapping[str, Mapping[str, Mapping[str, Any]]]
    actor_steps: Mapping[str, str]
    staleness: Sequence[int]
    seeds: Sequence[int]
    steps: int
    settings: Mapping[str, Any]
    cells: Sequence[CellOutcome]
    rows: Sequence[MethodRow]

    def at(self, staleness: int) -> list[MethodRow]:
        """The rows of one staleness, in the order the methods were named."""
        return [row for row in self.rows if row.staleness == staleness]

    @property
    def failures(self) -> list[CellOutcome]:
        """Cells that ended in an error."""
        return [cell for cell in self.cells if cell.status == "failed"]

    @property
    def missing(self) -> int:
        """Cells that have not been run to their end."""
        return sum(row.missing for row in self.rows)


def read_comparison(plan: Plan, folder: CompareFolder) -> Comparison:
    """What the cells of ``plan`` have come to so far.

    Raises:
        BraceError: a run is not the cell its name says.
    """
    runs = {cell.name: _run(cell, folder) for cell in plan.cells}
    starts = _success_at_start(plan, runs)
    cells = [_outcome(cell, folder, runs[cell.name], starts.get(cell.seed)) for cell in plan.cells]
    rows = [
        row
        for s in plan.staleness
        for row in method_rows(plan.methods, s, [cell for cell in cells if cell.staleness == s])
    ]
    return Comparison(
        recipe=str(plan.recipe),
        methods=plan.methods,
        parts={cell.method: method_parts(cell.config) for cell in plan.cells},
        actor_steps={cell.method: actor_steps(cell.config) for cell in plan.cells},
        staleness=plan.staleness,
        seeds=plan.seeds,
        steps=plan.steps,
        settings=plan.overrides,
        cells=cells,
        rows=rows,
    )


def method_rows(methods: Sequence[str], staleness: int, cells: Sequence[CellOutcome]) -> list[MethodRow]:
    """One row per method from all its cells at one staleness; methods are compared seed by seed."""
    by_method = {method: [cell for cell in cells if cell.method == method] for method in methods}
    finals = {m: {c.seed: c.final for c in own if c.final is not None} for m, own in by_method.items()}
    areas = {m: {c.seed: c.area for c in own if c.area is not None} for m, own in by_method.items()}
    first, best_final, best_area = leader(finals), best(finals), best(areas)
    rows = []
    for method, own in by_method.items():
        counted = [cell for cell in own if cell.final is not None]
        seconds, tokens, steps = (sum(getattr(c, name) for c in own) for name in ("seconds", "tokens", "steps"))
        is_behind = first is not None and method != first and finals[method]
        rows.append(
            MethodRow(
                method=method,
                staleness=staleness,
                finished=sum(cell.status == "finished" for cell in own),
                failed=sum(cell.status == "failed" for cell in own),
                missing=sum(cell.status in ("half done", "not run") for cell in own),
                damaged=sum(bool(cell.damage) for cell in own),
                final=_mean([cell.final for cell in counted]),
                area=_mean([cell.area for cell in counted]),
                behind=paired_difference(finals[first], finals[method]) if first and is_behind else None,
                is_best=method == best_final,
                is_best_area=method == best_area,
                measures={
                    m.key: _mean([m.summarise(cell.series.get(m.key, [])) for cell in counted]) for m in MEASURES
                },
                seconds_per_step=seconds / steps if steps else None,
                tokens_per_second=tokens / seconds if seconds else None,
                tokens_per_step=tokens / steps if steps else None,
                curve=[
                    (step, mean_over_seeds(values))
                    for step, values in _by_step([_held(cell, counted) for cell in counted])
                ],
                courses={
                    m.key: [
                        (step, fmean(values)) for step, values in _by_step([c.series.get(m.key, []) for c in counted])
                    ]
                    for m in MEASURES
                },
            )
        )
    return rows


def _run(cell: Cell, folder: CompareFolder) -> RunData | None:
    """What a cell has written; None where there is nothing yet, or nothing that can be read."""
    is_there = (folder.run_dir(cell) / "config.json").is_file() and not folder.unreadable(cell)
    return read_run(folder.run_dir(cell)) if is_there else None


def _success_at_start(plan: Plan, runs: Mapping[str, RunData | None]) -> dict[int, float]:
    """Seed -> success before training, which all its cells share: the same weights meet the same problems."""
    found: dict[int, float] = {}
    for cell in plan.cells:
        run = runs[cell.name]
        for evaluation in run.evaluations() if run else []:
            if evaluation.step == 0:
                found.setdefault(cell.seed, evaluation.success)
    return found


def _outcome(cell: Cell, folder: CompareFolder, run: RunData | None, start: float | None) -> CellOutcome:
    status = folder.status(cell)
    failure = folder.failure(cell) if status == "failed" else None
    evaluations: Series = [] if run is None else [(float(e.step), e.success) for e in run.evaluations()]
    if not evaluations and status == "failed" and start is not None and not folder.unreadable(cell):
        evaluations = [(0.0, start)]
    counts = bool(evaluations) and status in ("finished", "failed")
    has_critic = cell.config.algorithm.value_target != "none"
    timed = [] if run is None else [row for row in run.training_rows if "time/step" in row and "tokens/step" in row]
    return CellOutcome(
        method=cell.method,
        staleness=cell.staleness,
        seed=cell.seed,
        run=str(Path("cells") / cell.name),
        status=status,
        error=failure.error if failure else "",
        damage=[] if run is None else _damage(run, cell, status),
        evaluations=evaluations,
        final=evaluations[-1][1] if counts else None,
        area=area(evaluations, steps=cell.config.optim.steps) if counts else None,
        series={} if run is None else {m.key: m.of_run(run, has_critic=has_critic) for m in MEASURES},
        seconds=sum(row["time/step"] for row in timed),
        tokens=sum(row["tokens/step"] for row in timed),
        steps=len(timed),
    )


def _damage(run: RunData, cell: Cell, status: Status) -> list[str]:
    """What :func:`read_run` left out, and trainer steps of which a finished cell has no figures."""
    steps = cell.config.optim.steps
    lost = steps - len(run.training_rows) if status == "finished" else 0
    return [*run.damage, *([f"metrics.jsonl has no figures of {lost} of {steps} trainer steps."] if lost > 0 else [])]


def _mean(values: Sequence[float | None]) -> Estimate | None:
    known = [value for value in values if value is not None]
    return mean_over_seeds(known) if known else None


def _held(cell: CellOutcome, others: Sequence[CellOutcome]) -> Series:
    """The evaluations of a cell; a failed one's last holds for the steps at which only others were evaluated."""
    last = cell.evaluations[-1]
    later = sorted({step for other in others for step, _ in other.evaluations if step > last[0]})
    return [*cell.evaluations, *((step, last[1]) for step in later)]


def _by_step(series: Sequence[Series]) -> list[tuple[float, list[float]]]:
    """The values that the series have at each step, steps ascending."""
    by_step: dict[float, list[float]] = {}
    for points in series:
        for step, value in points:
            by_step.setdefault(step, []).append(value)
    return sorted(by_step.items())
