"""From verl's padded tensors to what verl's critic and actor are trained on. Both routes end here."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from brace_rl.errors import DataError
from brace_rl.integrations.token_level import TokenLevelOptions, token_level_estimates

PREFIX = "brace/"
"""Of the metrics in verl's log."""


class VerlEstimates(NamedTuple):
    """verl's names for what a step is trained on, ``[B, T]`` over response tokens, and figures for its log."""

    advantages: Tensor
    returns: Tensor
    metrics: dict[str, float]


def verl_estimates(
    *,
    rewards: Tensor,
    values: Tensor | None,
    rollout_log_probs: Tensor | None,
    old_log_probs: Tensor | None,
    action_mask: Tensor,
    response_mask: Tensor,
    options: TokenLevelOptions,
    whiten: Any,
) -> VerlEstimates:
    """Estimates of one batch.

    Args:
        rewards: ``[B, T]`` verl's ``token_level_rewards``.
        values: ``[B, T]`` of verl's critic, before the token.
        rollout_log_probs: ``[B, T]`` mu, from the rollout engine.
        old_log_probs: ``[B, T]`` pi, recomputed by the actor before the update.
        action_mask: ``[B, T]`` verl's ``response_mask`` as the rollout wrote it.
        response_mask: ``[B, T]`` the same after rollout correction has rejected tokens of it.
        whiten: verl's ``masked_whiten(advantages, mask)``.

    Raises:
        DataError: a tensor is missing; the message says which setting brings it.
    """
    if values is None:
        raise DataError("values: missing, the critic is off; set algorithm.adv_estimator=gae, critic.enable=True")
    if options.needs_ratios and rollout_log_probs is None:
        raise DataError("rollout_log_probs: missing; set actor_rollout_ref.rollout.calculate_log_probs=True")
    is_action = action_mask.bool()
    found = token_level_estimates(
        values=values,
        rewards=rewards,
        action_mask=is_action,
        loss_mask=response_mask.bool(),
        behavior_logprobs=rollout_log_probs,
        target_logprobs=old_log_probs,
        options=options,
    )
    # verl's own whitening, so that nothing but the target and the advantage tells a run from verl's.
    advantages = torch.where(is_action, whiten(found.advantages, response_mask), 0.0)
    metrics = {PREFIX + name: float(figure) for name, figure in found.metrics.items()}
    return VerlEstimates(advantages=advantages, returns=found.targets, metrics=metrics)
