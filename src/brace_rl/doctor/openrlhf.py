"""The doctor for OpenRLHF: its version, what BRACE overrides, and the traps of its settings."""

from __future__ import annotations

from typing import Any

from brace_rl.doctor import fresh_process
from brace_rl.doctor.examination import Examination, Request
from brace_rl.doctor.installation import Framework
from brace_rl.doctor.settings import with_overrides
from brace_rl.integrations.openrlhf.checks import config_findings
from brace_rl.integrations.openrlhf.options import NODE
from brace_rl.integrations.openrlhf.versions import INSTALL, check_openrlhf

PROBE = "brace_rl.doctor.openrlhf_probe"

FRAMEWORK = Framework(
    "OpenRLHF",
    "openrlhf",
    check_openrlhf,
    INSTALL,
    part="OpenRLHF's trainers",
    import_mend="install what is missing, as OpenRLHF says",
)


def examine(request: Request) -> Examination:
    """Look at the installation, then at the settings if there are any, with or without the dashes before them."""
    answer = _ask_process()
    facts = [("openrlhf", answer["openrlhf"] or "not installed"), ("brace-rl", answer["brace"] or "not installed")]
    findings = FRAMEWORK.findings(answer)
    if not any(finding.severity == "error" for finding in findings):
        facts.append(("trainers", "the hook reaches them"))
    if request.config is not None or request.overrides:
        settings = with_overrides(request.config or {}, [pair.lstrip("-") for pair in request.overrides])
        found = config_findings(settings, settings.pop(NODE, None) or {})
        facts.append(("settings", f"{len(found)} found" if found else "good"))
        findings += found
    return Examination(facts=tuple(facts), findings=tuple(findings))


def _ask_process() -> dict[str, Any]:
    return fresh_process.ask(PROBE, about="OpenRLHF")
