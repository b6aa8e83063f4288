"""The Ray backend against actors that are killed, slow, hung or broken, and orders that are lost."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from backend_checks import (
    WorkerContract,
    assert_weights_were_those_of_the_version,
    check_answers_equal_those_of_the_inline_backend,
    check_killed_again_and_again_nothing_is_lost_or_answered_twice,
    check_no_prompt_is_sampled_under_older_weights,
    check_once_closed_it_refuses_and_closes_again_in_peace,
    collect,
)
from fakes import FakeFactory, fake_request, fake_weights
from ray_environment import is_loopback, listening_here_and_below

from brace_rl.errors import BraceError, WaitTimeoutError
from brace_rl.training.backends.ray_workers import MAX_DEATHS_IN_A_ROW, RayBackend
from brace_rl.training.rollout import RolloutDriver

pytestmark = pytest.mark.usefixtures("cluster")

PATIENCE_S = 600.0


@contextmanager
def running(made: RayBackend) -> Iterator[RayBackend]:
    try:
        yield made
    finally:
        made.close()


def backend(factory: FakeFactory | None = None, *, workers: int = 1, timeout_s: float = PATIENCE_S):
    return running(RayBackend(factory or FakeFactory(), workers=workers, timeout_s=timeout_s))


class MixedBackend(RayBackend):
    """Worker ``i`` is built by ``factories[i]``; each delivery of (worker, version) in ``lost`` is lost once."""

    def __init__(self, factories, *, timeout_s: float = PATIENCE_S, lost=()):
        self.factories = factories
        self.lost = set(lost)
        super().__init__(factories[0], workers=len(factories), timeout_s=timeout_s)

    def _start(self, number, **arguments):
        self._factory = self.factories[number]
        return super()._start(number, **arguments)

    def _deliver(self, worker, weights):
        if (worker.number, weights.version) in self.lost:
            self.lost.remove((worker.number, weights.version))
            worker.offered = weights.version
        else:
            super()._deliver(worker, weights)


def kill(worker) -> None:
    import ray

    ray.kill(worker.handle)


@pytest.mark.parametrize("workers", [1, 3])
def test_answers_equal_those_of_the_inline_backend(workers: int) -> None:
    with backend(workers=workers) as made:
        check_answers_equal_those_of_the_inline_backend(made, prompts=9)
        assert made.resent == 0


def test_a_prompt_is_never_sampled_under_weights_older_than_those_published_before_it() -> None:
    with backend(FakeFactory(slots=2, step_s=0.001), workers=2) as made:
        check_no_prompt_is_sampled_under_older_weights(made)


def test_prompts_are_divided_by_responses_to_make() -> None:
    with backend(FakeFactory(step_s=60.0), workers=2) as made:
        made.publish(fake_weights(0), 0)
        made.submit([fake_request(0, samples=3), fake_request(1), fake_request(2), fake_request(3), fake_request(4)])
        assert [sorted(worker.unanswered) for worker in made._workers] == [[0, 4], [1, 2, 3]]


def test_killed_again_and_again_nothing_is_lost_or_answered_twice() -> None:
    with backend(FakeFactory(slots=2, step_s=0.01), workers=3) as made:
        check_killed_again_and_again_nothing_is_lost_or_answered_twice(
            made, lambda version: kill(made._workers[version % 3]), kills=3, prompts=60
        )


def test_a_slow_worker_holds_nobody_up() -> None:
    fast, slow = FakeFactory(), FakeFactory(step_s=3600.0)
    with running(MixedBackend([slow, fast])) as made:
        made.publish(fake_weights(0), 0)
        made.submit([fake_request(i) for i in range(6)])
        assert sorted(collect(made, 3)) == [1, 3, 5]
        made.publish(fake_weights(1), 1)
        made.submit([fake_request(i, issued_version=1) for i in (6, 7)])
        assert sorted(collect(made, 2)) == [6, 7]  # the slow one owes three already


def test_a_lost_weight_update_is_noticed_and_sent_again() -> None:
    with running(MixedBackend([FakeFactory()] * 2, lost=[(1, 1)])) as made:
        made.publish(fake_weights(0), 0)
        made.publish(fake_weights(1), 1)
        made.submit([fake_request(i, issued_version=1) for i in range(4)])
        groups = collect(made, 4)
        assert (made.resent, made.restarts) == (1, 0)
    assert {v for group in groups.values() for v in group.trajectories[0].versions} == {1}
    assert_weights_were_those_of_the_version(groups)


@dataclass(frozen=True)
class DyingFactory:
    """Ends the process that builds it."""

    def build(self) -> RolloutDriver:
        os._exit(3)


def test_a_worker_that_always_dies_ends_the_run(cluster: str, caplog: pytest.LogCaptureFixture) -> None:
    if cluster == "threads":
        pytest.skip("its actors share our process")
    with running(MixedBackend([DyingFactory()])) as made, caplog.at_level(logging.WARNING):
        made.submit([fake_request(0)])
        with pytest.raises(BraceError, match=rf"worker 0 was replaced {MAX_DEATHS_IN_A_ROW} times") as caught:
            made.collect()
        assert "\n" not in str(caught.value)
        assert made.restarts == MAX_DEATHS_IN_A_ROW
    assert "1 prompts are issued again" in caplog.text


def test_a_worker_that_hangs_is_a_timeout_that_says_who_waited_for_whom() -> None:
    with backend(FakeFactory(step_s=3600.0), timeout_s=2.0) as made:
        made.publish(fake_weights(4), 4)
        made.submit([fake_request(0, issued_version=4)])
        while made._workers[0].received < 4:  # it has started
            made._listen(0.1)
        expected = r"trainer waited 2 s for rollouts: worker 0 owes 1 prompts, has weights 4.*schedule\.timeout_s"
        with pytest.raises(WaitTimeoutError, match=expected):
            made.collect()


def test_a_worker_that_is_silent_while_others_answer_is_replaced() -> None:
    with running(MixedBackend([FakeFactory(step_s=3600.0), FakeFactory()])) as made:
        made.submit([fake_request(i) for i in range(4)])
        assert sorted(collect(made, 2)) == [1, 3]
        while not made._workers[0].is_heard:
            made._listen(0.1)
        made._workers[0].silent_s = PATIENCE_S + 1.0
        made._listen(0.0)
        assert made.restarts == 1
        assert sorted(collect(made, 2)) == [0, 2]


class TestContract(WorkerContract):
    backend = staticmethod(backend)


def test_a_closed_backend_refuses_closes_again_in_peace_and_leaves_the_cluster_it_found() -> None:
    with backend() as made:
        check_once_closed_it_refuses_and_closes_again_in_peace(made)
    import ray

    assert ray.is_initialized()


def test_a_cluster_started_here_listens_on_loopback_only(cluster: str) -> None:
    pytest.importorskip("psutil")
    if cluster == "threads" or "BRACE_TEST_RAY_ADDRESS" in os.environ:
        pytest.skip("no cluster was started here")
    listening = listening_here_and_below()
    assert all(map(is_loopback, listening)), listening
    assert listening
