"""Per-token records of consumed responses, in the form ``brace diagnose`` reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from brace_rl.training.estimates import Evaluation
from brace_rl.training.types import Trajectory

DIGITS = 6
"""Significant digits kept: a ratio at staleness 0 differs from 1 in the sixth."""


def rollout_records(
    trajectories: Sequence[Trajectory], evaluation: Evaluation, *, step: int, version: int
) -> Iterator[dict[str, Any]]:
    """One line of ``rollouts.jsonl`` per response.

    Args:
        trajectories: the first rows of the batch, in its order.
        evaluation: policy and critic (without one, the group's baseline) before the update, of the whole batch.
        step: the trainer step that consumed them.
        version: of the weights that ``evaluation`` was made with.

    Yields:
        step, current_version, prompt_id, sample_index, truncated, bootstrap, and lists over response tokens, tool
        output included: token_ids, policy_mask, rewards, versions (-1 outside the mask), and behavior_logprobs,
        target_logprobs, values (null outside the mask; the value is that *before* the token).
    """
    for row, t in enumerate(trajectories):
        columns = slice(len(t.prompt_ids) - 1, len(t.prompt_ids) + len(t.response_ids) - 1)
        bootstrap = evaluation.bootstrap_values
        yield {
            "step": step,
            "current_version": version,
            "prompt_id": t.problem_id,
            "sample_index": t.sample_index,
            "token_ids": t.response_ids,
            "policy_mask": [int(is_policy) for is_policy in t.policy_mask],
            "behavior_logprobs": _masked(t.behavior_logprobs, t.policy_mask),
            "target_logprobs": _masked(_list(evaluation.target_logprobs[row, columns]), t.policy_mask),
            "values": _masked(_list(evaluation.values[row, columns]), t.policy_mask),
            "rewards": t.rewards,
            "versions": t.versions,
            "truncated": t.truncated,
            "bootstrap": 0.0 if bootstrap is None else _rounded(float(bootstrap[row])),
        }


def _list(x: Tensor) -> list[float]:
    values: list[float] = x.tolist()
    return values


def _masked(values: Sequence[float], mask: Sequence[bool]) -> list[float | None]:
    return [_rounded(value) if is_policy else None for value, is_policy in zip(values, mask, strict=True)]


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
