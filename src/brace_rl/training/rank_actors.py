"""The other ranks of the learner as actors of a Ray cluster, on this machine or on others.

Rank 0 is in the trainer's process, which is on a machine of the cluster. Orders and reports are calls of the actors and
their results; batches, weights and sums go directly from rank to rank, as between processes of one machine.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from brace_rl.config import Config
from brace_rl.errors import BraceError, WaitTimeoutError
from brace_rl.training.backends.ray_cluster import gist, join_cluster, node_address
from brace_rl.training.learner_group import Peer
from brace_rl.training.meeting import Meeting, port_meeting
from brace_rl.training.models import resolve_device
from brace_rl.training.rank_worker import Order, RankWorker, Report, rank_threads, reported_error

NEWS_S = 2.0
"""Time Ray has, once something is known to be wrong, to say that an actor has raised something or is dead."""

FAREWELL_S = 5.0
"""Time an actor that has failed has to send its report, before it ends."""


@contextmanager
def rank_actors(config: Config, model_dir: str) -> Iterator[tuple[list[Peer], Meeting]]:
    """Start ranks 1 to ``optim.learner_ranks - 1``; yields them and where all ranks meet, and ends them after.

    On a GPU, if that is where the trainer computes, each has one to itself.

    Args:
        model_dir: where they read the actor's architecture; the same path on all machines.

    Raises:
        BraceError: there is no cluster at ``backend.address``.
    """
    first = resolve_device(config.model.device)
    others, threads = config.optim.learner_ranks - 1, rank_threads(config)
    cpus = others * threads + config.backend.workers * config.schedule.rollout_threads
    is_own_cluster = join_cluster(config.backend.address, cpus=cpus, kept=first)
    import ray

    peers: list[Peer] = []
    try:
        with port_meeting(node_address()) as meeting:
            for rank in range(1, others + 1):
                peers.append(ActorPeer(rank, config, model_dir, threads=threads, is_on_gpu=first.type == "cuda"))
            yield peers, meeting
    finally:
        for peer in peers:
            peer.close()
        if is_own_cluster:
            ray.shutdown()


class RankActor:
    """What an actor holds: a rank.

    Args:
        threads: of torch.
        device: of its models, as its process numbers them.
    """

    def __init__(self, rank: int, config: Config, model_dir: str, threads: int, device: str) -> None:
        torch.set_num_threads(threads)
        self._worker = RankWorker(rank=rank, config=config, model_dir=model_dir, device=device, address=node_address())

    def answer(self, order: Order) -> Report:
        """As :meth:`.RankWorker.answer`; an actor that fails then ends, as a process does."""
        report = self._worker.answer(order)
        if report:
            # Its connections end with it. Ranks that wait for what it would have sent would wait on otherwise.
            threading.Timer(FAREWELL_S, os._exit, (1,)).start()
        return report


class ActorPeer:
    """A rank in an actor, which carries out its calls in order. An actor that dies is not replaced."""

    def __init__(self, rank: int, config: Config, model_dir: str, *, threads: int, is_on_gpu: bool) -> None:
        import ray

        self._rank = rank
        self._timeout_s = config.schedule.timeout_s
        self._has_started = False
        self._is_closed = False
        # Orders not yet reported on, the oldest first.
        self._calls: deque[Any] = deque()
        remote = ray.remote(num_cpus=threads, num_gpus=int(is_on_gpu), max_restarts=0, max_task_retries=0)(RankActor)
        # Ray shows an actor the GPUs it was given and no others.
        device = "cuda:0" if is_on_gpu else "cpu"
        self._actor = remote.remote(rank, config, model_dir, threads, device)

    def order(self, order: Order) -> None:
        """See :class:`.learner_group.Peer`.

        Raises:
            BraceError: the actor has been ended.
        """
        if self._is_closed:
            raise self._gone("it was ended with the other ranks")
        self._calls.append(self._actor.answer.remote(order))

    def report(self) -> None:
        """See :class:`.learner_group.Peer`.

        Raises:
            WaitTimeoutError: no report within ``schedule.timeout_s``.
            BraceError, RuntimeError: what the rank raised; it died.
        """
        if not self._has_report(self._timeout_s):
            state = "alive" if self._has_started else "said nothing yet: has the cluster the CPUs and GPUs for it?"
            raise WaitTimeoutError(
                f"rank 0 of the learner waited {self._timeout_s:.0f} s for rank {self._rank} (an actor, {state}); "
                "raise schedule.timeout_s if it may take as long as that"
            )
        if (failure := self._read()) is not None:
            raise failure

    def failure(self) -> Exception | None:
        """See :class:`.learner_group.Peer`."""
        while self._calls and self._has_report(NEWS_S):
            if (failure := self._read()) is not None:
                return failure
        return None

    def close(self) -> None:
        """Kill the actor; it keeps nothing."""
        import ray

        self._is_closed = True
        self._calls.clear()
        if ray.is_initialized():
            ray.kill(self._actor)

    def _has_report(self, wait_s: float) -> bool:
        import ray

        done, _ = ray.wait([self._calls[0]], num_returns=1, timeout=wait_s)
        return bool(done)

    def _read(self) -> Exception | None:
        import ray.exceptions

        try:
            report: Report = ray.get(self._calls.popleft())
        except ray.exceptions.RayError as error:
            return self._gone(gist(error))
        self._has_started = True
        return reported_error(self._rank, report) if report else None

    def _gone(self, cause: str) -> BraceError:
        return BraceError(
            f"rank {self._rank} of the learner (an actor) is gone ({cause}); resume the run from its last checkpoint"
        )
