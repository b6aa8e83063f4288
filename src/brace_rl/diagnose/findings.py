"""All checks, in the order in which their mends should be tried; what a more certain finding explains is held back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from brace_rl.diagnose import data_findings, ratio_findings
from brace_rl.diagnose.finding import SEVERITIES, Finding
from brace_rl.diagnose.statistics import Statistics

CHECKS: Sequence[Callable[[Statistics], Finding | None]] = (
    data_findings.not_finite,
    data_findings.placeholder_logprobs,
    data_findings.mu_equals_pi,
    ratio_findings.engine_mismatch,
    ratio_findings.systematic_factor,
    ratio_findings.temperature,
    data_findings.positive_logprobs,
    ratio_findings.positive_drift,
    data_findings.reward_before_policy,
    data_findings.reward_on_non_policy_token,
    data_findings.values_shifted,
    ratio_findings.version_ahead,
    ratio_findings.version_per_response,
    data_findings.bootstrap_on_ended,
    data_findings.truncation_as_termination,
    ratio_findings.critic_stale,
    ratio_findings.poor_critic,
    ratio_findings.lambda_with_long_window,
    ratio_findings.extreme_window_weights,
    ratio_findings.low_ess,
    ratio_findings.constant_reward,
    ratio_findings.low_response_ess,
    ratio_findings.too_few_rows,
)

_OF_WEIGHTS = ("extreme_window_weights", "low_ess", "low_response_ess", "critic_stale")
_OF_RATIOS = ("version_per_response", *_OF_WEIGHTS)

EXPLAINS: Mapping[str, Sequence[str]] = {
    "placeholder_logprobs": (
        "mu_equals_pi",
        "engine_mismatch",
        "systematic_factor",
        "temperature",
        "positive_drift",
        *_OF_RATIOS,
    ),
    "mu_equals_pi": ("critic_stale",),
    "systematic_factor": ("positive_logprobs", *_OF_WEIGHTS),
    "positive_logprobs": _OF_WEIGHTS,
    "temperature": ("engine_mismatch", "positive_drift", *_OF_RATIOS),
    "positive_drift": ("critic_stale",),
    "reward_before_policy": ("constant_reward", "poor_critic", "critic_stale"),
    "values_shifted": ("poor_critic", "critic_stale"),
    "bootstrap_on_ended": ("poor_critic", "critic_stale"),
}
"""Fault -> what it brings about by itself; earlier ones are the more certain."""


def findings(stats: Statistics) -> tuple[Finding, ...]:
    """Everything found, worst first, but for what another finding explains: that one names it."""
    found = {finding.name: finding for check in CHECKS if (finding := check(stats)) is not None}
    for cause, effects in EXPLAINS.items():
        if cause not in found or found[cause].severity == "note":
            continue
        held = [name for name in effects if name in found]
        if held:
            mend = f"{found[cause].mend} Held back until this is mended, because it explains them: {', '.join(held)}."
            found[cause] = replace(found[cause], mend=mend)
        found = {name: finding for name, finding in found.items() if name not in held}
    return tuple(sorted(found.values(), key=lambda finding: SEVERITIES.index(finding.severity)))
