"""One picture of one or more runs, for a README or a paper."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from brace_rl.errors import BraceError
from brace_rl.files import write_bytes_atomic
from brace_rl.report.page import describe_method, describe_schedule
from brace_rl.report.run_data import RunData, read_run

SIZE_INCHES = (9.6, 5.6)
DOTS_PER_INCH = 130
LEGEND_CHARACTERS = 115
"""Characters of labels that fit side by side under the picture."""


def training_figure(run_dirs: Sequence[Path | str], out_png: Path | str) -> Path:
    """Draw success, staleness, effective sample size and critic error of the runs over their steps.

    Success is the held-out success rate with its 95 % interval, over a faint line of the training batches' reward. Runs
    are told apart by method, schedule and seed, or by folder name where these are equal. Returns ``out_png``.

    Raises:
        BraceError: no run given, a folder that is not a run, or a picture that cannot be written.
    """
    if not run_dirs:
        raise BraceError("no run to draw; name at least one folder such as runs/NAME")
    runs = [read_run(directory) for directory in run_dirs]
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2).ravel()
    panels = (
        ("Success on held-out problems (faint: training reward)", "reward/mean"),
        ("Staleness of consumed tokens (faint: largest)", "staleness/mean"),
        ("Effective sample size of the ratios", "ratio/ess"),
        ("Critic error, mean |target − V|", "target/abs_gap"),
    )
    for index, (run, label) in enumerate(zip(runs, _labels(runs), strict=True)):
        colour = f"C{index}"
        _draw_success(axes[0], run, colour)
        _draw_series(axes[1], run, "staleness/max", color=colour, alpha=0.35, linewidth=1)
        for axis, (_, metric) in zip(axes[1:], panels[1:], strict=True):
            _draw_series(axis, run, metric, color=colour, label=label)
    for axis, (title, _) in zip(axes, panels, strict=True):
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    for axis, top in ((axes[0], 1.02), (axes[1], None), (axes[2], 1.02), (axes[3], None)):
        axis.set_ylim(bottom=0, top=top)
    for axis in axes[2:]:
        axis.set_xlabel("trainer step", fontsize=9)
    handles, labels = axes[3].get_legend_handles_labels()
    if handles:
        columns = max(1, min(len(labels), LEGEND_CHARACTERS // max(map(len, labels))))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=9, frameon=False)
    return _save(figure, Path(out_png))


def _draw_success(axis: Any, run: RunData, colour: str) -> None:
    _draw_series(axis, run, "reward/mean", color=colour, alpha=0.3, linewidth=1)
    found = run.evaluations()
    if not found:
        return
    below, above = [], []
    for evaluation in found:
        low, high = evaluation.interval() or (evaluation.success, evaluation.success)
        below.append(evaluation.success - low)
        above.append(high - evaluation.success)
    axis.errorbar(
        [e.step for e in found],
        [e.success for e in found],
        yerr=[below, above],
        color=colour,
        marker="o",
        markersize=4,
        capsize=2,
        linewidth=1.6,
    )


def _draw_series(axis: Any, run: RunData, metric: str, **style: Any) -> None:
    points = run.series(metric)
    if points:
        style.setdefault("marker", "o" if len(points) == 1 else None)
        axis.plot([step for step, _ in points], [value for _, value in points], **{"linewidth": 1.5, **style})


def _labels(runs: Sequence[RunData]) -> list[str]:
    labels = [f"{describe_method(run)}; {describe_schedule(run)}; seed {run.setting('run.seed')}" for run in runs]
    counts = Counter(labels)
    return [f"{label} ({run.name})" if counts[label] > 1 else label for label, run in zip(labels, runs, strict=True)]


def _save(figure: Any, path: Path) -> Path:
    content = io.BytesIO()
    figure.savefig(content, format="png", facecolor="white")
    write_bytes_atomic(path, content.getvalue())
    return path
