"""Which AReaL the adapter was made for."""

from __future__ import annotations

from brace_rl.integrations.versions import UnsupportedVersionError, release

DISTRIBUTION = "areal"
SUPPORTED = ((1, 0), (2, 0))
INSTALL = "pip install areal==1.0.4"


def check_areal(found: str) -> None:
    """Refuse an AReaL that the adapter was not made for.

    Raises:
        UnsupportedVersionError: names the version found and the supported ones.
    """
    if release(found) not in SUPPORTED:
        known = " and ".join(".".join(map(str, numbers)) for numbers in SUPPORTED)
        raise UnsupportedVersionError(f"AReaL {found}: brace-rl supports {known}; install one of them")
