"""Runs a piece of Python in a process of its own, under limits, and returns what it printed.

Isolated (the default), the code runs under Linux namespaces and a system-call filter, set up without any privilege by
:mod:`brace_rl.tasks.python_tool.child`. What is and is not enforced is in docs/tasks.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Literal

from brace_rl.errors import ConfigError

CHILD = Path(__file__).with_name("child.py")
LONGEST_MESSAGE = 4096
"""Bytes read of why isolation failed."""
_STOPPED = 128
"""A shell's way to say that a signal ended a process: this plus its number."""


@dataclass(frozen=True)
class Limits:
    """What one call may use.

    Attributes:
        wall_s: seconds until everything is killed.
        cpu_s: CPU seconds of each process.
        memory_bytes: address space of each process.
        disk_bytes: of all files together (isolated), or of each.
        output_bytes: printed; beyond it everything is killed.
        processes: processes and threads beside the first (isolated only).
        isolated: without, the code can reach the network and every file of the user who trains.
    """

    wall_s: float = 10.0
    cpu_s: int = 5
    memory_bytes: int = 512 << 20
    disk_bytes: int = 16 << 20
    output_bytes: int = 10_000
    processes: int = 4
    isolated: bool = True


@dataclass(frozen=True)
class Outcome:
    """What came of a call.

    Attributes:
        output: standard output and error, mixed as they came, at most ``output_bytes``.
        ended: "exit", or the limit that ended it: "wall", "output".
        status: exit status; 128 plus the number of a signal that killed it.
    """

    output: str
    ended: Literal["exit", "wall", "output"]
    status: int


class IsolationError(Exception):
    """The process could not isolate itself; the code was not run."""


def run_python(code: str, limits: Limits) -> Outcome:
    """Run ``code`` as a script in an empty folder; blocks for at most a little over ``limits.wall_s``.

    Nothing of it is left running, and no file.

    Raises:
        IsolationError: this machine does not permit the isolation asked for.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="brace-python-", ignore_cleanup_errors=True))
        ready_read, ready_write = os.pipe()
        stack.callback(os.close, ready_read)
        try:
            process = _start(limits, folder, ready_write)
        finally:
            os.close(ready_write)
        stack.callback(_reap, process)
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = time.monotonic() + limits.wall_s
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(code.encode("utf-8", errors="replace"))
            process.stdin.close()
        output, ended = _read(process.stdout, limits.output_bytes, deadline)
        if ended == "exit":
            try:  # the output may be closed while the code goes on
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                ended = "wall"
        _kill(process)
        status = process.wait()
        ready = os.read(ready_read, LONGEST_MESSAGE)
    if ready not in (b"ready", b"") or (not ready and ended == "exit"):
        raise IsolationError(ready.decode(errors="replace") or "the isolated process died while it was set up")
    return Outcome(output.decode("utf-8", errors="replace"), ended, status if status >= 0 else _STOPPED - status)


def check_isolation(limits: Limits) -> None:
    """Try it with a program that prints one word.

    Raises:
        ConfigError: this machine does not permit it; says why and what may be done.
    """
    try:
        outcome = run_python("print('works')", limits)
    except IsolationError as error:
        raise ConfigError(
            f"task.python_tool: this machine does not let the Python tool be isolated ({error}); allow unprivileged "
            f"user namespaces, or set task.python_isolation = false to run model-written code with your own rights"
        ) from None
    if outcome.output.strip() != "works":
        raise ConfigError(
            f"task.python_tool: a first program failed under the limits of task.python_*: "
            f"{' '.join(outcome.output.split())[:200] or outcome}; raise them"
        )


def _start(limits: Limits, folder: str, ready: int) -> subprocess.Popen[bytes]:
    """The child, which writes to the pipe ``ready`` when it is about to run the code, or why it cannot."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-X", "utf8", str(CHILD), json.dumps(asdict(limits)), str(ready)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(ready,),
        start_new_session=True,
        # Isolated, root becomes nobody, who may not enter the folder; the code gets one in its own root.
        cwd="/" if limits.isolated else folder,
        env={"PATH": os.defpath, "HOME": "/work" if limits.isolated else folder, "PYTHONDONTWRITEBYTECODE": "1"},
    )


def _read(stream: IO[bytes], most: int, deadline: float) -> tuple[bytes, Literal["exit", "wall", "output"]]:
    """Up to ``most`` bytes, and why reading ended."""
    output = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not selector.select(left):
                return bytes(output), "wall"
            chunk = os.read(stream.fileno(), 65_536)
            if not chunk:
                return bytes(output), "exit"
            output += chunk
            if len(output) > most:
                return bytes(output[:most]), "output"


def _kill(process: subprocess.Popen[bytes]) -> None:
    # The child leads its own process group. Killing it also ends its namespaces, and with them everything inside.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Leave nothing behind, whatever happened: background processes of the group included."""
    _kill(process)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()
