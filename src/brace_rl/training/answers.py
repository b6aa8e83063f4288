"""What an environment answers, checked before any of it is used: tasks are other people's code."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import SupportsFloat

from brace_rl.errors import DataError
from brace_rl.tasks.base import StepResult

LARGEST_REWARD = 1e30
"""Beyond it sums and squares of rewards leave float32."""


def check_answer(result: object, problem_id: str) -> StepResult:
    """The answer to a step.

    Raises:
        DataError: it is no :class:`~brace_rl.tasks.base.StepResult`, or a field of it is of another kind than it must
            be; names problem and field. Figures in ``info`` are left to :func:`finite_number`.
    """
    if not isinstance(result, StepResult):
        raise DataError(
            f"problem {problem_id}: its environment's step returned {type(result).__name__}; return a StepResult"
        )
    expected = {
        "observation": (_is_observation(result.observation), "text, or messages with role and content"),
        "observation_end": (isinstance(result.observation_end, str), "text"),
        "done": (_is_truth(result.done), "True or False"),
        "success": (_is_truth(result.success), "True or False"),
        "excluded": (_is_truth(result.excluded), "True or False"),
        "info": (isinstance(result.info, Mapping), "a mapping of names to numbers"),
    }
    for field, (is_right, wanted) in expected.items():
        if not is_right:
            given = type(getattr(result, field)).__name__
            raise DataError(
                f"problem {problem_id}: its environment's step returned {field} as {given}; return {wanted}"
            )
    return result


def checked_reward(reward: object, problem_id: str, *, source: str) -> float:
    """A reward as float; raises DataError where it is not a finite number of a usable size."""
    number = finite_number(reward)
    if number is None or abs(number) > LARGEST_REWARD:
        raise DataError(
            f"problem {problem_id}: {source} gave the reward {reward!r}; mend the scoring or drop the problem"
        )
    return number


def finite_number(value: object) -> float | None:
    """A number as float; None for anything else, text included, and where it is not finite."""
    try:
        number = float(value) if isinstance(value, SupportsFloat) else math.nan
    except (TypeError, ValueError, OverflowError, RuntimeError):  # arrays and tensors of several numbers, huge integers
        return None
    return number if math.isfinite(number) else None


def _is_truth(value: object) -> bool:
    """A bool, or what numpy and torch have for one."""
    return isinstance(value, (bool, int)) or getattr(getattr(value, "dtype", None), "kind", None) == "b"


def _is_observation(value: object) -> bool:
    if isinstance(value, str):
        return True
    if not isinstance(value, Sequence) or isinstance(value, bytes) or not value:
        return False
    return all(
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        for message in value
    )
