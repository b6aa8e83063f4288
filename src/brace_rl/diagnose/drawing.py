"""Two small SVG charts in the report's style: points with intervals over bins, and histograms."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence

from brace_rl.diagnose.collect import histogram_place
from brace_rl.diagnose.sums import Estimate
from brace_rl.report.svg import number

_WIDTH, _HEIGHT = 420, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 12, 26
_TICKS = 4
_MARGIN = 0.05
"""Room above and below the data, as a share of its range."""
_LOWEST_SHARE = 1e-6
"""Shares below this are drawn at it: the axis is logarithmic."""


def by_bin(
    title: str, labels: Sequence[str], series: Sequence[Sequence[Estimate]], *, reference: float | None = None
) -> str:
    """Points with 95 % whiskers, one group of ``series`` for every label; empty when nothing is finite."""
    values = [x for line in series for e in line for x in (e.value, e.low, e.high) if math.isfinite(x)]
    if not values:
        return ""
    if reference is not None:
        values.append(reference)
    low, high = _range(values)

    def y(value: float) -> float:
        return _TOP + (high - value) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [_levels(low, high, y)]
    if reference is not None:
        parts.append(f'<path class="ref" d="M{_LEFT} {y(reference):.1f}H{_WIDTH - _RIGHT}"/>')
    slot = (_WIDTH - _LEFT - _RIGHT) / len(labels)
    for i, label in enumerate(labels):
        middle = _LEFT + (i + 0.5) * slot
        parts.append(_text(middle, label))
        for j, line in enumerate(series):
            e, x = line[i], middle + (j - (len(series) - 1) / 2) * slot / (len(series) + 2)
            if not math.isfinite(e.value):
                continue
            if math.isfinite(e.low) and math.isfinite(e.high):
                parts.append(f'<path class="whisker c{j + 1}" d="M{x:.1f} {y(e.low):.1f}V{y(e.high):.1f}"/>')
            tip = html.escape(f"{label}: {number(e.value)}")
            parts.append(
                f'<circle class="c{j + 1}" cx="{x:.1f}" cy="{y(e.value):.1f}" r="3"><title>{tip}</title></circle>'
            )
    return _svg(title, parts)


def histograms(title: str, series: Sequence[Sequence[int]]) -> str:
    """Shares by bin of log w, on a logarithmic axis; bins as :mod:`~brace_rl.diagnose.collect` makes them."""
    parts = []
    floor = math.log10(_LOWEST_SHARE)

    def y(share: float) -> float:
        return _TOP + math.log10(max(share, _LOWEST_SHARE)) / floor * (_HEIGHT - _TOP - _BOTTOM)

    for power in range(0, int(floor) - 1, -2):
        parts.append(f'<path class="grid" d="M{_LEFT} {y(10.0**power):.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 5}" y="{y(10.0**power) + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    for i in range(_TICKS + 1):
        x = _LEFT + i / _TICKS * (_WIDTH - _LEFT - _RIGHT)
        parts.append(_text(x, f"{math.exp(histogram_place(i / _TICKS)):.3g}"))
    for j, counts in enumerate(series):
        total = sum(counts)
        step = (_WIDTH - _LEFT - _RIGHT) / len(counts)
        points = [f"{_LEFT + (i + 0.5) * step:.1f} {y(count / total):.1f}" for i, count in enumerate(counts)]
        parts.append(f'<path class="line c{j + 1}" d="M{"L".join(points)}"/>')
    return _svg(title, parts) if series else ""


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = (high - low) * _MARGIN or abs(high) * _MARGIN or 1.0
    return low - margin, high + margin


def _levels(low: float, high: float, y: Callable[[float], float]) -> str:
    parts = []
    for i in range(_TICKS + 1):
        level = low + (high - low) * i / _TICKS
        parts.append(f'<path class="grid" d="M{_LEFT} {y(level):.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 5}" y="{y(level) + 4:.1f}" text-anchor="end">{level:.2g}</text>')
    return "".join(parts)


def _text(x: float, label: str) -> str:
    return f'<text x="{x:.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{html.escape(label)}</text>'


def _svg(title: str, parts: Sequence[str]) -> str:
    label = html.escape(title, quote=True)
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
