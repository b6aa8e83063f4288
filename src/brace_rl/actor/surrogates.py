"""The two forms every actor rule's loss has, and the ratios they are fed with."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from brace_rl import core
from brace_rl.actor.contract import ActorBatch, ActorLoss

Edge = Literal["B", "E", "U"]

_EDGES = {"B": "proximal/behavior", "E": "target/behavior", "U": "target/proximal"}

CLIP_LOW, CLIP_HIGH = 0.20, 0.28
"""Clip of the ratio below and above 1 in the BRACE comparison (arXiv 2609.09783), for every rule with a PPO clip."""


def check_edge(edge: str, allowed: str, *, rule: str) -> None:
    """Raise ValueError unless ``edge`` is one of the letters ``allowed``."""
    if edge not in tuple(allowed):
        choices = " or ".join(f"{letter!r} ({_EDGES[letter]})" for letter in allowed)
        raise ValueError(f"{rule}: edge = {edge!r}; must be {choices}")


def anchor(batch: ActorBatch, edge: Edge, *, rule: str) -> Tensor:
    """``[B, T]`` what target is divided by on edge E (behavior) or U (proximal), detached."""
    return batch.need("behavior_logprobs" if edge == "E" else "proximal_logprobs", rule=rule)


def log_ratio(batch: ActorBatch, edge: Edge, *, rule: str) -> Tensor:
    """``[B, T]`` log-ratio on an edge, detached, 0 outside the mask."""
    if edge == "B":
        return batch.need("proximal_logprobs", rule=rule) - batch.need("behavior_logprobs", rule=rule)
    return batch.at_tokens(batch.target_logprobs.detach()) - anchor(batch, edge, rule=rule)


def clip_anchor(batch: ActorBatch, mask_edge: Edge, *, rule: str) -> Tensor:
    """The anchor of the ratio beside a mask on ``mask_edge``: that of U beside B, that of E beside E."""
    check_edge(mask_edge, "BE", rule=rule)
    return anchor(batch, "U" if mask_edge == "B" else "E", rule=rule)


def outside(ratio: Tensor, low: float, high: float) -> Tensor:
    """Where ``ratio`` is not in ``[low, high]``; what is no number is nowhere."""
    return ~((ratio >= low) & (ratio <= high))


def check_band(low: float, high: float, *, rule: str) -> None:
    """Raise ValueError unless ``0 <= low <= high``, finite."""
    if not 0 <= low <= high < math.inf:
        raise ValueError(f"{rule}: low = {low}, high = {high}; need 0 <= low <= high, finite")


def check_positive(value: float, name: str, *, rule: str) -> None:
    """Raise ValueError unless ``value`` is a number above 0 and finite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{rule}: {name} = {value}; must be above 0 and finite")


def capped_weight(log_weight: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """``min(exp(log_weight), cap)``, never infinite, and where the cap was met."""
    log_cap = math.log(cap)
    return log_weight.clamp(max=log_cap).exp(), log_weight > log_cap


def clipped_surrogate(
    batch: ActorBatch,
    *,
    anchor: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    target_logprobs: Tensor | None = None,
    rejected: Tensor | None = None,
    weight: Tensor | None = None,
    capped: Tensor | None = None,
) -> ActorLoss:
    """``mask * weight * max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))`` with ``r = target / anchor``.

    ``clip_low = 1`` with ``clip_high = inf`` is no clip. A non-negative factor commutes with the maximum, so mask and
    weight go into the advantages and the rest is :func:`brace_rl.core.ppo_clip_loss`.
    """
    weight = _token_weight(batch, rejected, weight)
    result = core.ppo_clip_loss(
        target_logprobs=batch.target_logprobs if target_logprobs is None else target_logprobs,
        behavior_logprobs=anchor,
        advantages=weight * batch.at_tokens(batch.advantages.detach()),
        policy_mask=batch.loss_mask,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        denominator=batch.count,
    )
    return ActorLoss(result.loss, _metrics(batch, weight, rejected, capped, result.clip_fraction))


def weighted_likelihood(
    batch: ActorBatch, *, weight: Tensor, rejected: Tensor | None = None, capped: Tensor | None = None
) -> ActorLoss:
    """``-mask * weight * A log target``: a policy gradient with a detached weight, and no clip."""
    weight = _token_weight(batch, rejected, weight)
    target = batch.at_tokens(batch.target_logprobs)
    # A token of weight 0 has no say, even where its log-prob is minus infinity; what is no number stays to be seen.
    target = torch.where((weight > 0) | target.isnan(), target, 0.0)
    loss = -(weight * batch.at_tokens(batch.advantages.detach()) * target).sum() / batch.count
    return ActorLoss(loss, _metrics(batch, weight, rejected, capped, torch.zeros_like(loss.detach())))


def row_mean(batch: ActorBatch, x: Tensor) -> Tensor:
    """``[B, T]`` the mean of ``x`` over the tokens of its row, at each of them; ``x`` is 0 outside the mask."""
    count = batch.loss_mask.sum(1, keepdim=True).clamp(min=1)
    return batch.at_tokens((x.sum(1, keepdim=True) / count).expand_as(x))


def _token_weight(batch: ActorBatch, rejected: Tensor | None, weight: Tensor | None) -> Tensor:
    dtype = torch.promote_types(batch.target_logprobs.dtype, torch.float32)
    factor = torch.ones_like(batch.target_logprobs, dtype=dtype) if weight is None else weight.detach()
    return batch.at_tokens(factor if rejected is None else torch.where(rejected, 0.0, factor))


def _metrics(
    batch: ActorBatch, weight: Tensor, rejected: Tensor | None, capped: Tensor | None, clip_fraction: Tensor
) -> dict[str, Tensor]:
    def share(where: Tensor | None) -> Tensor:
        if where is None:
            return torch.zeros_like(clip_fraction)
        return (where & batch.loss_mask).sum().to(clip_fraction.dtype) / batch.count

    rejected_fraction = share(rejected)
    return {
        "clip_fraction": clip_fraction,
        "rejected_fraction": rejected_fraction,
        "capped_fraction": share(capped),
        "active_fraction": share(batch.loss_mask) - rejected_fraction - clip_fraction,
        "weight_mean": weight.sum() / batch.count,
    }
