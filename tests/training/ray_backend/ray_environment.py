"""What Ray's processes inherit from the test that starts a cluster."""

from __future__ import annotations

import os
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from pathlib import Path

import brace_rl
from brace_rl.training.backends import ray_cluster

HERE = Path(__file__).parent


def prepare_environment() -> None:
    """What Ray's processes inherit: where modules of the tests and of the package are, no token file, no statistics."""
    paths = [str(HERE), str(HERE.parent), str(Path(brace_rl.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    os.environ |= ray_cluster.LOOPBACK_ONLY
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}


def join_cluster(cpus: int) -> None:
    """Start a cluster on loopback, or join one that runs already: ``BRACE_TEST_RAY_ADDRESS``."""
    prepare_environment()
    ray_cluster.join_cluster(os.environ.get("BRACE_TEST_RAY_ADDRESS", ""), cpus=cpus)


def listening_here_and_below() -> list[str]:
    """Addresses at which this process and its descendants listen; those that end meanwhile are passed over."""
    import psutil

    found: list[str] = []
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            connections = process.net_connections("inet")
            found += [c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN]
    return found


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches an address; ``::ffff:127.0.0.1`` is 127.0.0.1 to a socket of both families."""
    found = ip_address(address)
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return (mapped or found).is_loopback
