"""From what the two models say about a batch to what they are trained on: the critic's target, the actor's advantage.

The two are chosen apart (``algorithm.value_target`` and ``algorithm.advantage``). All tensors are ``[B, L-1]``, column
``i`` about token ``i + 1``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from brace_rl import core
from brace_rl.config import AlgorithmConfig
from brace_rl.config_checks import GROUP_ADVANTAGES
from brace_rl.training.batch import Batch


class Evaluation(NamedTuple):
    """The policy and the critic before the update.

    Attributes:
        target_logprobs: pi of the sampled tokens, under the sampling temperature and kept sets.
        entropies: of pi at the sampling temperature, nats.
        values: the critic *before* the token; without a critic, the baseline of the response's group.
        bootstrap_values: ``[B]`` the critic after the last token of truncated rows, 0 for the others; None when off.
    """

    target_logprobs: Tensor
    entropies: Tensor
    values: Tensor
    bootstrap_values: Tensor | None


class Estimates(NamedTuple):
    """What a batch is trained on; zero outside ``policy_mask``.

    Attributes:
        targets: the critic's regression target; without a critic ``values + advantages``.
        advantages: not whitened.
        windows: policy tokens corrected before the tail, a whole number, a scalar tensor or ``[B, L-1]``.
    """

    targets: Tensor
    advantages: Tensor
    windows: int | Tensor


class Groups(NamedTuple):
    """Rewards of responses and of their groups (all responses to one prompt), ``[B]`` each.

    Attributes:
        returns: sum of a response's rewards.
        means: of the group's returns.
        deviations: standard deviation of the group's returns, over its size less one, as frameworks have it.
        others: mean return of the group's other responses; the response's own where it is alone.
    """

    returns: Tensor
    means: Tensor
    deviations: Tensor
    others: Tensor


def estimates(algorithm: AlgorithmConfig, batch: Batch, before: Evaluation) -> Estimates:
    """The configured target and advantage.

    Raises:
        ValueError: log-probs or values that are not finite.
    """
    windows = chosen_windows(algorithm, batch, before)
    if algorithm.value_target == "none":
        advantages = group_advantages(algorithm, batch, before, windows)
        targets = torch.where(batch.policy_mask, before.values, 0.0) + advantages
        return Estimates(targets, advantages, windows)
    estimate = value_targets(algorithm, batch, before, windows)
    if algorithm.advantage in GROUP_ADVANTAGES:
        return Estimates(estimate.targets, group_advantages(algorithm, batch, before, windows), windows)
    if algorithm.advantage == "gae":
        return Estimates(estimate.targets, _gae_advantages(algorithm, batch, before), windows)
    return Estimates(estimate.targets, estimate.advantages, windows)


def chosen_windows(algorithm: AlgorithmConfig, batch: Batch, before: Evaluation) -> int | Tensor:
    """The window as a number, or chosen from the ratios: one for the batch (``auto``) or per token (``auto_path``)."""
    if isinstance(algorithm.window, int):
        return algorithm.window
    ratios: dict[str, Any] = {
        "behavior_logprobs": batch.behavior_logprobs,
        "target_logprobs": before.target_logprobs,
        "policy_mask": batch.policy_mask,
        "c_clip": algorithm.c_clip,
    }
    if algorithm.window == "auto":
        chosen = core.drift_window(**ratios, eps=algorithm.auto_eps, gamma=algorithm.gamma, lam=algorithm.lam)
        return chosen.window
    return core.path_windows(**ratios, budget=algorithm.auto_budget)


def value_targets(
    algorithm: AlgorithmConfig, batch: Batch, before: Evaluation, windows: int | Tensor
) -> core.ValueTargets:
    """The critic's target, and the advantage that Eq. 27 makes of it."""
    common: dict[str, Any] = {
        "values": before.values,
        "rewards": batch.rewards,
        "policy_mask": batch.policy_mask,
        "gamma": algorithm.gamma,
        "bootstrap_values": before.bootstrap_values,
    }
    if algorithm.value_target == "monte_carlo":
        return core.monte_carlo_targets(**common)
    if algorithm.value_target == "gae":
        return core.gae_targets(**common, lam=algorithm.lam)
    common |= {
        "behavior_logprobs": batch.behavior_logprobs,
        "target_logprobs": before.target_logprobs,
        "rho_clip": algorithm.rho_clip,
        "c_clip": algorithm.c_clip,
        "lam": algorithm.lam,
    }
    if algorithm.value_target == "vtrace":
        return core.vtrace_targets(**common)
    estimator = core.brace_targets if algorithm.value_target == "brace" else core.capped_targets
    return estimator(**common, window=windows)


def group_rewards(batch: Batch) -> Groups:
    """Returns of the responses beside those of their groups; a response that could not be judged has no say.

    Such a response has no policy token and stands in the batch all the same.
    """
    returns = batch.rewards.sum(1)
    judged = batch.policy_mask.any(1).double()
    _, group = batch.groups.unique(return_inverse=True)
    sizes = torch.zeros_like(judged).index_add(0, group, judged)[group]

    def group_mean(x: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add(0, group, x * judged)[group] / sizes.clamp(min=1)

    # In double precision, so that the mean of equal rewards, rounded back, is that reward and no ulp beside it.
    exact = group_mean(returns.double())
    means = exact.to(returns.dtype)
    deviations = (group_mean((returns - means).double().square()) * sizes / (sizes - 1).clamp(min=1)).sqrt()
    others = torch.where(sizes > 1, (exact * sizes - returns) / (sizes - 1).clamp(min=1), returns.double())
    return Groups(returns, means, deviations.to(returns.dtype), others.to(returns.dtype))


def group_advantages(algorithm: AlgorithmConfig, batch: Batch, before: Evaluation, windows: int | Tensor) -> Tensor:
    """A response's reward against its group's: the advantage that needs no critic.

    ``group`` (GRPO, arXiv 2402.03300): ``(R - mean) / std``, 0 where all of a group got the same; ``dr_grpo`` (arXiv
    2503.20783): ``R - mean``; ``rloo`` (arXiv 2402.14740): ``R`` - mean of the others; ``group_brace``: the window
    weight ``Pi_k(s+1)`` times ``R - mean``, which is Eq. 27 with the group's mean as the critic.
    """
    rewards = group_rewards(batch)
    if algorithm.advantage == "group_brace":
        return core.critic_free_advantages(
            returns=rewards.returns,
            baselines=rewards.means,
            behavior_logprobs=batch.behavior_logprobs,
            target_logprobs=before.target_logprobs,
            policy_mask=batch.policy_mask,
            window=windows,
            c_clip=algorithm.c_clip,
        )
    if algorithm.advantage == "rloo":
        gains = rewards.returns - rewards.others
    elif algorithm.advantage == "dr_grpo":
        gains = rewards.returns - rewards.means
    else:
        differs = rewards.deviations > 0
        gains = torch.where(differs, (rewards.returns - rewards.means) / rewards.deviations.where(differs, 1.0), 0.0)
    return torch.where(batch.policy_mask, gains[:, None], 0.0)


def _gae_advantages(algorithm: AlgorithmConfig, batch: Batch, before: Evaluation) -> Tensor:
    """Generalised advantage over policy tokens (tool output skipped), with a lambda of the actor's own.

    With ``policy_lam_alpha`` the lambda of a response of ``l`` policy tokens is ``1 - 1 / (alpha l)``, at least 0
    (VAPO, arXiv 2504.05118).
    """
    everything = torch.ones(len(batch), dtype=torch.bool, device=before.values.device)
    if algorithm.policy_lam_alpha == 0:
        return _gae_of_rows(algorithm, batch, before, everything, algorithm.policy_lam)
    advantages = torch.zeros_like(before.values)
    tokens = batch.policy_mask.sum(1)
    for length in tokens.unique().tolist():
        rows = (tokens == length) & (length > 0)
        if not rows.any():
            continue
        lam = length_adaptive_lam(algorithm.policy_lam_alpha, length)
        advantages[rows] = _gae_of_rows(algorithm, batch, before, rows, lam)
    return advantages


def _gae_of_rows(algorithm: AlgorithmConfig, batch: Batch, before: Evaluation, rows: Tensor, lam: float) -> Tensor:
    return core.gae_targets(
        values=before.values[rows],
        rewards=batch.rewards[rows],
        policy_mask=batch.policy_mask[rows],
        gamma=algorithm.gamma,
        lam=lam,
        bootstrap_values=None if before.bootstrap_values is None else before.bootstrap_values[rows],
    ).advantages


def length_adaptive_lam(alpha: float, length: int) -> float:
    """``1 - 1 / (alpha length)``, and 0 for responses so short that it would be negative (arXiv 2504.05118)."""
    return max(0.0, 1.0 - 1.0 / (alpha * length))
