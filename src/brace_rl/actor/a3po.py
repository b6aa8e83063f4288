"""A-3PO: decoupled PPO whose proximal policy is interpolated instead of computed."""

from __future__ import annotations

from brace_rl.actor.contract import ActorBatch, ActorLoss
from brace_rl.actor.decoupled import OverCap, capped_behavior_weight
from brace_rl.actor.surrogates import CLIP_HIGH, CLIP_LOW, log_ratio
from brace_rl.core.losses import MAX_LOG_RATIO


def a3po(
    batch: ActorBatch,
    *,
    weight_cap: float = 5.0,
    over_cap: OverCap = "mask",
    clip_low: float = CLIP_LOW,
    clip_high: float = CLIP_HIGH,
) -> ActorLoss:
    """Decoupled PPO with ``log proximal = log mu + alpha (sg(log pi) - log mu)`` (arXiv 2512.06547).

    ``alpha = (d - 1) / d`` at version lag ``d``, and 0 at ``d = 0``: the anchor stands one update behind the target.

    Edges: weight on B, ``E^alpha``; clip on U, ``E^(1 - alpha)``, whose gradient is that of ``log target``.

    Published: ``alpha``. The cap on the weight is that of AReaL's decoupled loss (see :mod:`brace_rl.actor.decoupled`).

    Edge cases: at lag 0 and 1 this is PPO on E. ``log pi - log mu`` is held within ``MAX_LOG_RATIO``.
    """
    behavior = batch.need("behavior_logprobs", rule="a3po")
    total = log_ratio(batch, "E", rule="a3po").clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    lag = batch.need("version_lag", rule="a3po").to(total.dtype)
    log_weight = total * (lag - 1).clamp(min=0) / lag.clamp(min=1)
    return capped_behavior_weight(
        batch,
        log_weight=log_weight,
        anchor=behavior + log_weight,
        weight_cap=weight_cap,
        over_cap=over_cap,
        clip_low=clip_low,
        clip_high=clip_high,
        rule="a3po",
    )
