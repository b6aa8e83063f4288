"""All checks, in the order in which their mends should be tried."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from brace_rl.diagnose import data_findings, ratio_findings
from brace_rl.diagnose.finding import SEVERITIES, Finding
from brace_rl.diagnose.statistics import Statistics

CHECKS: Sequence[Callable[[Statistics], Finding | None]] = (
    data_findings.not_finite,
    data_findings.placeholder_logprobs,
    data_findings.mu_equals_pi,
    ratio_findings.systematic_factor,
    ratio_findings.temperature,
    ratio_findings.positive_drift,
    ratio_findings.engine_mismatch,
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


def findings(stats: Statistics) -> tuple[Finding, ...]:
    """Everything found, worst first."""
    found = [finding for check in CHECKS if (finding := check(stats)) is not None]
    return tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity)))
