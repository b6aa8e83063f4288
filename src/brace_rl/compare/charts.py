"""Learning curves with bands as inline SVG, in the style of the report; the other charts are the report's own."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from brace_rl.diagnose.sums import Estimate
from brace_rl.report.svg import number

PALETTE = 8
"""Colours of the report's style."""

LINE_STYLES = ("", "6 3", "2 3")
"""Dashes that tell lines of the same colour apart."""

STYLE = """
.band { fill: var(--c); opacity: .13; stroke: none; }
.curve { stroke: var(--c); stroke-width: 1.8; fill: none; stroke-linejoin: round; }
"""
"""Rules these charts add to the report's style."""

_WIDTH, _HEIGHT = 720, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 12, 10, 26
_LEVELS = 5
_STEPS = 6


@dataclass(frozen=True)
class Curve:
    """Successes by step; ``place`` among the methods chooses colour and dashes."""

    label: str
    points: Sequence[tuple[float, Estimate]]
    place: int

    @property
    def colour(self) -> int:
        """1 to 8."""
        return self.place % PALETTE + 1

    @property
    def dashes(self) -> str:
        """An SVG dash pattern; empty for a full line."""
        return LINE_STYLES[self.place // PALETTE % len(LINE_STYLES)]


def success_chart(title: str, curves: Sequence[Curve], *, steps: int) -> str:
    """Mean success with its interval as a band, from 0 to 1 over the steps of a run; empty without a point."""
    if not any(curve.points for curve in curves):
        return ""
    top = _top(curves)

    def x(step: float) -> float:
        return _LEFT + step / steps * (_WIDTH - _LEFT - _RIGHT)

    def y(success: float) -> float:
        return _TOP + (top - success) / top * (_HEIGHT - _TOP - _BOTTOM)

    parts = []
    for i in range(_LEVELS + 1):
        level = top * i / _LEVELS
        parts.append(f'<path class="grid" d="M{_LEFT} {y(level):.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 5}" y="{y(level) + 4:.1f}" text-anchor="end">{level:.2g}</text>')
    for tick in sorted({round(steps * i / _STEPS) for i in range(_STEPS + 1)}):
        parts.append(f'<text x="{x(tick):.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{tick}</text>')
    for curve in curves:
        known = [(step, e) for step, e in curve.points if math.isfinite(e.low)]
        if known:
            edge = [f"{x(step):.1f} {y(e.low):.1f}" for step, e in known]
            edge += [f"{x(step):.1f} {y(e.high):.1f}" for step, e in reversed(known)]
            parts.append(f'<path class="band c{curve.colour}" d="M{"L".join(edge)}Z"/>')
    for curve in curves:
        if curve.points:
            line = "L".join(f"{x(step):.1f} {y(e.value):.1f}" for step, e in curve.points)
            dashes = f' stroke-dasharray="{curve.dashes}"' if curve.dashes else ""
            parts.append(f'<path class="curve c{curve.colour}"{dashes} d="M{line}"/>')
        for step, e in curve.points:
            tip = html.escape(f"{curve.label}, step {step:g}: {number(e.value)}")
            place = f'cx="{x(step):.1f}" cy="{y(e.value):.1f}"'
            parts.append(f'<circle class="c{curve.colour}" {place} r="2.5"><title>{tip}</title></circle>')
    label = html.escape(title, quote=True)
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _top(curves: Sequence[Curve]) -> float:
    """A multiple of a tenth that holds every band."""
    highest = max(x for c in curves for _, e in c.points for x in (e.value, e.high) if math.isfinite(x))
    return min(1.0, max(0.1, math.ceil(highest * 10) / 10))
