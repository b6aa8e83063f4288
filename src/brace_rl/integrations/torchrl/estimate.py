"""From TorchRL's ``[*B, T, *F]`` entries to what its losses are trained on. Imports torch alone.

TorchRL lays several episodes into one row and flags where one ends; the core wants runs of equal segment ids and a
value to bootstrap from. All that is particular about TorchRL's rows is dealt with here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from brace_rl.errors import DataError
from brace_rl.integrations.token_level import TokenLevelOptions, token_level_estimates

OUT_OF_ORDER = 0.5
"""How far next values may lie from the values of the following steps, as a share of the values' mean deviation.

For steps in random order it is 1 or more on average; in order it is 0, or little with target parameters.
"""


class TorchrlEstimates(NamedTuple):
    """TorchRL's names for what its losses read, in the shape of the values, and figures of the batch.

    Attributes:
        advantage, value_target: 0 at steps that are not valid.
        metrics: those of :class:`~brace_rl.integrations.token_level.TokenLevelEstimates`.
    """

    advantage: Tensor
    value_target: Tensor
    metrics: dict[str, Tensor]


def torchrl_estimates(
    *,
    values: Tensor,
    next_values: Tensor,
    rewards: Tensor,
    done: Tensor,
    terminated: Tensor,
    sample_log_prob: Tensor | None,
    actor_log_prob: Tensor | None,
    valid: Tensor | None,
    options: TokenLevelOptions,
    time_dim: int,
) -> TorchrlEstimates:
    """Estimates of one batch; every tensor has the shape of ``values``, ``[*B, T, *F]``.

    Args:
        values: of the state that the step starts from.
        next_values: of the state that it leads to, the last one of an episode included; read where the step is the last
            of a row or of an episode, and not where it terminated the episode.
        rewards: of the step.
        done: the episode ended with this step, or was cut off after it.
        terminated: it ended, so that nothing is to come. A step that is done and not terminated bootstraps.
        sample_log_prob: log mu, from when the action was taken; None where no ratios are needed.
        actor_log_prob: log pi of that action; None likewise.
        valid: bool, false at steps that are none (padding); they are as if they were not there, their rewards too.
            None: all are steps.
        time_dim: index of ``T``.

    Raises:
        DataError: a shape that does not fit, steps that are not in the order of time, or what is not finite.
    """
    named = {"done": done, "terminated": terminated, "reward": rewards, "next value": next_values}
    for name, x in named.items():
        if x.shape != values.shape:
            raise DataError(
                f"{name}: got {list(x.shape)}, must be {list(values.shape)} like the values; see set_keys for the entry"
            )

    def rows(x: Tensor) -> Tensor:
        return x.movedim(time_dim, -1).reshape(-1, values.shape[time_dim])

    def entry(x: Tensor) -> Tensor:
        moved = values.movedim(time_dim, -1).shape
        return x.reshape(moved).movedim(-1, time_dim)

    is_step = torch.ones_like(rows(done)) if valid is None else rows(valid.expand(values.shape))
    value, next_value, is_terminated = rows(values), rows(next_values), rows(terminated)
    is_end = rows(done) | is_terminated
    # A step before one that is none is the last of what is known of its episode.
    is_end[:, :-1] |= is_step[:, :-1] & ~is_step[:, 1:]
    _check_order(value, next_value, is_step=is_step, is_end=is_end)
    try:
        found = token_level_estimates(
            values=value,
            rewards=torch.where(is_step, rows(rewards), 0.0),
            action_mask=is_step,
            behavior_logprobs=None if sample_log_prob is None else rows(sample_log_prob),
            target_logprobs=None if actor_log_prob is None else rows(actor_log_prob),
            bootstrap_values=torch.where(is_terminated, 0.0, next_value),
            segment_ids=is_end.cumsum(1) - is_end.long(),
            options=options,
        )
    except ValueError as error:
        raise DataError(str(error)) from None
    return TorchrlEstimates(entry(found.advantages), entry(found.targets), found.metrics)


def _check_order(value: Tensor, next_value: Tensor, *, is_step: Tensor, is_end: Tensor) -> None:
    """What follows a step in its row must be the state that the step led to."""
    continues = is_step[:, :-1] & is_step[:, 1:] & ~is_end[:, :-1]
    if not continues.any():
        return
    known = value[is_step]
    apart = (next_value[:, :-1] - value[:, 1:])[continues].abs().mean()
    spread = (known - known.mean()).abs().mean()
    if apart > OUT_OF_ORDER * spread:
        raise DataError(
            f"next value: {float(apart):.3g} away from the value of the following step on average, where values spread "
            f"by {float(spread):.3g}; the time dimension must hold whole trajectories, neither shuffled nor n-step"
        )
