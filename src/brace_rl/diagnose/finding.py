"""What a finding is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["error", "warning", "note"]

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""Worst first. An error: figures made of these data mislead. A warning: training suffers. A note: worth knowing."""


@dataclass(frozen=True)
class Finding:
    """Something about the data or the settings that a person should know.

    Attributes:
        name: stable, for machines and for ``docs/diagnose.md``.
        title: what is the matter, in one sentence.
        evidence: the numbers it rests on.
        mend: what to do.
        numbers: the evidence for machines.
    """

    name: str
    severity: Severity
    title: str
    evidence: str
    mend: str
    numbers: Mapping[str, float] = field(default_factory=dict)
