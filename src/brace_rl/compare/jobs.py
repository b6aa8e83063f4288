"""Runs processes side by side, and ends those it started, by their ids, when it is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from brace_rl.errors import BraceError

POLL_S = 0.2
"""Seconds between looks at the running processes."""

GRACE_S = 60.0
"""Seconds a stopped process has to finish its step and save it."""

THREADS: Mapping[str, str] = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Environment of every process: several processes with several threads each fight over the cores."""


class Process(Protocol):
    """The part of ``subprocess.Popen`` that is used."""

    def poll(self) -> int | None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


@dataclass(frozen=True)
class Job:
    """One process to run.

    Attributes:
        start: starts it; called when its turn has come.
    """

    name: str
    start: Callable[[], Process]


class Watcher(Protocol):
    """Is told what happens."""

    def began(self, name: str) -> None: ...

    def ended(self, name: str, exit_code: int) -> None: ...

    def tick(self) -> None: ...


def run_side_by_side(
    jobs: Sequence[Job],
    watcher: Watcher,
    *,
    workers: int,
    poll_s: float = POLL_S,
    grace_s: float = GRACE_S,
) -> None:
    """Run all jobs in order, ``workers`` at a time. Whatever ends this early, Ctrl-C or an error, ends the processes.

    A process is asked to stop once, so that it can save what it has, and killed if it is still there after ``grace_s``
    or at a second Ctrl-C.
    """
    waiting, running = deque(jobs), dict[str, Process]()
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                job = waiting.popleft()
                running[job.name] = job.start()
                watcher.began(job.name)
            time.sleep(poll_s)
            for name, process in list(running.items()):
                exit_code = process.poll()
                if exit_code is not None:
                    del running[name]
                    watcher.ended(name, exit_code)
            watcher.tick()
    finally:
        _stop(list(running.values()), poll_s=poll_s, grace_s=grace_s)


def start_process(command: Sequence[str], log: Path, *, inherited: int) -> Process:
    """Start ``command`` with one thread, its output in ``log``.

    It gets a session of its own, so that Ctrl-C on the terminal reaches the parent alone, which then stops it once.

    Args:
        inherited: a file descriptor the process keeps open while it lives.

    Raises:
        BraceError: the log cannot be written.
    """
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        file = log.open("wb")
    except OSError as error:
        raise BraceError(f"{log}: cannot be written: {error.strerror}") from None
    with file:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | THREADS,
            start_new_session=True,
            pass_fds=(inherited,),
        )


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP do what Ctrl-C does; one that is ignored, as under nohup, stays so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _stop(processes: Sequence[Process], *, poll_s: float, grace_s: float) -> None:
    try:
        for process in processes:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + grace_s
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(poll_s)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
