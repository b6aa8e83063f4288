"""A rank of the learner other than 0: builds its models, joins, then does what rank 0 is told to do.

Orders are JSON-able dictionaries, so that they can come through a pipe, as here, or as the calls of an actor on a
cluster. What they are about, batches and weights, comes by ``torch.distributed``.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import traceback
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import brace_rl.errors
from brace_rl.config import Config, config_from_dict
from brace_rl.errors import BraceError, ModelError
from brace_rl.training.learner import Learner
from brace_rl.training.learner_state import gather, receive_state
from brace_rl.training.models import Critic, load_actor, resolve_device
from brace_rl.training.ranks import Ranks
from brace_rl.training.wire import batch_from_tensors, receive

Order = dict[str, Any]
"""``do`` names what to do; the other keys belong to it."""


class RankWorker:
    """One rank. Call :meth:`obey` with the orders in the sequence they were given on rank 0.

    Args:
        rank: from 1.
        meeting: file through which the ranks find each other.
        model_dir: where the actor's architecture is read; weights come from rank 0.
    """

    def __init__(self, *, rank: int, config: Config, model_dir: str, meeting: Path) -> None:
        self._rank = rank
        self._config = config
        self._meeting = meeting
        self._device = rank_device(resolve_device(config.model.device), rank)
        self._actor = load_actor(model_dir, dtype="float32", device=self._device)
        has_critic = config.algorithm.value_target != "none"
        self._critic = Critic.from_actor(self._actor) if has_critic else None

    def obey(self, order: Order) -> None:
        """Carry out one order.

        Raises:
            BraceError: as the learner on rank 0 does.
        """
        if order["do"] == "join":
            self._ranks = join(self._rank, self._config, self._meeting, self._device)
            self._learner = Learner(self._actor, self._critic, self._config, self._ranks)
        elif order["do"] == "restore":
            receive_state(order, self._learner, self._ranks)
        elif order["do"] == "gather":
            gather(self._learner, None, optimizers=order["optimizers"])
        else:
            batch = batch_from_tensors(dict(receive(order["batch"], self._ranks, self._device)))
            if order["do"] == "update":
                self._learner.update(batch)
            else:
                self._learner.evaluate(batch)


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


def join(rank: int, config: Config, meeting: Path, device: torch.device) -> Ranks:
    """Meet the other ranks; returns when all are there. On one machine, over its loopback interface alone.

    Raises:
        RuntimeError: not all came within ``schedule.timeout_s``.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    os.environ.setdefault(f"{backend.upper()}_SOCKET_IFNAME", loopback)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    size = config.optim.learner_ranks
    dist.init_process_group(
        backend,
        # A file, not a port: no other user of the machine can join or listen.
        store=dist.FileStore(str(meeting), size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=config.schedule.timeout_s),
    )
    return Ranks(dist.group.WORLD)


def serve_rank(rank: int, config_json: str, model_dir: str, meeting: str, threads: int, pipe: Connection) -> None:
    """Body of a rank's process: reports ``{}`` once built and after every order, or error, message and trace."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal; rank 0 decides
    torch.set_num_threads(threads)
    with suppress(EOFError, OSError):  # rank 0 is gone
        try:
            config = config_from_dict(json.loads(config_json))
            worker = RankWorker(rank=rank, config=config, model_dir=model_dir, meeting=Path(meeting))
            pipe.send_bytes(b"{}")
            while True:
                order = json.loads(pipe.recv_bytes())
                worker.obey(order)
                pipe.send_bytes(b"{}")
        except (EOFError, OSError):
            raise
        except Exception as error:
            name = type(error).__name__ if isinstance(error, BraceError) else ""
            report = {"error": name, "message": str(error), "trace": traceback.format_exc()}
            pipe.send_bytes(json.dumps(report).encode())


def reported_error(rank: int, report: dict[str, str]) -> Exception:
    """What rank 0 raises for a report of failure: the same BraceError, or a RuntimeError; both show the traceback."""
    remote = RuntimeError(f"rank {rank} of the learner failed:\n{report['trace']}")
    if not report["error"]:
        return remote
    error: Exception = getattr(brace_rl.errors, report["error"], BraceError)(report["message"])
    error.__cause__ = remote
    return error
