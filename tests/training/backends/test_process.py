"""The process backend against real processes that are killed, stopped, slow or broken."""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

import pytest
from backend_checks import (
    ELEMENTS,
    WorkerContract,
    check_answers_equal_those_of_the_inline_backend,
    check_killed_again_and_again_nothing_is_lost_or_answered_twice,
    check_no_prompt_is_sampled_under_older_weights,
    check_once_closed_it_refuses_and_closes_again_in_peace,
    collect,
)
from fakes import FakeFactory, fake_request, fake_weights

from brace_rl.errors import BraceError, WaitTimeoutError
from brace_rl.training.backends.process import MAX_DEATHS_IN_A_ROW, ProcessBackend, _Child
from brace_rl.training.types import RolloutGroup

PATIENCE_S = 60.0


@contextmanager
def backend(
    factory: FakeFactory | None = None, *, elements: int = 1000, start_method: str = "forkserver"
) -> Iterator[ProcessBackend]:
    multiprocessing.set_forkserver_preload(["torch", "brace_rl.training.backends.process"])
    template = fake_weights(0, elements)
    made = ProcessBackend(
        factory or FakeFactory(), template, timeout_s=PATIENCE_S, threads=1, start_method=start_method
    )
    try:
        yield made
    finally:
        made.close()
        assert not is_running(made.pid)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def kill(made: ProcessBackend) -> None:
    os.kill(made.pid, signal.SIGKILL)


def kill_and_await_the_next(made: ProcessBackend) -> None:
    dead = made.pid
    kill(made)
    while made.pid == dead:
        made._receive(1.0)


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_answers_equal_those_of_the_inline_backend(start_method: str) -> None:
    with backend(start_method=start_method) as made:
        check_answers_equal_those_of_the_inline_backend(made, prompts=6)


def test_a_prompt_is_never_sampled_under_weights_older_than_those_published_before_it() -> None:
    with backend(FakeFactory(slots=2, step_s=0.001), elements=ELEMENTS) as made:
        check_no_prompt_is_sampled_under_older_weights(made)


def test_generation_goes_on_while_the_trainer_does_not_listen_and_full_pipes_hold_nobody_up() -> None:
    # Answers and prompts of several times a pipe's capacity, and more weight updates than buffers.
    with backend(FakeFactory(burst=1000)) as made:
        for version in range(6):
            made.publish(fake_weights(version), version)
            requests = [fake_request(100 * version + i, max_response_tokens=2000) for i in range(20)]
            made.submit([replace(r, problem=replace(r.problem, answer="x" * 20_000)) for r in requests])
        groups = collect(made, 120)
    assert all(len(group.trajectories[0].response_ids) == 2000 for group in groups.values())


def test_killed_again_and_again_nothing_is_lost_or_answered_twice() -> None:
    with backend(FakeFactory(slots=2, step_s=0.002)) as made:
        check_killed_again_and_again_nothing_is_lost_or_answered_twice(
            made, lambda version: kill_and_await_the_next(made), kills=4, prompts=40
        )


def test_answers_that_came_before_the_death_are_kept() -> None:
    with backend(FakeFactory(slots=1, step_s=0.01)) as made:
        made.publish(fake_weights(0), 0)
        made.submit([fake_request(0, max_response_tokens=1)])
        made.submit([fake_request(1, max_response_tokens=10**6)])
        while made._child.inbox.qsize() < 2:  # weights copied, prompt 0 answered
            time.sleep(0.01)
        kill(made)
        made._child._process.join()
        made._unanswered[1] = fake_request(1, max_response_tokens=2)
        groups = collect(made, 2)
        assert made.restarts == 1
    assert len(groups[0].trajectories[0].response_ids) == 1
    assert len(groups[1].trajectories[0].response_ids) == 2


def test_killed_while_building_idle_and_with_weights_unread() -> None:
    with backend(FakeFactory(build_s=0.2)) as made:
        kill(made)
        made.publish(fake_weights(0), 0)
        made.publish(fake_weights(1), 1)
        made.publish(fake_weights(2), 2)
        made.submit([fake_request(0)])
        assert collect(made, 1)[0].trajectories[0].versions == [2] * 8
        kill(made)
        made._child._process.join()
        made.submit([fake_request(1)])
        assert collect(made, 1)[1].trajectories[0].versions == [2] * 8
        assert made.restarts == 2


def test_a_message_cut_off_in_the_middle_counts_as_the_end() -> None:
    child = _Child.__new__(_Child)
    child.inbox = queue.SimpleQueue()
    reader, writer = Pipe(duplex=False)
    writer.send_bytes(b"whole")
    os.write(writer.fileno(), (1000).to_bytes(4, "big") + b"only the start")
    writer.close()
    child._read(reader)
    assert [child.inbox.get(), child.inbox.get()] == [b"whole", None]


def test_killed_while_it_sends_answers_longer_than_the_pipe() -> None:
    with backend(FakeFactory(slots=1, burst=20_000)) as made:
        made.publish(fake_weights(0), 0)
        made.submit([fake_request(i, max_response_tokens=20_000) for i in range(12)])
        groups: dict[int, RolloutGroup] = {}
        for _ in range(2):
            groups |= {group.request.index: group for group in made.collect()}
            kill(made)
        groups |= collect(made, 12 - len(groups))
    assert all(len(group.trajectories[0].response_ids) == 20_000 for group in groups.values())


def test_a_process_that_always_dies_ends_the_run_with_the_signal_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), backend(FakeFactory(build_s=PATIENCE_S)) as made:
        made.submit([fake_request(0)])
        for _ in range(MAX_DEATHS_IN_A_ROW):
            kill(made)
            made._child._process.join()
            made._receive(PATIENCE_S)
        kill(made)
        with pytest.raises(BraceError, match=r"died 4 times without answering .* was killed by SIGKILL"):
            made.collect()
        assert made.restarts == MAX_DEATHS_IN_A_ROW
    assert "1 prompts are issued again" in caplog.text


def test_a_process_that_hangs_is_a_timeout_that_says_who_waited_for_whom() -> None:
    with backend() as made:
        made.publish(fake_weights(0), 0)
        made.submit([fake_request(0)])
        collect(made, 1)
        os.kill(made.pid, signal.SIGSTOP)
        made._timeout_s = 0.2
        made.submit([fake_request(i, max_response_tokens=50) for i in range(1, 8)])
        message = rf"waited 0 s for rollouts: process {made.pid} is alive, last message \d+ s ago, 7 prompts unanswered"
        with pytest.raises(WaitTimeoutError, match=message):
            made.collect()
        made.publish(fake_weights(1), 1)
        made.publish(fake_weights(2), 2)
        with pytest.raises(
            WaitTimeoutError, match=r"rollout process to copy the weights .* version 3\): process \d+ is"
        ):
            made.publish(fake_weights(3), 3)


class TestContract(WorkerContract):
    backend = staticmethod(backend)


def test_a_closed_backend_refuses_and_closes_again_in_peace() -> None:
    with backend() as made:
        check_once_closed_it_refuses_and_closes_again_in_peace(made)


def test_ctrl_c_reaches_the_trainer_alone_even_while_the_process_starts() -> None:
    with backend(start_method="spawn") as made:
        os.kill(made.pid, signal.SIGINT)
        made.submit([fake_request(0)])
        collect(made, 1)
        os.kill(made.pid, signal.SIGINT)
        made.submit([fake_request(1)])
        collect(made, 1)
        assert made.restarts == 0
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


TRAINER = """
import sys, time
sys.path.insert(0, {folder!r})
from fakes import FakeFactory, fake_request, fake_weights
from brace_rl.training.backends.process import ProcessBackend

if __name__ == "__main__":
    idle, busy = (
        ProcessBackend(FakeFactory(step_s=0.01), fake_weights(0), timeout_s=60, threads=1) for _ in range(2)
    )
    for index, backend in enumerate((idle, busy)):
        backend.submit([fake_request(index)])
        backend.collect()
    busy.submit([fake_request(2, max_response_tokens=10**9)])
    print("ready", flush=True)
    {end}
"""


@pytest.mark.slow
@pytest.mark.parametrize("killed", [True, False])
def test_the_processes_end_when_their_trainer_is_killed_or_leaves_without_closing(killed: bool, tmp_path: Path) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(
        TRAINER.format(folder=str(Path(__file__).parents[1]), end="time.sleep(60)" if killed else "sys.exit(3)")
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "ready\n"
        if killed:
            trainer.kill()
        # The rollout processes inherited the pipe: it ends when the last of them has.
        trainer.communicate(timeout=PATIENCE_S)
    assert trainer.returncode == (-signal.SIGKILL if killed else 3)
