"""Tables of figures as text, shared by the terminal and the page."""

from __future__ import annotations

import math
from collections.abc import Sequence

from brace_rl.diagnose.advice import drift_reach
from brace_rl.diagnose.finding import SEVERITIES, Finding
from brace_rl.diagnose.measures import ESTIMATORS
from brace_rl.diagnose.statistics import BinFigures, LagFigures, RatioFigures, Statistics
from brace_rl.diagnose.sums import Estimate

Cells = Sequence[str]
TextTable = tuple[Cells, list[Cells]]


def figure(value: float) -> str:
    """Four digits, or a dash."""
    return "-" if not math.isfinite(value) else f"{value:.4g}"


def bounds(e: Estimate) -> str:
    """The interval, or a dash."""
    return "-" if math.isnan(e.low) else f"{e.low:.3g} to {e.high:.3g}"


def findings_count(found: Sequence[Finding]) -> str:
    """How many of which severity."""
    counts = [(severity, sum(f.severity == severity for f in found)) for severity in SEVERITIES]
    named = [f"{count} {severity}{'s' if count > 1 else ''}" for severity, count in counts if count]
    return f"Findings: {', '.join(named)}" if named else "Findings: none"


def summary_rows(stats: Statistics) -> list[Cells]:
    """(figure, value, interval) of everything that is one number."""
    counts = stats.counts
    rows: list[Cells] = [
        ("responses used / read", f"{counts.rows_used:,} / {counts.rows:,}", ""),
        ("policy tokens", f"{counts.tokens:,}", ""),
    ]
    if stats.prompts:
        rows.append(("prompts", f"{stats.prompts:,}", ""))
    if math.isfinite(stats.surprise):
        rows.append(("mean -log mu", figure(stats.surprise), ""))
    if stats.ratio is not None:
        rows += _ratio_rows(stats, stats.ratio)
    if stats.reward is not None:
        rows += _reward_rows(stats)
    if stats.critic is not None:
        critic = stats.critic
        rows += [
            _row("mean V over policy tokens", critic.mean_value),
            _row("mean V before the first token", critic.first_value),
            _row("explained variance of the return", critic.explained_variance),
        ]
    if stats.shift is not None:
        rows.append(_row("BRACE target - return (all tokens)", stats.shift))
        rows.append(("mean |BRACE target - V|", figure(stats.gap), ""))
        rows += [_row(f"beta, {name} (all tokens)", stats.beta[name]) for name in ESTIMATORS]
    return rows


def _row(name: str, e: Estimate) -> Cells:
    return (name, figure(e.value), bounds(e))


def _ratio_rows(stats: Statistics, ratio: RatioFigures) -> list[Cells]:
    settings = stats.settings
    reach = drift_reach(ratio.drift.value, settings.eps)
    return [
        _row("mean pi/mu", ratio.mean),
        _row("sigma of log pi/mu", ratio.log_sigma),
        ("largest |log pi/mu|", figure(ratio.largest_log), ""),
        _row("ESS, share of tokens", ratio.ess),
        ("ESS of whole responses", f"{ratio.response_ess:.1f} of {stats.counts.rows_used}", ""),
        _row(f"drift m (c_clip {settings.c_clip:g}, gamma lambda {settings.gamma * settings.lam:g})", ratio.drift),
        _row("sigma of log min(c_clip, pi/mu)", ratio.sigma),
        (
            f"largest window that keeps {settings.eps:g} (Eq. 45)",
            "no limit" if math.isinf(reach) else f"{math.floor(reach):,}",
            "",
        ),
        (
            f"predicted weight over the window, exp({settings.window} m)",
            figure(math.exp(min(700.0, settings.window * ratio.drift.value))),
            "",
        ),
    ]


def _reward_rows(stats: Statistics) -> list[Cells]:
    reward = stats.reward
    assert reward is not None
    rows = [_row("E_mu[R], mean", reward.under_mu)]
    for name, e in (
        ("E_pi[R], whole-response SNIS", reward.under_pi),
        ("b_hat = E_pi[R] - E_mu[R] (SNIS)", reward.bias),
        ("g_hat = |mean V - E_pi[R]| (SNIS)", reward.critic_gap),
        ("g_hat with V before the first token (SNIS)", reward.critic_gap_first),
    ):
        if e is not None:
            rows.append(_row(name, e))
    return rows


def horizon_table(stats: Statistics) -> TextTable | None:
    """One row per bin of remaining policy tokens."""
    if not stats.bins:
        return None
    heads: list[str] = ["to come", "tokens"]
    has_targets = bool(stats.bins[0].beta)
    if has_targets:
        heads += [f"beta {name}" for name in ESTIMATORS]
    heads += ["exp((T-s)m)", "Pi mean", "Pi max"]
    if has_targets:
        heads += ["G - V", "BRACE - G", "95 % interval"]
    return heads, [_bin_row(b) for b in stats.bins]


def _bin_row(b: BinFigures) -> Cells:
    cells = [b.label, f"{b.tokens:,}", *(figure(beta.value) for beta in b.beta.values())]
    cells += [figure(b.predicted), figure(b.weight_mean.value), figure(b.weight_max)]
    if b.value_error is not None and b.shift is not None:
        cells += [figure(b.value_error.value), figure(b.shift.value), bounds(b.shift)]
    return cells


def lag_table(stats: Statistics) -> TextTable | None:
    """One row per group of version lag; lag 0 is engine mismatch, what grows after it is staleness."""
    if not stats.lags:
        return None
    heads = ("lag", "tokens", "mean", "95 % interval", "mean log", "sigma log", "mean |log|", "5 %", "50 %", "95 %")
    return heads, [_lag_row(lag) for lag in stats.lags]


def _lag_row(lag: LagFigures) -> Cells:
    return [
        f"{lag.label} (mismatch)" if lag.low == 0 else lag.label,
        f"{lag.tokens:,}",
        figure(lag.mean.value),
        bounds(lag.mean),
        figure(lag.log_mean.value),
        figure(lag.log_sigma.value),
        figure(lag.log_abs_mean),
        *(figure(q) for q in lag.quantiles),
    ]
