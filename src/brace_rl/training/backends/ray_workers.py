"""Rollouts in the actors of a Ray cluster, on this machine or on many.

::

    trainer                                             each of N rollout actors
    publish  --> object store, once --> reference  -->  fetched beside generation, applied between engine steps
    submit   --> the least busy worker  ------------->  prompts, with the version they need at least
    collect  <-- one report outstanding per worker <--  answers, newest version received, failure

Every wait for a worker is one call that returns within a second or so, so a worker that is slow, dead or hung holds
nobody up: the trainer waits for whichever says something first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from brace_rl.errors import BraceError, WaitTimeoutError
from brace_rl.training.backends.base import Backend
from brace_rl.training.backends.ray_actor import NO_WEIGHTS, PackedWeights, Report, RolloutActor
from brace_rl.training.backends.ray_cluster import gist, join_cluster, require_ray
from brace_rl.training.driver_spec import DriverFactory
from brace_rl.training.types import RolloutGroup, RolloutRequest

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

MAX_DEATHS_IN_A_ROW = 3
"""Deaths of one worker without an answer in between that are mended; the next one ends the run."""

REPORT_EVERY_S = 1.0
"""Longest a worker that has nothing to tell keeps the trainer's call."""

MAX_DELIVERIES = 2
"""Weight updates under way to one worker; to one that is further behind, the newest are sent once it is ready."""


@dataclass(frozen=True)
class _Published:
    """Weights in the object store, which keeps them while ``reference`` lives."""

    reference: Any
    version: int


@dataclass
class _Worker:
    """One actor, from its start to its death.

    Attributes:
        unanswered: prompts it was given, by issue number.
        offered: newest weights it was told of.
        received: newest weights it is known to have.
        deliveries: weight updates under way to it.
        silent_s: time the trainer has listened to it in vain.
        is_heard: whether it ever said anything.
    """

    number: int
    handle: Any
    deaths_in_a_row: int
    started: float = field(default_factory=time.monotonic)
    unanswered: dict[int, RolloutRequest] = field(default_factory=dict)
    offered: int = NO_WEIGHTS
    received: int = NO_WEIGHTS
    deliveries: int = 0
    silent_s: float = 0.0
    is_heard: bool = False

    @property
    def load(self) -> int:
        """Responses it has still to make."""
        return sum(request.samples for request in self.unanswered.values())

    def describe(self) -> str:
        """State for an error message."""
        if not self.is_heard:
            return f"worker {self.number} has not started (has the cluster the CPUs and GPUs it asks for?)"
        return (
            f"worker {self.number} owes {len(self.unanswered)} prompts, has weights {self.received}, "
            f"said something {self.silent_s:.0f} s ago"
        )


class RayBackend(Backend):
    """Runs a driver in each of several Ray actors. Not thread-safe; use it from one thread.

    A prompt goes to the worker with the fewest responses to make. Answers are taken from whoever has them.

    *Faults.* A worker that dies, or says nothing for ``timeout_s`` while others answer, is replaced; its unanswered
    prompts go to the others. An answer counts once, whoever gives it. A worker whose reports show that weights did not
    reach it is sent the newest again. A driver that *raises* is not replaced: its error is raised here, by the call
    that learns of it and by every later one.

    With one worker, results are those of the other backends, bit for bit, where theirs do not depend on time.

    Args:
        factory: built in each actor; picklable.
        workers: number of actors.
        timeout_s: longest any wait may last, counted anew when a worker is replaced.
        threads: torch threads, and CPUs asked of Ray, per actor.
        gpus: GPUs asked of Ray per actor; may be a fraction.
        address: of a cluster to join ("auto": the one this machine belongs to); empty: start one on this machine that
            listens on loopback only and ends with :meth:`close`. Where Ray is running already in this process, that is
            used and left running.

    Raises:
        BraceError: Ray is not installed, or there is no cluster at ``address``.
    """

    def __init__(
        self,
        factory: DriverFactory,
        *,
        workers: int,
        timeout_s: float,
        threads: int = 1,
        gpus: float = 0.0,
        address: str = "",
    ) -> None:
        require_ray()
        self.restarts = 0
        self.resent = 0
        """Weight updates that did not arrive and were sent again."""
        self._factory = factory
        self._timeout_s = timeout_s
        self._threads = threads
        self._gpus = gpus
        self._newest: _Published | None = None
        self._answered: list[RolloutGroup] = []
        self._failure: Exception | None = None
        # Calls under way: their references, whom they were made to, and what to do with the outcome.
        self._calls: dict[Any, tuple[_Worker, Callable[[_Worker, Any], None]]] = {}
        self._is_own_cluster = join_cluster(address, cpus=workers * threads)
        self._workers = [self._start(number, deaths_in_a_row=0) for number in range(workers)]

    def publish(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Put the weights into the object store and send word of them. Does not wait for the workers."""
        import ray

        self._listen(0.0)
        self._newest = _Published(ray.put(PackedWeights.of(weights)), version)
        for worker in self._workers:
            self._bring_up_to_date(worker)

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Queue prompts. A prompt that cannot be used is an error of a later call.

        Raises:
            ValueError: a prompt of this index is still unanswered.
        """
        self._listen(0.0)
        known = {index for worker in self._workers for index in worker.unanswered}
        if twice := sorted(request.index for request in requests if request.index in known):
            raise ValueError(f"prompts {twice} were submitted before and are not answered yet")
        self._assign(requests, self._workers)

    def collect(self) -> list[RolloutGroup]:
        """Wait for an answer; return all that have come.

        Raises:
            WaitTimeoutError: none came in time, or none can come as every prompt is answered.
            BraceError: a worker died again and again, or its driver raised one.
            RuntimeError: a driver raised something else; the text holds the traceback.
        """
        self._listen(0.0)
        if not self._answered and not any(worker.unanswered for worker in self._workers):
            raise WaitTimeoutError("trainer waits for rollouts, but every prompt it submitted is answered")
        since = time.monotonic()
        while not self._answered:
            waited = time.monotonic() - max(since, *(worker.started for worker in self._workers))
            if waited >= self._timeout_s:
                raise WaitTimeoutError(
                    f"trainer waited {waited:.0f} s for rollouts: {'; '.join(w.describe() for w in self._workers)}; "
                    f"raise schedule.timeout_s if they may take as long as that"
                )
            self._listen(min(self._timeout_s - waited, REPORT_EVERY_S))
        answered, self._answered = self._answered, []
        return answered

    def close(self) -> None:
        """End the actors, and the cluster if it was started for this backend."""
        import ray

        self._failure = self._failure or RuntimeError("the backend is closed")
        self._calls.clear()
        if not ray.is_initialized():
            return
        for worker in self._workers:
            ray.kill(worker.handle)
        self._workers, self._newest = [], None
        if self._is_own_cluster:
            ray.shutdown()
            self._is_own_cluster = False

    # Orders

    def _start(self, number: int, *, deaths_in_a_row: int) -> _Worker:
        """An actor that knows the newest weights and is asked for its first report."""
        import ray

        # Two threads of Ray's in each actor, one for orders and one for reports; restarting is our own affair.
        remote = ray.remote(
            num_cpus=self._threads,
            num_gpus=self._gpus,
            max_restarts=0,
            max_task_retries=0,
            concurrency_groups={"orders": 1, "reports": 1},
        )(RolloutActor)
        worker = _Worker(number, remote.remote(self._factory, self._threads, self._timeout_s), deaths_in_a_row)
        self._ask(worker)
        self._bring_up_to_date(worker)
        return worker

    def _ask(self, worker: _Worker) -> None:
        call = worker.handle.collect.options(concurrency_group="reports").remote(REPORT_EVERY_S)
        self._calls[call] = (worker, self._take_report)

    def _bring_up_to_date(self, worker: _Worker) -> None:
        """Send the newest weights to a worker that was not told of them, or was and shows that they never came."""
        if self._newest is None or worker.received >= self._newest.version:
            return
        if worker.offered < self._newest.version:
            if worker.deliveries < MAX_DELIVERIES:
                self._deliver(worker, self._newest)
        elif not worker.deliveries:
            self.resent += 1
            message = "weights %d did not reach rollout worker %d, which has %d; they are sent again"
            logger.warning(message, self._newest.version, worker.number, worker.received)
            self._deliver(worker, self._newest)

    def _deliver(self, worker: _Worker, weights: _Published) -> None:
        """Tell a worker where weights are. In a box, Ray leaves it to the worker when to fetch them."""
        give = worker.handle.give_weights.options(concurrency_group="orders")
        self._calls[give.remote([weights.reference], weights.version)] = (worker, self._take_receipt)
        worker.offered = weights.version
        worker.deliveries += 1

    def _assign(self, requests: Sequence[RolloutRequest], workers: Sequence[_Worker]) -> None:
        """Divide prompts among ``workers``, each to the least busy one; one message to each."""
        version = NO_WEIGHTS if self._newest is None else self._newest.version
        loads = {worker.number: worker.load for worker in workers}
        shares: dict[int, list[RolloutRequest]] = {worker.number: [] for worker in workers}
        for request in requests:
            number = min(loads, key=lambda number: (loads[number], number))
            loads[number] += request.samples
            shares[number].append(request)
        for worker in workers:
            share = shares[worker.number]
            if share:
                call = worker.handle.give_prompts.options(concurrency_group="orders").remote(share, version)
                self._calls[call] = (worker, _nothing_to_do)
                worker.unanswered.update((request.index, request) for request in share)

    # What comes back

    def _listen(self, timeout_s: float) -> None:
        """Handle what workers said, waiting ``timeout_s`` at most for the first of it."""
        import ray

        if self._failure is not None:
            raise self._failure
        since = time.monotonic()
        heard, _ = ray.wait(list(self._calls), num_returns=1, timeout=timeout_s)
        if heard:
            heard, _ = ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)
        for worker in self._workers:
            worker.silent_s += time.monotonic() - since
        for call in heard:
            if call in self._calls:  # else of a worker that was replaced a moment ago
                self._hear(call)
        for worker in self._workers:
            if worker.is_heard and worker.silent_s > self._timeout_s:
                self._replace(worker, f"said nothing for {worker.silent_s:.0f} s")

    def _hear(self, call: Any) -> None:
        """Handle the outcome of a call."""
        import ray.exceptions

        worker, handle = self._calls.pop(call)
        try:
            said = ray.get(call)
        except ray.exceptions.RayActorError as error:
            self._replace(worker, f"died: {gist(error)}")
        else:
            handle(worker, said)

    def _take_report(self, worker: _Worker, report: Report) -> None:
        worker.is_heard, worker.silent_s = True, 0.0
        worker.received = max(worker.received, report.received)
        for group in report.groups:
            if worker.unanswered.pop(group.request.index, None) is not None:
                self._answered.append(group)
                worker.deaths_in_a_row = 0
        if report.failure is not None:
            self._fail(report.failure.exception())
        self._ask(worker)
        self._bring_up_to_date(worker)

    def _take_receipt(self, worker: _Worker, received: int) -> None:
        worker.deliveries -= 1
        worker.received = max(worker.received, received)
        self._bring_up_to_date(worker)

    def _replace(self, dead: _Worker, cause: str) -> None:
        import ray

        ray.kill(dead.handle)
        self._calls = {call: entry for call, entry in self._calls.items() if entry[0] is not dead}
        deaths = dead.deaths_in_a_row + 1
        if deaths > MAX_DEATHS_IN_A_ROW:
            self._fail(
                BraceError(
                    f"rollout worker {dead.number} was replaced {deaths - 1} times without answering a prompt in "
                    f"between; the last one {cause}"
                )
            )
        logger.warning("rollout worker %d %s; %d prompts are issued again", dead.number, cause, len(dead.unanswered))
        self.restarts += 1
        others = [worker for worker in self._workers if worker is not dead]
        fresh = self._start(dead.number, deaths_in_a_row=deaths)
        self._workers = [fresh if worker is dead else worker for worker in self._workers]
        # The others are at work already; the new one may have a model to load.
        self._assign(list(dead.unanswered.values()), others or [fresh])

    def _fail(self, error: Exception) -> None:
        self._failure = error
        raise error


def _nothing_to_do(worker: _Worker, said: None) -> None:
    """Prompts were taken."""
