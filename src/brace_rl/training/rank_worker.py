"""A rank of the learner other than 0: builds its models, joins, then does what rank 0 is told to do.

Orders and reports are JSON-able dictionaries, so that they can pass through a pipe or as the calls of an actor on a
cluster. What they are about, batches and weights, comes by ``torch.distributed``.
"""

from __future__ import annotations

import os
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import brace_rl.errors
from brace_rl.config import Config
from brace_rl.errors import BraceError
from brace_rl.training.learner import Learner
from brace_rl.training.learner_state import gather, receive_state
from brace_rl.training.meeting import LOOPBACK, Meeting, interface_of
from brace_rl.training.models import Critic, load_actor, resolve_device
from brace_rl.training.ranks import Ranks
from brace_rl.training.wire import batch_from_tensors, receive

Order = dict[str, Any]
"""``do`` names what to do; the other keys belong to it."""

Report = dict[str, str]
"""``{}`` of an order carried out, else ``error`` (the name of a BraceError, or ""), ``message`` and ``trace``."""


class RankWorker:
    """One rank. Call :meth:`answer` with the orders in the sequence they were given on rank 0.

    Args:
        rank: from 1.
        model_dir: where the actor's architecture is read; weights come from rank 0.
        device: of its models.
        address: of this machine, at which the other ranks reach it.
    """

    def __init__(self, *, rank: int, config: Config, model_dir: str, device: str, address: str = LOOPBACK) -> None:
        self._rank = rank
        self._config = config
        self._model_dir = model_dir
        self._device = torch.device(device)
        self._address = address

    def answer(self, order: Order) -> Report:
        """Carry out one order; what it raises is reported."""
        try:
            self._obey(order)
        except Exception as error:
            name = type(error).__name__ if isinstance(error, BraceError) else ""
            return {"error": name, "message": str(error), "trace": traceback.format_exc()}
        return {}

    def _obey(self, order: Order) -> None:
        if order["do"] == "build":
            self._build()
        elif order["do"] == "join":
            meeting = Meeting(order["place"])
            self._ranks = join(self._rank, self._config, meeting, device=self._device, address=self._address)
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

    def _build(self) -> None:
        self._actor = load_actor(self._model_dir, dtype="float32", device=resolve_device(str(self._device)))
        has_critic = self._config.algorithm.value_target != "none"
        self._critic = Critic.from_actor(self._actor) if has_critic else None


def join(rank: int, config: Config, meeting: Meeting, *, device: torch.device, address: str = LOOPBACK) -> Ranks:
    """Meet the other ranks; returns when all are there.

    Args:
        address: of this machine; the interface that has it is the one that is used, unless the environment names one.

    Raises:
        BraceError: no interface has the address.
        RuntimeError: not all came within ``schedule.timeout_s``.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    interface = f"{backend.upper()}_SOCKET_IFNAME"
    if interface not in os.environ:
        os.environ[interface] = interface_of(address)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    size, timeout_s = config.optim.learner_ranks, config.schedule.timeout_s
    dist.init_process_group(
        backend,
        store=meeting.store(size=size, timeout_s=timeout_s),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )
    return Ranks(dist.group.WORLD)


def rank_threads(config: Config) -> int:
    """Torch threads of a rank: as many as the recipe says, or a share of this process's."""
    return config.schedule.learner_threads or max(1, torch.get_num_threads() // config.optim.learner_ranks)


def reported_error(rank: int, report: Report) -> Exception:
    """What rank 0 raises for a report of failure: the same BraceError, or a RuntimeError; both show the traceback."""
    remote = RuntimeError(f"rank {rank} of the learner failed:\n{report['trace']}")
    if not report["error"]:
        return remote
    error: Exception = getattr(brace_rl.errors, report["error"], BraceError)(report["message"])
    error.__cause__ = remote
    return error
