"""Promises that every backend with workers elsewhere keeps, tested with the drivers of ``fakes``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import ClassVar

import pytest
from fakes import FakeFactory, fake_request, fake_weights

from brace_rl.errors import DataError, WaitTimeoutError
from brace_rl.training.backends.base import Backend
from brace_rl.training.backends.inline import InlineBackend
from brace_rl.training.types import RolloutGroup

ELEMENTS = 100_000
"""Size of the weights of :func:`check_no_prompt_is_sampled_under_older_weights`."""
LATEST = 11
"""Their last version."""


def collect(made: Backend, count: int) -> dict[int, RolloutGroup]:
    """``count`` answers, none of them twice."""
    groups: dict[int, RolloutGroup] = {}
    while len(groups) < count:
        for group in made.collect():
            assert group.request.index not in groups
            groups[group.request.index] = group
    return groups


def assert_weights_were_those_of_the_version(groups: dict[int, RolloutGroup]) -> None:
    """The fake engine's log-prob is minus the value of the weights, which is their version."""
    for group in groups.values():
        for trajectory in group.trajectories:
            assert trajectory.behavior_logprobs == [-float(version) for version in trajectory.versions]
            assert trajectory.versions == sorted(trajectory.versions)
            assert min(trajectory.versions) >= group.request.issued_version


def check_answers_equal_those_of_the_inline_backend(made: Backend, prompts: int) -> None:
    requests = [fake_request(i, samples=2, max_response_tokens=5) for i in range(prompts)]
    inline = InlineBackend(FakeFactory().build())
    inline.publish(fake_weights(3), 3)
    inline.submit(requests)
    expected = {group.request.index: group for group in inline.collect()}
    made.publish(fake_weights(3), 3)
    made.submit(requests)
    assert len(expected) == prompts
    assert collect(made, prompts) == expected
    assert made.restarts == 0


def check_no_prompt_is_sampled_under_older_weights(made: Backend) -> None:
    """Than those published before it."""
    groups: dict[int, RolloutGroup] = {}
    for version in range(LATEST + 1):
        made.publish(fake_weights(version, ELEMENTS), version)
        made.submit([fake_request(2 * version + i, issued_version=version) for i in range(2)])
        if version % 3 == 2:
            groups |= collect(made, 1)
    groups |= collect(made, 2 * (LATEST + 1) - len(groups))
    assert_weights_were_those_of_the_version(groups)
    assert max(max(group.trajectories[0].versions) for group in groups.values()) <= LATEST


def check_killed_again_and_again_nothing_is_lost_or_answered_twice(
    made: Backend, kill: Callable[[int], None], *, kills: int, prompts: int
) -> None:
    """``kill(version)`` ends a worker, after which that version is published."""
    made.publish(fake_weights(1), 1)
    made.submit([fake_request(i, issued_version=1) for i in range(prompts)])
    groups: dict[int, RolloutGroup] = {}
    for version in range(2, 2 + kills):
        groups |= collect(made, 1)
        kill(version)
        made.publish(fake_weights(version), version)
    assert len(groups) < prompts
    rest = collect(made, prompts - len(groups))
    assert made.restarts == kills
    assert not groups.keys() & rest.keys()
    assert sorted(groups.keys() | rest.keys()) == list(range(prompts))
    assert_weights_were_those_of_the_version(groups | rest)


def _submit_and_collect(made: Backend) -> None:
    """Either of the calls may be the one that learns of a failure."""
    made.submit([fake_request(0)])
    made.collect()


class WorkerContract:
    """What is asked of every such backend in the same words; derive a test class and say how one is made."""

    backend: ClassVar[Callable[[FakeFactory], AbstractContextManager[Backend]]]

    def test_waiting_for_nothing_is_an_error_at_once(self) -> None:
        with (
            type(self).backend(FakeFactory()) as made,
            pytest.raises(WaitTimeoutError, match="every prompt it submitted is answered"),
        ):
            made.collect()

    def test_a_brace_error_of_the_driver_stays_one_and_is_raised_by_every_later_call(self) -> None:
        with type(self).backend(FakeFactory(failure="train.jsonl: line 3: no answer")) as made:
            with pytest.raises(DataError, match=r"^train\.jsonl: line 3: no answer$") as caught:
                _submit_and_collect(made)
            assert "in build" in str(caught.value.__cause__)
            with pytest.raises(DataError):
                made.publish(fake_weights(0), 0)
            assert made.restarts == 0

    def test_any_other_error_of_the_driver_comes_with_its_traceback(self) -> None:
        with (
            type(self).backend(FakeFactory(failure="!disk on fire")) as made,
            pytest.raises(RuntimeError, match=r"(?s)rollout process failed:\nTraceback.*disk on fire"),
        ):
            _submit_and_collect(made)

    def test_a_prompt_in_flight_cannot_be_submitted_again(self) -> None:
        with type(self).backend(FakeFactory(step_s=60.0)) as made:
            made.submit([fake_request(0)])
            with pytest.raises(ValueError, match=r"prompts \[0\] were submitted before"):
                made.submit([fake_request(0)])


def check_once_closed_it_refuses_and_closes_again_in_peace(made: Backend) -> None:
    made.close()
    made.close()
    with pytest.raises(RuntimeError, match="closed"):
        made.submit([fake_request(0)])
    with pytest.raises(RuntimeError, match="closed"):
        made.collect()
