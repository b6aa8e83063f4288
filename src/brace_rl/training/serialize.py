"""Answered prompts as JSON-able dictionaries and back, exactly.

Floats survive because JSON text written by Python repeats them to the last bit; NaN and infinity survive because
``json_text`` spells them as strings that ``float()`` reads. What a task keeps in ``Problem.metadata`` must be JSON
itself: its tuples come back as lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from brace_rl.tasks.base import Problem
from brace_rl.training.types import RolloutGroup, RolloutRequest, SamplingParams, Trajectory

_FLOAT_LISTS = ("behavior_logprobs", "behavior_entropies", "rewards")


def group_to_dict(group: RolloutGroup) -> dict[str, Any]:
    """A group as a JSON-able dictionary; lists are shared with the group, not copied."""
    return {
        "request": request_to_dict(group.request),
        "trajectories": [trajectory_to_dict(trajectory) for trajectory in group.trajectories],
    }


def group_from_dict(data: Mapping[str, Any]) -> RolloutGroup:
    """Inverse of :func:`group_to_dict`.

    Raises:
        KeyError, TypeError, ValueError: ``data`` was not made by :func:`group_to_dict`.
    """
    return RolloutGroup(
        request=request_from_dict(data["request"]),
        trajectories=[trajectory_from_dict(trajectory) for trajectory in data["trajectories"]],
    )


def request_to_dict(request: RolloutRequest) -> dict[str, Any]:
    """A request as a JSON-able dictionary."""
    return {
        **_fields(request),
        "problem": problem_to_dict(request.problem),
        "sampling": _fields(request.sampling),
    }


def request_from_dict(data: Mapping[str, Any]) -> RolloutRequest:
    """Inverse of :func:`request_to_dict`; raises as :func:`group_from_dict`."""
    nested = {"problem": problem_from_dict(data["problem"]), "sampling": SamplingParams(**data["sampling"])}
    return RolloutRequest(**{**data, **nested})


def problem_to_dict(problem: Problem) -> dict[str, Any]:
    """A problem as a JSON-able dictionary."""
    is_text = isinstance(problem.prompt, str)
    prompt = (
        problem.prompt if is_text else [dict(message) for message in problem.prompt if not isinstance(message, str)]
    )
    return {**_fields(problem), "prompt": prompt, "metadata": dict(problem.metadata)}


def problem_from_dict(data: Mapping[str, Any]) -> Problem:
    """Inverse of :func:`problem_to_dict`; raises as :func:`group_from_dict`."""
    prompt = data["prompt"]
    return Problem(**{**data, "prompt": prompt if isinstance(prompt, str) else tuple(prompt)})


def trajectory_to_dict(trajectory: Trajectory) -> dict[str, Any]:
    """A trajectory as a JSON-able dictionary."""
    return {**_fields(trajectory), "info": dict(trajectory.info)}


def trajectory_from_dict(data: Mapping[str, Any]) -> Trajectory:
    """Inverse of :func:`trajectory_to_dict`; raises as :func:`group_from_dict`."""
    floats: dict[str, Any] = {name: [float(x) for x in data[name]] for name in _FLOAT_LISTS}
    floats["info"] = {name: float(x) for name, x in data["info"].items()}
    return Trajectory(**{**data, **floats})


def _fields(record: Any) -> dict[str, Any]:
    """The fields one level deep; ``dataclasses.asdict`` would copy every list of tokens element by element."""
    return {field.name: getattr(record, field.name) for field in fields(record)}
