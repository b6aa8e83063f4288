"""What to conclude and what to set: the verdict on the critic, and a window and two clips, each with its reason."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from brace_rl.diagnose.finding import Finding
from brace_rl.diagnose.measures import C_GRID, RHO_GRID
from brace_rl.diagnose.statistics import Statistics
from brace_rl.diagnose.sums import Estimate

MIN_BIAS = 0.02
"""Smallest bias worth the name, in standard deviations of the reward."""
WIDENED = 1.5
"""A verdict asks for an interval this many times as wide, about three standard errors: two figures are looked at, and a
false alarm costs more than another file."""
MIN_RESPONSE_ESS = 30.0
"""Responses that whole-response weights must be worth before an expectation made with them is believed."""
MIN_ROWS = 30
MIN_CLUSTERS = 10
"""Fewer responses, or prompts, than these say nothing with an interval."""
MIN_BIN_SHARE = 0.01
"""Share of the tokens that a bin must hold to be named the worst."""
MAX_CUT = 0.01
"""Share of pi's mass, per token, that rho_clip may cut off."""
MAX_WEIGHT = 10.0
"""A window weight above this lets single responses rule a batch."""
ROUNDING_DRIFT = 1e-4
"""Drifts closer to 0 than this are none."""
RATIO_FAULTS = (
    "placeholder_logprobs",
    "mu_equals_pi",
    "systematic_factor",
    "temperature",
    "positive_logprobs",
    "positive_drift",
)
"""Findings that leave no ratio, and no window or clip made of ratios, to be believed ..."""
FAULTS = (*RATIO_FAULTS, "reward_before_policy", "values_shifted", "bootstrap_on_ended")
"""... and those that leave no verdict: of ratios, rewards and values it is made."""


@dataclass(frozen=True)
class Verdict:
    """Whether a critic fitted to the logged returns is stale.

    Attributes:
        sentence: how badly and where, or why it cannot be told.
    """

    state: Literal["stale", "no sign", "cannot tell"]
    sentence: str


@dataclass(frozen=True)
class Recommendation:
    """A setting; ``value`` is None when the data does not say."""

    name: str
    value: float | None
    reason: str


def verdict(stats: Statistics, found: Sequence[Finding] = ()) -> Verdict:
    """Compare what the logged returns teach a critic (``V^mu``) with the value of the current policy.

    Args:
        found: all findings; a fault of the data among them leaves no verdict.
    """
    counts = stats.counts
    if not counts.rows_used:
        return Verdict(
            "cannot tell",
            f"None of the {counts.rows} responses can be used: {counts.rows_empty} have no policy token, "
            f"{counts.rows_not_finite} have NaN or infinity at one, {counts.rows_unearned} a reward before the first.",
        )
    if stats.ratio is None:
        return Verdict("cannot tell", "Without both behavior_logprobs and target_logprobs nothing tells mu from pi.")
    if stats.reward is None:
        return Verdict("cannot tell", "Without rewards there is no value to be stale.")
    if counts.identical == counts.compared:
        return Verdict("cannot tell", "mu equals pi at every token, so nothing in these files tells them apart.")
    faults = _faults(found, FAULTS)
    if faults:
        return Verdict("cannot tell", f"Not before this is mended, or known to be harmless: {faults}.")
    if stats.reward.low == stats.reward.high:
        return Verdict("cannot tell", "Every response has the same reward, so there is no bias to be seen.")
    if counts.rows_used < MIN_ROWS or stats.clusters < MIN_CLUSTERS:
        return Verdict("cannot tell", f"{counts.rows_used} usable responses to {stats.clusters} prompts are too few.")
    return _judged(stats, stats.ratio.response_ess, stats.reward.sigma)


def _judged(stats: Statistics, response_ess: float, sigma: float) -> Verdict:
    """The verdict of files that hold all that it takes; ``sigma`` is the deviation of the reward."""
    threshold = MIN_BIAS * sigma
    evidence = _bias_evidence(stats)
    if not evidence:
        return Verdict(
            "cannot tell",
            f"Whole-response weights are worth {response_ess:.1f} responses, too few for b_hat, and "
            "without values no target can be corrected.",
        )
    seen = [(name, e) for name, e in evidence if e.excludes(0, WIDENED) and abs(e.value) > threshold]
    if seen:
        direction = "low" if seen[0][1].value > 0 else "high"
        found = "; ".join(f"{name} = {interval(e)}" for name, e in seen)
        return Verdict(
            "stale",
            f"A critic fitted to these returns is too {direction}: {found}, at a reward deviation of "
            f"{sigma:.3g}.{_where(stats)}",
        )
    suspect = [f"{name} = {interval(e)}" for name, e in evidence if e.excludes(0) and abs(e.value) > threshold]
    if suspect:
        return Verdict(
            "cannot tell",
            f"A bias is likely but not proven: {'; '.join(suspect)}, where about three standard errors are asked for. "
            "More responses would tell.",
        )
    widest = max(max(abs(e.low), abs(e.high)) for _, e in evidence)
    found = "; ".join(f"{name} = {interval(e)}" for name, e in evidence)
    return Verdict("no sign", f"No bias that matters was seen: {found}. One above {widest:.3g} is unlikely.")


def _faults(found: Sequence[Finding], names: Sequence[str]) -> str:
    return ", ".join(f.name for f in found if f.name in names and f.severity != "note")


def _bias_evidence(stats: Statistics) -> list[tuple[str, Estimate]]:
    evidence = []
    bias = stats.reward.bias if stats.reward is not None else None
    if stats.ratio is not None and bias is not None and stats.ratio.response_ess >= MIN_RESPONSE_ESS:
        evidence.append(("b_hat", bias))
    if stats.shift is not None:
        evidence.append(("BRACE target - return", stats.shift))
    return evidence


def _where(stats: Statistics) -> str:
    enough = MIN_BIN_SHARE * stats.counts.tokens
    clear = [b for b in stats.bins if b.tokens >= enough and b.shift is not None and b.shift.excludes(0)]
    if not clear:
        return ""
    worst = max(clear, key=lambda b: abs(b.shift.value) if b.shift else 0.0)
    shift = interval(worst.shift) if worst.shift else ""
    return f" It is largest with {worst.label} policy tokens to come ({shift})."


def recommendations(stats: Statistics, found: Sequence[Finding] = ()) -> tuple[Recommendation, ...]:
    """Window, rho_clip and c_clip, in that order; none from ratios that a finding says are wrong."""
    faults = _faults(found, RATIO_FAULTS)
    if stats.ratio is None:
        reason = "needs behavior_logprobs and target_logprobs"
    elif stats.counts.identical == stats.counts.compared:
        reason = "mu equals pi at every token, so every window and clip gives the same target; mend the log-probs first"
    elif faults:
        reason = f"the ratios it would rest on are wrong; mend {faults} first and run again"
    else:
        c_clip = _c_clip(stats)
        return _window(stats, c_clip.value or C_GRID[0]), _rho_clip(stats), c_clip
    return tuple(Recommendation(name, None, reason) for name in ("window", "rho_clip", "c_clip"))


def drift_reach(drift: float, eps: float) -> float:
    """``log(1/eps) / |m|`` (Eq. 45); infinite when the weight does not fall."""
    return -math.log(eps) / -drift if drift < -ROUNDING_DRIFT else math.inf


def _window(stats: Statistics, c_clip: float) -> Recommendation:
    assert stats.ratio is not None
    drift = stats.ratio.drift_by_clip[c_clip]
    last = max(1, stats.counts.most_policy_tokens - 1)
    reach = drift_reach(drift, stats.settings.eps)
    eps = stats.settings.eps
    if reach >= last:
        fall = (
            f"at a drift of m = {drift:.3g} the return keeps a weight above {eps:g} over any of them"
            if math.isfinite(reach)
            else f"the weight of the return does not fall (m = {drift:.3g})"
        )
        return Recommendation(
            "window",
            last,
            f"all of the longest response ({last + 1} policy tokens): {fall} (Eq. 45, c_clip {c_clip:g})",
        )
    return Recommendation(
        "window",
        max(1, math.floor(reach)),
        f"log(1/{eps:g}) / |{drift:.3g}|: the longest after which the return keeps a predicted weight of {eps:g} "
        f"(Eq. 45, c_clip {c_clip:g})",
    )


def _rho_clip(stats: Statistics) -> Recommendation:
    assert stats.ratio is not None
    cuts = stats.ratio.cut_by_clip
    clip = next((clip for clip in RHO_GRID if cuts[clip] <= MAX_CUT), None)
    if clip is None:
        largest = RHO_GRID[-1]
        return Recommendation(
            "rho_clip",
            largest,
            f"even {largest:g} cuts off {cuts[largest]:.1%} of pi's mass per token: the responses are too old to be "
            "corrected well; lower the staleness",
        )
    if clip == RHO_GRID[0]:
        return Recommendation(
            "rho_clip", clip, f"the paper's; it cuts off {cuts[clip]:.2%} of pi's mass per token, at most {MAX_CUT:.0%}"
        )
    return Recommendation(
        "rho_clip",
        clip,
        f"the smallest that cuts off at most {MAX_CUT:.0%} of pi's mass per token ({cuts[clip]:.2%}; the paper's "
        f"{RHO_GRID[0]:g} would cut {cuts[RHO_GRID[0]]:.2%}), so the window's fixed point stays near V^pi",
    )


def _c_clip(stats: Statistics) -> Recommendation:
    assert stats.ratio is not None
    loose, tight = C_GRID
    drift = stats.ratio.drift_by_clip
    largest = max((b.weight_max for b in stats.bins), default=1.0)
    if drift[loose] > ROUNDING_DRIFT:
        return Recommendation(
            "c_clip",
            tight,
            f"with {loose:g} the drift is positive (m = {drift[loose]:.3g}), so window weights would grow",
        )
    if largest > MAX_WEIGHT:
        return Recommendation(
            "c_clip",
            tight,
            f"window weights reach {largest:.3g} (c_clip {stats.settings.c_clip:g}); with 1 they cannot pass 1",
        )
    reach = [drift_reach(drift[clip], stats.settings.eps) for clip in C_GRID]
    shown = ["no limit" if math.isinf(r) else f"{r:.0f} tokens" for r in reach]
    return Recommendation(
        "c_clip",
        loose,
        f"the paper's; window weights stay below {largest:.3g}, and the window may reach {shown[0]} instead of "
        f"{shown[1]} with {tight:g}",
    )


def interval(e: Estimate) -> str:
    """Value and interval as text."""
    if math.isnan(e.low):
        return f"{e.value:.3g} (no interval)"
    return f"{e.value:.3g} [{e.low:.3g}, {e.high:.3g}]"
