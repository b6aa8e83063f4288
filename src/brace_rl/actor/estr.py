"""ESTR: a trust region as wide as the policy was uncertain."""

from __future__ import annotations

from typing import Literal

from brace_rl.actor.contract import ActorBatch, ActorLoss
from brace_rl.actor.surrogates import (
    CLIP_HIGH,
    CLIP_LOW,
    check_positive,
    clip_anchor,
    clipped_surrogate,
    log_ratio,
)


def estr(
    batch: ActorBatch,
    *,
    tau: float,
    eps: float = 0.01,
    edge: Literal["B", "E"] = "E",
    clip_low: float = CLIP_LOW,
    clip_high: float = CLIP_HIGH,
) -> ActorLoss:
    """``1[delta^2 / (H + eps) <= tau] * ppo_clip(target/behavior, A)`` (arXiv 2607.22186).

    ``delta = log target - log behavior``, ``H`` the entropy, over the whole vocabulary, of the *behaviour* distribution
    where the token was sampled (nats). The embedded engine records it.

    Edges: mask on E, clip on E. With ``edge = "B"``, ``delta = log proximal - log behavior`` and the clip is on U.

    Published: the rule. ``eps = 0.01`` we know from what others write about it. Not published: ``tau``, which therefore
    has no default.

    Edge cases: where the policy was certain (``H = 0``) only ``delta^2 <= tau eps`` is kept. Written as
    ``delta^2 <= tau (H + eps)``, so nothing is divided by 0. An entropy below 0 is rounding and counts as 0.
    """
    check_positive(tau, "tau", rule="estr")
    if not eps >= 0:
        raise ValueError(f"estr: eps = {eps}; must be at least 0")
    clip_from = clip_anchor(batch, edge, rule="estr")
    entropy = batch.need("behavior_entropy", rule="estr").clamp(min=0.0)
    return clipped_surrogate(
        batch,
        anchor=clip_from,
        clip_low=clip_low,
        clip_high=clip_high,
        rejected=~(log_ratio(batch, edge, rule="estr").square() <= tau * (entropy + eps)),
    )
