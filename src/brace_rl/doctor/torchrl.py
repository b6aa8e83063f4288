"""The doctor for TorchRL: its version, what BRACE builds on, and the estimator's arguments."""

from __future__ import annotations

from typing import Any

from brace_rl.doctor import fresh_process
from brace_rl.doctor.examination import Examination, Request
from brace_rl.doctor.installation import Framework
from brace_rl.doctor.settings import with_overrides
from brace_rl.integrations.torchrl.options import config_findings
from brace_rl.integrations.torchrl.versions import check_torchrl

PROBE = "brace_rl.doctor.torchrl_probe"

INSTALL = "pip install 'torchrl>=0.14,<0.15' in an environment without verl, which wants another tensordict"

FRAMEWORK = Framework("TorchRL", "torchrl", check_torchrl, INSTALL)


def examine(request: Request) -> Examination:
    """Look at the installation, then at the estimator's arguments if there are any."""
    answer = _ask_process()
    names = {"torchrl": "torchrl", "tensordict": "tensordict", "brace": "brace-rl"}
    facts = [(name, answer[key] or "not installed") for key, name in names.items()]
    findings = FRAMEWORK.findings(answer)
    if not any(finding.severity == "error" for finding in findings):
        facts.append(("estimator", "registered as brace"))
    if request.config is not None or request.overrides:
        found = config_findings(with_overrides(request.config or {}, request.overrides))
        facts.append(("configuration", f"{len(found)} found" if found else "good"))
        findings += found
    return Examination(facts=tuple(facts), findings=tuple(findings))


def _ask_process() -> dict[str, Any]:
    return fresh_process.ask(PROBE, about="TorchRL")
