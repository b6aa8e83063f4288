"""The episode driver: token-exactness, turns, limits, failures, determinism. Fakes only."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import re
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from fakes import (
    FakeEngine,
    FakeTask,
    FakeTokenizer,
    ScriptedEnvironment,
    fake_request,
    fake_weights,
)

from brace_rl.config import Config
from brace_rl.errors import DataError
from brace_rl.tasks.base import Environment, Problem, StepResult
from brace_rl.training.backends.inline import InlineBackend
from brace_rl.training.driver_spec import DriverSpec
from brace_rl.training.rollout import RolloutDriver
from brace_rl.training.types import (
    NOT_A_POLICY_TOKEN,
    Generation,
    GenerationRequest,
    RolloutGroup,
    SamplingParams,
    Trajectory,
    derive_seed,
)

TOKENIZER = FakeTokenizer()
SOLVED = StepResult(reward=1.0, done=True, success=True, info={"turns": 2.0})


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def replies(*turns: str) -> Callable[[GenerationRequest], str]:
    """Turn ``i`` of every episode, found by counting the observations in the context."""

    def reply(request: GenerationRequest) -> str:
        return turns[TOKENIZER.decode(request.token_ids).count("=")]

    return reply


def driver(engine: FakeEngine, task: FakeTask | None = None, **limits: float) -> RolloutDriver:
    return RolloutDriver(engine, task or FakeTask(), TOKENIZER, **{"max_prompt_tokens": 64, **limits})


def finish(driver: RolloutDriver) -> list[RolloutGroup]:
    groups: list[RolloutGroup] = []
    while driver.unfinished:
        groups += driver.advance()
    return groups


def only(driver: RolloutDriver) -> Trajectory:
    (group,) = finish(driver)
    (trajectory,) = group.trajectories
    lists = ("policy_mask", "behavior_logprobs", "behavior_entropies", "versions", "rewards")
    assert {len(getattr(trajectory, name)) for name in lists} == {len(trajectory.response_ids)}
    assert all(m for m, reward in zip(trajectory.policy_mask, trajectory.rewards, strict=True) if reward)
    return trajectory


def two_turns(max_response_tokens: int = 32, observation: str = "=3;") -> tuple[RolloutDriver, FakeEngine, FakeTask]:
    task = FakeTask([StepResult(observation=observation, reward=0.25), SOLVED], stop=(")",))
    engine = FakeEngine(reply=replies("(1+2)", "so 3"))
    engine.update_weights(fake_weights(3), 3)
    made = driver(engine, task)
    made.submit([fake_request(0, max_response_tokens=max_response_tokens)])
    return made, engine, task


def test_response_is_the_sampled_ids_and_the_observation_ids_in_order() -> None:
    made, _, task = two_turns()
    trajectory = only(made)
    assert trajectory.prompt_ids == ids("q0:")
    assert trajectory.response_ids == ids("(1+2)") + ids("=3;") + ids("so 3") + [0]
    assert trajectory.policy_mask == [True] * 5 + [False] * 3 + [True] * 5
    assert trajectory.behavior_logprobs == [-3.0] * 5 + [0.0] * 3 + [-3.0] * 5
    assert trajectory.behavior_entropies == [0.5] * 5 + [0.0] * 3 + [0.5] * 5
    assert trajectory.versions == [3] * 5 + [NOT_A_POLICY_TOKEN] * 3 + [3] * 5
    assert trajectory.rewards == [0.0] * 4 + [0.25] + [0.0] * 7 + [1.0]
    assert (trajectory.success, trajectory.truncated, trajectory.turns) == (True, False, 2)
    assert trajectory.info == {"turns": 2.0}
    assert task.environments[0].actions == ["(1+2)", "so 3"]


def test_the_next_turn_carries_the_whole_context_under_the_same_session_and_seed() -> None:
    made, engine, _ = two_turns()
    only(made)
    first, second = engine.requests
    assert list(second.token_ids) == ids("q0:(1+2)=3;")
    assert (second.session, second.seed) == (first.session, first.seed)
    assert (first.max_new_tokens, second.max_new_tokens) == (32, 32 - 8)
    assert first.stop == (")",)
    assert first.stop_token_ids == (0,)
    assert engine.released == [first.session]


def test_the_next_turn_is_submitted_in_the_step_that_finished_the_last() -> None:
    made, engine, _ = two_turns()
    while len(engine.requests) == 1:
        assert engine.unfinished == 1
        made.advance()
    assert engine.unfinished == 1


def test_the_action_keeps_tags_that_are_special_tokens_and_loses_the_closing_end_of_sequence() -> None:
    task = FakeTask([SOLVED])
    made = driver(FakeEngine(reply=lambda _: "<tag>7"), task)
    made.submit([fake_request(0)])
    assert only(made).response_ids == [1, ord("7"), 0]
    assert task.environments[0].actions == ["<tag>7"]


def test_samples_of_a_prompt_are_seeded_by_their_number_and_returned_in_order() -> None:
    engine = FakeEngine(slots=2, newest_first=True)
    made = driver(engine)
    made.submit([fake_request(4, samples=3)])
    (group,) = finish(made)
    assert [t.sample_index for t in group.trajectories] == [0, 1, 2]
    assert [r.seed for r in engine.requests] == [derive_seed(fake_request(4).seed, i) for i in range(3)]
    assert len({tuple(t.response_ids) for t in group.trajectories}) == 3


def test_responses_do_not_depend_on_batching() -> None:
    def answers(slots: int, burst: int) -> dict[int, list[list[int]]]:
        made = driver(FakeEngine(slots=slots, burst=burst, newest_first=slots > 2))
        made.submit([fake_request(i, samples=2) for i in range(5)])
        return {g.request.index: [t.response_ids for t in g.trajectories] for g in finish(made)}

    assert answers(1, 1) == answers(3, 1) == answers(16, 5)


def test_next_turns_are_queued_in_order_of_submission_whatever_the_engine_returns() -> None:
    def sessions(newest_first: bool) -> list[str]:
        engine = FakeEngine(reply=replies("(1)", "x"), newest_first=newest_first)
        made = driver(engine, FakeTask([StepResult("="), SOLVED], stop=(")",)))
        made.submit([fake_request(i) for i in range(3)])
        finish(made)
        return [request.session for request in engine.requests]

    assert sessions(False) == sessions(True)


def test_a_turn_cut_at_the_limit_is_truncated_and_never_shown_to_the_environment() -> None:
    task = FakeTask()
    made = driver(FakeEngine(), task)
    made.submit([fake_request(0, max_response_tokens=6)])
    trajectory = only(made)
    assert len(trajectory.response_ids) == 6
    assert (trajectory.truncated, trajectory.success, trajectory.reward, trajectory.info) == (True, False, 0.0, {})
    assert task.environments == []


def test_a_second_turn_cut_at_the_limit_keeps_the_reward_of_the_first() -> None:
    made, _, task = two_turns(max_response_tokens=10)
    trajectory = only(made)
    assert trajectory.response_ids == ids("(1+2)=3;so")
    assert (trajectory.truncated, trajectory.reward) == (True, 0.25)
    assert len(task.environments[0].actions) == 1


@pytest.mark.parametrize("limit", [5, 7, 8])
def test_an_observation_that_leaves_no_room_for_a_token_is_left_out(limit: int) -> None:
    made, _, _ = two_turns(max_response_tokens=limit)
    trajectory = only(made)
    assert trajectory.response_ids == ids("(1+2)")
    assert (trajectory.truncated, trajectory.reward) == (True, 0.25)


def test_an_episode_the_environment_ends_at_the_limit_is_not_truncated() -> None:
    made, _, _ = two_turns(max_response_tokens=13)
    trajectory = only(made)
    assert len(trajectory.response_ids) == 13
    assert (trajectory.truncated, trajectory.success) == (False, True)


def test_the_models_context_limits_prompt_and_response_together() -> None:
    made = driver(FakeEngine(max_context_tokens=7))
    made.submit([fake_request(0, max_response_tokens=50)])
    trajectory = only(made)
    assert len(trajectory.prompt_ids) + len(trajectory.response_ids) == 7
    assert trajectory.truncated


@pytest.mark.parametrize(("most_prompt", "most_context"), [(2, None), (100, 3)])
def test_a_prompt_too_long_is_an_error_that_names_the_problem_and_queues_nothing(
    most_prompt: int, most_context: int | None
) -> None:
    made = driver(FakeEngine(max_context_tokens=most_context), max_prompt_tokens=most_prompt)
    with pytest.raises(DataError, match="problem p0: its prompt has 3 tokens"):
        made.submit([fake_request(0)])
    assert made.unfinished == 0
    assert made.advance() == []


def test_tokens_kept_by_top_k_are_recorded_per_token_and_empty_for_observations() -> None:
    engine = FakeEngine(reply=replies("(1)", "x"))
    made = driver(engine, FakeTask([StepResult("=2"), SOLVED], stop=(")",)))
    made.submit([fake_request(0, sampling=SamplingParams(top_k=1))])
    trajectory = only(made)
    assert trajectory.kept_ids == [[i] for i in ids("(1)")] + [[], []] + [[ord("x")], [0]]


def test_versions_follow_weights_that_change_within_a_response() -> None:
    made = driver(FakeEngine())
    made.update_weights(fake_weights(0), 0)
    made.submit([fake_request(0, max_response_tokens=4)])
    made.advance()
    made.update_weights(fake_weights(1), 1)
    trajectory = only(made)
    assert trajectory.versions == [0, 1, 1, 1]
    assert trajectory.behavior_logprobs == [0.0, -1.0, -1.0, -1.0]


class Meeting(Environment):
    """Answers once as many environments as expected are waiting."""

    def __init__(self, expected: int, waiting: list[asyncio.Future[None]]) -> None:
        self.expected = expected
        self.waiting = waiting

    async def step(self, action: str) -> StepResult:
        self.waiting.append(asyncio.get_running_loop().create_future())
        if len(self.waiting) == self.expected:
            for future in self.waiting:
                future.set_result(None)
        await self.waiting[-1]
        return SOLVED


class TaskOf(FakeTask):
    """A task whose environments a function makes."""

    def __init__(self, make: Callable[[], Environment]) -> None:
        super().__init__()
        self.make = make

    def environment(self, problem: Problem) -> Environment:
        return self.make()


def test_environments_of_turns_that_finish_together_run_concurrently() -> None:
    waiting: list[asyncio.Future[None]] = []
    engine = FakeEngine(reply=lambda _: "x")
    made = driver(engine, TaskOf(lambda: Meeting(3, waiting)), environment_timeout_s=5.0)
    made.submit([fake_request(i) for i in range(3)])
    assert all(g.trajectories[0].success for g in finish(made))


class Forever(Environment):
    async def step(self, action: str) -> StepResult:
        await asyncio.get_running_loop().create_future()
        raise AssertionError


def broken_constructor() -> Environment:
    raise OSError("no sandbox")


class Exiting(Environment):
    async def step(self, action: str) -> StepResult:
        sys.exit(7)


class OwnExit(BaseException):
    """No Exception, as a library's own way out may be none."""


class Stopping(Environment):
    async def step(self, action: str) -> StepResult:
        raise OwnExit


@pytest.mark.parametrize(
    "make",
    [
        lambda: ScriptedEnvironment([ZeroDivisionError("boom")]),
        Exiting,
        Stopping,
        Forever,
        broken_constructor,
    ],
)
def test_an_environment_that_fails_costs_its_response_and_nothing_else(
    make: Callable[[], Environment], caplog: pytest.LogCaptureFixture
) -> None:
    made = driver(FakeEngine(reply=lambda _: "x"), TaskOf(make), environment_timeout_s=0.01)
    with caplog.at_level(logging.WARNING):
        made.submit([fake_request(0, samples=2)])
        (group,) = finish(made)
    for trajectory in group.trajectories:
        assert (trajectory.reward, trajectory.success, trajectory.truncated) == (0.0, False, False)
        assert trajectory.info == {"environment_error": 1.0}
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["problem p0"]


def test_a_failure_takes_back_the_reward_of_earlier_turns() -> None:
    task = FakeTask([StepResult("=", reward=0.25), RuntimeError("boom")], stop=(")",))
    made = driver(FakeEngine(reply=replies("(1)", "x")), task)
    made.submit([fake_request(0)])
    assert only(made).rewards == [0.0] * 6


class ShortTask(FakeTask):
    """Takes a hundredth of the reward for every token, and a tenth where the response reached its limit."""

    def length_reward(self, tokens: int, *, limit: int) -> float:
        return -tokens / 100 - (tokens == limit) / 10


@pytest.mark.parametrize(("limit", "rewards"), [(8, [0.0, 0.0, 0.97]), (3, [0.0, 0.0, 0.87]), (2, [0.0, -0.12])])
def test_a_task_s_reward_for_length_is_added_to_the_last_token_right_or_wrong_cut_or_not(
    limit: int, rewards: list[float]
) -> None:
    made = driver(FakeEngine(reply=lambda _: "xy"), ShortTask())
    made.submit([fake_request(0, max_response_tokens=limit)])
    assert only(made).rewards == pytest.approx(rewards)


@pytest.mark.parametrize("last", [RuntimeError("boom"), StepResult(done=True, excluded=True)])
def test_a_response_that_failed_or_is_excluded_is_not_rewarded_for_its_length(last: StepResult | Exception) -> None:
    made = driver(FakeEngine(reply=lambda _: "x"), ShortTask([last]))
    made.submit([fake_request(0)])
    assert only(made).reward == 0.0


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "good", None, [1.0], torch.ones(2), 10**400, 1e308])
def test_a_reward_that_is_not_a_finite_number_is_an_error_that_names_the_problem(reward: Any) -> None:
    made = driver(FakeEngine(reply=lambda _: "x"), FakeTask([StepResult(reward=reward, done=True)]))
    made.submit([fake_request(0)])
    with pytest.raises(DataError, match=re.escape(f"problem p0: its environment gave the reward {reward!r}")):
        finish(made)


def test_a_reward_that_is_a_tensor_of_one_number_is_kept_as_that_number() -> None:
    made = driver(FakeEngine(reply=lambda _: "x"), FakeTask([StepResult(reward=torch.tensor(0.5), done=True)]))
    made.submit([fake_request(0)])
    rewards = only(made).rewards
    assert (rewards[-1], type(rewards[-1])) == (0.5, float)


def test_figures_that_are_no_finite_numbers_are_left_out_and_each_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    info: dict[Any, Any] = {"good": 2, "undefined": float("nan"), "text": "x", 3: 1.0}
    made = driver(FakeEngine(reply=lambda _: "x"), FakeTask([StepResult(done=True, info=info)]))
    made.submit([fake_request(0, samples=2)])
    (group,) = finish(made)
    assert [trajectory.info for trajectory in group.trajectories] == [{"good": 2.0}] * 2
    assert {record.args[0] for record in caplog.records if isinstance(record.args, tuple)} == {"text", "undefined", 3}
    assert len(caplog.records) == 3


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("observation", None, "text, or messages"),
        ("observation", b"x", "text, or messages"),
        ("observation", [{"role": "user"}], "text, or messages"),
        ("observation_end", 3, "text"),
        ("success", None, "True or False"),
        ("done", "yes", "True or False"),
        ("info", [1], "a mapping of names to numbers"),
    ],
)
def test_a_field_of_another_kind_is_an_error_that_names_it(field: str, value: Any, wanted: str) -> None:
    answers: list[Any] = [StepResult(**{"done": True, field: value})]
    made = driver(FakeEngine(reply=lambda _: "x"), FakeTask(answers))
    made.submit([fake_request(0)])
    message = f"problem p0: its environment's step returned {field} as {type(value).__name__}; return {wanted}"
    with pytest.raises(DataError, match=re.escape(message)):
        finish(made)


def test_an_answer_that_is_no_step_result_is_an_error_that_names_the_problem() -> None:
    answers: list[Any] = ["done"]
    made = driver(FakeEngine(reply=lambda _: "x"), FakeTask(answers))
    made.submit([fake_request(0)])
    with pytest.raises(DataError, match="problem p0: its environment's step returned str; return a StepResult"):
        finish(made)


# Slow environments


class Slow(Environment):
    """Answers when its gate opens, whatever the time."""

    def __init__(self, gate: asyncio.Event, steps_seen: list[int], engine: FakeEngine) -> None:
        self.gate, self.steps_seen, self.engine = gate, steps_seen, engine

    async def step(self, action: str) -> StepResult:
        await self.gate.wait()
        self.steps_seen.append(self.engine.steps)
        return SOLVED


class CountingEngine(FakeEngine):
    """Counts its steps, and opens a gate at one of them."""

    steps = 0

    def open_at(self, step: int, gate: asyncio.Event) -> None:
        self.opening, self.gate = step, gate

    def step(self) -> list[Generation]:
        self.steps += 1
        if self.steps == self.opening:
            self.gate.set()
        return super().step()


def test_decoding_goes_on_while_a_tool_of_another_response_works() -> None:
    """The tool of p0 answers after engine step 40; a driver that waited for it would never get there."""
    gate, steps_seen = asyncio.Event(), list[int]()
    engine = CountingEngine(slots=2, reply=lambda request: "x" * (30 if request.session.startswith("1.") else 2))
    engine.open_at(40, gate)

    class Mixed(FakeTask):
        def environment(self, problem: Problem) -> Environment:
            return Slow(gate, steps_seen, engine) if problem.id == "p0" else super().environment(problem)

    made = driver(engine, Mixed())
    made.submit([fake_request(i, max_response_tokens=64) for i in range(3)])
    done_at: dict[int, int] = {}
    while made.unfinished:
        done_at |= {group.request.index: engine.steps for group in made.advance()}
    # p1 writes 30 tokens and the end of sequence, a token a step; p2 got the slot p0 left, and had it for 3 steps.
    assert (done_at[2], done_at[1]) == (6, 31)
    assert steps_seen[0] >= 40


def test_an_idle_engine_waits_for_the_slow_environment_without_losing_it() -> None:
    class Thread(Environment):
        async def step(self, action: str) -> StepResult:
            await asyncio.to_thread(threading.Event().wait, 0.01)
            return SOLVED

    made = driver(FakeEngine(reply=lambda _: "x"), TaskOf(Thread))
    made.submit([fake_request(i) for i in range(3)])
    assert all(group.trajectories[0].success for group in finish(made))


def test_a_step_that_ignores_its_cancellation_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    class Stubborn(Environment):
        async def step(self, action: str) -> StepResult:
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.get_running_loop().create_future()

    made = driver(FakeEngine(reply=lambda _: "x"), TaskOf(Stubborn), environment_timeout_s=0.01)
    made.submit([fake_request(0)])
    assert only(made).info == {"environment_error": 1.0}


def test_abandoning_cancels_the_steps_in_flight() -> None:
    events: list[str] = []

    class Cleaning(Environment):
        async def step(self, action: str) -> StepResult:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                events.append("cleaned")
            raise AssertionError

    made = driver(FakeEngine(reply=lambda _: "x"), TaskOf(Cleaning))
    made.submit([fake_request(0)])
    for _ in range(3):
        made.advance()
    assert events == []
    made.abandon()
    assert events == ["cleaned"]
    made.submit([fake_request(1)])
    assert made.unfinished == 1


# Observations


def test_a_long_observation_is_cut_keeps_its_end_and_is_counted() -> None:
    script = [StepResult("=123456789", observation_end=";"), SOLVED]
    task = FakeTask(script, stop=(")",))
    task.max_observation_tokens = 5
    made = driver(FakeEngine(reply=replies("(1)", "x")), task)
    made.submit([fake_request(0, max_response_tokens=32)])
    trajectory = only(made)
    assert trajectory.response_ids == [*ids("(1)=123;x"), 0]
    assert trajectory.info == {"turns": 2.0, "observation_cut": 1.0}


def test_an_observation_of_exactly_the_limit_is_whole() -> None:
    task = FakeTask([StepResult("=123", observation_end=";"), SOLVED], stop=(")",))
    task.max_observation_tokens = 5
    made = driver(FakeEngine(reply=replies("(1)", "x")), task)
    made.submit([fake_request(0, max_response_tokens=32)])
    assert "observation_cut" not in only(made).info


def test_an_observation_left_out_for_want_of_room_is_counted_and_keeps_the_figures() -> None:
    task = FakeTask([StepResult("=12345678", info={"tool_calls": 1.0}), SOLVED], stop=(")",))
    made = driver(FakeEngine(reply=replies("(1)", "x")), task)
    made.submit([fake_request(0, max_response_tokens=8)])
    trajectory = only(made)
    assert (trajectory.response_ids, trajectory.truncated) == (ids("(1)"), True)
    assert trajectory.info == {"tool_calls": 1.0, "observation_too_long": 1.0}


def test_an_excluded_episode_has_no_policy_token_and_no_reward() -> None:
    script = [StepResult("=", reward=0.5), StepResult(done=True, reward=1.0, success=True, excluded=True)]
    made = driver(FakeEngine(reply=replies("(1)", "x")), FakeTask(script, stop=(")",)))
    made.submit([fake_request(0)])
    trajectory = only(made)
    assert (trajectory.excluded, trajectory.success, trajectory.reward) == (True, False, 0.0)
    assert trajectory.policy_versions == []
    assert not any(trajectory.policy_mask)


class ClientOfOneLoop(Environment):
    """Keeps an object that only works in the event loop it was made in."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None

    async def step(self, action: str) -> StepResult:
        if self.loop is None:
            self.loop = asyncio.get_running_loop()
            return StepResult("=")
        same = self.loop is asyncio.get_running_loop()
        return StepResult(done=True, success=same)


def test_all_turns_of_an_episode_are_awaited_in_one_event_loop() -> None:
    made = driver(FakeEngine(reply=lambda _: "x"), TaskOf(ClientOfOneLoop))
    made.submit([fake_request(0)])
    assert only(made).success


def test_an_abandoned_prompt_is_released_and_its_late_turns_are_ignored() -> None:
    engine = FakeEngine(slots=1)
    made = driver(engine)
    made.submit([fake_request(0, max_response_tokens=3)])
    made.advance()
    made.abandon()
    assert made.unfinished == 0
    assert engine.released == [engine.requests[0].session]
    made.submit([fake_request(0, max_response_tokens=3)])
    (group,) = finish(made)
    assert len(group.trajectories[0].response_ids) == 3


class Broken(FakeEngine):
    """Forgets the log-probs."""

    def step(self):  # type: ignore[no-untyped-def]
        finished = super().step()
        for generation in finished:
            generation.logprobs.clear()
        return finished


def test_an_engine_that_breaks_its_contract_is_an_error() -> None:
    made = driver(Broken())
    made.submit([fake_request(0)])
    with pytest.raises(ValueError, match="turn of 8 tokens with figures for"):
        finish(made)


def test_driver_spec_survives_pickling() -> None:
    spec = DriverSpec(Config(), "folder", slots=4)
    assert pickle.loads(pickle.dumps(spec)) == spec


def answers(backend: InlineBackend, requests: Sequence[object]) -> list[tuple[int, list[int], list[int]]]:
    backend.publish(fake_weights(2), 2)
    backend.submit(requests)
    groups: list[RolloutGroup] = []
    while len(groups) < len(requests):
        groups += backend.collect()
    return [(g.request.index, g.trajectories[0].response_ids, g.trajectories[0].versions) for g in groups]


def test_inline_backend_repeats_exactly() -> None:
    requests = [fake_request(i, max_response_tokens=3 + i) for i in range(4)]
    first = answers(InlineBackend(driver(FakeEngine(slots=2))), requests)
    assert first == answers(InlineBackend(driver(FakeEngine(slots=2))), requests)
    assert {version for _, _, versions in first for version in versions} == {2}
