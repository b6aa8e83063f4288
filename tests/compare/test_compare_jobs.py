"""Processes side by side: never more than asked for, and none left behind."""

import os
import sys

import pytest

from brace_rl.compare.jobs import Job, run_side_by_side, start_process


class FakeProcess:
    def __init__(self, polls_until_end, deaf=False):
        self.left, self.deaf = polls_until_end, deaf
        self.asked, self.killed = 0, False

    def poll(self):
        if self.killed:
            return -9
        self.left -= 1
        return 0 if self.left <= 0 else None

    def terminate(self):
        self.asked += 1
        if not self.deaf:
            self.left = 0

    def kill(self):
        self.killed = True


class Diary:
    def __init__(self, on_end=lambda name: None, on_tick=lambda: None):
        self.running, self.most, self.ended_names = set(), 0, []
        self.on_end, self.on_tick = on_end, on_tick

    def began(self, name):
        self.running.add(name)
        self.most = max(self.most, len(self.running))

    def ended(self, name, exit_code):
        self.running.remove(name)
        self.ended_names.append((name, exit_code))
        self.on_end(name)

    def tick(self):
        self.on_tick()


def run(jobs, diary, workers=2, grace_s=1.0):
    run_side_by_side(jobs, diary, workers=workers, poll_s=0.0, grace_s=grace_s)


def test_all_jobs_run_in_order_and_never_more_than_the_workers_at_once():
    processes = {str(i): FakeProcess(2 + i % 3) for i in range(7)}
    diary = Diary()
    run([Job(name, lambda p=p: p) for name, p in processes.items()], diary, workers=3)
    assert diary.most == 3
    assert sorted(diary.ended_names) == [(str(i), 0) for i in range(7)]


def test_a_job_is_started_only_when_its_turn_has_come():
    started = []

    def starter(name):
        def start():
            started.append((name, len(diary.ended_names)))
            return FakeProcess(1)

        return start

    diary = Diary()
    run([Job(name, starter(name)) for name in "abc"], diary, workers=1)
    assert started == [("a", 0), ("b", 1), ("c", 2)]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_whatever_ends_it_early_stops_every_process_once_and_starts_no_other(error):
    def stop():
        raise error

    processes = [FakeProcess(10**6) for _ in range(4)]
    with pytest.raises(error):
        run([Job(str(i), lambda p=p: p) for i, p in enumerate(processes)], Diary(on_tick=stop))
    assert [p.asked for p in processes] == [1, 1, 0, 0]
    assert not any(p.killed for p in processes)


def test_a_process_that_does_not_stop_is_killed():
    def stop():
        raise KeyboardInterrupt

    process = FakeProcess(10**9, deaf=True)
    with pytest.raises(KeyboardInterrupt):
        run([Job("a", lambda: process)], Diary(on_tick=stop), grace_s=0.0)
    assert process.killed


def test_a_process_has_one_thread_its_own_log_and_a_session_of_its_own(tmp_path):
    log = tmp_path / "logs" / "a.txt"
    code = "import os, sys; print(os.environ['OMP_NUM_THREADS'], os.getsid(0) == os.getpid()); sys.exit('bad')"
    with (tmp_path / "held").open("w") as held:
        process = start_process([sys.executable, "-c", code], log, inherited=held.fileno())
        assert os.waitpid(process.pid, 0)[1] >> 8 == 1
    assert log.read_text() == "1 True\nbad\n"
