"""Learning curves over methods and lags, and the map of where a window begins to pay. Plain data, ready for JSON.

Every method meets the same seeds, so methods are compared by the paired differences of their seeds, with Student's 95 %
interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from brace_rl.errors import BraceError
from brace_rl.oracle.learn import Curve, learn
from brace_rl.oracle.methods import AUTOMATIC, Method
from brace_rl.oracle.presets import Preset
from brace_rl.oracle.settings import LearnConfig
from brace_rl.quantiles import student_quantile

BASELINE = "mc"
"""What every method is compared with, seed by seed."""

Row = dict[str, Any]
"""A learning curve as plain data, see :func:`curve_row`."""

RunCell = Callable[[Preset, Method, LearnConfig], Row]
"""One method on one task at one lag."""


def learnt_row(preset: Preset, method: Method, config: LearnConfig) -> Row:
    """Learn, and keep nothing but the row."""
    return curve_row(learn(preset, method, config))


def curves(
    preset: Preset,
    methods: Sequence[Method],
    lags: Sequence[int],
    config: LearnConfig,
    *,
    run: RunCell = learnt_row,
) -> Iterator[Row]:
    """Learn with every method at every lag; yields one :func:`curve_row` at a time, lag by lag."""
    for lag in lags:
        for method in methods:
            yield run(preset, method, replace(config, lag=lag))


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
        "target_bias": curve.target_bias.mean(1).tolist(),
        "target_rmse": curve.target_error.mean(1).tolist(),
        "mean_window": curve.mean_window,
        "ratio_spread": curve.ratio_spread,
        "mean_ratio": curve.mean_ratio,
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
    run: RunCell = learnt_row,
) -> Iterator[dict[str, Any]]:
    """One point per lag, horizon and engine noise: the area under every method's curve.

    Args:
        make: a preset for a horizon.
        noises: logit noise of the engine, recorded as sampled: how wide the ratios are besides staleness.

    Yields:
        "lag", "horizon", "noise", "start" (success), "ratio_spread" (of the first method), "seconds"; "area" and
        "final" by method and seed; "mean_window" and "critic_rmse" by method.
    """
    for horizon in horizons:
        preset = make(horizon)
        for noise in noises:
            noisy = replace(preset, engine=replace(preset.engine, noise=noise))
            for lag in lags:
                rows = [run(noisy, method, replace(config, lag=lag)) for method in methods]
                yield {
                    "lag": lag,
                    "horizon": horizon,
                    "noise": noise,
                    "start": rows[0]["success"][0],
                    "ratio_spread": rows[0]["ratio_spread"],
                    "seconds": sum(row["seconds"] for row in rows),
                    "area": {row["method"]: row["area"] for row in rows},
                    "final": {row["method"]: row["final"] for row in rows},
                    "mean_window": {row["method"]: row["mean_window"] for row in rows},
                    "critic_rmse": {row["method"]: mean_of(row["critic_rmse"]) for row in rows},
                }


class Summary(NamedTuple):
    """What is said of a method among others on the same seeds; pairs are a mean and the half-width of its interval.

    Attributes:
        area, final: success, mean over the curve and at its end.
        area_gain, final_gain: the same minus that of the baseline, seed by seed.
        stuck: seeds that end below twice the success they started from.
        seeds: how many there are.
    """

    method: str
    area: tuple[float, float]
    final: tuple[float, float]
    area_gain: tuple[float, float]
    final_gain: tuple[float, float]
    stuck: int
    seeds: int


def summarise(
    area: Mapping[str, Sequence[float]], final: Mapping[str, Sequence[float]], *, start: float
) -> list[Summary]:
    """One :class:`Summary` per method, in the order given.

    Args:
        area, final: by method and seed. The baseline is :data:`BASELINE` if it is among them, else the first.
        start: success before training.
    """
    base = baseline_of(list(area))
    return [
        Summary(
            method=name,
            area=interval_of(area[name]),
            final=interval_of(final[name]),
            area_gain=paired(area[name], area[base]),
            final_gain=paired(final[name], final[base]),
            stuck=sum(end < 2 * start for end in final[name]),
            seeds=len(final[name]),
        )
        for name in area
    ]


def baseline_of(names: Sequence[str]) -> str:
    """The method the others are compared with."""
    return BASELINE if BASELINE in names else names[0]


def by_lag(rows: Sequence[Row]) -> dict[int, list[Summary]]:
    """Summaries of learning curves, lag by lag."""
    lags = dict.fromkeys(row["lag"] for row in rows)
    return {lag: _summaries([row for row in rows if row["lag"] == lag]) for lag in lags}


def _summaries(rows: Sequence[Row]) -> list[Summary]:
    area, final = ({row["method"]: row[key] for row in rows} for key in ("area", "final"))
    return summarise(area, final, start=rows[0]["success"][0])


def cap_gain(cell: Row, *, method: str, baseline: str) -> tuple[float, float]:
    """Mean paired difference of area, ``method - baseline``, and the half-width of its interval."""
    areas = cell["area"]
    for name in (method, baseline):
        if name not in areas:
            raise BraceError(f"the map has no method {name!r}; it has {', '.join(areas)}")
    return paired(areas[method], areas[baseline])


def best_fixed(cell: Row) -> str:
    """The method with the largest mean area among those that choose no window; GAE, which has none, is not among them.

    It is picked by the very figures it is then compared with, which flatters it.
    """
    fixed: dict[str, list[float]] = {
        name: areas
        for name, areas in cell["area"].items()
        if not is_automatic(name) and name.partition(":")[0] != "gae"
    }
    if not fixed:
        raise BraceError("the map has only methods that choose their window; add one that does not, such as brace:100")
    return max(fixed, key=lambda name: float(sum(fixed[name])))


def is_automatic(name: str) -> bool:
    """Whether a method of that name chooses its window."""
    return name.partition(":")[0] in AUTOMATIC


def paired(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Mean of ``a - b`` over seeds and the half-width of its 95 % interval."""
    return interval_of([x - y for x, y in zip(a, b, strict=True)])


def mean_of(x: Sequence[float]) -> float:
    """Plain mean."""
    return sum(x) / len(x)


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
