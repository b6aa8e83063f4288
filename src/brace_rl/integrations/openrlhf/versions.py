"""Which OpenRLHF the adapter was made for."""

from __future__ import annotations

from brace_rl.integrations.versions import check_version

DISTRIBUTION = "openrlhf"
AT_LEAST, BELOW = (0, 11), (0, 12)
INSTALL = "pip install 'openrlhf[vllm]==0.11.2'"


def check_openrlhf(found: str) -> None:
    """Refuse an OpenRLHF that the adapter was not made for.

    Raises:
        UnsupportedVersionError: names the version found and the supported range.
    """
    check_version("OpenRLHF", found, at_least=AT_LEAST, below=BELOW)
