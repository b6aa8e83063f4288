"""Processes that run math-verify, so that no answer a policy writes can hang or kill a run.

math-verify's own limits are alarms, which work in the main thread of a process only and cannot stop code that does
not return to the interpreter. Here each check has a limit of processor time that the kernel enforces, a limit of
memory, and a wall-clock limit after which the process is killed; an answer that runs into one is wrong, and the process
is replaced. Processes are kept between checks: an ordinary one takes milliseconds.

::

    event loop --> thread --> pipe --> worker process
                   (one each)          limits set before, cleared after every check
"""

from __future__ import annotations

import functools
import json
import logging
import multiprocessing
import os
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from brace_rl.tasks.math import worker

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""Longest a worker may take to start, on a machine that is busy with other things."""

WALL_FACTOR = 10.0
"""Wall-clock limit of a check over its limit of processor time: only reached on a machine that has no time for it."""

CHECKS_PER_WORKER = 500
"""A worker is replaced after so many: symbolic algebra caches, and caches must not fill its memory."""


class Outcome(Enum):
    """What became of a check."""

    SAME = "same"
    DIFFERENT = "different"
    LIMIT = "limit"
    """The answer ran into a limit, or brought the worker down; it counts as wrong."""
    UNJUDGED = "unjudged"
    """No worker could be started; nothing is known about the answer."""


@dataclass(frozen=True)
class Limits:
    """Of one check.

    Attributes:
        cpu_s: processor time, in seconds; independent of how busy the machine is.
        memory_mb: address space of a worker, in MiB.
        workers: processes.
    """

    cpu_s: float = 2.0
    memory_mb: int = 1024
    workers: int = 2


DEFAULT_LIMITS = Limits()


@functools.cache
def shared_workers(limits: Limits) -> Workers:
    """The workers of this process for these limits; made on first use, started when needed."""
    return Workers(limits)


class Workers:
    """A fixed number of workers, each served by a thread of its own."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._threads = ThreadPoolExecutor(limits.workers, thread_name_prefix="brace-math")
        self._own = threading.local()
        self._lock = threading.Lock()
        self._started: list[_Worker] = []
        self._broken = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that run at present."""
        with self._lock:
            return [running.pid for running in self._started if running.usable]

    def submit(self, given: str, gold: str) -> Future[Outcome]:
        """Check an answer against the gold one as soon as a worker is free. Never raises for what an answer holds."""
        return self._threads.submit(self._check, given, gold)

    def close(self) -> None:
        """Stop everything; checks that wait are cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for running in self._started:
                running.kill()

    def _check(self, given: str, gold: str) -> Outcome:
        try:
            own = self._worker()
        except OSError as error:
            if not self._broken:
                logger.warning("answers that need math-verify are not judged from here on: %s", error)
            self._broken = True
        return Outcome.UNJUDGED if self._broken else own.check(given, gold)

    def _worker(self) -> _Worker:
        """This thread's worker, replaced if it is used up."""
        own: _Worker | None = getattr(self._own, "worker", None)
        if own is None or not own.usable:
            if own is not None:
                own.kill()
            if self._broken:
                raise OSError("a worker could not be started")
            fresh = _Worker(self._limits)
            with self._lock:
                self._started = [running for running in self._started if running is not own] + [fresh]
            self._own.worker = own = fresh
        return own


class _Worker:
    """One process and the pipe to it.

    Raises:
        OSError: the process does not start.
    """

    def __init__(self, limits: Limits) -> None:
        self._wall_s = limits.cpu_s * WALL_FACTOR
        self._checks = 0
        here, there = multiprocessing.Pipe()
        package_root = str(Path(worker.__file__).parents[3])
        paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-m", worker.__name__, str(there.fileno()), str(limits.cpu_s), str(limits.memory_mb)],
                pass_fds=(there.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
                start_new_session=True,  # Ctrl-C is the trainer's to handle
            )
        self._connection = here
        try:
            started = here.poll(START_TIMEOUT_S) and here.recv_bytes() == worker.READY
        except (EOFError, OSError):
            started = False
        if not started:
            self.kill()
            raise OSError(f"a worker process ended with code {self._process.returncode} before it was ready")

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def usable(self) -> bool:
        """Whether it may be given another check."""
        return self._checks < CHECKS_PER_WORKER and self._process.poll() is None

    def check(self, given: str, gold: str) -> Outcome:
        """Run one check; blocks for the wall-clock limit at most."""
        self._checks += 1
        try:
            self._connection.send_bytes(json.dumps([given, gold]).encode())
            if self._connection.poll(self._wall_s):
                answer = self._connection.recv_bytes()
                if answer != worker.OUT_OF_MEMORY:
                    return Outcome.SAME if answer == worker.SAME else Outcome.DIFFERENT
        except (EOFError, OSError):
            pass  # the kernel ended it for its use of processor time, or it crashed
        self.kill()
        return Outcome.LIMIT

    def kill(self) -> None:
        """End the process by its id, at once. Idempotent."""
        self._connection.close()
        self._process.kill()
        self._process.wait()
