"""The rollout process's side of :mod:`~brace_rl.training.backends.process`, and what passes between the two.

Commands and results are pickled: both ends are processes of one run, and nothing of it touches a disk.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

import brace_rl.errors
from brace_rl.errors import BraceError
from brace_rl.training.backends.shared_weights import SharedWeights
from brace_rl.training.driver_spec import DriverFactory
from brace_rl.training.rollout import RolloutDriver
from brace_rl.training.types import RolloutGroup, RolloutRequest

ORPHAN_CHECK_S = 1.0
"""How often an idle process looks whether its trainer still exists, beside the pipe's end of file."""


@dataclass(frozen=True)
class Weights:
    """Command: weights of ``version`` are in shared buffer number ``buffer``."""

    buffer: int
    version: int


@dataclass(frozen=True)
class Prompts:
    """Command: answer these."""

    requests: list[RolloutRequest]


@dataclass(frozen=True)
class Copied:
    """Result: the engine has the weights, ``buffer`` may be written to."""

    buffer: int


@dataclass(frozen=True)
class Answers:
    """Result: finished prompts."""

    groups: list[RolloutGroup]


@dataclass(frozen=True)
class Failure:
    """Result, the last one: what the driver raised. ``error`` is the name of a BraceError, or empty for others."""

    error: str
    message: str
    trace: str

    def exception(self) -> Exception:
        """What the trainer raises: the same BraceError, or a RuntimeError; both show the traceback."""
        remote = RuntimeError(f"the rollout process failed:\n{self.trace}")
        if not self.error:
            return remote
        error: Exception = getattr(brace_rl.errors, self.error, BraceError)(self.message)
        error.__cause__ = remote
        return error


class _TrainerGoneError(Exception):
    """The other ends of the pipes are closed."""


def serve(
    factory: DriverFactory,
    buffers: Sequence[SharedWeights],
    threads: int,
    commands: Connection,
    results: Connection,
) -> None:
    """Build the driver, then obey and generate until the trainer is gone. What the driver raises is sent."""
    # Ctrl-C reaches every process of the terminal; the trainer decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    torch.set_num_threads(threads)
    with suppress(_TrainerGoneError):
        try:
            _generate(factory.build(), buffers, commands, results)
        except _TrainerGoneError:
            raise
        except Exception as error:
            name = type(error).__name__ if isinstance(error, BraceError) else ""
            _send(results, Failure(name, str(error), traceback.format_exc()))


def _generate(
    driver: RolloutDriver,
    buffers: Sequence[SharedWeights],
    commands: Connection,
    results: Connection,
) -> None:
    trainer = multiprocessing.parent_process()
    while trainer is not None and trainer.is_alive():
        wait_s = 0.0 if driver.unfinished else ORPHAN_CHECK_S
        while (command := _next_command(commands, wait_s)) is not None:
            if isinstance(command, Weights):
                driver.update_weights(buffers[command.buffer].tensors(), command.version)
                _send(results, Copied(command.buffer))
            else:
                driver.submit(command.requests)
            wait_s = 0.0
        if groups := driver.advance():
            _send(results, Answers(groups))


def _next_command(commands: Connection, wait_s: float) -> Weights | Prompts | None:
    """The next command, or None if there is none within ``wait_s``."""
    try:
        if not commands.poll(wait_s):
            return None
        payload = commands.recv_bytes()
    except (EOFError, OSError):
        raise _TrainerGoneError from None
    command: Weights | Prompts = pickle.loads(payload)
    return command


def _send(results: Connection, message: Copied | Answers | Failure) -> None:
    payload = pickle.dumps(message)
    try:
        results.send_bytes(payload)
    except OSError:
        raise _TrainerGoneError from None
