"""Decoupled PPO: a detached weight for what has happened, a clip for what this update does."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from brace_rl.actor.contract import ActorBatch, ActorLoss
from brace_rl.actor.surrogates import (
    CLIP_HIGH,
    CLIP_LOW,
    anchor,
    capped_weight,
    check_positive,
    clipped_surrogate,
    log_ratio,
)

OverCap = Literal["mask", "clamp"]


def decoupled(
    batch: ActorBatch,
    *,
    weight_cap: float = 5.0,
    over_cap: OverCap = "mask",
    clip_low: float = CLIP_LOW,
    clip_high: float = CLIP_HIGH,
) -> ActorLoss:
    """``sg(proximal/behavior) * ppo_clip(target/proximal, A)`` (AReaL, arXiv 2505.24298).

    Edges: weight on B, clip on U. ``proximal`` is the policy just before the update: one forward pass when the batch
    arrives, none where the trainer has those log-probs for its value targets anyway.

    Published: the objective. The cap is that of AReaL's code, which drops tokens whose weight exceeds 5.0
    (``over_cap = "mask"``) or holds the weight there (``"clamp"``).

    Edge cases: dropped tokens stay in the denominator. On-policy data has weight 1, and this is PPO on U.
    """
    return capped_behavior_weight(
        batch,
        log_weight=log_ratio(batch, "B", rule="decoupled"),
        anchor=anchor(batch, "U", rule="decoupled"),
        weight_cap=weight_cap,
        over_cap=over_cap,
        clip_low=clip_low,
        clip_high=clip_high,
        rule="decoupled",
    )


def capped_behavior_weight(
    batch: ActorBatch,
    *,
    log_weight: Tensor,
    anchor: Tensor,
    weight_cap: float,
    over_cap: OverCap,
    clip_low: float,
    clip_high: float,
    rule: str,
) -> ActorLoss:
    """The decoupled loss from ``log_weight`` and ``anchor``, both ``[B, T]`` and detached."""
    check_positive(weight_cap, "weight_cap", rule=rule)
    if over_cap not in ("mask", "clamp"):
        raise ValueError(f"{rule}: over_cap = {over_cap!r}; must be 'mask' or 'clamp'")
    weight, beyond = capped_weight(log_weight, weight_cap)
    is_mask = over_cap == "mask"
    return clipped_surrogate(
        batch,
        anchor=anchor,
        clip_low=clip_low,
        clip_high=clip_high,
        rejected=beyond if is_mask else None,
        capped=None if is_mask else beyond,
        weight=weight,
    )
