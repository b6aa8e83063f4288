"""Figures of an oracle report. The only module here that loads matplotlib, and only when something is drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from brace_rl.oracle.sweep import cap_gain
from brace_rl.pictures import save_figure

DARK = 0.6
"""Share of the colour scale beyond which a cell takes white ink."""

MOMENTS = (("bias", "bias"), ("spread", "spread (standard deviation)"), ("rmse", "root mean square error"))


def draw_study(study: dict[str, Any], folder: Path) -> list[Path]:
    """Moments, fixed points and the offset bound of `brace_rl.oracle.study.study`; returns the files written."""
    what = f"{study['preset']}, {study['horizon']} tokens, lag {study['lag']}"
    drawn = [
        ("moments", _moments(study, what)),
        ("fixed_points", _fixed_points(study, what)),
        ("offset", _offset(study, what)),
    ]
    return [path for name, figure in drawn for path in save_figure(figure, folder / name)]


def draw_curves(rows: Sequence[dict[str, Any]], folder: Path, title: str) -> list[Path]:
    """One panel per lag: exact success of the current policy, mean and 95 % interval over seeds."""
    lags = list(dict.fromkeys(row["lag"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    figure, axes = _figure(len(lags), columns=3, share_y=True)
    for axis, lag in zip(axes, lags, strict=False):
        for row in (row for row in rows if row["lag"] == lag):
            colour = f"C{methods.index(row['method']) % 10}"
            axis.plot(row["steps"], row["success"], color=colour, label=row["method"])
            pairs = list(zip(row["success"], row["half_width"], strict=True))
            low, high = [mean - half for mean, half in pairs], [mean + half for mean, half in pairs]
            axis.fill_between(row["steps"], low, high, color=colour, alpha=0.15, linewidth=0)
        axis.set(title=f"S = {lag}", xlabel="trainer step", ylabel="success (exact)", ylim=(-0.02, 1.02))
    return save_figure(_finish(figure, axes, title), folder / "curves")


def draw_map(cells: Sequence[dict[str, Any]], folder: Path, *, method: str, baseline: str) -> list[Path]:
    """One panel per lag: gain in area of ``method`` over ``baseline``; a star where the interval leaves out zero."""
    lags = sorted({cell["lag"] for cell in cells})
    horizons = sorted({cell["horizon"] for cell in cells})
    noises = sorted({cell["noise"] for cell in cells})
    found = {(c["lag"], c["horizon"], c["noise"]): cap_gain(c, method=method, baseline=baseline) for c in cells}
    limit = max((abs(mean) for mean, _ in found.values()), default=0.0) or 1.0
    figure, axes = _figure(len(lags), columns=3, share_y=True)
    for axis, lag in zip(axes, lags, strict=False):
        grid = [[found.get((lag, h, n), (math.nan, math.nan))[0] for n in noises] for h in horizons]
        image = axis.imshow(grid, cmap="RdBu", vmin=-limit, vmax=limit, origin="lower", aspect="auto")
        for y, horizon in enumerate(horizons):
            for x, noise in enumerate(noises):
                if (lag, horizon, noise) in found:
                    mean, half = found[lag, horizon, noise]
                    mark = "*" if abs(mean) > half else ""
                    ink = "white" if abs(mean) > DARK * limit else "black"
                    axis.text(x, y, f"{mean:+.3f}{mark}", ha="center", va="center", fontsize=8, color=ink)
        axis.set(title=f"S = {lag}", xlabel="engine noise (logits)", ylabel="horizon (tokens)")
        axis.set_xticks(range(len(noises)), [f"{noise:g}" for noise in noises])
        axis.set_yticks(range(len(horizons)), [str(horizon) for horizon in horizons])
        figure.colorbar(image, ax=axis)
    figure.suptitle(f"area under the curve: {method} minus {baseline} (* 95 % interval leaves out 0)")
    return save_figure(figure, folder / f"map_{method}_{baseline}".replace(":", "").replace("@", "clip"))


def _moments(study: dict[str, Any], what: str) -> Any:
    methods = list(dict.fromkeys(row["method"] for row in study["targets"]))
    critics = list(dict.fromkeys(row["critic"] for row in study["targets"]))
    figure, axes = _figure(len(critics) * len(MOMENTS), columns=len(MOMENTS))
    panels = [(critic, key, label) for critic in critics for key, label in MOMENTS]
    for axis, (critic, key, label) in zip(axes, panels, strict=False):
        for row in (row for row in study["targets"] if row["critic"] == critic):
            axis.plot(row[key], color=f"C{methods.index(row['method']) % 10}", label=row["method"])
        critic_name = {"own": "own fixed point", "mu": "V^mu", "pi": "V^pi"}[critic]
        axis.set(title=f"V = {critic_name}", xlabel="position", ylabel=label)
        axis.axhline(0, color="0.6", linewidth=0.8)
    return _finish(figure, axes, f"targets against V^pi: {what}")


def _fixed_points(study: dict[str, Any], what: str) -> Any:
    figure, axes = _figure(1, columns=1, width=8.0)
    axis = axes[0]
    for name, style in (("pi", "-"), ("mu", "--"), ("pi_rho", ":")):
        axis.plot(study["values"][name], "k" + style, linewidth=2, label=f"V^{name}")
    for i, row in enumerate(study["fixed_points"]):
        axis.plot(row["values"], color=f"C{i % 10}", label=row["method"])
    axis.set(xlabel="position", ylabel="value")
    return _finish(figure, axes, f"what a critic ends at: {what}")


def _offset(study: dict[str, Any], what: str) -> Any:
    figure, axes = _figure(1, columns=1, width=8.0)
    axis, offset = axes[0], study["offset"]
    axis.plot(offset["bound"], "k--", label="bound: Theta_k max|g|")
    axis.plot(offset["measured"], color="C0", label="measured at V^{pi_rho}")
    axis.set(xlabel="window k (tokens)", ylabel="largest offset of one application", ylim=(0, None))
    return _finish(figure, axes, f"offset bound: {what}")


def _figure(panels: int, *, columns: int, width: float = 4.6, share_y: bool = False) -> tuple[Any, list[Any]]:
    """A figure without a window or global state, so that it can be drawn anywhere."""
    from matplotlib.figure import Figure

    columns = min(panels, columns)
    rows = math.ceil(panels / columns)
    figure = Figure(figsize=(width * columns, 3.6 * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, sharey=share_y).flat)
    for axis in axes[panels:]:
        axis.set_visible(False)
    return figure, axes


def _finish(figure: Any, axes: Sequence[Any], title: str) -> Any:
    axes[0].legend(fontsize=7)
    figure.suptitle(title)
    return figure
