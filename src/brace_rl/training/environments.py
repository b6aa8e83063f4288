"""Runs the steps of environments between the steps of the engine, in one thread.

The event loop turns only when :class:`EnvironmentRunner` is asked to: a step that needs no waiting is done within one
such turn, whatever the time it takes, so tasks without slow tools give the same results in the same order every run.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor

from brace_rl.tasks.base import StepResult

SETTLING_ROUNDS = 12
"""Rounds of the event loop per turn: enough for tasks, time limits and gathered calls that wait for nobody but each
other, each of which costs a few."""
LONGEST_WAIT_S = 0.05
"""Longest :meth:`EnvironmentRunner.finished` may block, so that whoever calls can look at other things."""
MOST_THREADS = 64
"""Blocking calls of tools that run at once; more wait for a thread."""


class EnvironmentRunner:
    """Steps of environments in flight, by the session of their response.

    Args:
        timeout_s: longest a step may take; beyond it its answer is a ``TimeoutError``. None: no limit.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        # One loop for all steps: an environment may keep a client between its turns, and clients belong to a loop.
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="environment"))
        self._running: dict[str, asyncio.Task[StepResult]] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._expired: dict[str, asyncio.Task[StepResult]] = {}
        # Cancelled tasks are held until they end: the loop itself keeps only weak references.
        self._cancelled: set[asyncio.Task[StepResult]] = set()
        weakref.finalize(self, self._loop.close)

    @property
    def unfinished(self) -> int:
        """Steps in flight."""
        return len(self._running) + len(self._expired)

    def start(self, session: str, step: Coroutine[None, None, StepResult]) -> None:
        """Begin a step; it does nothing before :meth:`finished` is called."""
        self._running[session] = self._loop.create_task(_without_exit(step))
        if self._timeout_s is not None:
            self._timers[session] = self._loop.call_later(self._timeout_s, self._expire, session)

    def finished(self, *, wait: bool) -> dict[str, StepResult | Exception]:
        """What has been answered, or raised, since the last call.

        Args:
            wait: block until something has, for at most ``LONGEST_WAIT_S``.
        """
        self._settle()
        answers = self._take()
        if wait and not answers and self._running:
            waiting = asyncio.wait(self._running.values(), timeout=LONGEST_WAIT_S, return_when=asyncio.FIRST_COMPLETED)
            self._loop.run_until_complete(waiting)
            answers = self._take()
        return answers

    def cancel(self) -> None:
        """Forget every step in flight; each is cancelled and given a chance to clean up."""
        for session in list(self._running):
            self._expire(session)
        self._expired.clear()
        self._settle()

    def _settle(self) -> None:
        for _ in range(SETTLING_ROUNDS):
            if not (self._running or self._cancelled):
                return
            self._loop.call_soon(self._loop.stop)
            self._loop.run_forever()
            if all(task.done() for task in self._running.values()) and not self._cancelled:
                return

    def _take(self) -> dict[str, StepResult | Exception]:
        late = TimeoutError(f"no answer within {self._timeout_s} s")
        answers: dict[str, StepResult | Exception] = dict.fromkeys(self._expired, late)
        self._expired.clear()
        for session in [session for session, task in self._running.items() if task.done()]:
            answers[session] = _outcome(self._running.pop(session))
            if session in self._timers:
                self._timers.pop(session).cancel()
        return answers

    def _expire(self, session: str) -> None:
        """Give a step up. What it does with its cancellation is its own affair; the response does not wait for it."""
        if session in self._timers:
            self._timers.pop(session).cancel()
        task = self._running.pop(session)
        self._expired[session] = task
        self._cancelled.add(task)
        task.add_done_callback(self._forget)
        task.cancel()

    def _forget(self, task: asyncio.Task[StepResult]) -> None:
        self._cancelled.discard(task)
        if not task.cancelled():
            task.exception()  # an exception nobody asks for would be printed


async def _without_exit(step: Coroutine[None, None, StepResult]) -> StepResult:
    """A step that wants to end the program, by :class:`SystemExit` or the like, has failed, no more."""
    try:
        return await step
    except (Exception, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt):
        raise  # GeneratorExit is how a coroutine is closed
    except BaseException as error:
        raise RuntimeError(f"the step asked to end the program ({type(error).__name__}: {error})") from error


def _outcome(task: asyncio.Task[StepResult]) -> StepResult | Exception:
    if task.cancelled():
        return RuntimeError("the step cancelled itself")
    error = task.exception()
    if error is None:
        return task.result()
    if isinstance(error, Exception):
        return error
    raise error
