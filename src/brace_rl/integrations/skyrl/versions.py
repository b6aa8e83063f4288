"""Which SkyRL the adapter was made for."""

from __future__ import annotations

from brace_rl.integrations.versions import check_version

DISTRIBUTION = "skyrl"
AT_LEAST, BELOW = (0, 3), (0, 4)
INSTALL = "pip install 'skyrl[fsdp]==0.3.0'"


def check_skyrl(found: str) -> None:
    """Refuse a SkyRL that the adapter was not made for.

    Raises:
        UnsupportedVersionError: names the version found and the supported range.
    """
    check_version("SkyRL", found, at_least=AT_LEAST, below=BELOW)
