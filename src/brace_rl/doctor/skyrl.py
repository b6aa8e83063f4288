"""The doctor for SkyRL: its version, the methods that BRACE overrides, and the traps of its configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from brace_rl.doctor import fresh_process
from brace_rl.doctor.examination import Examination, Request
from brace_rl.doctor.installation import Framework
from brace_rl.doctor.settings import with_overrides
from brace_rl.errors import BraceError
from brace_rl.integrations.skyrl.checks import config_findings
from brace_rl.integrations.skyrl.versions import INSTALL, check_skyrl

PROBE = "brace_rl.doctor.skyrl_probe"

FRAMEWORK = Framework("SkyRL", "skyrl", check_skyrl, INSTALL, part="SkyRL's trainers")


def examine(request: Request) -> Examination:
    """Look at the installation, then at the configuration if there is one."""
    # SkyRL reads settings itself where they are all there is; over a file they are laid here.
    answer = _ask_process(() if request.config is not None else request.overrides)
    facts = [("skyrl", answer["skyrl"] or "not installed"), ("brace-rl", answer["brace"] or "not installed")]
    findings = FRAMEWORK.findings(answer)
    if not any(finding.severity == "error" for finding in findings):
        facts.append(("trainers", "what BRACE overrides is there"))
    if request.config is not None or request.overrides:
        found = config_findings(_settings(request, answer))
        facts.append(("configuration", f"{len(found)} found" if found else "good"))
        findings += found
    return Examination(facts=tuple(facts), findings=tuple(findings))


def _ask_process(arguments: Sequence[str]) -> dict[str, Any]:
    return fresh_process.ask(PROBE, *arguments, about="SkyRL")


def _settings(request: Request, answer: dict[str, Any]) -> dict[str, Any]:
    if request.config is not None:
        return with_overrides(request.config, request.overrides)
    if answer["refused"]:
        raise BraceError(f"SkyRL would refuse these settings: {answer['refused']}")
    composed: dict[str, Any] | None = answer["settings"]
    return composed if composed is not None else with_overrides({}, request.overrides)
