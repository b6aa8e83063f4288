"""From a chunk to sums per response: pure functions, each returning ``[B]`` arrays by name.

Names are grouped by a prefix; figures are made of them in :mod:`brace_rl.diagnose.statistics`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from brace_rl import core
from brace_rl.diagnose.chunk import UNKNOWN_LAG, Chunk
from brace_rl.diagnose.response import Floats
from brace_rl.diagnose.settings import Settings
from brace_rl.diagnostics.batch import HORIZON_EDGES

LAG_EDGES = (0, 1, 2, 3, 5, 9, 17, 33)
"""Lower ends of the groups of version lag; the last is open."""

RHO_GRID = (1.2, 1.5, 2.0, 3.0, 5.0)
"""Values of rho_clip that are compared; the paper's default first."""

C_GRID = (1.1, 1.0)
"""Values of c_clip that are compared; the paper's default first."""

ESTIMATORS = ("gae", "vtrace", "capped", "brace")

ALIGNMENTS = (-1, 0, 1)
"""Offsets at which value changes are matched with token surprise."""

MAX_LOG_RATIO = 100.0
"""Keeps sums of squared ratios inside float64; such a ratio is a finding in itself."""

Columns = dict[str, Floats]


def horizon_bins(longest: int) -> list[tuple[int, int | None]]:
    """(low, high) of the bins of remaining policy tokens that responses of up to ``longest`` policy tokens reach."""
    every = list(zip((0, *HORIZON_EDGES), (*HORIZON_EDGES, None), strict=True))
    return [(low, high) for low, high in every if low < longest]


def ratio_sums(chunk: Chunk, settings: Settings) -> Columns:
    """Of ``w = pi / mu`` over policy tokens."""
    log_ratios = known(chunk.log_ratios)
    mask = chunk.policy_mask
    ratios = log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    of = _sum_over(mask)
    trace = log_ratios.clamp(max=math.log(settings.c_clip))
    sums = {
        "ratio/n": of(torch.ones_like(ratios)),
        "ratio/w": of(ratios),
        "ratio/ww": of(ratios.square()),
        "ratio/l": of(log_ratios),
        "ratio/ll": of(log_ratios.square()),
        "ratio/c": of(trace),
        "ratio/cc": of(trace.square()),
    }
    for clip in RHO_GRID:
        sums[f"rho/{clip}"] = of(ratios.clamp(max=clip))
    for clip in C_GRID:
        sums[f"c/{clip}"] = of(log_ratios.clamp(max=math.log(clip)))
    if chunk.behavior_logprobs is not None and chunk.target_logprobs is not None:
        mu, pi = chunk.behavior_logprobs, chunk.target_logprobs
        # Only tokens of lag 0 tell temperature from training; without versions all tokens stand in.
        for name, which in (("all", mask), ("fresh", mask & (chunk.lags == 0))):
            part = _sum_over(which)
            product = part(mu * pi)
            sums |= {
                f"temper/{name}/n": part(torch.ones_like(mu)),
                f"temper/{name}/x": part(mu),
                f"temper/{name}/xx": part(mu.square()),
                f"temper/{name}/y": part(pi),
                f"temper/{name}/yy": part(pi.square()),
                f"temper/{name}/xy": product,
                f"temper/{name}/yx": product,
            }
    return sums


def lag_group(lag: Tensor) -> Tensor:
    """Index into :data:`LAG_EDGES`; -1 for a negative or unknown lag."""
    return torch.bucketize(lag, torch.tensor(LAG_EDGES), right=True) - 1


def lag_sums(chunk: Chunk) -> Columns:
    """Of ``w`` for each group of version lag."""
    log_ratios = known(chunk.log_ratios)
    groups = lag_group(chunk.lags)
    ratios = log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    sums: Columns = {}
    for group in range(len(LAG_EDGES)):
        inside = chunk.policy_mask & (groups == group)
        if not bool(inside.any()):
            continue
        of = _sum_over(inside)
        sums |= {
            f"lag{group}/n": of(torch.ones_like(ratios)),
            f"lag{group}/w": of(ratios),
            f"lag{group}/l": of(log_ratios),
            f"lag{group}/ll": of(log_ratios.square()),
            f"lag{group}/a": of(log_ratios.abs()),
        }
    return sums


def weight_sums(chunk: Chunk, weights: Tensor) -> Columns:
    """Of the window weight ``Pi_k`` by remaining horizon."""
    sums: Columns = {}
    for name, inside in _bins(chunk):
        of = _sum_over(inside)
        sums |= {
            f"{name}/n": of(torch.ones_like(weights)),
            f"{name}/horizon": of(chunk.after.double()),
            f"{name}/pi": of(weights),
        }
    return sums


def targets_of(chunk: Chunk, settings: Settings) -> dict[str, Tensor]:
    """Targets by estimator, and ``return``, the realised return; ``[B, T]``, 0 outside ``policy_mask``."""
    common: dict[str, Any] = {
        "values": known(chunk.values),
        "rewards": known(chunk.rewards),
        "policy_mask": chunk.policy_mask,
        "bootstrap_values": chunk.bootstrap,
        "gamma": settings.gamma,
        "check_inputs": False,
    }
    ratios: dict[str, Any] = {
        "behavior_logprobs": known(chunk.behavior_logprobs),
        "target_logprobs": known(chunk.target_logprobs),
        "rho_clip": settings.rho_clip,
        "c_clip": settings.c_clip,
        "lam": settings.lam,
    }
    return {
        "return": core.monte_carlo_targets(**common).targets,
        "gae": core.gae_targets(**common, lam=settings.lam).targets,
        "vtrace": core.vtrace_targets(**common, **ratios).targets,
        "capped": core.capped_targets(**common, **ratios, window=settings.window).targets,
        "brace": core.brace_targets(**common, **ratios, window=settings.window).targets,
    }


def slope_sums(chunk: Chunk, targets: Mapping[str, Tensor]) -> Columns:
    """For beta (Eq. 15): of ``x = G - V`` and each estimator's ``target - V``, by remaining horizon and over all."""
    values = known(chunk.values)
    surprise = targets["return"] - values
    corrections = {name: targets[name] - values for name in ESTIMATORS}
    sums: Columns = {}
    for name, inside in [*_bins(chunk), ("all", chunk.policy_mask)]:
        of = _sum_over(inside)
        sums |= {
            f"beta/{name}/n": of(torch.ones_like(surprise)),
            f"beta/{name}/x": of(surprise),
            f"beta/{name}/xx": of(surprise.square()),
        }
        for estimator, correction in corrections.items():
            sums[f"beta/{name}/{estimator}"] = of(correction)
            sums[f"beta/{name}/x{estimator}"] = of(correction * surprise)
        sums[f"gap/{name}"] = of(corrections["brace"].abs())
    return sums


def value_sums(chunk: Chunk, returns: Tensor) -> Columns:
    """Of V and of the realised return over policy tokens."""
    of = _sum_over(chunk.policy_mask)
    values = known(chunk.values)
    error = returns - values
    return {
        "value/n": of(torch.ones_like(values)),
        "value/v": of(values),
        "value/vv": of(values.square()),
        "value/g": of(returns),
        "value/gg": of(returns.square()),
        "value/e": of(error),
        "value/ee": of(error.square()),
    }


def alignment_sums(chunk: Chunk) -> Columns:
    """Whether V changes across the surprising tokens, or across their neighbours.

    Between the states before and after a token that was certain, a value cannot change (it is the mean over what comes
    next); it may where the token was a surprise. So ``|V_{t+1} - V_t|`` goes with the surprise of token ``t``, and with
    that of a neighbour when the column is shifted. Square root and logarithm tame the tails.
    """
    values, mu, mask = known(chunk.values), known(chunk.behavior_logprobs), chunk.policy_mask
    inside = mask[:, :-2] & mask[:, 1:-1] & mask[:, 2:]
    of = _sum_over(inside)
    surprise = (-mu).clamp(min=0).log1p()
    change = (values[:, 2:] - values[:, 1:-1]).abs().sqrt()
    sums = {
        "align/n": of(torch.ones_like(change)),
        "align/d": of(change),
        "align/dd": of(change.square()),
    }
    for offset in ALIGNMENTS:
        x = surprise[:, 1 + offset : surprise.shape[1] - 1 + offset]
        sums |= {
            f"align/{offset}": of(x),
            f"align/{offset}{offset}": of(x.square()),
            f"align/d{offset}": of(change * x),
        }
    return sums


def version_sums(chunk: Chunk) -> Columns:
    """Widths of the log ratio in both halves of stale responses that carry one version only.

    Each width is relative to the tokens' surprise, because where the policy is certain no ratio can stray.
    """
    mask, log_ratios = chunk.policy_mask, known(chunk.log_ratios)
    lags = torch.where(mask, chunk.lags, UNKNOWN_LAG)
    oldest, newest = lags.amax(1), torch.where(mask, chunk.lags, -UNKNOWN_LAG).amin(1)
    stale = ((oldest == newest) & (oldest > 0))[:, None]
    count = mask.sum(1, keepdim=True)
    early = 2 * chunk.after >= count
    surprise = -known(chunk.behavior_logprobs)
    sums: Columns = {}
    for name, half in (("early", early), ("late", ~early)):
        of = _sum_over(mask & half & stale)
        sums |= {f"halves/{name}/ll": of(log_ratios.square()), f"halves/{name}/surprise": of(surprise)}
    return sums


def _bins(chunk: Chunk) -> list[tuple[str, Tensor]]:
    longest = int(chunk.after.max()) + 1 if chunk.after.numel() else 0
    return [
        (f"h{low}", chunk.policy_mask & (chunk.after >= low) & (True if high is None else chunk.after < high))
        for low, high in horizon_bins(longest)
    ]


def _sum_over(inside: Tensor) -> Callable[[Tensor], Floats]:
    """Sums over the tokens of each response that lie ``inside``."""
    weights = inside.double()  # a product, since everything is finite: several times faster than torch.where
    return lambda x: torch.linalg.vecdot(weights, x).numpy()


def known(x: Tensor | None) -> Tensor:
    """``x``, which a caller has found to be there."""
    if x is None:
        raise TypeError("asked for a figure of a column the files do not hold")
    return x
