"""Ranks meet where they should and listen nowhere else."""

import socket
import sys

import pytest

from brace_rl.errors import BraceError
from brace_rl.training import meeting
from brace_rl.training.meeting import LOOPBACK, Meeting, file_meeting, interface_of, port_meeting

TIMEOUT_S = 60.0
NOBODYS = "203.0.113.7"
"""Kept for documentation (RFC 5737): no machine has it."""


@pytest.mark.parametrize("made", [file_meeting, lambda: port_meeting(LOOPBACK)])
def test_what_one_rank_leaves_at_the_place_another_finds(made):
    with made() as ours:
        first = ours.store(size=2, timeout_s=TIMEOUT_S)
        other = Meeting(ours.place).store(size=2, timeout_s=TIMEOUT_S)
        first.set("key", "from rank 0")
        assert other.get("key") == b"from rank 0"


def test_a_port_is_open_at_its_own_address_alone():
    with port_meeting(LOOPBACK) as ours:
        store = ours.store(size=1, timeout_s=TIMEOUT_S)
        with socket.create_connection((LOOPBACK, ours.place["port"]), timeout=TIMEOUT_S) as connection:
            assert connection.getpeername()[0] == LOOPBACK
        # Another address of the same interface, which a socket that listens everywhere would answer at.
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.2", ours.place["port"]), timeout=TIMEOUT_S)
        assert store.num_keys() >= 0


def test_nobody_can_meet_at_an_address_of_another_machine():
    with pytest.raises(BraceError, match=rf"cannot meet at {NOBODYS}: ") as caught, port_meeting(NOBODYS):
        pass
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces are asked for their addresses as Linux wants it")
def test_the_interface_with_an_address_is_found_or_the_error_says_how_to_name_one():
    assert interface_of(LOOPBACK) == "lo"
    addresses = {name: meeting._address_of(name) for _, name in socket.if_nameindex()}
    assert addresses["lo"] == LOOPBACK
    for address in filter(None, addresses.values()):
        assert addresses[interface_of(address)] == address
    with pytest.raises(BraceError, match=rf"no network interface here has the address {NOBODYS}.*GLOO_SOCKET_IFNAME"):
        interface_of(NOBODYS)
