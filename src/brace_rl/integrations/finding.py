"""What is wrong with an installation or a configuration, and what mends it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """Something to mend.

    Attributes:
        severity: an error: training would fail, or do something else than BRACE; a warning: it may.
        what: the thing, its value, and what is wrong with that, in one line.
        mend: what to do.
    """

    severity: Literal["error", "warning"]
    what: str
    mend: str
