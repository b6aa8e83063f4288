"""The doctor for OpenRLHF: its version, what BRACE overrides, and the traps of its settings."""

from __future__ import annotations

from typing import Any

from brace_rl.doctor import fresh_process
from brace_rl.doctor.examination import Examination, Request
from brace_rl.doctor.settings import read_settings, with_overrides
from brace_rl.integrations.finding import Finding
from brace_rl.integrations.openrlhf.checks import config_findings
from brace_rl.integrations.openrlhf.options import NODE
from brace_rl.integrations.openrlhf.versions import INSTALL, check_openrlhf
from brace_rl.integrations.versions import UnsupportedVersionError

PROBE = "brace_rl.doctor.openrlhf_probe"


def examine(request: Request) -> Examination:
    """Look at the installation, then at the settings if there are any, with or without the dashes before them."""
    answer = _ask_process()
    facts = [("openrlhf", answer["openrlhf"] or "not installed"), ("brace-rl", answer["brace"] or "not installed")]
    findings = _installation_findings(answer)
    if not findings:
        facts.append(("trainers", "the hook reaches them"))
    if request.config is not None or request.overrides:
        settings = read_settings(request.config) if request.config is not None else {}
        settings = with_overrides(settings, [pair.lstrip("-") for pair in request.overrides])
        found = config_findings(settings, settings.pop(NODE, None) or {})
        facts.append(("settings", f"{len(found)} found" if found else "good"))
        findings += found
    return Examination(facts=tuple(facts), findings=tuple(findings))


def _ask_process() -> dict[str, Any]:
    return fresh_process.ask(PROBE, about="OpenRLHF")


def _installation_findings(answer: dict[str, Any]) -> list[Finding]:
    if answer["openrlhf"] is None:
        return [Finding("error", "OpenRLHF: not installed", INSTALL)]
    try:
        check_openrlhf(answer["openrlhf"])
    except UnsupportedVersionError as error:
        return [Finding("error", str(error), INSTALL)]
    if answer["error"]:
        what = f"OpenRLHF's trainers cannot be imported: {answer['error']}"
        return [Finding("error", what, "install what is missing, as OpenRLHF says")]
    return [Finding("error", line, INSTALL) for line in answer["seam"]]
