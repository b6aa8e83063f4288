"""The comparison as rows of text and as files: ``table.csv``, ``table.md``, ``curves.csv`` and ``results.json``."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from typing import Any

from brace_rl import __version__
from brace_rl.compare.measures import MEASURES
from brace_rl.compare.outcomes import FAILED_RULE, WARMUP_RULE, CellOutcome, Comparison, MethodRow
from brace_rl.diagnose.sums import Estimate
from brace_rl.markdown import markdown_table
from brace_rl.report.svg import number

Cells = Sequence[str]

NONE = "–"
"""What a table shows where there is nothing, such as figures of a critic without a critic."""

BEST = " *"
"""Behind the figure of the best method."""

SUCCESS_HEADS = ("method", "seeds", "final success", "95 % interval", "behind the first", "area", "95 % interval")

COST_HEADS = ("method", "seconds/step", "× tokens/s", "= tokens/step")

INTERVALS = (
    "95 % intervals: bootstrap over seeds; up to four seeds that is their range, which covers less than 95 %. "
    "behind the first: the largest mean less this one, seed by seed. * best: Student's 95 % interval of its paired "
    "differences to every other method lies above 0; without a mark the seeds do not tell. area: mean success over the "
    "steps (trapezoids)."
)


def success_rows(rows: Sequence[MethodRow]) -> list[Cells]:
    """One row per method: :data:`SUCCESS_HEADS`."""
    return [
        (
            row.method,
            ", ".join(
                [row.seeds]
                + [f"{count} {what}" for count, what in ((row.failed, "failed"), (row.damaged, "damaged")) if count]
            ),
            figure(row.final) + (BEST if row.is_best else ""),
            bounds(row.final),
            NONE if row.behind is None else f"{row.behind.value:+.3f} {bounds(row.behind)}",
            figure(row.area) + (BEST if row.is_best_area else ""),
            bounds(row.area),
        )
        for row in rows
    ]


def measure_heads() -> Cells:
    """Heads of :func:`measure_rows`."""
    return ["method", *(measure.title for measure in MEASURES)]


def measure_rows(rows: Sequence[MethodRow]) -> list[Cells]:
    """One row per method, the mean over seeds of every measure."""
    return [[row.method, *(_measure(row.measures[m.key]) for m in MEASURES)] for row in rows]


def cost_rows(rows: Sequence[MethodRow]) -> list[Cells]:
    """One row per method: :data:`COST_HEADS`."""
    return [[row.method, *(NONE if x is None else number(x) for x in _costs(row))] for row in rows]


def method_heads(comparison: Comparison) -> Cells:
    """Heads of :func:`method_lines`."""
    return ["method", *next(iter(comparison.parts.values())), "steps that train the actor"]


def method_lines(comparison: Comparison) -> list[Cells]:
    """One row per method: every setting that makes it, defaults and constants of our own included."""
    return [
        [
            method,
            *(", ".join(f"{key} = {value}" for key, value in keys.items()) for keys in parts.values()),
            comparison.actor_steps[method],
        ]
        for method, parts in comparison.parts.items()
    ]


def notes(comparison: Comparison) -> list[str]:
    """A line for every S the runs are too short for, cell that failed, and thing missing from a cell's files."""
    oldest = comparison.steps - 1
    lines = [
        f"S = {s}: no batch of a run of {comparison.steps} trainer steps is older than {oldest}"
        for s in comparison.staleness
        if s > oldest
    ]
    for cell in comparison.cells:
        label = f"{cell.method}, S = {cell.staleness}, seed {cell.seed}"
        if cell.status == "failed":
            lines.append(f"failed: {label}, after step {cell.steps}: {cell.error}")
        lines += [f"damaged: {label}: {sentence}" for sentence in cell.damage]
    return lines


def figure(estimate: Estimate | None) -> str:
    """A success."""
    return NONE if estimate is None else f"{estimate.value:.3f}"


def bounds(estimate: Estimate | None) -> str:
    """An interval of successes."""
    return NONE if estimate is None or math.isnan(estimate.low) else f"[{estimate.low:.3f}, {estimate.high:.3f}]"


def table_csv(comparison: Comparison) -> str:
    """One row per staleness and method; what does not exist is empty."""
    heads = ["staleness", "method", "finished", "failed", "missing"]
    for name in ("final", "area", "behind", *(m.key for m in MEASURES)):
        heads += [name, f"{name}_low", f"{name}_high"]
    heads += ["best_final", "best_area", "seconds_per_step", "tokens_per_second", "tokens_per_step"]
    lines: list[Sequence[Any]] = []
    for row in comparison.rows:
        line: list[Any] = [row.staleness, row.method, row.finished, row.failed, row.missing]
        for estimate in (row.final, row.area, row.behind, *(row.measures[m.key] for m in MEASURES)):
            line += ["" if x is None else x for x in _numbers(estimate)]
        lines.append([*line, int(row.is_best), int(row.is_best_area), *("" if x is None else x for x in _costs(row))])
    return _csv(heads, lines)


def table_markdown(comparison: Comparison) -> str:
    """The printed tables, to be put into a document: success, diagnostics and cost at every staleness."""
    parts = []
    for staleness in comparison.staleness:
        rows = comparison.at(staleness)
        parts.append(f"### S = {staleness}")
        parts += [
            markdown_table(SUCCESS_HEADS, success_rows(rows)),
            markdown_table(measure_heads(), measure_rows(rows)),
            markdown_table(COST_HEADS, cost_rows(rows)),
        ]
    parts.append(f"{INTERVALS} {FAILED_RULE}")
    if told := notes(comparison):
        parts += ["### Notes", "\n".join(f"* {line}" for line in told)]
    made = markdown_table(method_heads(comparison), method_lines(comparison))
    return "\n\n".join([*parts, "### What makes each method", made, WARMUP_RULE]) + "\n"


def curves_csv(comparison: Comparison) -> str:
    """Success by staleness, method and step, and the measures in columns of their own."""
    lines: list[Sequence[Any]] = []
    for row in comparison.rows:
        curve = dict(row.curve)
        courses = {m.key: dict(row.courses[m.key]) for m in MEASURES}
        for step in sorted({*curve, *(step for course in courses.values() for step in course)}):
            success = ["" if x is None else x for x in _numbers(curve.get(step))]
            lines.append([row.staleness, row.method, int(step), *success, *(c.get(step, "") for c in courses.values())])
    heads = ["staleness", "method", "step", "success", "success_low", "success_high", *(m.key for m in MEASURES)]
    return _csv(heads, lines)


def results_json(comparison: Comparison) -> dict[str, Any]:
    """Everything, as plain data; what does not exist is null."""
    return {
        "version": __version__,
        "recipe": comparison.recipe,
        "settings": dict(comparison.settings),
        "methods": list(comparison.methods),
        "method_settings": {method: dict(parts) for method, parts in comparison.parts.items()},
        "actor_steps": dict(comparison.actor_steps),
        "staleness": list(comparison.staleness),
        "seeds": list(comparison.seeds),
        "steps": comparison.steps,
        "rules": {"failed cells": FAILED_RULE, "intervals": INTERVALS, "actor steps": WARMUP_RULE},
        "measures": {m.key: {"title": m.title, "meaning": m.meaning} for m in MEASURES},
        "table": [_row_json(row) for row in comparison.rows],
        "cells": [_cell_json(cell) for cell in comparison.cells],
    }


def _row_json(row: MethodRow) -> dict[str, Any]:
    return {
        "staleness": row.staleness,
        "method": row.method,
        "finished": row.finished,
        "failed": row.failed,
        "missing": row.missing,
        "damaged": row.damaged,
        "final": _interval(row.final),
        "area": _interval(row.area),
        "behind": _interval(row.behind),
        "best_final": row.is_best,
        "best_area": row.is_best_area,
        "measures": {key: _interval(estimate) for key, estimate in row.measures.items()},
        **dict(zip(("seconds_per_step", "tokens_per_second", "tokens_per_step"), _costs(row), strict=True)),
        "curve": [{"step": int(step), **(_interval(estimate) or {})} for step, estimate in row.curve],
        "courses": {key: [[int(step), value] for step, value in course] for key, course in row.courses.items()},
    }


def _cell_json(cell: CellOutcome) -> dict[str, Any]:
    return {
        "method": cell.method,
        "staleness": cell.staleness,
        "seed": cell.seed,
        "run": cell.run,
        "status": cell.status,
        "error": cell.error,
        "damage": list(cell.damage),
        "final": cell.final,
        "area": cell.area,
        "evaluations": [[int(step), success] for step, success in cell.evaluations],
        "measures": {m.key: m.summarise(cell.series.get(m.key, [])) for m in MEASURES},
        "seconds": cell.seconds,
        "tokens": cell.tokens,
        "steps": cell.steps,
    }


def _measure(estimate: Estimate | None) -> str:
    return NONE if estimate is None else number(float(f"{estimate.value:.3g}"))


def _costs(row: MethodRow) -> tuple[float | None, float | None, float | None]:
    return row.seconds_per_step, row.tokens_per_second, row.tokens_per_step


def _interval(estimate: Estimate | None) -> dict[str, float | None] | None:
    if estimate is None:
        return None
    return dict(zip(("mean", "low", "high"), _numbers(estimate), strict=True))


def _numbers(estimate: Estimate | None) -> tuple[float | None, float | None, float | None]:
    """Value and bounds; None for what is not known."""
    if estimate is None:
        return None, None, None
    low, high = (None if math.isnan(x) else x for x in (estimate.low, estimate.high))
    return estimate.value, low, high


def _csv(heads: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows(lines)
    return text.getvalue()
