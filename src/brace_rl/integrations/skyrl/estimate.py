"""From SkyRL's tensors to what its critic and actor are trained on.

SkyRL's ``[B, T]`` tensors are over response tokens and right-aligned: a response ends in the last column, and what is
left of it is padding. Its ``response_mask`` covers the whole response, tool output included, so it is neither of the
two masks that targets need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from brace_rl.errors import DataError
from brace_rl.integrations.token_level import TokenLevelOptions, token_level_estimates

PREFIX = "brace/"
"""Of the metrics in SkyRL's log."""


class SkyRLEstimates(NamedTuple):
    """SkyRL's names for what a step is trained on, ``[B, T]`` over response tokens, and figures for its log."""

    advantages: Tensor
    returns: Tensor
    metrics: dict[str, float]


def right_aligned(masks: Sequence[Sequence[float]], *, rows: int, width: int) -> Tensor:
    """Masks of responses as a ``[rows, width]`` bool tensor in SkyRL's layout.

    Args:
        masks: one per response, of its length.
        rows: at least as many as responses; those beyond are the copies that fill up a batch, and stay false.
        width: at least the longest response.
    """
    aligned = torch.zeros(rows, width, dtype=torch.bool)
    for row, mask in enumerate(masks):
        aligned[row, width - len(mask) :] = torch.tensor(mask) > 0
    return aligned


def skyrl_estimates(
    *,
    rewards: Tensor,
    values: Tensor | None,
    rollout_logprobs: Tensor | None,
    action_log_probs: Tensor | None,
    action_mask: Tensor,
    loss_mask: Tensor,
    options: TokenLevelOptions,
    whiten: Callable[[Tensor, Tensor], Tensor],
) -> SkyRLEstimates:
    """Estimates of one batch.

    Args:
        rewards: ``[B, T]`` SkyRL's ``rewards``, the KL penalty in them if there is one.
        values: ``[B, T]`` of SkyRL's critic, before the token.
        rollout_logprobs: ``[B, T]`` mu, from the inference engine.
        action_log_probs: ``[B, T]`` pi, recomputed by the policy before the update.
        action_mask: ``[B, T]`` bool, the generator's loss mask, before any response was rejected.
        loss_mask: ``[B, T]`` SkyRL's ``loss_mask`` as the losses will see it.
        whiten: SkyRL's ``masked_whiten(values, mask)``.

    Raises:
        DataError: a tensor is missing; the message says which setting brings it.
    """
    if values is None:
        raise DataError("values: missing, the critic is off; set trainer.critic.model.path")
    placeholders = torch.zeros((), dtype=torch.long)
    if options.needs_ratios:
        if rollout_logprobs is None:
            raise DataError("rollout_logprobs: missing; set generator.sampling_params.logprobs=1")
        if action_log_probs is None:
            raise DataError(
                "action_log_probs: missing, the policy's forward pass was skipped; let the trainer's "
                "_skip_policy_forward return False"
            )
        placeholder = _placeholders(rollout_logprobs, action_mask)
        placeholders = placeholder.sum()
        rollout_logprobs = torch.where(placeholder, action_log_probs, rollout_logprobs)
    found = token_level_estimates(
        values=values,
        rewards=rewards,
        action_mask=action_mask,
        loss_mask=loss_mask > 0,
        behavior_logprobs=rollout_logprobs,
        target_logprobs=action_log_probs,
        options=options,
    )
    trained = action_mask & (loss_mask > 0)
    metrics = {**found.metrics, "logprobs/placeholders": placeholders}
    return SkyRLEstimates(
        advantages=_whitened(found.advantages, trained, whiten),
        returns=found.targets,
        metrics={PREFIX + name: float(figure) for name, figure in metrics.items()},
    )


def _placeholders(rollout_logprobs: Tensor, action_mask: Tensor) -> Tensor:
    """Last tokens of a response whose log-prob is not known.

    With ``generator.use_conversation_multi_turn=False`` SkyRL takes the end token off a response that has one, appends
    one to every response that was not cut off, with log-prob 0, and trains on it. Its ratio would be the policy's
    probability of that token, which is small where the policy did not want to stop, and would keep the reward from
    every token before. One that was sampled so surely that its log-prob was rounded to 0 has a ratio of about 1 anyway.
    """
    last = torch.zeros_like(action_mask)
    last[:, -1] = True
    return last & action_mask & (rollout_logprobs == 0)


def _whitened(advantages: Tensor, trained: Tensor, whiten: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """SkyRL's own whitening, so that nothing but target and advantage tells a run from SkyRL's; 0 outside the mask."""
    if trained.sum() < 2:
        # There is nothing to scale, and SkyRL's function raises.
        return torch.zeros_like(advantages)
    return torch.where(trained, whiten(torch.where(trained, advantages, 0.0), trained), 0.0)
