"""Learning curves over methods and lags, and the map of where a window begins to pay. Plain data, ready for JSON.

Every method meets the same seeds, so methods are compared by the paired differences of their seeds, with Student's 95 %
interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from brace_rl.errors import BraceError
from brace_rl.oracle.learn import Curve, learn
from brace_rl.oracle.methods import Method
from brace_rl.oracle.presets import Preset
from brace_rl.oracle.settings import LearnConfig

CONFIDENCE = 0.95

AUTOMATIC = ("drift", "path")
"""Kinds of method that choose their window."""

Row = dict[str, Any]


def curves(
    preset: Preset,
    methods: Sequence[Method],
    lags: Sequence[int],
    config: LearnConfig,
    *,
    on_step: Callable[[int], None] | None = None,
) -> Iterator[Row]:
    """Learn with every method at every lag; yields one :func:`curve_row` at a time, lag by lag."""
    for lag in lags:
        for method in methods:
            yield curve_row(learn(preset, method, replace(config, lag=lag), on_step=on_step))


def curve_row(curve: Curve) -> Row:
    """A curve as plain data: means and half-widths of the interval by point, areas and ends by seed."""
    mean, half = interval(curve.success)
    return {
        "method": curve.method,
        "lag": curve.lag,
        "steps": curve.steps,
        "success": mean.tolist(),
        "half_width": half.tolist(),
        "area": curve.area.tolist(),
        "final": curve.final.tolist(),
        "critic_bias": curve.critic_bias.mean(1).tolist(),
        "critic_rmse": curve.critic_error.mean(1).tolist(),
        "mean_window": curve.mean_window,
        "ratio_spread": curve.ratio_spread,
        "seconds": curve.seconds,
    }


def boundary_map(
    make: Callable[[int], Preset],
    methods: Sequence[Method],
    *,
    lags: Sequence[int],
    horizons: Sequence[int],
    noises: Sequence[float],
    config: LearnConfig,
    on_step: Callable[[int], None] | None = None,
) -> Iterator[Row]:
    """One cell per lag, horizon and engine noise: the area under every method's curve.

    Args:
        make: a preset for a horizon.
        noises: logit noise of the engine, recorded as sampled: how wide the ratios are besides staleness.

    Yields:
        "lag", "horizon", "noise", "ratio_spread" (of the first method), "seconds", and "area" by method and seed.
    """
    for horizon in horizons:
        preset = make(horizon)
        for noise in noises:
            noisy = replace(preset, engine=replace(preset.engine, noise=noise))
            for lag in lags:
                found = [learn(noisy, method, replace(config, lag=lag), on_step=on_step) for method in methods]
                yield {
                    "lag": lag,
                    "horizon": horizon,
                    "noise": noise,
                    "ratio_spread": found[0].ratio_spread,
                    "seconds": sum(curve.seconds for curve in found),
                    "area": {curve.method: curve.area.tolist() for curve in found},
                }


def cap_gain(cell: Row, *, method: str, baseline: str) -> tuple[float, float]:
    """Mean paired difference of area, ``method - baseline``, and the half-width of its interval."""
    areas = cell["area"]
    for name in (method, baseline):
        if name not in areas:
            raise BraceError(f"the map has no method {name!r}; it has {', '.join(areas)}")
    return paired(areas[method], areas[baseline])


def best_fixed(cell: Row) -> str:
    """The method with the largest mean area among those that choose no window.

    It is picked by the very figures it is then compared with, which flatters it.
    """
    fixed: dict[str, list[float]] = {
        name: areas for name, areas in cell["area"].items() if name.partition(":")[0] not in AUTOMATIC
    }
    if not fixed:
        raise BraceError("the map has only methods that choose their window; add one that does not, such as brace:100")
    return max(fixed, key=lambda name: float(sum(fixed[name])))


def paired(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Mean of ``a - b`` over seeds and the half-width of its 95 % interval."""
    return interval_of([x - y for x, y in zip(a, b, strict=True)])


def interval_of(x: Sequence[float]) -> tuple[float, float]:
    """:func:`interval` of one number per seed."""
    mean, half = interval(torch.tensor(x, dtype=torch.float64))
    return float(mean), float(half)


def interval(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over the last axis (seeds) and half-width of Student's 95 % interval; NaN for a single seed."""
    seeds = x.shape[-1]
    if seeds == 1:
        return x[..., 0], torch.full_like(x[..., 0], torch.nan)
    return x.mean(-1), student_quantile(seeds - 1) * x.std(-1) / math.sqrt(seeds)


def student_quantile(degrees: int) -> float:
    """Two-sided 95 % quantile of Student's t.

    Exact for one and two degrees of freedom, else Cornish and Fisher's expansion (Abramowitz and Stegun 26.7.5), which
    is good to 0.01 from three on and to 1e-5 from nineteen on.
    """
    upper = (1 + CONFIDENCE) / 2
    if degrees == 1:
        return math.tan(math.pi * (upper - 0.5))
    if degrees == 2:
        return (2 * upper - 1) / math.sqrt(2 * upper * (1 - upper))
    z = NormalDist().inv_cdf(upper)
    terms: tuple[float, ...] = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return math.fsum(term / degrees**power for power, term in enumerate(terms))
