"""What a doctor says about an installed framework, from what a probe of it answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from brace_rl.integrations.finding import Finding
from brace_rl.integrations.versions import UnsupportedVersionError


@dataclass(frozen=True)
class Framework:
    """A framework as its doctor speaks of it.

    Attributes:
        name: in sentences.
        distribution: its key in what the probe answers.
        check_version: raises UnsupportedVersionError where the adapter does not support the version.
        install: how to get one that is supported.
        part: what could not be imported, in a sentence that begins with it.
        import_mend: what to do then; None: ``install``.
    """

    name: str
    distribution: str
    check_version: Callable[[str], object]
    install: str
    part: str = ""
    import_mend: str | None = None

    def findings(self, answer: Mapping[str, Any]) -> list[Finding]:
        """What is wrong, from what :func:`~brace_rl.doctor.seam.found_here` found."""
        version = answer[self.distribution]
        if version is None:
            return [Finding("error", f"{self.name}: not installed", self.install)]
        try:
            self.check_version(version)
        except UnsupportedVersionError as error:
            return [Finding("error", str(error), self.install)]
        if answer["error"]:
            what = f"{self.part or self.name} cannot be imported: {answer['error']}"
            return [Finding("error", what, self.import_mend or self.install)]
        if answer["seam"]:
            return [Finding("error", line, self.install) for line in answer["seam"]]
        if answer["brace"] is None:
            what = "brace-rl: found by its path, and not installed; other processes may not find it"
            return [Finding("warning", what, "pip install --no-deps brace-rl")]
        return []
