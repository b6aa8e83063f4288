"""How far a correction reaches: the weight a window leaves to the return, and two ways to choose the window.

The window weight ``Pi_k(s)`` is what BRACE multiplies the realised residual ``G_j - V_j`` with. It drifts: with stale
samples ``log min(c_clip, w)`` is negative on average, so a long window forgets the reward, and a short one corrects
little. :func:`drift_window` picks one window for a batch from the measured drift, :func:`path_windows` one for each
position from the ratios ahead of it. Both return windows that :func:`~brace_rl.core.brace.brace_targets` takes as
``window``, so what was chosen is at hand to be logged.

Arguments are as in :mod:`brace_rl.core.brace`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from brace_rl.core.backup import Backup, trace_coefficients
from brace_rl.core.checks import check_options, check_rows, check_window, checked_tokens, tensors_of
from brace_rl.core.layout import Steps, Tokens, place_tokens, steps_of
from brace_rl.core.solve import corrections


class DriftWindow(NamedTuple):
    """A window for a whole batch.

    Attributes:
        window: int64 scalar tensor, policy tokens.
        drift: scalar tensor, the measured ``m``.
    """

    window: Tensor
    drift: Tensor


@torch.no_grad()
def window_weights(
    *,
    behavior_logprobs: Tensor,
    target_logprobs: Tensor,
    policy_mask: Tensor,
    window: int | Tensor = 100,
    c_clip: float = 1.1,
    gamma: float = 1.0,
    lam: float = 1.0,
    segment_ids: Tensor | None = None,
    check_inputs: bool = True,
) -> Tensor:
    """``gamma^{j-s} Pi_k(s)``, the weight of the return in the BRACE target of ``s``.

        Pi_k(s) = prod_{i=s}^{j-1} c_i,   c_i = lam * min(c_clip, w_i),   j = min(s + window, T)

    Returns:
        ``[B, T]``: 1 at the last policy token of a response, 0 outside ``policy_mask``.
    """
    check_options(c_clip=c_clip, gamma=gamma, lam=lam)
    tokens = _ratio_tokens(behavior_logprobs, target_logprobs, policy_mask, segment_ids, check_inputs)
    times = check_window(window, policy_mask, check_inputs=check_inputs)
    weights = torch.empty(policy_mask.shape, dtype=tokens.dtype, device=policy_mask.device)
    for chunk in corrections(tokens, _weight_backup(c_clip, gamma * lam), times=times, gamma=gamma):
        weights[chunk.rows] = chunk.put(chunk.correction)
    return weights


@torch.no_grad()
def critic_free_advantages(
    *,
    returns: Tensor,
    baselines: Tensor,
    behavior_logprobs: Tensor,
    target_logprobs: Tensor,
    policy_mask: Tensor,
    window: int | Tensor = 100,
    c_clip: float = 1.1,
    check_inputs: bool = True,
) -> Tensor:
    """BRACE without a critic: a windowed suffix importance weight on a group-relative advantage.

        A_s = Pi_k(s+1) (R - b) for s < T,      A_T = R - b

    It is Eq. 27 with ``V = b`` everywhere, ``gamma = lam = 1`` and the reward at the end: all residuals inside a window
    vanish. With ``window = 0`` it is the advantage of GRPO (before its division by a deviation) or RLOO.

    Args:
        returns: ``[B]`` reward R of the response.
        baselines: ``[B]`` b: the mean reward of the response's group, or of the others in it.

    Returns:
        ``[B, T]``, 0 outside ``policy_mask``, not whitened.
    """
    check_options(c_clip=c_clip)
    for name, x in (("returns", returns), ("baselines", baselines)):
        check_rows(name, x, policy_mask, check_inputs=check_inputs)
    tokens = _ratio_tokens(behavior_logprobs, target_logprobs, policy_mask, None, check_inputs)
    times = check_window(window, policy_mask, check_inputs=check_inputs)
    gain = (returns.detach().to(tokens.dtype) - baselines.detach().to(tokens.dtype))[:, None]
    advantages = torch.empty(policy_mask.shape, dtype=tokens.dtype, device=policy_mask.device)
    for chunk in corrections(tokens, _weight_backup(c_clip, 1.0), times=times, gamma=1.0):
        steps = chunk.steps
        is_last = steps.is_policy - steps.continues
        weights = torch.addcmul(is_last, steps.continues, chunk.next_correction)
        advantages[chunk.rows] = torch.where(policy_mask[chunk.rows], chunk.put(weights) * gain[chunk.rows], 0.0)
    return advantages


@torch.no_grad()
def drift_window(
    *,
    behavior_logprobs: Tensor,
    target_logprobs: Tensor,
    policy_mask: Tensor,
    eps: float,
    c_clip: float = 1.1,
    gamma: float = 1.0,
    lam: float = 1.0,
    check_inputs: bool = True,
) -> DriftWindow:
    """The longest window that leaves the return a predicted weight of at least ``eps`` (Eq. 45).

        m = log(gamma lam) + mean log min(c_clip, w),      window = floor(log(1/eps) / |m|),

    the mean over all policy tokens of the batch (Eq. 13), which predicts ``Pi_k ~ exp(k m)``. Where ``m >= 0`` the
    weight does not fall and the window is the number of columns: all of every response. ``m > 0`` cannot come from
    staleness alone (``E_mu[w] = 1``): it means that engine and trainer disagree.

    Args:
        eps: smallest weight to be left, between 0 and 1. The paper names no value.
    """
    check_options(c_clip=c_clip, gamma=gamma, lam=lam)
    if not 0 < eps < 1:
        raise ValueError(f"eps = {eps}: must be between 0 and 1")
    tokens = _ratio_tokens(behavior_logprobs, target_logprobs, policy_mask, None, check_inputs)
    log_ratios = target_logprobs.detach().to(tokens.dtype) - behavior_logprobs.detach().to(tokens.dtype)
    capped = torch.where(policy_mask, log_ratios.clamp(max=math.log(c_clip)), 0.0)
    discount = math.log(gamma * lam) if gamma * lam > 0 else -math.inf
    drift = capped.sum() / policy_mask.sum().clamp(min=1) + discount
    columns = policy_mask.shape[1]
    reach = torch.where(drift < 0, -math.log(eps) / drift.abs(), torch.inf)
    return DriftWindow(window=reach.clamp(max=columns).floor().to(torch.int64), drift=drift)


@torch.no_grad()
def path_windows(
    *,
    behavior_logprobs: Tensor,
    target_logprobs: Tensor,
    policy_mask: Tensor,
    budget: float,
    c_clip: float = 1.1,
    segment_ids: Tensor | None = None,
    check_inputs: bool = True,
) -> Tensor:
    """A window for every position, which closes once the ratios ahead have strayed too far from 1.

        window(s) = j(s) - s,   j(s) = the first j with  sum_{i=s}^{j-1} |log min(c_clip, w_i)| > budget,  at most T.

    Tokens on which both policies agree cost nothing, so the window grows where it is safe and shrinks where it is not:
    ``|log Pi|`` exceeds ``budget`` by one token's share at most. One sorted search per row; the cost does not depend on
    the windows found.

    Args:
        budget: at least 0; ``math.inf`` reaches to the end of every response.

    Returns:
        ``[B, T]`` int64 policy tokens, 0 outside ``policy_mask`` and at the last policy token of a response.
    """
    check_options(c_clip=c_clip)
    if not budget >= 0:
        raise ValueError(f"budget = {budget}: must be at least 0")
    tokens = _ratio_tokens(behavior_logprobs, target_logprobs, policy_mask, segment_ids, check_inputs)
    windows = torch.empty(policy_mask.shape, dtype=torch.int64, device=policy_mask.device)
    for rows, chunk in tokens.chunks():
        placement = place_tokens(chunk.policy_mask, segment_ids=chunk.segment_ids, dtype=tokens.dtype)
        steps = steps_of(chunk, placement, 1.0)
        # float64, because what is searched for is a difference of two long sums.
        log_ratios = steps.log_ratios * steps.is_policy
        spent = log_ratios.clamp_(max=math.log(c_clip)).abs_().double().view(steps.shape).cumsum(1)
        before = torch.nn.functional.pad(spent[:, :-1], (1, 0))
        closes = torch.searchsorted(spent, before + budget, right=True) + 1
        column = torch.arange(steps.shape[1], device=policy_mask.device).expand(steps.shape)
        is_end = placement.continues == 0
        end = torch.where(is_end, column, steps.shape[1]).flip(1).cummin(1).values.flip(1)
        windows[rows] = placement.put(torch.where(placement.is_policy > 0, torch.minimum(closes, end) - column, 0))
    return windows


def _weight_backup(c_clip: float, discount: float) -> Callable[[Steps], Backup]:
    """Products of coefficients: a start of 1, and a map that is 1 at the last token, where every product stops."""

    def backup(steps: Steps) -> Backup:
        ratios = steps.log_ratios.exp()
        return Backup(
            coef=trace_coefficients(ratios, steps.continues, c_clip=c_clip, discount=discount),
            offset=steps.is_policy - steps.continues,
            start=steps.is_policy,
            largest_coef=c_clip * discount,
        )

    return backup


def _ratio_tokens(
    behavior_logprobs: Tensor,
    target_logprobs: Tensor,
    policy_mask: Tensor,
    segment_ids: Tensor | None,
    check_inputs: bool,
) -> Tokens:
    """Input of a function that needs ratios alone: values and rewards are 0 and take no memory."""
    tensors_of({"policy_mask": policy_mask})
    nothing = torch.zeros((), dtype=torch.float32, device=policy_mask.device).expand(policy_mask.shape)
    return checked_tokens(
        values=nothing,
        rewards=nothing,
        behavior_logprobs=behavior_logprobs,
        target_logprobs=target_logprobs,
        policy_mask=policy_mask,
        bootstrap_values=None,
        segment_ids=segment_ids,
        check_inputs=check_inputs,
    )
