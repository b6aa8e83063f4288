"""Small charts drawn as inline SVG: no script, no outside resource, colours from the page's light or dark theme.

A chart is a few kilobytes whatever the length of the run: long series are reduced to the lowest and highest value of
each of :data:`BINS` stretches, so that no spike is lost.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from brace_rl.report.run_data import Series

BINS = 120
"""Stretches a long series is reduced to."""

_WIDTH, _HEIGHT = 400, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 16, 10, 24
_SMOOTHING_SHARE = 0.08
"""Width of the moving average, as a share of the series."""
_FLAT = 1e-4
"""Values that differ by less, relative to their size, are drawn as constant: rounding, and more digits than fit."""
_SMALLEST, _LARGEST = 1e-200, 1e200
_LOG_SPAN = 50.0
"""A chart that allows it turns logarithmic when its largest value is this many times its smallest."""


@dataclass(frozen=True)
class Line:
    """One curve.

    Attributes:
        colour: 1 to 8, an entry of the page's palette.
        smooth: draw the moving average in full and the values faintly behind it.
        dots: mark every point (evaluations).
        intervals: per point a (low, high) bar, or None.
    """

    label: str
    points: Series
    colour: int = 1
    smooth: bool = False
    dots: bool = False
    intervals: Sequence[tuple[float, float] | None] = ()


@dataclass(frozen=True)
class _Axes:
    """Maps (step, value) to the picture."""

    steps: tuple[float, float]
    values: tuple[float, float]
    log: bool = False

    def x(self, step: float) -> float:
        low, high = self.steps
        return _LEFT + (step - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.values
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return _TOP + (high - value) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    floor: float | None = None,
    ceiling: float | None = None,
    reference: float | None = None,
    allow_log: bool = False,
) -> str:
    """Curves over steps.

    Args:
        title: read out by screen readers.
        floor, ceiling: values the axis reaches at least.
        reference: draws a dashed level (1 for ratios, 0 for explained variance).
        allow_log: take a logarithmic axis where values span orders of magnitude and all are positive.
    """
    lines = [replace(line, points=_drawable(line.points)) for line in lines]
    values = [v for line in lines for _, v in line.points if math.isfinite(v)]
    values += [v for line in lines for pair in line.intervals if pair is not None for v in pair]
    if not values:
        return ""
    steps = [s for line in lines for s, _ in line.points]
    log = allow_log and min(values) > 0 and max(values) / min(values) > _LOG_SPAN
    if not log:
        values += [v for v in (floor, ceiling, reference) if v is not None]
    axes = _Axes(_widen(min(steps), max(steps)), _log_range(values) if log else _nice_range(values), log)
    parts = [_grid(axes)]
    if reference is not None and axes.values[0] <= reference <= axes.values[1]:
        y = axes.y(reference)
        parts.append(f'<path class="ref" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
    parts += [_curve(line, axes) for line in lines]
    return _svg(title, parts)


def stacked_chart(title: str, areas: Sequence[Line]) -> str:
    """Areas on top of each other; all have the same steps, NaN counts as 0."""
    if not areas or not areas[0].points:
        return ""
    binned = [_bin_means(_drawable(area.points)) for area in areas]
    steps = [step for step, _ in binned[0]]
    if len(steps) == 1:  # one step: draw it as a bar one step wide
        binned = [[(steps[0] - 0.5, points[0][1]), (steps[0] + 0.5, points[0][1])] for points in binned]
        steps = [step for step, _ in binned[0]]
    tops: list[list[float]] = [[0.0] * len(steps)]
    for points in binned:
        heights = [value if math.isfinite(value) else 0.0 for _, value in points]
        tops.append([below + height for below, height in zip(tops[-1], heights, strict=True)])
    first, last = areas[0].points[0][0], areas[0].points[-1][0]
    axes = _Axes((first, last) if last > first else (steps[0], steps[-1]), _nice_range([0.0, *tops[-1]]))
    parts = [_grid(axes)]
    for area, lower, upper in zip(areas, tops, tops[1:], strict=False):
        there = [f"{axes.x(s):.1f} {axes.y(v):.1f}" for s, v in zip(steps, upper, strict=True)]
        back = [f"{axes.x(s):.1f} {axes.y(v):.1f}" for s, v in zip(steps, lower, strict=True)]
        parts.append(f'<path class="area c{area.colour}" d="M{"L".join(there + back[::-1])}Z"/>')
    return _svg(title, parts)


def number(value: float) -> str:
    """A figure as a person would write it: four digits, thousands separated, powers of ten only where needed."""
    if not math.isfinite(value):
        return "not finite"
    size = abs(value)
    if value == 0 or (value == int(value) and size < 1e6):
        return f"{int(value):,}"
    if size >= 1e6 or size < 1e-4:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _svg(title: str, parts: Sequence[str]) -> str:
    label = html.escape(title, quote=True)
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _grid(axes: _Axes) -> str:
    parts = []
    levels = _log_ticks(*axes.values) if axes.log else _ticks(*axes.values)
    for tick in levels:
        y = axes.y(tick)
        label = _tick_label(tick, tick if axes.log else levels[1] - levels[0])
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for tick in _ticks(*axes.steps):
        if tick == int(tick) and tick >= 0:
            parts.append(f'<text x="{axes.x(tick):.1f}" y="{_HEIGHT - 7}" text-anchor="middle">{int(tick)}</text>')
    return "".join(parts)


def _curve(line: Line, axes: _Axes) -> str:
    colour = f"c{line.colour}"
    points = line.points
    raw = _path(_bin_extremes(points), axes)
    parts = []
    if line.smooth and len(points) > 3 * _window(len(points)):
        parts.append(f'<path class="faint {colour}" d="{raw}"/>')
        parts.append(f'<path class="line {colour}" d="{_path(_moving_average(_bin_means(points)), axes)}"/>')
    else:
        parts.append(f'<path class="line {colour}" d="{raw}"/>')
    for pair, (step, _) in zip(line.intervals, line.points, strict=False):
        if pair is not None:
            x = axes.x(step)
            parts.append(f'<path class="whisker {colour}" d="M{x:.1f} {axes.y(pair[0]):.1f}V{axes.y(pair[1]):.1f}"/>')
    if line.dots or len(points) == 1:
        for step, value in points:
            if math.isfinite(value):
                tip = f"<title>step {step:g}: {number(value)}</title>"
                place = f'cx="{axes.x(step):.1f}" cy="{axes.y(value):.1f}"'
                parts.append(f'<circle class="{colour}" {place} r="3.5">{tip}</circle>')
    return "".join(parts)


def _path(points: Series, axes: _Axes) -> str:
    """Straight pieces; a value that is not finite leaves a gap."""
    pieces, pen = [], "M"
    for step, value in points:
        if math.isfinite(value):
            pieces.append(f"{pen}{axes.x(step):.1f} {axes.y(value):.1f}")
            pen = "L"
        else:
            pen = "M"
    return "".join(pieces)


def _drawable(points: Series) -> Series:
    """Keeps the arithmetic of axes inside floating point: what is tinier is 0, what is larger counts as not finite."""
    return [
        (step, 0.0 if abs(value) < _SMALLEST else value if abs(value) < _LARGEST else math.nan)
        for step, value in points
    ]


def _stretches(points: Series) -> list[Series]:
    size = len(points) / BINS
    return [points[round(i * size) : round((i + 1) * size)] for i in range(BINS)]


def _bin_extremes(points: Series) -> Series:
    """Lowest and highest point of each stretch, in their order; a stretch with nothing finite stays a gap."""
    if len(points) <= 2 * BINS:
        return points
    reduced: Series = []
    for stretch in _stretches(points):
        finite = [point for point in stretch if math.isfinite(point[1])]
        if finite:
            reduced += sorted({min(finite, key=itemgetter(1)), max(finite, key=itemgetter(1))})
        else:
            reduced.append((stretch[0][0], math.nan))
    return reduced


def _bin_means(points: Series) -> Series:
    stretches = _stretches(points) if len(points) > BINS else [[point] for point in points]
    reduced: Series = []
    for stretch in stretches:
        finite = [value for _, value in stretch if math.isfinite(value)]
        mean = sum(finite) / len(finite) if finite else math.nan
        reduced.append((sum(step for step, _ in stretch) / len(stretch), mean))
    return reduced


def _window(count: int) -> int:
    return max(3, round(count * _SMOOTHING_SHARE))


def _moving_average(points: Series) -> Series:
    """Centred; the window is cut off at both ends; values that are not finite are left out."""
    finite = [(step, value) for step, value in points if math.isfinite(value)]
    half = _window(len(finite)) // 2
    averaged: Series = []
    for i, (step, _) in enumerate(finite):
        window = [value for _, value in finite[max(0, i - half) : i + half + 1]]
        averaged.append((step, sum(window) / len(window)))
    return averaged


def _widen(low: float, high: float) -> tuple[float, float]:
    return (low, high) if high > low else (low - 1, high + 1)


def _nice_step(low: float, high: float, pieces: int = 4) -> float:
    rough = (high - low) / pieces
    power = 10.0 ** math.floor(math.log10(rough))
    return power * next(factor for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))


def _nice_range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high - low <= _FLAT * max(abs(low), abs(high)):
        margin = abs(high) / 2 or 1.0
        low, high = (max(0.0, low - margin) if low >= 0 else low - margin), high + margin
    step, next_step = 0.0, _nice_step(low, high)
    while next_step > step * (1 + 1e-9):  # widening to whole ticks may ask for a coarser tick
        step = next_step
        low, high = math.floor(low / step + _FLAT) * step, math.ceil(high / step - _FLAT) * step
        next_step = _nice_step(low, high)
    return low, high


def _log_range(values: Sequence[float]) -> tuple[float, float]:
    return 10.0 ** math.floor(math.log10(min(values))), 10.0 ** math.ceil(math.log10(max(values)))


def _ticks(low: float, high: float) -> list[float]:
    step = _nice_step(low, high)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = round(math.log10(low)), round(math.log10(high))
    stride = max(1, math.ceil((last - first) / 5))
    return [10.0**exponent for exponent in range(first, last + 1, stride)]


def _tick_label(value: float, step: float) -> str:
    """As many decimals as tell ticks ``step`` apart from each other."""
    if step >= 1000:
        for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
            if abs(value) >= size:
                return f"{value / size:.4g}{letter}" if abs(value) < 1e15 else f"{value:.0e}"
        return f"{value:.0f}"
    decimals = next((d for d in range(6) if math.isclose(round(step, d), step, rel_tol=1e-6)), None)
    if decimals is None:
        return f"{value:.3g}".replace("e-0", "e-")
    return f"{value:.{decimals}f}"
