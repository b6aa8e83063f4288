"""IcePop: weight a token by how far trainer and engine differ on it, and drop it outside a band."""

from __future__ import annotations

from typing import Literal

from brace_rl.actor.contract import ActorBatch, ActorLoss
from brace_rl.actor.surrogates import (
    CLIP_HIGH,
    CLIP_LOW,
    check_band,
    clip_anchor,
    clipped_surrogate,
    log_ratio,
    outside,
)


def icepop(
    batch: ActorBatch,
    *,
    edge: Literal["B", "E"] = "B",
    low: float = 0.5,
    high: float = 5.0,
    clip_low: float = CLIP_LOW,
    clip_high: float = CLIP_HIGH,
) -> ActorLoss:
    """``sg(x 1[low <= x <= high]) * ppo_clip(target/proximal, A)``, ``x = proximal/behavior`` (arXiv 2510.18855).

    Edges: mask and weight on B, clip on U. BRACE and ESTR describe the rule on E, ``x = target/behavior``: then the
    clip is on E too, and the loss is ``1[low <= x <= high] * ppo_clip(x, A)``. The mask stays; the weight does not,
    because the clipped ratio holds it already.

    Published: the rule (the Ring-1T report). 0.5 and 5.0 are the bounds of the implementations.

    Edge cases: both bounds belong to the band.
    """
    check_band(low, high, rule="icepop")
    ratio = log_ratio(batch, edge, rule="icepop").exp()
    return clipped_surrogate(
        batch,
        anchor=clip_anchor(batch, edge, rule="icepop"),
        clip_low=clip_low,
        clip_high=clip_high,
        rejected=outside(ratio, low, high),
        weight=ratio if edge == "B" else None,
    )
