"""Faults of the data: numbers that are not what their column says. Every check is a pure function of the statistics."""

from __future__ import annotations

from brace_rl.diagnose.advice import interval
from brace_rl.diagnose.collect import UNMOVED, Counts
from brace_rl.diagnose.finding import Finding, Severity
from brace_rl.diagnose.statistics import CriticFigures, Statistics

MIN_FALSE_ZEROS = 3
"""Contradicted zeros below this may be chance: float32 rounds a probability above 1 - 6e-8 to 1."""
MIN_STALE = 100
"""Stale tokens that say whether updates move log-probs, and the share that must be unmoved for a finding."""
UNMOVED_SHARE = 0.9
MIN_UNMOVED_ROWS = 3
"""Stale responses with every ratio exactly 1 that are no accident ..."""
EQUAL_BY_CHANCE = 0.1
"""... where at most this share of the others' tokens is equal: eight equal ones in a row then are one in 10^8."""
STANDSTILL = (
    " Right only where the weights stood still meanwhile (warm-up of the critic, advantages of 0, a tiny learning "
    "rate); then these tokens are as good as fresh, and nothing can be said about staleness."
)
RECORD_MU = (
    "Log the log-probs the engine sampled with, when it samples; do not recompute them with current weights (verl: "
    "rollout.calculate_log_probs = True, and no bypass_mode, which copies them)."
)
MIN_PAIRS = 20
SIBLINGS_DIFFER = 0.5
"""Differences of V before the token that differs, relative to those after it, from which on it is no V-before."""
SIBLINGS_AGREE = 0.01
"""The same from which on two values count as equal."""
MIN_SPREAD = 0.02
"""Differences of V, relative to its deviation, that are worth comparing."""
MIN_ALIGNMENT = 0.2
"""Correlation of value changes with surprise that a shift is read from ..."""
MIN_GAIN = 0.1
"""... and by how much it must exceed that at the right place."""
FULL_LENGTH_SHARE = 0.02
"""Share of responses of exactly the largest length from which on they look cut off ..."""
FULL_LENGTH_ROWS = 5
"""... and their number."""
FULL_LENGTH_SHARE_FLAGGED = 0.1
"""The share where a column says that none was cut, which is believed unless many are."""
MIN_TRUNCATED_SHARE = 0.01


def mu_equals_pi(stats: Statistics) -> Finding | None:
    """Every ratio is exactly 1, or those of stale tokens are but for rounding."""
    counts = stats.counts
    if not counts.compared or counts.identical < counts.compared:
        return _recomputed(counts)
    stale = counts.identical_stale
    aged = bool(counts.fresh or counts.stale)
    severity: Severity
    if aged and not stale:
        severity, what = (
            "note",
            "all of lag 0, where that can be right; an engine of its own differs a little even then",
        )
    else:
        severity = "error" if stale else "warning"
        what = f"{stale} of them stale" if aged else "their lag is not known"
    return Finding(
        "mu_equals_pi",
        severity,
        "behavior_logprobs equal target_logprobs at every policy token, so every ratio is 1 and nothing is corrected.",
        f"{counts.identical} of {counts.compared} tokens are identical; {what}.",
        RECORD_MU,
        {"identical": counts.identical, "compared": counts.compared, "identical_stale": stale},
    )


def _recomputed(counts: Counts) -> Finding | None:
    """Stale tokens, or some stale responses, whose log-probs no update has moved.

    A warning: where no update lies between, nothing is wrong, and the numbers look the same.
    """
    if counts.unsure_stale >= MIN_STALE and counts.unmoved_stale >= UNMOVED_SHARE * counts.unsure_stale:
        which = "stale tokens"
        evidence = (
            f"{counts.unmoved_stale} of {counts.unsure_stale} stale tokens of which the policy was not certain differ "
            f"by less than {UNMOVED:g}"
        )
    elif (
        counts.rows_unmoved >= MIN_UNMOVED_ROWS
        and counts.unsure_elsewhere >= MIN_STALE
        and counts.equal_elsewhere <= EQUAL_BY_CHANCE * counts.unsure_elsewhere
    ):
        which = "some stale responses"
        evidence = (
            f"in {counts.rows_unmoved} of {counts.rows_stale} responses with stale tokens all of these are equal to "
            f"the last digit, in the others {counts.equal_elsewhere} of {counts.unsure_elsewhere}"
        )
    else:
        return None
    return Finding(
        "mu_equals_pi",
        "warning",
        f"behavior_logprobs of {which} equal target_logprobs, as if no update lay between them.",
        evidence + ".",
        RECORD_MU + STANDSTILL,
        {
            "unmoved_stale": counts.unmoved_stale,
            "unsure_stale": counts.unsure_stale,
            "rows_unmoved": counts.rows_unmoved,
            "rows_stale": counts.rows_stale,
        },
    )


def not_finite(stats: Statistics) -> Finding | None:
    """NaN, infinity or null at policy tokens."""
    counts = stats.counts
    if not counts.not_finite:
        return None
    found = ", ".join(f"{name}: {count}" for name, count in counts.not_finite.items())
    return Finding(
        "not_finite",
        "error",
        "Numbers at policy tokens are NaN, infinite or null; their responses are left out of every figure.",
        f"{found} entries; {counts.rows_not_finite} of {counts.rows} responses left out.",
        "Score every policy token. A token that was inserted rather than sampled (a forced end of sequence, tool "
        "output) does not belong into policy_mask.",
        {"rows": counts.rows_not_finite, **{f"entries_{k}": v for k, v in counts.not_finite.items()}},
    )


def placeholder_logprobs(stats: Statistics) -> Finding | None:
    """Log-probs that cannot be log-probs of these tokens."""
    counts = stats.counts
    false = {name: count for name, count in counts.false_zeros.items() if count >= MIN_FALSE_ZEROS}
    if not false and not counts.impossible and not counts.zero_blocks:
        return None
    parts = [
        f"{count} tokens have {name} of exactly 0 where the other side gives less than 0.9"
        for name, count in false.items()
    ]
    if false.get("behavior_logprobs"):
        parts.append(f"{counts.false_zeros_last} of them at the end of a response")
    if counts.impossible:
        parts.append(f"{counts.impossible} log-probs are below anything that is ever sampled")
    if counts.zero_blocks:
        parts.append(f"{counts.zero_blocks} tokens stand in long runs of exact zeros")
    return Finding(
        "placeholder_logprobs",
        "error",
        "Some log-probs are placeholders, so their ratios mean nothing.",
        "; ".join(parts) + f"; {counts.tokens} policy tokens in all.",
        "Take tokens the policy did not sample (a synthetic end of sequence, tool output, padding) out of policy_mask, "
        "and store the sampled log-prob for all others.",
        {
            "impossible": counts.impossible,
            "zero_blocks": counts.zero_blocks,
            **{f"zeros_{k}": v for k, v in false.items()},
        },
    )


def positive_logprobs(stats: Statistics) -> Finding | None:
    """Log-probs of no probability: placeholders, or true ones that something was added to."""
    count = stats.counts.positive
    if not count:
        return None
    return Finding(
        "positive_logprobs",
        "error",
        "Some log-probs are above 0, which no probability has.",
        f"{count} log-probs at {stats.counts.tokens} policy tokens.",
        "Store log-probs as they come out of a log-softmax: no placeholder, no factor, no noise, enough digits.",
        {"positive": count},
    )


def reward_before_policy(stats: Statistics) -> Finding | None:
    """A reward that no action earned."""
    rows = stats.counts.rows_unearned
    if not rows:
        return None
    return Finding(
        "reward_before_policy",
        "error",
        "A reward stands before the first policy token, where no action has earned it.",
        f"{rows} of {stats.counts.rows} responses; they are left out of every figure. Where others have a 0 there, "
        "those left out are chosen by their reward, and the figures are of a selection.",
        "Put it on the policy token that earned it. If all rows are affected, rewards or policy_mask is shifted.",
        {"rows": rows},
    )


def reward_on_non_policy_token(stats: Statistics) -> Finding | None:
    """A reward on tool output or padding."""
    rows = stats.counts.reward_elsewhere - stats.counts.rows_unearned
    if rows <= 0:
        return None
    return Finding(
        "reward_on_non_policy_token",
        "warning",
        "Rewards stand on non-policy tokens (tool output, padding after the end).",
        f"{rows} of {stats.counts.rows} responses; here each was moved to the policy token before it.",
        "Move them yourself before training: a trainer that masks rewards loses them, and every target becomes 0.",
        {"rows": rows},
    )


def _shift_by_siblings(critic: CriticFigures) -> int:
    """Shift of ``values`` from responses to the same prompts; 0: none seen.

    V before the first token that differs tells of a shift only where V agrees at the token before it: where it does
    not, the critics differ, and where few pairs share a token nothing says that they do not.
    """
    if critic.sibling_pairs < MIN_PAIRS:
        return 0
    first, second, third = critic.sibling_differences
    worth = MIN_SPREAD * critic.spread
    if first > worth and first > SIBLINGS_DIFFER * second:
        tested = critic.sibling_earlier_pairs >= MIN_PAIRS
        return 1 if tested and critic.sibling_earlier_difference <= SIBLINGS_DIFFER * first else 0
    return -1 if third > worth and max(first, second) < SIBLINGS_AGREE * third else 0


def values_shifted(stats: Statistics) -> Finding | None:
    """``values[t]`` is not V before token t."""
    critic = stats.critic
    if critic is None:
        return None
    parts: list[str] = []
    numbers: dict[str, float] = {}
    by_siblings = shift = _shift_by_siblings(critic)
    if shift:
        first, second, third = critic.sibling_differences
        earlier = critic.sibling_earlier_difference
        numbers |= {"sibling_pairs": critic.sibling_pairs, "first": first, "second": second, "third": third}
        numbers |= {"earlier_pairs": critic.sibling_earlier_pairs, "earlier": earlier}
        parts.append(
            f"over {critic.sibling_pairs} pairs of responses to the same prompt, V at the first token where they "
            f"differ and at the next two is apart by {first:.3g}, {second:.3g}, {third:.3g} on average, at the token "
            f"before by {earlier:.3g} ({critic.sibling_earlier_pairs} pairs have one); up to the first that differs "
            "they should agree, after it not"
        )
    for offset in (-1, 1):
        gain, own = critic.alignment_gain.get(offset), critic.alignment.get(offset)
        if gain is None or own is None or not (gain.low > 0 and gain.value > MIN_GAIN and own.value > MIN_ALIGNMENT):
            continue
        if shift in (0, offset):
            shift = offset
            numbers |= {"correlation": own.value, "correlation_gain": gain.value}
            parts.append(
                f"changes of V go with the surprise of the {'next' if offset > 0 else 'previous'} token (correlation "
                f"{own.value:.2f}, {interval(gain)} more than with that of their own token)"
            )
    if not shift:
        return None
    which = "after token t" if shift > 0 else "before token t - 1"
    return Finding(
        "values_shifted",
        "error" if by_siblings else "warning",
        f"values look shifted by one: entry t seems to be V {which}, not V before token t.",
        "; ".join(parts) + ".",
        "V before token t is the critic's output at the position before it; shift the column, and check policy_mask "
        "and the log-probs for the same fault.",
        {"shift": shift, **numbers},
    )


def truncation_as_termination(stats: Statistics) -> Finding | None:
    """Cut-off responses are valued as if they had ended."""
    counts = stats.counts
    if not counts.truncated:
        return _full_length(stats)
    rows, cut = counts.rows_used, counts.truncated_without_bootstrap
    if cut < max(1, MIN_TRUNCATED_SHARE * rows):
        return None
    rewards = "" if stats.reward is None else f"; their mean reward is {stats.reward.truncated:.3g}"
    rewards += f", of all {stats.reward.under_mu.value:.3g}" if stats.reward is not None else ""
    if stats.reward is not None and stats.critic is not None:
        rewards += f", and V before their last token {stats.reward.truncated_last:.3g}"
    return Finding(
        "truncation_as_termination",
        "warning",
        "Responses cut at the length limit carry no bootstrap value, so they count as ended with what they got.",
        f"{cut} of {rows} responses ({cut / rows:.1%}){rewards}.",
        "If running out of length should count as failure, nothing is wrong. Otherwise bootstrap from the critic "
        "(algorithm.bootstrap_truncated = true, or a bootstrap column), or raise the length limit.",
        {"rows": cut, "share": cut / rows},
    )


def _full_length(stats: Statistics) -> Finding | None:
    """Many responses of exactly the largest length, none of which is said to be cut."""
    counts, flagged = stats.counts, "truncated" in stats.columns
    share = FULL_LENGTH_SHARE_FLAGGED if flagged else FULL_LENGTH_SHARE
    if counts.shortest == counts.longest or counts.at_longest < max(FULL_LENGTH_ROWS, share * counts.rows):
        return None
    says = "the truncated column is false in every row" if flagged else "no truncated column says so"
    return Finding(
        "truncation_as_termination",
        "note",
        f"Many responses have exactly the largest length and look cut off, but {says}.",
        f"{counts.at_longest} of {counts.rows} responses have {counts.longest} tokens.",
        "If the task itself ends there, nothing is wrong. Otherwise log whether a response was cut, and bootstrap "
        "those that were unless the cut should count as failure.",
        {"rows": counts.at_longest, "length": counts.longest},
    )


def bootstrap_on_ended(stats: Statistics) -> Finding | None:
    """A bootstrap value where the episode was over."""
    counts = stats.counts
    if not counts.bootstrap_on_ended or "truncated" not in stats.columns:
        return None
    return Finding(
        "bootstrap_on_ended",
        "error",
        "Responses that ended carry a bootstrap value, which adds a reward nobody gave.",
        f"{counts.bootstrap_on_ended} of {counts.rows_used} responses.",
        "Set it to 0 where truncated is false; a value from the next packed response may have leaked in.",
        {"rows": counts.bootstrap_on_ended},
    )
