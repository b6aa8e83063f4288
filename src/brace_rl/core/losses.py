"""The two losses of PPO and the whitening between them.

A loss is a sum over policy tokens divided by ``denominator``: the number of policy tokens of the *whole* batch when the
tensors given are one micro-batch of it, so that the losses of the micro-batches add up to that of the batch; None when
they are the batch. Nothing outside ``policy_mask`` reaches a loss or its gradient, NaN included. A batch without policy
tokens has loss 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are held within this before exponentiation: far outside any clip, far inside float32."""


class LossResult(NamedTuple):
    """A scalar loss with its gradient, and the share of policy tokens at which a clip decided (no gradient).

    Both are sums over the given tokens divided by the same denominator, so both add up over micro-batches.
    """

    loss: Tensor
    clip_fraction: Tensor


def whiten(advantages: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale advantages to mean 0 and (population) variance 1 over the masked tokens.

    Args:
        advantages: ``[B, T]``; what lies outside ``mask`` is not read.
        mask: ``[B, T]`` bool, policy tokens of the whole batch.

    Returns:
        ``[B, T]``, 0 outside ``mask``, in float32 or better. Where all masked advantages are equal (one token among
        them), there is nothing to scale: all are 0. An empty mask gives zeros.
    """
    dtype = torch.promote_types(advantages.dtype, torch.float32)
    x = torch.where(mask, advantages.detach().to(dtype), 0.0)
    count = mask.sum().clamp(min=1)
    centred = torch.where(mask, x - x.sum() / count, 0.0)
    deviation = (centred.square().sum() / count).sqrt()
    # Rounding leaves a mean a few ulps off; a spread of that size is none.
    noise = x.abs().amax() * torch.finfo(dtype).eps * 2 if x.numel() else deviation
    spread = deviation > noise
    return torch.where(spread, centred / torch.where(spread, deviation, 1.0), 0.0)


def value_loss(
    *,
    values: Tensor,
    old_values: Tensor,
    targets: Tensor,
    policy_mask: Tensor,
    value_clip: float = 0.5,
    denominator: Tensor | float | None = None,
) -> LossResult:
    """Clipped critic loss (Eq. 28): half the mean over policy tokens of

        max[(V - target)^2, (clip(V, V_old - value_clip, V_old + value_clip) - target)^2].

    Args:
        values: ``[B, T]`` V before the token, with gradient.
        old_values: ``[B, T]`` V before the token from the critic before the update: the same that entered the target.
        targets: ``[B, T]`` regression target.
        policy_mask: ``[B, T]`` bool.
        value_clip: farthest a value may move in one update and still be judged by its own error alone.
        denominator: see the module.

    Raises:
        ValueError: ``value_clip`` not above 0.
    """
    if not value_clip > 0:
        raise ValueError(f"value_clip = {value_clip}: must be above 0 (math.inf for no clip)")
    values = _masked(values, policy_mask)
    old = _masked(old_values.detach(), policy_mask)
    target = _masked(targets.detach(), policy_mask)
    plain = (values - target).square()
    clipped = (values.clamp(min=old - value_clip, max=old + value_clip) - target).square()
    return _reduce(torch.maximum(plain, clipped) / 2, clipped > plain, policy_mask, denominator)


def ppo_clip_loss(
    *,
    target_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    policy_mask: Tensor,
    clip_low: float = 0.20,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
    denominator: Tensor | float | None = None,
) -> LossResult:
    """PPO's clipped policy loss (Schulman et al., arXiv 1707.06347): with ``w = pi / mu``, the mean over tokens of

        max(-A w, -A clip(w, 1 - clip_low, 1 + clip_high)),

    and where ``A < 0``, with ``dual_clip = c``, at most ``-A c`` (Ye et al., arXiv 1912.09729).

    Args:
        target_logprobs: ``[B, T]`` log-prob of the token under the policy being trained, with gradient.
        behavior_logprobs: ``[B, T]`` log-prob recorded when the token was sampled.
        advantages: ``[B, T]``.
        policy_mask: ``[B, T]`` bool.
        clip_low, clip_high: the ratio's clip below and above 1; the paper's defaults.
        dual_clip: largest ratio counted against a token with negative advantage, above 1; None for no bound.
        denominator: see the module.

    Raises:
        ValueError: a clip out of range.
    """
    if not 0 < clip_low <= 1 or not clip_high > 0:
        raise ValueError(f"clip_low = {clip_low}, clip_high = {clip_high}: need 0 < clip_low <= 1 and clip_high > 0")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip = {dual_clip}: must be above 1, or None for none")
    log_ratio = _masked(target_logprobs, policy_mask) - _masked(behavior_logprobs.detach(), policy_mask)
    advantage = _masked(advantages.detach(), policy_mask)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain = -advantage * ratio
    clipped = -advantage * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss, was_clipped = torch.maximum(plain, clipped), clipped > plain
    if dual_clip is not None:
        bound = -advantage * dual_clip
        beyond = (advantage < 0) & (loss > bound)
        loss, was_clipped = torch.where(beyond, bound, loss), was_clipped | beyond
    return _reduce(loss, was_clipped, policy_mask, denominator)


def _masked(x: Tensor, mask: Tensor) -> Tensor:
    # torch.where, not multiplication: its gradient is exactly zero where the mask is false, whatever stands there.
    return torch.where(mask, x.to(torch.promote_types(x.dtype, torch.float32)), 0.0)


def _reduce(loss: Tensor, clipped: Tensor, mask: Tensor, denominator: Tensor | float | None) -> LossResult:
    count = mask.sum().clamp(min=1) if denominator is None else denominator
    return LossResult(
        loss=torch.where(mask, loss, 0.0).sum() / count,
        clip_fraction=(clipped & mask).sum().to(loss.dtype) / count,
    )
