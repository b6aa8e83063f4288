"""The other ranks of the learner as processes of this machine, which talk to rank 0 over its loopback interface."""

from __future__ import annotations

import json
import multiprocessing
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

import torch

from brace_rl.config import Config, config_from_dict
from brace_rl.errors import BraceError, ModelError, WaitTimeoutError
from brace_rl.training.learner_group import Peer
from brace_rl.training.meeting import Meeting, file_meeting
from brace_rl.training.models import resolve_device
from brace_rl.training.rank_worker import Order, RankWorker, Report, rank_threads, reported_error

CLOSE_GRACE_S = 5.0
"""Time a rank has to end by itself before it is killed."""

POLL_S = 0.5
"""How often rank 0, while it waits for a report, looks whether the rank still exists."""


@contextmanager
def rank_processes(config: Config, model_dir: str) -> Iterator[tuple[list[Peer], Meeting]]:
    """Start ranks 1 to ``optim.learner_ranks - 1``; yields them and where all ranks meet, and ends them after.

    Args:
        model_dir: where they read the actor's architecture.

    Raises:
        ModelError: there are not enough GPUs.
    """
    first = resolve_device(config.model.device)
    peers: list[Peer] = []
    with file_meeting() as meeting:
        try:
            for rank in range(1, config.optim.learner_ranks):
                peers.append(ProcessPeer(rank, config, model_dir, rank_device(first, rank)))
            yield peers, meeting
        finally:
            for peer in peers:
                peer.close()


def rank_device(first: torch.device, rank: int) -> torch.device:
    """The device of a rank: the CPU for all, or the GPUs from that of rank 0 on.

    Raises:
        ModelError: there are not enough GPUs.
    """
    if first.type != "cuda":
        return first
    index = (first.index or 0) + rank
    if index >= torch.cuda.device_count():
        raise ModelError(
            f"optim.learner_ranks: rank {rank} needs cuda:{index}, and torch sees {torch.cuda.device_count()} GPU(s); "
            "use fewer ranks"
        )
    return torch.device("cuda", index)


class ProcessPeer:
    """A rank in a spawned process. Orders and reports are JSON."""

    def __init__(self, rank: int, config: Config, model_dir: str, device: torch.device) -> None:
        self._rank = rank
        self._timeout_s = config.schedule.timeout_s
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve_rank,
            args=(rank, config.model_dump_json(), model_dir, str(device), rank_threads(config), theirs),
            name=f"brace-learner-{rank}",
            daemon=True,
        )
        self._process.start()
        # The process holds the only copy now: when it dies, reads end instead of waiting for ever.
        theirs.close()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid or 0

    def order(self, order: Order) -> None:
        """See :class:`.learner_group.Peer`.

        Raises:
            BraceError: the process is gone.
        """
        try:
            self._pipe.send_bytes(json.dumps(order).encode())
        except OSError:
            raise self._dead() from None

    def report(self) -> None:
        """See :class:`.learner_group.Peer`.

        Raises:
            WaitTimeoutError: no report within ``schedule.timeout_s``.
            BraceError, RuntimeError: what the rank raised; its process died.
        """
        since = time.monotonic()
        while not self._has_report(POLL_S):
            waited = time.monotonic() - since
            if waited >= self._timeout_s:
                raise WaitTimeoutError(
                    f"rank 0 of the learner waited {waited:.0f} s for rank {self._rank} (process {self.pid}, alive); "
                    "raise schedule.timeout_s if it may take as long as that"
                )
        if (failure := self._read()) is not None:
            raise failure

    def failure(self) -> Exception | None:
        """See :class:`.learner_group.Peer`."""
        while self._has_report(POLL_S):
            if (failure := self._read()) is not None:
                return failure
        return None

    def close(self) -> None:
        """Close the pipe, which ends an idle rank; kill it if it has not ended after some seconds."""
        self._pipe.close()
        self._process.join(CLOSE_GRACE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _has_report(self, wait_s: float) -> bool:
        try:
            return not self._pipe.closed and self._pipe.poll(wait_s)
        except OSError:
            return True  # the end of the pipe, which reading tells

    def _read(self) -> Exception | None:
        try:
            report: Report = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            return self._dead()
        return reported_error(self._rank, report) if report else None

    def _dead(self) -> BraceError:
        self._process.join(POLL_S)
        code = self._process.exitcode
        return BraceError(
            f"rank {self._rank} of the learner (process {self.pid}) is gone (exit code {code}); resume the run from "
            "its last checkpoint"
        )


def _serve_rank(rank: int, config_json: str, model_dir: str, device: str, threads: int, pipe: Connection) -> None:
    """Body of the process: a report for every order, up to the first failure."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal; rank 0 decides
    torch.set_num_threads(threads)
    config = config_from_dict(json.loads(config_json))
    worker = RankWorker(rank=rank, config=config, model_dir=model_dir, device=device)
    report: Report = {}
    with suppress(EOFError, OSError):  # rank 0 is gone
        while not report:
            report = worker.answer(json.loads(pipe.recv_bytes()))
            pipe.send_bytes(json.dumps(report).encode())
