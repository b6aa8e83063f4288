"""Bound, at-most-once, balance and liveness of the staleness controller, by examples and by random histories."""

from __future__ import annotations

import json

import pytest
from fakes import fake_problem
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from brace_rl.errors import ConfigError, StalenessError
from brace_rl.training.staleness import StalenessController
from brace_rl.training.types import (
    NOT_A_POLICY_TOKEN,
    RolloutGroup,
    RolloutRequest,
    SamplingParams,
    Trajectory,
)


def request(index: int, issued_version: int = 0) -> RolloutRequest:
    return RolloutRequest(index, fake_problem(index), 1, issued_version, SamplingParams(), 8, seed=index)


def answer(index: int, *responses: list[int], issued_version: int = 0) -> RolloutGroup:
    """One response per list of token versions; each ends in a tool token."""
    trajectories = [
        Trajectory(
            index,
            sample,
            f"p{index}",
            [1],
            response_ids=[0] * (len(versions) + 1),
            policy_mask=[True] * len(versions) + [False],
            versions=[*versions, NOT_A_POLICY_TOKEN],
        )
        for sample, versions in enumerate(responses)
    ]
    return RolloutGroup(request(index, issued_version), trajectories)


def controller(batch_size: int = 2, max_staleness: int = 1, lookahead: int | None = None, too_old: str = "wait"):
    ahead = max_staleness if lookahead is None else lookahead
    return StalenessController(batch_size=batch_size, max_staleness=max_staleness, lookahead=ahead, too_old=too_old)


def indices(batch: list[RolloutGroup] | None) -> list[int] | None:
    return None if batch is None else [group.request.index for group in batch]


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("lookahead", [0, 2])
def test_admits_prompt_n_exactly_while_the_formula_holds(batch_size: int, lookahead: int) -> None:
    control = controller(batch_size, max_staleness=2, lookahead=lookahead)
    for version in range(3):
        admitted = 0
        while control.admissible(version):
            control.issued(request(control.ledger()["issued"], version))
            admitted += 1
        n = control.ledger()["issued"]
        assert (n - 1) // batch_size <= version + lookahead < n // batch_size


def test_issuing_more_than_can_be_consumed_in_time_is_refused() -> None:
    control = controller(batch_size=1, max_staleness=1)
    control.issued(request(0))
    control.issued(request(1))
    with pytest.raises(StalenessError, match="prompt 2 issued under version 0 is first used at version 2"):
        control.issued(request(2))


def test_issue_numbers_are_consecutive() -> None:
    with pytest.raises(ValueError, match="prompt 1 issued out of order: the next issue number is 0"):
        controller().issued(request(1))


def test_batch_takes_the_oldest_and_sorts_by_issue_number() -> None:
    control = controller(batch_size=2, max_staleness=2)
    for index in range(6):
        control.issued(request(index))
    for index, version in ((5, 2), (4, 0), (3, 1), (1, 0), (2, 1), (0, 2)):
        control.arrived(answer(index, [version]))
    # Nothing is due at version 0, but the future version 2 of some tokens is not consumable yet.
    assert indices(control.take_batch(0)) == [1, 4]


def test_batch_waits_for_a_straggler_that_the_next_version_would_make_too_old() -> None:
    control = controller(batch_size=1, max_staleness=1)
    control.issued(request(0))
    control.issued(request(1))
    control.arrived(answer(1, [0]))
    assert indices(control.take_batch(0)) == [1]
    control.issued(request(2, 1))
    control.arrived(answer(2, [1], issued_version=1))
    assert control.take_batch(1) is None
    control.arrived(answer(0, [0, 1]))
    assert indices(control.take_batch(1)) == [0]


def test_batch_waits_when_stragglers_could_not_all_be_consumed_in_later_steps() -> None:
    # One step ahead all is well: nothing is due before version 2. But taking prompt 3 at version 1 would leave the
    # prompts 0 and 1, both of version 0, for version 2, which consumes one.
    control = controller(batch_size=1, max_staleness=2)
    for index in range(3):
        control.issued(request(index))
    control.arrived(answer(2, [0]))
    assert indices(control.take_batch(0)) == [2]
    control.issued(request(3, 1))
    control.arrived(answer(3, [1], issued_version=1))
    assert control.take_batch(1) is None
    control.arrived(answer(1, [0]))
    assert indices(control.take_batch(1)) == [1]


def test_tokens_sampled_later_than_the_issue_relax_the_wait() -> None:
    control = controller(batch_size=1, max_staleness=1)
    control.issued(request(0))
    control.issued(request(1))
    control.arrived(answer(0, [0]))
    assert indices(control.take_batch(0)) == [0]
    control.issued(request(2, 1))
    control.arrived(answer(1, [1]))
    control.arrived(answer(2, [1], issued_version=1))
    assert indices(control.take_batch(1)) == [1]
    assert indices(control.take_batch(2)) == [2]


def test_drop_counts_what_is_too_old_and_frees_its_admission() -> None:
    control = controller(batch_size=1, max_staleness=1, too_old="drop")
    for index in range(2):
        control.issued(request(index))
    control.arrived(answer(1, [0]))
    assert indices(control.take_batch(0)) == [1]
    control.issued(request(2, 1))
    control.arrived(answer(2, [1], issued_version=1))
    assert indices(control.take_batch(1)) == [2]
    assert control.dropped_mean_length is None
    control.issued(request(3, 2))
    before = control.admissible(2)
    control.arrived(answer(0, [0, 0, 1], [2], issued_version=0))
    assert control.take_batch(2) is None
    assert control.admissible(2) == before + 1
    assert control.dropped_mean_length == 3.0  # four and two tokens
    assert control.ledger() == {
        "issued": 4, "consumed": 2, "dropped": 1, "in_flight": 1, "buffered": 0, "duplicates": 0
    }  # fmt: skip
    assert control.admitted == 3


def test_lag_schedule_consumes_answers_exactly_as_old_as_the_bound() -> None:
    staleness = 2
    control = controller(batch_size=2, max_staleness=staleness, lookahead=0)
    for version in range(5):
        snapshot = max(0, version - staleness)
        assert control.admissible(version) == 2
        for index in (2 * version, 2 * version + 1):
            control.issued(request(index, snapshot))
            control.arrived(answer(index, [snapshot], issued_version=snapshot))
        assert indices(control.take_batch(version)) == [2 * version, 2 * version + 1]


def test_an_answer_that_arrives_again_is_ignored_and_counted() -> None:
    control = controller(batch_size=1, max_staleness=1)
    control.issued(request(0))
    control.arrived(answer(0, [0]))
    control.arrived(answer(0, [0]))
    assert indices(control.take_batch(0)) == [0]
    control.arrived(answer(0, [0]))
    assert control.ledger()["duplicates"] == 2
    assert control.ledger()["buffered"] == 0


def test_an_answer_to_a_prompt_never_issued_is_an_error() -> None:
    with pytest.raises(StalenessError, match="prompt 7, which was never issued"):
        controller().arrived(answer(7, [0]))


def test_an_answer_older_than_its_issue_is_an_error() -> None:
    control = controller(batch_size=1, max_staleness=1)
    control.issued(request(0, 1))
    with pytest.raises(StalenessError, match="prompt 0 was issued under version 1 but holds a token of version 0"):
        control.arrived(answer(0, [1, 0], issued_version=1))


@pytest.mark.parametrize("versions", [[0, 1], [2]])
def test_consumption_checks_every_token_again(versions: list[int]) -> None:
    control = controller(batch_size=1, max_staleness=0)
    control.issued(request(0))
    control.arrived(answer(0, [0]))
    control.buffered[0].trajectories[0].versions[:] = [*versions, NOT_A_POLICY_TOKEN]
    control.buffered[0].trajectories[0].policy_mask[:] = [True] * len(versions) + [False]
    with pytest.raises(StalenessError, match=r"prompt 0 holds a token of version \d, outside \[0, 0\] at version 0"):
        control.take_batch(0)


def test_one_batch_makes_one_version() -> None:
    with pytest.raises(StalenessError, match="at version 1 after 0 prompts"):
        controller().take_batch(1)


@pytest.mark.parametrize(
    ("key", "changed"), [("rollout.prompts_per_step", controller(3, 1)), ("schedule.max_staleness", controller(2, 2))]
)
def test_a_checkpoint_of_another_batch_size_or_bound_is_refused(key: str, changed: StalenessController) -> None:
    with pytest.raises(ConfigError, match=key):
        changed.load_state_dict(controller(2, 1).state_dict(), [])


def test_a_checkpoint_without_its_buffered_answers_is_refused() -> None:
    control = controller()
    control.issued(request(0))
    control.arrived(answer(0, [0]))
    with pytest.raises(StalenessError, match="answers"):
        controller().load_state_dict(control.state_dict(), [])


@pytest.mark.parametrize(("batch_size", "max_staleness", "lookahead"), [(0, 1, 1), (1, 1, 2), (1, 0, -1)])
def test_impossible_settings_are_refused(batch_size: int, max_staleness: int, lookahead: int) -> None:
    with pytest.raises(ValueError, match=r"batch_size|lookahead"):
        controller(batch_size, max_staleness, lookahead)


class RandomHistory(RuleBasedStateMachine):
    """Prompts are issued, answered and consumed, weights sent and the run restarted, in any order the loop allows."""

    def __init__(self, batch_size: int, max_staleness: int, lookahead: int, too_old: str) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.max_staleness = max_staleness
        self.lookahead = lookahead
        self.too_old = too_old
        self.control = controller(batch_size, max_staleness, lookahead, too_old)
        self.version = 0
        self.published = 0
        self.next_index = 0
        self.in_flight: dict[int, int] = {}
        self.consumed: list[int] = []

    @rule(count=st.integers(1, 6))
    def issue(self, count: int) -> None:
        for _ in range(min(count, self.control.admissible(self.published))):
            self.control.issued(request(self.next_index, self.published))
            self.in_flight[self.next_index] = self.published
            self.next_index += 1

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), again=st.booleans())
    def arrive(self, data: st.DataObject, again: bool) -> None:
        index = data.draw(st.sampled_from(sorted(self.in_flight)))
        issued_version = self.in_flight.pop(index)
        versions = data.draw(st.lists(st.integers(issued_version, self.published), min_size=1, max_size=3))
        group = answer(index, sorted(versions), issued_version=issued_version)
        duplicates = self.control.ledger()["duplicates"]
        for _ in range(1 + again):
            self.control.arrived(group)
        assert self.control.ledger()["duplicates"] == duplicates + again

    @rule()
    def consume(self) -> None:
        self.take()

    @rule(skip=st.integers(0, 2))
    def fresh_answers_overtake_stragglers(self, skip: int) -> None:
        self.issue(10**6)
        overtaking = sorted(self.in_flight, reverse=True)[: self.batch_size + skip][skip:]
        for index in overtaking:
            issued_version = self.in_flight.pop(index)
            self.control.arrived(answer(index, [issued_version], issued_version=issued_version))
        self.take()

    @rule()
    def send_weights(self) -> None:
        self.published = self.version

    @rule()
    def restart(self) -> None:
        state = json.loads(json.dumps(self.control.state_dict()))
        buffered = self.control.buffered
        ledger = self.control.ledger()
        self.control = controller(self.batch_size, self.max_staleness, self.lookahead, self.too_old)
        self.control.load_state_dict(state, buffered)
        assert self.control.ledger() == ledger

    def take(self) -> bool:
        batch = self.control.take_batch(self.version)
        if batch is None:
            return False
        taken = [group.request.index for group in batch]
        assert len(taken) == self.batch_size
        assert taken == sorted(taken)
        oldest = min(group.oldest_version for group in batch)
        assert self.version - self.max_staleness <= oldest
        self.consumed += taken
        self.version += 1
        # The longest pause between weight updates for which the controller promises progress.
        if self.version - self.published > self.lookahead:
            self.published = self.version
        return True

    @invariant()
    def ledger_balances_and_nothing_is_consumed_twice(self) -> None:
        ledger = self.control.ledger()
        assert ledger["issued"] == self.next_index
        assert ledger["consumed"] == len(self.consumed) == len(set(self.consumed))
        assert self.control.unanswered == self.in_flight
        if self.too_old == "wait":
            assert ledger["dropped"] == 0

    def teardown(self) -> None:
        """Whatever happened before: if everything in flight arrives, a batch comes, step after step."""
        for _ in range(2 * self.max_staleness + 3):
            for _ in range(2):
                if self.take():
                    break
                self.issue(10**6)
                for index, issued_version in list(self.in_flight.items()):
                    del self.in_flight[index]
                    self.control.arrived(answer(index, [issued_version], issued_version=issued_version))
            else:
                assert self.take()


@pytest.mark.parametrize("too_old", ["wait", "drop"])
@pytest.mark.parametrize(
    ("batch_size", "max_staleness", "lookahead"), [(1, 1, 1), (1, 2, 2), (2, 2, 2), (2, 3, 3), (2, 3, 1), (2, 0, 0)]
)
def test_no_history_breaks_the_bound_the_ledger_or_progress(
    batch_size: int, max_staleness: int, lookahead: int, too_old: str
) -> None:
    run_state_machine_as_test(
        lambda: RandomHistory(batch_size, max_staleness, lookahead, too_old),
        settings=settings(
            max_examples=20, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        ),
    )
