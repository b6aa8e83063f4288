"""What a doctor is asked, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from brace_rl.integrations.finding import Finding


@dataclass(frozen=True)
class Request:
    """What to look at.

    Attributes:
        config: the settings in a configuration file of the framework, or None.
        overrides: ``key=value`` pairs on top, as the framework's own command takes them.
        workers: ask other processes of the framework too, which may take a while.
    """

    config: dict[str, Any] | None = None
    overrides: tuple[str, ...] = ()
    workers: bool = True


@dataclass(frozen=True)
class Examination:
    """What was seen.

    Attributes:
        facts: pairs of what was looked at and what was found there, in the order of looking.
        findings: what to mend; empty when all is well.
    """

    facts: tuple[tuple[str, str], ...]
    findings: tuple[Finding, ...]
