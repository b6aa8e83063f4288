"""Rollouts in a process of their own, which goes on generating while the trainer computes.

::

    trainer process                                            rollout process
    publish, submit --> queue --> thread --> command pipe -->  between engine steps: weights, prompts, in order
    publish         --> two buffers of shared memory, in turn  --> copied into the engine, then acknowledged
    collect         <-- queue <-- thread <-- result pipe  <--  answers, acknowledgements, failure

Both pipes have a thread on the trainer's side, so that neither process is ever held up by a full pipe, and a process
that hangs in the middle of a message holds up a thread but not the trainer, whose every wait has a timeout.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import multiprocessing.resource_tracker
import pickle
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Literal

import torch

from brace_rl.errors import BraceError, WaitTimeoutError
from brace_rl.training.backends.base import Backend
from brace_rl.training.backends.shared_weights import SharedWeights
from brace_rl.training.backends.worker import Answers, Copied, Prompts, Weights, serve
from brace_rl.training.driver_spec import DriverFactory
from brace_rl.training.types import RolloutGroup, RolloutRequest

logger = logging.getLogger(__name__)

StartMethod = Literal["spawn", "forkserver"]

MAX_DEATHS_IN_A_ROW = 3
"""Deaths of the rollout process without an answer in between that are mended; the next one ends the run."""

LIVENESS_CHECK_S = 1.0
"""How often the trainer, while it waits, looks whether the process still exists, beside the pipe's end of file."""

CLOSE_GRACE_S = 5.0
"""Time a rollout process has to end by itself before it is killed."""


class ProcessBackend(Backend):
    """Runs a driver in a spawned process. Not thread-safe; use it from one thread.

    A process that dies is replaced: the new one is sent the newest weights and every unanswered prompt. Answers that
    had come are kept, and a prompt is never answered twice. A driver that *raises* is not replaced: its error is
    raised here, by the call that learns of it and by every later one.

    Args:
        factory: built in the process; picklable.
        weights_template: names, shapes and dtypes of what :meth:`publish` will be given.
        timeout_s: longest any wait may last, counted anew when a process is replaced.
        threads: torch threads of the process.
        start_method: of multiprocessing. "forkserver" starts, and restarts, faster where its server has imported torch.
    """

    def __init__(
        self,
        factory: DriverFactory,
        weights_template: Mapping[str, torch.Tensor],
        *,
        timeout_s: float,
        threads: int,
        start_method: StartMethod = "spawn",
    ) -> None:
        self.restarts = 0
        self._start_method = start_method
        self._factory = factory
        self._timeout_s = timeout_s
        self._threads = threads
        self._buffers = (SharedWeights(weights_template), SharedWeights(weights_template))
        self._newest: Weights | None = None
        self._uncopied: set[int] = set()
        self._unanswered: dict[int, RolloutRequest] = {}
        self._answered: list[RolloutGroup] = []
        self._deaths_in_a_row = 0
        self._failure: Exception | None = None
        self._start_child()
        # Before the interpreter joins its children, which would wait for ever for one that waits for commands.
        atexit.register(self.close)

    @property
    def pid(self) -> int:
        """Process id of the present rollout process."""
        return self._child.pid

    def publish(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Copy the weights to shared memory and send word of them.

        Raises:
            WaitTimeoutError: the buffer is still to be copied by the rollout process: it is two versions behind.
            ValueError: names, shapes or dtypes are not those of the template.
        """
        buffer = 0 if self._newest is None else 1 - self._newest.buffer
        self._wait_until(
            lambda: buffer not in self._uncopied,
            f"the rollout process to copy the weights before the last ones (now publishing version {version})",
        )
        self._buffers[buffer].write(weights)
        self._newest = Weights(buffer, version)
        self._uncopied.add(buffer)
        self._child.send(self._newest)

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Queue prompts, in one message. A prompt that cannot be used is an error of a later call.

        Raises:
            ValueError: a prompt of this index is still unanswered.
        """
        self._receive_all()
        if twice := sorted(request.index for request in requests if request.index in self._unanswered):
            raise ValueError(f"prompts {twice} were submitted before and are not answered yet")
        self._child.send(Prompts(list(requests)))
        self._unanswered.update((request.index, request) for request in requests)

    def collect(self) -> list[RolloutGroup]:
        """Wait for an answer; return all that have come, in order of arrival.

        Raises:
            WaitTimeoutError: none came in time, or none can come as every prompt is answered.
            BraceError: the process died again and again, or its driver raised one.
            RuntimeError: its driver raised something else; the text holds the traceback.
        """
        self._receive_all()
        if not self._answered and not self._unanswered:
            raise WaitTimeoutError("trainer waits for rollouts, but every prompt it submitted is answered")
        self._wait_until(lambda: bool(self._answered), "rollouts")
        answered, self._answered = self._answered, []
        return answered

    def close(self) -> None:
        """End the process: by asking, after some seconds by force."""
        atexit.unregister(self.close)
        self._failure = self._failure or RuntimeError("the backend is closed")
        self._child.stop(min(CLOSE_GRACE_S, self._timeout_s))

    def _start_child(self) -> None:
        """Start a process and tell it all that one must know: the newest weights, then the unanswered prompts."""
        self._child = _Child(self._factory, self._buffers, self._threads, self._start_method)
        self._uncopied = set()
        if self._newest is not None:
            self._uncopied.add(self._newest.buffer)
            self._child.send(self._newest)
        if self._unanswered:
            self._child.send(Prompts(list(self._unanswered.values())))

    def _wait_until(self, ready: Callable[[], bool], awaited: str) -> None:
        """Receive until ``ready()``; ``awaited`` names for the error what the trainer waits for."""
        since = time.monotonic()
        self._receive_all()
        while not ready():
            waited = time.monotonic() - max(since, self._child.started)
            if waited >= self._timeout_s:
                raise WaitTimeoutError(
                    f"trainer waited {waited:.0f} s for {awaited}: {self._child.describe()}, "
                    f"{len(self._unanswered)} prompts unanswered; "
                    f"raise schedule.timeout_s if they may take as long as that"
                )
            self._receive(min(self._timeout_s - waited, LIVENESS_CHECK_S))

    def _receive_all(self) -> None:
        if self._failure is not None:
            raise self._failure
        while self._receive(0.0):
            pass

    def _receive(self, timeout_s: float) -> bool:
        """Handle the next message, or notice a death; False if there was no message in time."""
        try:
            payload = self._child.inbox.get(block=timeout_s > 0, timeout=timeout_s)
        except queue.Empty:
            # Normally the end of file tells; not where a process the dead one forked holds its pipe open.
            if timeout_s > 0 and not self._child.is_alive():
                self._replace_child()
            return False
        if payload is None:
            self._replace_child()
            return True
        # Not from disk: the bytes come from a process of our own.
        message = pickle.loads(payload)
        if isinstance(message, Copied):
            self._uncopied.discard(message.buffer)
        elif isinstance(message, Answers):
            self._take_answers(message.groups)
        else:
            self._fail(message.exception())
        return True

    def _take_answers(self, groups: Sequence[RolloutGroup]) -> None:
        for group in groups:
            if self._unanswered.pop(group.request.index, None) is not None:
                self._answered.append(group)
                self._deaths_in_a_row = 0

    def _replace_child(self) -> None:
        self._child.stop(CLOSE_GRACE_S)
        pid, cause = self._child.pid, self._child.cause_of_death()
        self._deaths_in_a_row += 1
        if self._deaths_in_a_row > MAX_DEATHS_IN_A_ROW:
            self._fail(
                BraceError(
                    f"the rollout process died {self._deaths_in_a_row} times without answering a prompt in between; "
                    f"the last one, {pid}, {cause}"
                )
            )
        logger.warning("rollout process %d %s; %d prompts are issued again", pid, cause, len(self._unanswered))
        self.restarts += 1
        self._start_child()

    def _fail(self, error: Exception) -> None:
        self._failure = error
        raise error


class _Child:
    """One rollout process with its two pipes and, in this process, the two threads that serve them.

    Attributes:
        inbox: messages it sent, pickled; None after the last one, when its end of the pipe is closed.
        started: on the monotonic clock.
    """

    def __init__(
        self,
        factory: DriverFactory,
        buffers: Sequence[SharedWeights],
        threads: int,
        start_method: StartMethod,
    ) -> None:
        context = (
            multiprocessing.get_context("spawn")
            if start_method == "spawn"
            else multiprocessing.get_context("forkserver")
        )
        command_reader, command_writer = context.Pipe(duplex=False)
        result_reader, result_writer = context.Pipe(duplex=False)
        self.started = time.monotonic()
        self.inbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._last_message: float | None = None
        self._process = context.Process(
            target=serve,
            args=(factory, buffers, threads, command_reader, result_writer),
            name="brace-rollouts",
        )
        with _interrupts_held():
            self._process.start()
        # The child holds the only copies now: when it dies, reads end and writes fail instead of waiting for ever.
        command_reader.close()
        result_writer.close()
        threading.Thread(target=self._write, args=(command_writer,), daemon=True).start()
        threading.Thread(target=self._read, args=(result_reader,), daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid or 0

    def is_alive(self) -> bool:
        """Whether the process exists."""
        return self._process.is_alive()

    def send(self, command: Weights | Prompts) -> None:
        """Queue a command. Pickled here, so that what cannot be pickled is the caller's error."""
        self._outbox.put(pickle.dumps(command))

    def stop(self, grace_s: float) -> None:
        """Close the command pipe, which ends the process; kill it if it has not ended after ``grace_s``."""
        self._outbox.put(None)
        self._process.join(grace_s)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def describe(self) -> str:
        """State for an error message."""
        state = "is alive" if self.is_alive() else self.cause_of_death()
        heard = "no message yet" if self._last_message is None else f"last message {self._silence():.0f} s ago"
        return f"process {self.pid} {state}, {heard}"

    def cause_of_death(self) -> str:
        """How the process ended."""
        code = self._process.exitcode or 0
        if code >= 0:
            return f"exited with code {code}"
        hint = " (by the system, if memory ran out)" if -code == signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{hint}"

    def _silence(self) -> float:
        return time.monotonic() - (self._last_message or self.started)

    def _write(self, connection: Connection) -> None:
        with connection:
            while (payload := self._outbox.get()) is not None:
                try:
                    connection.send_bytes(payload)
                except OSError:  # the process is dead, which the other thread will learn and tell
                    return

    def _read(self, connection: Connection) -> None:
        with connection:
            while True:
                try:
                    payload = connection.recv_bytes()
                except (EOFError, OSError):  # OSError: it ended in the middle of a message
                    break
                self._last_message = time.monotonic()
                self.inbox.put(payload)
        self.inbox.put(None)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold SIGINT back here, and in a child started meanwhile until it has arranged to ignore it."""
    # A process of multiprocessing's own, started with the first child; starting it would lift the block.
    multiprocessing.resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
