"""Which TorchRL the adapter was made for."""

from __future__ import annotations

from brace_rl.integrations.versions import check_version

AT_LEAST, BELOW = (0, 14), (0, 15)


def check_torchrl(version: str) -> None:
    """Refuse a TorchRL that was not read.

    Raises:
        UnsupportedVersionError: names the supported range.
    """
    check_version("torchrl", version, at_least=AT_LEAST, below=BELOW)
