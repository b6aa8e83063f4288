"""Value targets for asynchronous PPO: BRACE and its relatives.

    Zhao, Xie, Zheng, Lu, Gong, Chen: BRACE: Anchored Bellman-Residual Correction for Stale Critics in Asynchronous RL,
    arXiv 2609.09783. Equation numbers are that paper's.

A response has policy tokens ``0 .. T``. ``V_t`` is the value of the state *before* token ``t``, ``V_{T+1} = 0``, and
``r_t`` the reward received on emitting token ``t``. The token was sampled by ``mu`` (the behaviour policy, which may be
several weight versions) and is judged by ``pi`` (the policy before the update). With

    w_t = pi(a_t|s_t) / mu(a_t|s_t),   rho_t = min(rho_clip, w_t),   c_t = lam * min(c_clip, w_t),
    delta_t = r_t + gamma V_{t+1} - V_t,

every target below is ``V_s`` plus a correction that obeys ``u_t <- offset_t + coef_t u_{t+1}``, applied some number of
times to a start. An estimator is its offset, its coefficient, its start and that number, and its function states them.

Common arguments
    values, rewards, behavior_logprobs, target_logprobs: ``[B, T]`` floating point, over response tokens, time last.
        ``values[:, t]`` is the critic's output *before* token ``t``. ``behavior_logprobs`` are those recorded when the
        token was sampled, ``target_logprobs`` the trainer's before the update; both of the distribution that is really
        sampled from (temperature, top-p and top-k included).
    policy_mask: ``[B, T]`` bool, true where the policy sampled the token. Elsewhere (prompt, tool output, padding)
        nothing but ``rewards`` is read: NaN there changes nothing. Time counts policy tokens only. A reward on a
        non-policy token belongs to the policy token before it. A row without policy tokens gives zeros.
    bootstrap_values: ``[B]``, the value after the last token of a response that was cut off, 0 for one that ended; None
        (the paper) bootstraps nothing. With ``segment_ids`` it is ``[B, T]``, read at the last policy token of each
        response.
    segment_ids: ``[B, T]`` integers, for rows that hold several responses: a response is a run of equal ids, its tool
        output included. None means one response per row.
    check_inputs: look at the data for NaN and misplaced rewards, for which a GPU must wait. Shapes, dtypes and options
        are always checked.

Windows that the data choose are in :mod:`brace_rl.core.windows`; the cost grows with the logarithm of the longest.
Where most ratios meet a ``c_clip`` above 1, which staleness alone does not bring about, the weight of the return leaves
float32 after 930 tokens at 1.1.

Result
    ``ValueTargets`` of ``[B, T]`` tensors, zero where there is no policy token, never carrying a gradient. The dtype is
    float64 if any input is float64; anything lower is computed and returned in float32.

Raises
    ValueError: names the argument, what is wrong with it and where (row and position), and how to mend it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from brace_rl.core.backup import Backup, Workspace, capped, finished, largest_shift, trace_coefficients
from brace_rl.core.checks import check_options, check_window, checked_tokens
from brace_rl.core.layout import Steps, Tokens
from brace_rl.core.solve import Correction, corrections


class ValueTargets(NamedTuple):
    """What the critic is fitted to and what the actor is trained on.

    Attributes:
        targets: ``[B, T]`` regression target of V before each policy token, 0 elsewhere.
        advantages: ``[B, T]`` advantage of each policy token, not whitened, 0 elsewhere.
    """

    targets: Tensor
    advantages: Tensor


def brace_targets(
    *,
    values: Tensor,
    rewards: Tensor,
    behavior_logprobs: Tensor,
    target_logprobs: Tensor,
    policy_mask: Tensor,
    window: int | Tensor = 100,
    rho_clip: float = 1.2,
    c_clip: float = 1.1,
    gamma: float = 1.0,
    lam: float = 1.0,
    bootstrap_values: Tensor | None = None,
    segment_ids: Tensor | None = None,
    check_inputs: bool = True,
) -> ValueTargets:
    """BRACE (Eq. 26 = 25): ``window`` corrected tokens, then the realised return. With ``j = min(s + window, T)``

        target_s = V_s + sum_{t=s}^{j-1} gamma^{t-s} (prod_{i=s}^{t-1} c_i) rho_t delta_t
                       + gamma^{j-s} (prod_{i=s}^{j-1} c_i) (G_j - V_j),       G_j = sum_{t>=j} gamma^{t-j} r_t
        A_s = r_s + gamma target_{s+1} - V_s,                                  target_{T+1} = 0      (Eq. 27)

    that is, ``window`` corrected one-step backups of the Monte-Carlo residual ``G - V``. Special cases: ``window = 0``
    is :func:`monte_carlo_targets`; ``window >= T`` is :func:`vtrace_targets` but for the last residual, which keeps
    weight 1; ``pi = mu`` with ``gamma = lam = 1`` is the return everywhere; the last token's target is its reward.

    Args:
        window: policy tokens to correct, from 0: an int, a scalar tensor, or ``[B, T]`` integers, one per position.
        rho_clip: cap of the residual's ratio; the window's own fixed point is the value of ``~ min(rho_clip mu, pi)``.
        c_clip: cap of the trace's ratio; ``c_clip^window`` bounds the weight of the return.
        gamma: discount per policy token.
        lam: multiplies every trace coefficient; below 1 the return loses its weight in about ``1 / (1 - lam)`` tokens.
    """
    check_options(rho_clip=rho_clip, c_clip=c_clip, gamma=gamma, lam=lam)

    def backup(steps: Steps) -> Backup:
        # The last residual keeps weight 1: there the ratio is taken for 1, which a cap of 1 or more lets pass.
        ratios = (steps.log_ratios * steps.continues).exp_()
        weights = capped(ratios, rho_clip)
        if rho_clip < 1.0:
            weights = torch.where(steps.continues > 0, weights, 1.0)
        return Backup(
            coef=trace_coefficients(ratios, steps.continues, c_clip=c_clip, discount=gamma * lam),
            offset=_residuals(steps, gamma).mul_(weights),
            start=_suffix_sums(steps.rewards, steps, gamma).sub_(steps.values),
            largest_coef=c_clip * gamma * lam,
        )

    tokens = checked_tokens(
        values=values,
        rewards=rewards,
        policy_mask=policy_mask,
        behavior_logprobs=behavior_logprobs,
        target_logprobs=target_logprobs,
        bootstrap_values=bootstrap_values,
        segment_ids=segment_ids,
        check_inputs=check_inputs,
    )
    times = check_window(window, policy_mask, check_inputs=check_inputs)
    return _solve(tokens, backup, times=times, gamma=gamma, advantage=_one_step_advantage)


def capped_targets(
    *,
    values: Tensor,
    rewards: Tensor,
    behavior_logprobs: Tensor,
    target_logprobs: Tensor,
    policy_mask: Tensor,
    window: int | Tensor = 100,
    rho_clip: float = 1.2,
    c_clip: float = 1.1,
    gamma: float = 1.0,
    lam: float = 1.0,
    bootstrap_values: Tensor | None = None,
    segment_ids: Tensor | None = None,
    check_inputs: bool = True,
) -> ValueTargets:
    """V-trace whose trace product stops growing after ``window`` tokens (Eq. 17): BRACE without the return.

        target_s = V_s + sum_{t>=s} gamma^{t-s} (prod_{i=s}^{min(t, s+window)-1} c_i) rho_t delta_t

    The paper's ablation "no Monte-Carlo tail": all residuals to the end are corrected and weighted, the far ones by the
    product over the window. Advantage as in Eq. 27.

    Special cases: ``window >= T`` is :func:`vtrace_targets`.

    Args:
        window, rho_clip, c_clip, gamma, lam: as for :func:`brace_targets`.
    """
    check_options(rho_clip=rho_clip, c_clip=c_clip, gamma=gamma, lam=lam)

    def backup(steps: Steps) -> Backup:
        ratios = steps.log_ratios.exp()
        offset = _residuals(steps, gamma).mul_(capped(ratios, rho_clip))
        return Backup(
            coef=trace_coefficients(ratios, steps.continues, c_clip=c_clip, discount=gamma * lam),
            offset=offset,
            start=_suffix_sums(offset, steps, gamma),
            largest_coef=c_clip * gamma * lam,
        )

    tokens = checked_tokens(
        values=values,
        rewards=rewards,
        policy_mask=policy_mask,
        behavior_logprobs=behavior_logprobs,
        target_logprobs=target_logprobs,
        bootstrap_values=bootstrap_values,
        segment_ids=segment_ids,
        check_inputs=check_inputs,
    )
    times = check_window(window, policy_mask, check_inputs=check_inputs)
    return _solve(tokens, backup, times=times, gamma=gamma, advantage=_one_step_advantage)


def vtrace_targets(
    *,
    values: Tensor,
    rewards: Tensor,
    behavior_logprobs: Tensor,
    target_logprobs: Tensor,
    policy_mask: Tensor,
    rho_clip: float = 1.2,
    c_clip: float = 1.1,
    gamma: float = 1.0,
    lam: float = 1.0,
    bootstrap_values: Tensor | None = None,
    segment_ids: Tensor | None = None,
    check_inputs: bool = True,
) -> ValueTargets:
    """V-trace over the whole response (Eq. 8; Espeholt et al., IMPALA, arXiv 1802.01561).

        target_s = V_s + sum_{t>=s} gamma^{t-s} (prod_{i=s}^{t-1} c_i) rho_t delta_t

    The advantage is that of Eq. 27, without the factor ``rho_s`` of IMPALA's policy gradient, so that estimators differ
    in their target alone.

    Args:
        rho_clip, c_clip: as for :func:`brace_targets`; IMPALA sets both to 1.
        gamma, lam: as for :func:`brace_targets`.
    """
    check_options(rho_clip=rho_clip, c_clip=c_clip, gamma=gamma, lam=lam)

    def backup(steps: Steps) -> Backup:
        ratios = steps.log_ratios.exp()
        return Backup(
            coef=trace_coefficients(ratios, steps.continues, c_clip=c_clip, discount=gamma * lam),
            offset=_residuals(steps, gamma).mul_(capped(ratios, rho_clip)),
            start=torch.zeros_like(ratios),
            largest_coef=c_clip * gamma * lam,
        )

    tokens = checked_tokens(
        values=values,
        rewards=rewards,
        policy_mask=policy_mask,
        behavior_logprobs=behavior_logprobs,
        target_logprobs=target_logprobs,
        bootstrap_values=bootstrap_values,
        segment_ids=segment_ids,
        check_inputs=check_inputs,
    )
    return _solve(tokens, backup, times=policy_mask.shape[1], gamma=gamma, advantage=_one_step_advantage)


def gae_targets(
    *,
    values: Tensor,
    rewards: Tensor,
    policy_mask: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    bootstrap_values: Tensor | None = None,
    segment_ids: Tensor | None = None,
    check_inputs: bool = True,
) -> ValueTargets:
    """Generalised advantage estimation (Eq. 2; Schulman et al., arXiv 1506.02438). No ratio: as if ``pi = mu``.

        target_s = V_s + sum_{t>=s} (gamma lam)^{t-s} delta_t,      A_s = target_s - V_s

    Special cases: ``lam = 1`` is :func:`monte_carlo_targets`.

    Args:
        gamma: discount per policy token.
        lam: 0 is the one-step target, 1 the return.
    """
    check_options(gamma=gamma, lam=lam)

    def backup(steps: Steps) -> Backup:
        return finished(_suffix_sums(_residuals(steps, gamma), steps, gamma * lam))

    tokens = checked_tokens(
        values=values,
        rewards=rewards,
        policy_mask=policy_mask,
        behavior_logprobs=None,
        target_logprobs=None,
        has_ratios=False,
        bootstrap_values=bootstrap_values,
        segment_ids=segment_ids,
        check_inputs=check_inputs,
    )
    return _solve(tokens, backup, times=0, gamma=gamma, advantage=_target_minus_value)


def monte_carlo_targets(
    *,
    values: Tensor,
    rewards: Tensor,
    policy_mask: Tensor,
    gamma: float = 1.0,
    bootstrap_values: Tensor | None = None,
    segment_ids: Tensor | None = None,
    check_inputs: bool = True,
) -> ValueTargets:
    """The realised return: what PPO fits its critic to on language models.

        target_s = sum_{t>=s} gamma^{t-s} r_t,      A_s = target_s - V_s

    ``values`` enter the advantage alone. Under asynchronous sampling the fixed point is ``V^mu``, not ``V^pi``.

    Args:
        gamma: discount per policy token.
    """
    check_options(gamma=gamma)

    def backup(steps: Steps) -> Backup:
        return finished(_suffix_sums(steps.rewards, steps, gamma).sub_(steps.values))

    tokens = checked_tokens(
        values=values,
        rewards=rewards,
        policy_mask=policy_mask,
        behavior_logprobs=None,
        target_logprobs=None,
        has_ratios=False,
        bootstrap_values=bootstrap_values,
        segment_ids=segment_ids,
        check_inputs=check_inputs,
    )
    return _solve(tokens, backup, times=0, gamma=gamma, advantage=_target_minus_value)


def _residuals(steps: Steps, gamma: float) -> Tensor:
    """``delta_t = r_t + gamma V_{t+1} - V_t``."""
    return torch.addcmul(steps.rewards, steps.continues, steps.next_values, value=gamma).sub_(steps.values)


def _suffix_sums(x: Tensor, steps: Steps, discount: float) -> Tensor:
    """``sum_{t>=s} discount^{t-s} x_t`` within each response."""
    if discount == 1.0 and not steps.packed:
        return x.view(steps.shape).flip(1).cumsum(1).flip(1).flatten().mul_(steps.is_policy)
    columns = steps.shape[1]
    workspace = Workspace(length=x.numel(), largest_shift=largest_shift(columns), dtype=x.dtype, device=x.device)
    workspace.load(Backup(coef=steps.continues * discount, offset=x, start=torch.zeros_like(x), largest_coef=discount))
    return workspace.apply(columns).head.clone()


def _one_step_advantage(chunk: Correction, gamma: float) -> Tensor:
    """Eq. 27: ``r_s + gamma target_{s+1} - V_s = delta_s + gamma u_{s+1}``."""
    steps = chunk.steps
    return _residuals(steps, gamma).addcmul_(steps.continues, chunk.next_correction, value=gamma)


def _target_minus_value(chunk: Correction, gamma: float) -> Tensor:
    return chunk.correction


@torch.no_grad()
def _solve(
    tokens: Tokens,
    backup: Callable[[Steps], Backup],
    *,
    times: int | Tensor,
    gamma: float,
    advantage: Callable[[Correction, float], Tensor],
) -> ValueTargets:
    """Targets and advantages from the corrections of a batch."""
    targets = torch.empty(tokens.policy_mask.shape, dtype=tokens.dtype, device=tokens.policy_mask.device)
    advantages = torch.empty_like(targets)
    for chunk in corrections(tokens, backup, times=times, gamma=gamma):
        targets[chunk.rows] = chunk.put(chunk.steps.values + chunk.correction)
        advantages[chunk.rows] = chunk.put(advantage(chunk, gamma))
    return ValueTargets(targets=targets, advantages=advantages)
