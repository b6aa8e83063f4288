"""Where the ranks of the learner find each other, and the network interface they talk over.

Processes of one machine meet through a file in a private folder, and talk over its loopback interface. Actors of a
cluster meet at a port of the machine of rank 0, and talk over the interface that has the address by which the cluster
knows their machine. Where that is the loopback address, nothing here listens beyond it.
"""

from __future__ import annotations

import socket
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from brace_rl.errors import BraceError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

LOOPBACK = "127.0.0.1"

Place = dict[str, Any]
"""What the other ranks must know, JSON-able: ``{"path": FILE}`` or ``{"host": ADDRESS, "port": NUMBER}``."""

_SIOCGIFADDR = 0x8915
"""Linux: the request for an interface's address; it answers with a struct whose bytes 20 to 24 hold that."""


@dataclass(frozen=True)
class Meeting:
    """How ranks find each other.

    Attributes:
        place: where.
        listener: on rank 0, the socket at that place, if it is a port.
    """

    place: Place
    listener: socket.socket | None = None

    def store(self, *, size: int, timeout_s: float) -> Store:
        """What ``size`` ranks tell each other their addresses through. At a port, rank 0 keeps it."""
        if "path" in self.place:
            return dist.FileStore(self.place["path"], size)  # type: ignore[attr-defined,no-any-return]
        return dist.TCPStore(  # type: ignore[attr-defined,no-any-return]
            self.place["host"],
            self.place["port"],
            is_master=self.listener is not None,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            # Of its own accord the store would listen at every address of the machine.
            master_listen_fd=None if self.listener is None else self.listener.detach(),
        )


@contextmanager
def file_meeting() -> Iterator[Meeting]:
    """For one machine. A file, not a port: no other user of the machine can join or listen."""
    with tempfile.TemporaryDirectory(prefix="brace-ranks-") as folder:
        yield Meeting({"path": str(Path(folder) / "meeting")})


@contextmanager
def port_meeting(host: str) -> Iterator[Meeting]:
    """At a free port of this machine, which listens at its address ``host`` alone.

    Raises:
        BraceError: this machine does not have that address.
    """
    try:
        listener = socket.create_server((host, 0))
    except OSError as error:
        raise BraceError(f"the learner's ranks cannot meet at {host}: {error.strerror}") from None
    with listener:
        yield Meeting({"host": host, "port": listener.getsockname()[1]}, listener)


def interface_of(address: str) -> str:
    """The network interface of this machine with this IPv4 address.

    Raises:
        BraceError: there is none.
    """
    names = [name for _, name in socket.if_nameindex()]
    if address == LOOPBACK:
        return next((name for name in names if name.startswith("lo")), "lo")
    found = [name for name in names if _address_of(name) == address]
    if not found:
        raise BraceError(
            f"no network interface here has the address {address}, by which the cluster knows this machine; name the "
            f"one that the learner's ranks shall use: GLOO_SOCKET_IFNAME on CPUs, NCCL_SOCKET_IFNAME on GPUs"
        )
    return found[0]


def _address_of(interface: str) -> str | None:
    import fcntl  # not on every system, and neither is this request

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()))
        except OSError:  # it has no such address
            return None
    return socket.inet_ntoa(answer[20:24])
