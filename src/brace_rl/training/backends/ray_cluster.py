"""Joining a Ray cluster, or starting one on this machine that listens on its loopback address alone."""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from brace_rl.errors import BraceError
from brace_rl.training.meeting import LOOPBACK

LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Read when Ray is imported; makes it do on Linux what it does elsewhere, use the loopback address for this machine.
Naming that address to ``ray.init`` is not enough: it is replaced by the one that others can reach."""
_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0"}
"""Nothing is reported to Ray's makers."""

_VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
_HOST_AND_PORT = re.compile(r"([^:/\s]+):(\d+)")
_CONNECT_S = 10.0


def require_ray() -> None:
    """Raises BraceError, which says what to install, where Ray is not."""
    if find_spec("ray") is None:
        raise BraceError("backend.kind = 'ray': Ray is not installed; run: pip install 'brace-rl[ray]'")


def join_cluster(address: str, *, cpus: int, kept: torch.device | None = None) -> bool:
    """Make Ray ready for this process; whether it was not before.

    Args:
        address: of a cluster to join ("auto": the one this machine belongs to); empty: start one here.
        cpus: of a cluster that is started.
        kept: a GPU that a cluster that is started shall not give away, as this process computes on it.

    Raises:
        BraceError: there is no cluster, or the one that was started listens beyond loopback.
    """
    os.environ |= {name: value for name, value in _ENVIRONMENT.items() if name not in os.environ}
    if not address:
        os.environ |= LOOPBACK_ONLY
    import ray

    if ray.is_initialized():
        return False
    _check_that_somebody_listens(address)
    options: dict[str, Any] = {"address": address, "logging_level": logging.WARNING}
    if not address:
        options |= {"address": "local", "num_cpus": cpus, "include_dashboard": False}
    try:
        with _hidden(None if address else kept):
            ray.init(**options)
    except Exception as error:  # Ray raises bare ones too
        where = f"backend.address: no Ray cluster at {address!r}" if address else "Ray could not be started"
        raise BraceError(f"{where}: {gist(error)}") from error
    if not address and (listens_at := node_address()) != LOOPBACK:
        ray.shutdown()
        raise BraceError(
            f"Ray would listen at {listens_at}, since it was imported before us without {LOOPBACK_ONLY}; import "
            f"brace_rl first, or name a cluster of your own with backend.address"
        )
    return True


def _check_that_somebody_listens(address: str) -> None:
    """At ``host:port``: Ray itself would try for minutes. Addresses of other forms are Ray's affair.

    Raises:
        BraceError: nobody does.
    """
    match = _HOST_AND_PORT.fullmatch(address)
    if match is None:
        return
    try:
        socket.create_connection((match[1], int(match[2])), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise BraceError(
            f"backend.address: nobody listens at {address} ({error}); start Ray there (ray start --head), or leave the "
            f"address out to start a cluster here"
        ) from None


def node_address() -> str:
    """The address that Ray has for this machine; loopback in a cluster that :func:`join_cluster` started."""
    import ray

    return str(ray.util.get_node_ip_address())


def gist(error: Exception) -> str:
    """First and last line of an error of Ray's: what happened, and, where a traceback follows, why."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"


@contextmanager
def _hidden(device: torch.device | None) -> Iterator[None]:
    """In the body, a process that is started does not see this GPU of ours. Torch has looked before and still does."""
    if device is None or device.type != "cuda":
        yield
        return
    before = os.environ.get(_VISIBLE_GPUS)
    visible = [str(i) for i in range(torch.cuda.device_count())] if before is None else before.split(",")
    del visible[device.index or 0]
    os.environ[_VISIBLE_GPUS] = ",".join(visible)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VISIBLE_GPUS]
        else:
            os.environ[_VISIBLE_GPUS] = before
