"""Truncated importance sampling between engine and trainer: per token, per sequence, or as a filter."""

from __future__ import annotations

from typing import Literal

from brace_rl.actor.contract import ActorBatch, ActorLoss
from brace_rl.actor.surrogates import (
    CLIP_HIGH,
    CLIP_LOW,
    anchor,
    capped_weight,
    check_band,
    check_positive,
    clipped_surrogate,
    log_ratio,
    outside,
    row_mean,
)
from brace_rl.core.losses import MAX_LOG_RATIO


def tis(
    batch: ActorBatch,
    *,
    level: Literal["token", "sequence", "geometric"] = "token",
    cap: float = 2.0,
    low: float = 0.999,
    high: float = 1.001,
    clip_low: float = CLIP_LOW,
    clip_high: float = CLIP_HIGH,
) -> ActorLoss:
    """``sg(weight) * ppo_clip(target/proximal, A)``, the weight made of ``x = proximal/behavior``.

    ``level``:
        ``token``: ``min(x, cap)``.
        ``sequence``: ``min(prod x, cap)``, the product over the tokens of the response, the same at each of them.
        ``geometric``: no weight but a mask, 1 where ``low <= exp(mean log x) <= high`` over the response.

    Edges: B for weight and mask, U for the clip. There is no form on E: a capped weight on E and a clip on E would
    count the ratio twice, and without the clip it is CISPO.

    Published: ``cap = 2``; the geometric band is "about" [0.999, 1.001]. ``geometric`` does not read ``cap``, and it
    alone reads ``low`` and ``high``.

    Edge cases: one row is one response. In products and means each token's log-ratio is held within
    ``MAX_LOG_RATIO``. With ``sequence``, long responses drift to weight 0 or to the cap.
    """
    log_weight = log_ratio(batch, "B", rule="tis")
    clip_from = anchor(batch, "U", rule="tis")
    if level not in ("token", "sequence", "geometric"):
        raise ValueError(f"tis: level = {level!r}; must be 'token', 'sequence' or 'geometric'")
    if level != "token":
        log_weight = log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if level == "geometric":
        check_band(low, high, rule="tis")
        mean = row_mean(batch, log_weight)
        return clipped_surrogate(
            batch,
            anchor=clip_from,
            clip_low=clip_low,
            clip_high=clip_high,
            rejected=outside(mean.exp(), low, high),
        )
    check_positive(cap, "cap", rule="tis")
    if level == "sequence":
        log_weight = log_weight.sum(1, keepdim=True).expand_as(log_weight)
    weight, capped = capped_weight(log_weight, cap)
    return clipped_surrogate(
        batch, anchor=clip_from, clip_low=clip_low, clip_high=clip_high, weight=weight, capped=capped
    )
