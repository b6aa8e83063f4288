"""Figures of one training batch.

Every function takes ``[B, T]`` tensors over response tokens (``policy_mask`` true at policy tokens) and returns scalar
tensors by metric name, without a host synchronisation and without a gradient. Nothing outside ``policy_mask`` is read.
A batch without policy tokens gives zeros, except ratios, which are then 1 (mean, ESS).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

HORIZON_EDGES = (16, 64, 256, 1024, 4096)
"""Upper ends, exclusive, of the bins of remaining policy tokens; the last bin is open."""


@torch.no_grad()
def ratio_statistics(
    *,
    behavior_logprobs: Tensor,
    target_logprobs: Tensor,
    policy_mask: Tensor,
    c_clip: float = 1.1,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> dict[str, Tensor]:
    """How far the sampling policy is from the current one.

    Keys:
        ``ratio/mean``, ``ratio/max``: of ``w = pi / mu``. The mean is near 1 when the logged log-probs are those of the
            distribution really sampled from.
        ``ratio/ess``: effective sample size as a share, ``(sum w)^2 / (n sum w^2)``: 1 on-policy, ``1/n`` when one
            token carries everything.
        ``ratio/log_mean``, ``ratio/log_abs_max``: of ``log w``.
        ``drift/m``, ``drift/sigma``: ``log(gamma lam)`` + mean, and deviation, of ``log min(c_clip, w)`` (Eq. 13).
    """
    dtype = torch.promote_types(torch.promote_types(target_logprobs.dtype, behavior_logprobs.dtype), torch.float32)
    count = policy_mask.sum().clamp(min=1)
    log_ratio = torch.where(policy_mask, target_logprobs.to(dtype) - behavior_logprobs.to(dtype), 0.0)
    unread = torch.where(policy_mask, 0.0, -math.inf)
    # Relative to the largest ratio, so that extreme ones neither overflow nor hide the rest.
    largest = torch.where(policy_mask.any(), (log_ratio + unread).amax(), 0.0)
    relative = torch.where(policy_mask, (log_ratio - largest).exp(), 0.0)
    total = relative.sum()
    is_empty = ~policy_mask.any()
    finite = torch.finfo(dtype).max
    capped = torch.where(policy_mask, log_ratio.clamp(max=math.log(c_clip)), 0.0)
    mean = capped.sum() / count
    spread = torch.where(policy_mask, (capped - mean).square(), 0.0).sum() / count
    discount = math.log(gamma * lam) if gamma * lam > 0 else -math.inf
    ess = total.square() / (count * torch.where(is_empty, 1.0, relative.square().sum()))
    return {
        "ratio/mean": torch.where(is_empty, 1.0, (largest + (total / count).log()).exp().clamp(max=finite)),
        "ratio/max": largest.exp().clamp(max=finite),
        "ratio/ess": torch.where(is_empty, 1.0, ess),
        "ratio/log_mean": log_ratio.sum() / count,
        "ratio/log_abs_max": log_ratio.abs().amax(),
        "drift/m": mean + discount,
        "drift/sigma": spread.sqrt(),
    }


@torch.no_grad()
def target_statistics(*, values: Tensor, targets: Tensor, advantages: Tensor, policy_mask: Tensor) -> dict[str, Tensor]:
    """How the critic stands to its target.

    Args:
        values: V before each token, from the critic before the update.
        advantages: before whitening.

    Keys:
        ``target/abs_gap``: mean ``|target - V|``.
        ``value/mean``: mean V.
        ``value/explained_variance``: ``1 - Var(target - V) / Var(target)`` over all policy tokens of the batch; 0 when
            the target does not vary.
        ``advantage/abs_max``: largest ``|A|``.
    """
    count = policy_mask.sum().clamp(min=1)
    value, target, advantage = (_masked(x, policy_mask) for x in (values, targets, advantages))
    gap = target - value
    target_variance = _variance(target, policy_mask, count)
    varies = target_variance > 0
    explained = 1.0 - _variance(gap, policy_mask, count) / torch.where(varies, target_variance, 1.0)
    return {
        "target/abs_gap": gap.abs().sum() / count,
        "value/mean": value.sum() / count,
        "value/explained_variance": torch.where(varies, explained, 0.0),
        "advantage/abs_max": advantage.abs().amax(),
    }


@torch.no_grad()
def window_weight_statistics(*, window_weights: Tensor, policy_mask: Tensor) -> dict[str, Tensor]:
    """What the windows leave to the return.

    Args:
        window_weights: ``Pi_k(s)``, see :func:`brace_rl.core.window_weights`.

    Keys:
        ``window_weight/mean``, ``window_weight/max``.
    """
    weights = _masked(window_weights, policy_mask)
    return {
        "window_weight/mean": weights.sum() / policy_mask.sum().clamp(min=1),
        "window_weight/max": weights.amax(),
    }


@torch.no_grad()
def staleness_statistics(*, versions: Tensor, policy_mask: Tensor, current_version: int) -> dict[str, Tensor]:
    """How old the tokens are, in trainer steps.

    Args:
        versions: ``[B, T]`` integers, the weight version that sampled each token.
        current_version: of the weights about to be updated.

    Keys:
        ``staleness/mean``, ``staleness/max``: over policy tokens.
        ``staleness/within_response``, ``staleness/within_response_max``: newest less oldest version inside a response,
            mean and largest over the responses that have policy tokens.
    """
    age = torch.where(policy_mask, current_version - versions, 0).to(torch.float32)
    oldest = age.masked_fill(~policy_mask, -math.inf).amax(1)
    newest = age.masked_fill(~policy_mask, math.inf).amin(1)
    has_tokens = policy_mask.any(1)
    spread = torch.where(has_tokens, oldest - newest, 0.0)
    largest = torch.where(has_tokens.any(), oldest.amax(), 0.0)
    return {
        "staleness/mean": age.sum() / policy_mask.sum().clamp(min=1),
        "staleness/max": largest,
        "staleness/within_response": spread.sum() / has_tokens.sum().clamp(min=1),
        "staleness/within_response_max": spread.amax(),
    }


@torch.no_grad()
def reward_slopes(
    *,
    values: Tensor,
    targets: Tensor,
    returns: Tensor,
    policy_mask: Tensor,
    edges: Sequence[int] = HORIZON_EDGES,
) -> dict[str, Tensor]:
    """How much of the realised return is left in the target, by remaining horizon (Eq. 15).

    Policy tokens are binned by the number of policy tokens still to come; within a bin, beta is the least-squares slope
    of ``target - V`` on ``G - V``. It is 1 where the target is the return and falls to 0 where the reward no longer
    reaches the target. A trend, not an exact coefficient: whatever else moves with ``G - V`` is in it.

    Args:
        returns: ``[B, T]`` realised return from each token: the targets of
            :func:`brace_rl.core.monte_carlo_targets`.
        edges: increasing upper ends of the bins, exclusive; one open bin follows.

    Keys:
        ``beta/horizon_A_B`` for remaining tokens in ``[A, B)``, ``beta/horizon_A_up`` for the last. NaN where ``G - V``
        does not vary in the bin.
    """
    after = policy_mask.flip(1).cumsum(1).flip(1) - 1
    correction = _masked(targets, policy_mask) - _masked(values, policy_mask)
    surprise = _masked(returns, policy_mask) - _masked(values, policy_mask)
    slopes = {}
    for low, high in zip((0, *edges), (*edges, None), strict=True):
        inside = policy_mask & (after >= low)
        if high is not None:
            inside = inside & (after < high)
        count = inside.sum().clamp(min=1)
        x = torch.where(inside, surprise - torch.where(inside, surprise, 0.0).sum() / count, 0.0)
        slopes[f"beta/horizon_{low}_{'up' if high is None else high}"] = (x * correction).sum() / x.square().sum()
    return slopes


def _masked(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, x.to(torch.promote_types(x.dtype, torch.float32)), 0.0)


def _variance(x: Tensor, mask: Tensor, count: Tensor) -> Tensor:
    return torch.where(mask, (x - x.sum() / count).square(), 0.0).sum() / count
