"""The doctor for AReaL: its version, what BRACE overrides, and the traps of a configuration."""

from __future__ import annotations

from typing import Any

from brace_rl.doctor import fresh_process
from brace_rl.doctor.examination import Examination, Request
from brace_rl.doctor.installation import Framework
from brace_rl.doctor.settings import with_overrides
from brace_rl.integrations.areal.checks import config_findings
from brace_rl.integrations.areal.versions import INSTALL, check_areal

PROBE = "brace_rl.doctor.areal_probe"

FRAMEWORK = Framework("AReaL", "areal", check_areal, INSTALL, import_mend="install what is missing, as AReaL says")


def examine(request: Request) -> Examination:
    """Look at the installation, then at the configuration if there is one."""
    answer = _ask_process()
    facts = [("areal", answer["areal"] or "not installed"), ("brace-rl", answer["brace"] or "not installed")]
    findings = FRAMEWORK.findings(answer)
    if not any(finding.severity == "error" for finding in findings):
        facts.append(("trainer", "what BRACE overrides is there"))
    if request.config is not None or request.overrides:
        found = config_findings(_resolved(with_overrides(request.config or {}, request.overrides)))
        facts.append(("configuration", f"{len(found)} found" if found else "good"))
        findings += found
    return Examination(facts=tuple(facts), findings=tuple(findings))


def _ask_process() -> dict[str, Any]:
    return fresh_process.ask(PROBE, about="AReaL")


def _resolved(settings: dict[str, Any]) -> dict[str, Any]:
    """Replace ``${a.b}``, which AReaL's configurations are full of, by what stands at ``a.b``."""

    def at(key: str) -> Any:
        node: Any = settings
        for part in key.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        return node

    def resolve(node: Any) -> Any:
        if isinstance(node, dict):
            return {name: resolve(value) for name, value in node.items()}
        if isinstance(node, str) and node.startswith("${") and node.endswith("}"):
            return at(node[2:-1])
        return node

    resolved: dict[str, Any] = resolve(settings)
    return resolved
