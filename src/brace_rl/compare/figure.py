"""``compare.png`` and ``compare.svg``: success and diagnostics, a row per staleness. Loads matplotlib when drawing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from brace_rl.compare.measures import MEASURES
from brace_rl.compare.outcomes import Comparison, MethodRow
from brace_rl.pictures import save_figure

PANEL_INCHES = (3.1, 2.5)
LEGEND_INCHES = 0.5
PANELS = ("gap_fresh", "separation", "ess", "critic_grad_norm", "advantage_max")
"""Measures drawn beside success: those of the paper's Figures 4a, 4b and 6."""
LINE_STYLES = ("-", "--", ":")
COLOURS = 10
"""Colours of matplotlib's default cycle."""


def draw(comparison: Comparison, folder: Path) -> None:
    """Write both files; measures that no cell has get no panel.

    Raises:
        BraceError: a file cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure

    measures = [m for m in MEASURES if m.key in PANELS and any(row.courses[m.key] for row in comparison.rows)]
    columns, lines = 1 + len(measures), len(comparison.staleness)
    size = (PANEL_INCHES[0] * columns, PANEL_INCHES[1] * lines + LEGEND_INCHES)
    # Without the salt, the names inside an SVG would differ from call to call.
    with matplotlib.rc_context({"svg.hashsalt": "brace compare", "font.size": 8}):
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(lines, columns, squeeze=False)
        for axes, staleness in zip(grid, comparison.staleness, strict=True):
            _success(axes[0], comparison.at(staleness))
            axes[0].set(title=f"S = {staleness}: success", xlim=(0, comparison.steps))
            for axis, measure in zip(axes[1:], measures, strict=True):
                _courses(axis, comparison.at(staleness), measure.key)
                axis.set_title(f"S = {staleness}: {measure.title}")
        for axis in grid.ravel():
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
        for axis in grid[-1]:
            axis.set_xlabel("trainer step")
        handles, labels = grid[0][0].get_legend_handles_labels()
        if handles:
            figure.legend(
                handles, labels, loc="outside lower center", ncols=min(len(labels), 3 * columns), frameon=False
            )
        save_figure(figure, folder / "compare")


def _success(axis: Any, rows: list[MethodRow]) -> None:
    for place, row in enumerate(rows):
        style = _style(place)
        if not row.curve:
            axis.plot([], [], label=row.method, **style)
            continue
        steps, values, low, high = (
            np.array(column) for column in zip(*((step, e.value, e.low, e.high) for step, e in row.curve), strict=True)
        )
        axis.plot(steps, values, label=row.method, marker=".", **style)
        axis.fill_between(steps, low, high, color=style["color"], alpha=0.13, linewidth=0)
    axis.set_ylim(bottom=0)


def _courses(axis: Any, rows: list[MethodRow], key: str) -> None:
    for place, row in enumerate(rows):
        if course := row.courses[key]:
            axis.plot(*zip(*course, strict=True), linewidth=1, **_style(place))


def _style(place: int) -> dict[str, str]:
    return {"color": f"C{place % COLOURS}", "linestyle": LINE_STYLES[place // COLOURS % len(LINE_STYLES)]}
