"""What in OpenRLHF's settings keeps BRACE from working, without importing OpenRLHF.

The launcher and the experience maker refuse to start on an error, with the same words as ``brace doctor openrlhf``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from brace_rl.errors import ConfigError
from brace_rl.integrations.checking import entry, window_findings
from brace_rl.integrations.finding import Finding
from brace_rl.integrations.openrlhf.options import ADVANTAGE, NODE, options_from_settings
from brace_rl.integrations.token_level import TokenLevelOptions

KEEP_LOGPROBS = f"set --{ADVANTAGE}.is_correction_level token (before 0.11.2: --{ADVANTAGE}.is_correction_enable)"


def records_logprobs(settings: Mapping[str, Any]) -> bool:
    """Whether OpenRLHF asks its engine for the log-probs that tokens were sampled with."""
    level = entry(settings, f"{ADVANTAGE}.is_correction_level", "off")
    return level != "off" or bool(entry(settings, f"{ADVANTAGE}.is_correction_enable", False))


def config_findings(settings: Mapping[str, Any], node: Mapping[str, Any]) -> list[Finding]:
    """Findings about OpenRLHF's settings as nested mappings; what is missing counts as OpenRLHF's default.

    Args:
        node: BRACE's own options.
    """
    found = list(_critic_findings(settings))
    try:
        options = options_from_settings(node, settings)
    except ConfigError as error:
        return [*found, Finding("error", str(error), "see docs/openrlhf.md for the options")]
    if options.needs_ratios:
        found += _ratio_findings(settings, options)
    return [*found, *window_findings(options, lam=f"{ADVANTAGE}.lambd", window=f"{NODE}.window")]


def _critic_findings(settings: Mapping[str, Any]) -> Iterator[Finding]:
    estimator = entry(settings, f"{ADVANTAGE}.estimator", "gae")
    if estimator != "gae":
        yield Finding(
            "error",
            f"{ADVANTAGE}.estimator = {estimator}: BRACE takes its place, and OpenRLHF has a critic for gae only",
            f"set --{ADVANTAGE}.estimator gae",
        )


def _ratio_findings(settings: Mapping[str, Any], options: TokenLevelOptions) -> Iterator[Finding]:
    if not records_logprobs(settings):
        yield Finding(
            "error",
            f"{ADVANTAGE}.is_correction_level = off: the log-probs that tokens were sampled with are not asked for, "
            f"and value_target = {options.value_target} needs them",
            KEEP_LOGPROBS,
        )
    top_p = entry(settings, "rollout.top_p", 1.0)
    if top_p != 1.0:
        yield Finding(
            "warning",
            f"rollout.top_p = {top_p}: tokens come from a cut-off distribution, OpenRLHF's actor scores them under the "
            "whole one, so every ratio is too small",
            "set --rollout.top_p 1.0",
        )
