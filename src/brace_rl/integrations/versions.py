"""Which versions of a framework an adapter was made for."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from brace_rl.errors import BraceError


class UnsupportedVersionError(BraceError):
    """An installed framework that the adapter was not made for."""


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, None where it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def release(version_text: str) -> tuple[int, int] | None:
    """First two numbers of a version, None where it does not begin with two."""
    numbers = re.match(r"(\d+)\.(\d+)", version_text)
    return (int(numbers[1]), int(numbers[2])) if numbers else None


def check_version(framework: str, found: str, *, at_least: tuple[int, int], below: tuple[int, int]) -> None:
    """Refuse any version outside ``[at_least, below)``.

    Raises:
        UnsupportedVersionError: names the version found and the supported range.
    """
    numbers = release(found)
    if numbers is None or not at_least <= numbers < below:
        low, high = (".".join(map(str, bound)) for bound in (at_least, below))
        raise UnsupportedVersionError(
            f"{framework} {found}: brace-rl supports at least {low} and below {high}; install one of them"
        )
