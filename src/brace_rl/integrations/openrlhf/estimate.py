"""From OpenRLHF's experiences to what its critic and actor are trained on.

An experience is a micro-batch. Its ``[b, A]`` tensors are over all of a sequence but its first token, prompt included,
padded on the right: column ``t`` is token ``t + 1`` and the critic's value before it. Experiences are as wide as their
longest sequence, so they are padded to one batch here: an automatic window and whitening are of the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from brace_rl import core
from brace_rl.errors import DataError
from brace_rl.integrations.openrlhf.checks import KEEP_LOGPROBS
from brace_rl.integrations.token_level import TokenLevelOptions, token_level_estimates

PREFIX = "brace/"
"""Of the metrics in OpenRLHF's log."""


class OpenRLHFEstimates(NamedTuple):
    """OpenRLHF's names for what a step is trained on, one ``[b, A]`` tensor per experience, and figures for its log."""

    advantages: tuple[Tensor, ...]
    returns: tuple[Tensor, ...]
    metrics: dict[str, float]


def openrlhf_estimates(
    *, experiences: Sequence[Any], rewards: Sequence[Tensor], options: TokenLevelOptions, divide_by_std: bool
) -> OpenRLHFEstimates:
    """Estimates of one batch.

    Args:
        experiences: OpenRLHF's, with ``values``, ``action_mask``, ``action_log_probs`` (pi, from before the update) and
            ``rollout_log_probs`` (mu, from the engine).
        rewards: per experience ``[b, A]``, the KL penalty in them if there is one.
        divide_by_std: scale advantages to variance 1 after their mean was taken away, as OpenRLHF does by default.

    Raises:
        DataError: a tensor is missing; the message says which setting brings it.
    """
    for experience in experiences:
        if experience.values is None:
            raise DataError("values: missing, the critic is off; set --algo.advantage.estimator gae")
        if options.needs_ratios and experience.rollout_log_probs is None:
            raise DataError(f"rollout_log_probs: missing; {KEEP_LOGPROBS}")
    mask = _batch([experience.action_mask for experience in experiences]) > 0
    ratios = {"behavior_logprobs": "rollout_log_probs", "target_logprobs": "action_log_probs"}
    logprobs = {
        name: _batch([getattr(experience, theirs) for experience in experiences]) if options.needs_ratios else None
        for name, theirs in ratios.items()
    }
    found = token_level_estimates(
        values=_batch([experience.values for experience in experiences]),
        rewards=_batch(rewards),
        action_mask=mask,
        options=options,
        **logprobs,
    )
    if divide_by_std:
        advantages = core.whiten(found.advantages, mask)
    else:
        mean = found.advantages.sum() / mask.sum().clamp(min=1)
        advantages = torch.where(mask, found.advantages - mean, 0.0)
    shapes = [experience.action_mask.shape for experience in experiences]
    metrics = {PREFIX + name: float(figure) for name, figure in found.metrics.items()}
    return OpenRLHFEstimates(_parts(advantages, shapes), _parts(found.targets, shapes), metrics)


def _batch(parts: Sequence[Tensor]) -> Tensor:
    """One tensor of all rows, as wide as the widest part, zeros on the right, float32 or better."""
    width = max(part.shape[1] for part in parts)
    padded = [torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in parts]
    whole = torch.cat(padded)
    return whole.to(torch.promote_types(whole.dtype, torch.float32))


def _parts(whole: Tensor, shapes: Sequence[torch.Size]) -> tuple[Tensor, ...]:
    rows = whole.split([shape[0] for shape in shapes])
    return tuple(part[:, : shape[1]].contiguous() for part, shape in zip(rows, shapes, strict=True))
