"""PPO: one clipped ratio."""

from __future__ import annotations

from typing import Literal

from brace_rl.actor.contract import ActorBatch, ActorLoss
from brace_rl.actor.surrogates import CLIP_HIGH, CLIP_LOW, anchor, check_edge, clipped_surrogate


def ppo(
    batch: ActorBatch,
    *,
    edge: Literal["E", "U"] = "E",
    clip_low: float = CLIP_LOW,
    clip_high: float = CLIP_HIGH,
    dual_clip: float | None = None,
) -> ActorLoss:
    """``max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))`` (Schulman et al., arXiv 1707.06347).

    Edge: ``r`` is E, target/behavior, as in the BRACE comparison. With U, target/proximal, nothing corrects what was
    sampled by older weights; where proximal is the current policy, the ratio starts at 1 and hides all staleness, so a
    trainer must refuse U for stale batches.

    Published: the clip of the BRACE comparison, 0.20 / 0.28 (arXiv 2609.09783); the original has 0.2 on both sides.
    ``dual_clip`` (Ye et al., arXiv 1912.09729, who use 3): where ``A < 0`` the loss is at most ``-A dual_clip``.

    Edge cases: at a ratio beyond the clip, on the side that the advantage asks for, the token has no gradient. Without
    ``dual_clip`` a token with ``A < 0`` and a huge ratio has a huge loss (held at ``exp(MAX_LOG_RATIO)``).
    """
    check_edge(edge, "EU", rule="ppo")
    return clipped_surrogate(
        batch,
        anchor=anchor(batch, edge, rule="ppo"),
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )
