"""What ratios, settings and the critic reveal. Each check is pure: statistics to Finding or None."""

from __future__ import annotations

import math

from brace_rl.diagnose.advice import MIN_CLUSTERS, MIN_RESPONSE_ESS, MIN_ROWS, interval, verdict
from brace_rl.diagnose.finding import Finding, Severity
from brace_rl.diagnose.statistics import EXPECTATION, Statistics
from brace_rl.diagnose.sums import Estimate

MAX_EXPONENT = 700.0
"""``exp`` of more is no float."""
MIN_FRESH_TOKENS = 100
FACTOR_FRESH, FACTOR_STALE = 0.002, 0.01
"""How far the mean ratio may be from 1: over tokens of lag 0, and over all."""
MAX_SIGMA = 0.5
"""Above this deviation of log w a mean ratio rests on few tokens and proves nothing."""
NOISE_RAISES = 1.0
"""Largest excess of a mean ratio over 1, in variances of log w, that is put down to noise: half is what it makes of
even noise, and as much again is left for its tails."""
TEMPER_FRESH, TEMPER_STALE = 0.02, 0.15
"""How far the slope of log pi on log mu may be from 1; training itself moves it a little."""
MIRRORED = 0.5
"""How far the slope of log mu on log pi must be off 1 to the other side, in logarithms, as a share of the first slope:
1 for a temperature, 0 for noise in mu, in between for both."""
MISMATCH_SIGMA = 0.1
"""Deviation of log w at lag 0 that passes for numerical precision."""
ROUNDING_DRIFT = 1e-3
MIN_STAMPED = 30
"""Responses needed before their versions are judged."""
HALVES = 1.2
"""How much wider early ratios must be than late ones before a response seems to straddle an update."""
LONG_WINDOW = 20
"""Window from which on lambda below 1 is worth a warning; as in a recipe ..."""
LEAST_LEFT = 0.5
"""... where it leaves less weight than this."""
LOW_ESS = 0.1
LOW_EXPLAINED = 0.0
HIGH_WEIGHT = 100.0
LOW_WEIGHT = 0.01


def _severity(severity: Severity, stats: Statistics) -> Severity:
    """Of a finding that rests on an interval, which a handful of responses cannot give."""
    return "note" if _too_few(stats) else severity


def _too_few(stats: Statistics) -> bool:
    return stats.counts.rows_used < MIN_ROWS or stats.clusters < MIN_CLUSTERS


def systematic_factor(stats: Statistics) -> Finding | None:
    """The mean ratio is not 1, which no amount of staleness can do; noise in recorded log-probs raises it."""
    ratio, fresh = stats.ratio, stats.fresh
    if ratio is None:
        return None
    if fresh is not None and fresh.tokens >= MIN_FRESH_TOKENS:
        mean, sigma, allowed, which = fresh.mean, fresh.log_sigma.value, FACTOR_FRESH, "tokens of lag 0"
    else:
        mean, sigma, allowed, which = ratio.mean, ratio.log_sigma.value, FACTOR_STALE, "all tokens"
    if not mean.excludes(1) or abs(mean.value - 1) <= allowed or sigma > MAX_SIGMA:
        return None
    is_noise = 0 < mean.value - 1 <= NOISE_RAISES * sigma**2
    weight = math.exp(min(MAX_EXPONENT, math.log(mean.value) * stats.settings.window)) if mean.value > 0 else 0.0
    over = Estimate(mean.value - 1, mean.low - 1, mean.high - 1)
    evidence = (
        f"mean pi/mu over {which}, less 1, is {interval(over)}, where it must be 0 whatever the staleness; over a "
        f"window of {stats.settings.window} such a factor multiplies to {weight:.2g}"
    )
    numbers = {"mean_ratio": mean.value, "low": mean.low, "high": mean.high, "over_window": weight}
    if is_noise:
        return Finding(
            "systematic_factor",
            _severity("warning", stats),
            "Ratios are too large on average, by as much as noise in the recorded log-probs makes them.",
            f"{evidence}; noise alone raises it by half the variance of log pi/mu, {sigma**2 / 2:.3g}.",
            "Record the log-probs that tokens were really sampled with, to full precision. If they are, mu lacks a "
            "renormalisation or comes from other weights than it says.",
            numbers,
        )
    return Finding(
        "systematic_factor",
        _severity("error", stats),
        "Ratios carry a systematic factor: mu and pi are not log-probs of the same kind of distribution.",
        f"{evidence}.",
        "Below 1: mu was renormalised over a top-p or top-k set and pi was not; score pi over the same set, or sample "
        "with top_p = 1. Above 1: mu lacks a renormalisation or comes from other weights than it says. Either way log "
        "mu after all sampling filters, and give pi the same ones.",
        numbers,
    )


def temperature(stats: Statistics) -> Finding | None:
    """One side is hotter than the other: then one slope is above 1 and the other below. Noise lowers both."""
    if stats.ratio is None:
        return None
    slope, back, fresh = stats.ratio.temper, stats.ratio.temper_back, stats.ratio.temper_on_fresh
    allowed = TEMPER_FRESH if fresh else TEMPER_STALE
    if not slope.excludes(1) or abs(slope.value - 1) <= allowed or min(slope.value, back.value) <= 0:
        return None
    mirrored = -math.log(back.value) / math.log(slope.value)
    if not back.excludes(1) or mirrored < MIRRORED:
        return None
    return Finding(
        "temperature",
        _severity("error" if fresh else "warning", stats),
        "mu and pi look like log-probs at different temperatures.",
        f"the slope of log pi on log mu over {'tokens of lag 0' if fresh else 'all tokens'} is {interval(slope)}, "
        f"which is about what tokens sampled at temperature {slope.value:.2g} of pi's would give, and the slope of log "
        f"mu on log pi {interval(back)}; both should be 1.",
        "Divide the trainer's logits by the sampling temperature before its log-softmax, or log mu at the temperature "
        "that pi is scored at.",
        {"slope": slope.value, "low": slope.low, "high": slope.high, "slope_back": back.value},
    )


def positive_drift(stats: Statistics) -> Finding | None:
    """m above 0 cannot come from staleness: ``E[log min(c, w)] <= log E[w] = 0``."""
    if stats.ratio is None:
        return None
    drift = stats.ratio.drift
    if not (drift.low > 0 and drift.value > ROUNDING_DRIFT):
        return None
    growth = math.exp(min(MAX_EXPONENT, drift.value * stats.settings.window))
    return Finding(
        "positive_drift",
        _severity("error", stats),
        "The drift m is above 0: the trainer finds sampled tokens likelier than the engine did, on average.",
        f"m = {interval(drift)} at c_clip {stats.settings.c_clip:g}; window weights grow to about {growth:.3g}.",
        "Staleness makes m negative, so engine and trainer disagree: compare their log-probs under the same weights "
        "(precision, temperature, top-p, chat template, token ids). Until then use c_clip = 1.",
        {"m": drift.value, "low": drift.low, "high": drift.high},
    )


def engine_mismatch(stats: Statistics) -> Finding | None:
    """Fresh tokens already have wide ratios."""
    fresh = stats.fresh
    if fresh is None or fresh.tokens < MIN_FRESH_TOKENS or fresh.log_sigma.value <= MISMATCH_SIGMA:
        return None
    low, _, high = fresh.quantiles
    return Finding(
        "engine_mismatch",
        "warning",
        "Engine and trainer disagree on tokens that are not stale at all.",
        f"at lag 0 log pi/mu has deviation {fresh.log_sigma.value:.3g} and mean size {fresh.log_abs_mean:.3g} over "
        f"{fresh.tokens} tokens; 90 % of the ratios lie in [{low:.3g}, {high:.3g}].",
        "Score the same tokens with both under the same weights. Usual causes: bfloat16 or quantised sampling, another "
        "attention kernel, re-tokenised text, a prefix cache kept across a weight update.",
        {"sigma": fresh.log_sigma.value, "mean_abs": fresh.log_abs_mean, "tokens": fresh.tokens},
    )


def version_per_response(stats: Statistics) -> Finding | None:
    """One version for a whole response, although responses straddle updates."""
    counts = stats.counts
    if not counts.stale or counts.several_versions or counts.one_version < MIN_STAMPED or stats.versions < 2:
        return None
    halves = stats.ratio.halves if stats.ratio is not None else None
    straddles = halves is not None and halves.low > 1 and halves.value > HALVES
    if not straddles and counts.stamped < counts.one_version:
        return None
    evidence = f"all {counts.one_version} responses carry a single version, out of {stats.versions} in the files"
    if halves is not None and straddles:
        evidence += (
            f"; yet relative to surprise, log ratios are {interval(halves)} times as wide in their first half as in "
            "their second, as if later tokens came from newer weights"
        )
    return Finding(
        "version_per_response",
        "warning" if straddles else "note",
        "Versions are stamped once per response, so a response that straddles a weight update is misdated.",
        evidence + ".",
        "Log the version with every token. If no weights change while a response is sampled, one version is right.",
        {"responses": counts.one_version, "versions": stats.versions, "halves": halves.value if halves else math.nan},
    )


def version_ahead(stats: Statistics) -> Finding | None:
    """Tokens newer than the weights that judge them."""
    early = stats.counts.early
    if not early:
        return None
    return Finding(
        "version_ahead",
        "error",
        "Tokens carry a version newer than current_version.",
        f"{early} tokens have a negative lag.",
        "current_version counts completed trainer steps, as versions does; check that both use the same counter and "
        "that it was restored on resume.",
        {"tokens": early},
    )


def lambda_with_long_window(stats: Statistics) -> Finding | None:
    """lambda kills the anchor."""
    settings = stats.settings
    if settings.lam >= 1 or settings.window < LONG_WINDOW:
        return None
    left = settings.lam**settings.window
    if left >= LEAST_LEFT:
        return None
    half = max(1, int(math.log(LEAST_LEFT) / math.log(settings.lam)))
    return Finding(
        "lambda_with_long_window",
        "warning",
        "lambda below 1 with a long window: little of the realised return reaches the target.",
        f"lambda = {settings.lam:g} to the power of the window, {settings.window}, leaves {left:.2g}.",
        f"Use lambda = 1, or a window of at most {half}, which leaves half the weight.",
        {"lam": settings.lam, "window": settings.window, "left": left},
    )


def low_ess(stats: Statistics) -> Finding | None:
    """A handful of tokens carries the weight."""
    if stats.ratio is None or not stats.ratio.ess.value < LOW_ESS:
        return None
    return Finding(
        "low_ess",
        "warning",
        "The effective sample size of the per-token ratios is very low.",
        f"{stats.ratio.ess.value:.3g} of the tokens, where 1 is on-policy; the largest |log ratio| is "
        f"{stats.ratio.largest_log:.3g}.",
        "Lower the staleness, and check the findings on mismatch first: a wrong log-prob looks the same. Clips keep "
        "the targets bounded meanwhile.",
        {"ess": stats.ratio.ess.value},
    )


def low_response_ess(stats: Statistics) -> Finding | None:
    """Whole-response weights are worth too few responses."""
    rows = stats.counts.rows_used
    if stats.ratio is None or stats.reward is None or rows < MIN_ROWS or stats.ratio.response_ess >= MIN_RESPONSE_ESS:
        return None
    return Finding(
        "low_response_ess",
        "note",
        "b_hat and g_hat cannot be trusted here: whole-response weights are worth too few responses.",
        f"{rows} responses are worth {stats.ratio.response_ess:.1f} (estimator: {EXPECTATION}).",
        "Read the shift by horizon instead, which corrects a window only, or sample fresh responses with the current "
        "policy. More rows help little with long responses.",
        {"rows": rows, "worth": stats.ratio.response_ess},
    )


def too_few_rows(stats: Statistics) -> Finding | None:
    """Intervals mean nothing yet."""
    rows, clusters = stats.counts.rows_used, stats.clusters
    if not _too_few(stats):
        return None
    return Finding(
        "too_few_rows",
        "note",
        "There are too few responses to say much; findings that rest on an interval are notes here.",
        f"{rows} usable responses, {clusters} {'prompts' if stats.prompts else 'responses'} to resample; "
        f"wanted {MIN_ROWS} and {MIN_CLUSTERS}.",
        "Give several files of one run, or log more responses per step.",
        {"rows": rows, "clusters": clusters},
    )


def constant_reward(stats: Statistics) -> Finding | None:
    """Nothing to learn from."""
    if stats.reward is None or stats.reward.low != stats.reward.high:
        return None
    return Finding(
        "constant_reward",
        "warning",
        "Every response has the same reward, so there is nothing to learn from it.",
        f"{stats.counts.rows_used} responses, all with reward {stats.reward.low:g}.",
        "Check the verifier and the difficulty of the prompts; slopes and biases rest on the critic's noise alone.",
        {"reward": stats.reward.low},
    )


def extreme_window_weights(stats: Statistics) -> Finding | None:
    """Pi_k explodes, or forgets the return."""
    if not stats.bins or stats.ratio is None:
        return None
    largest = max(b.weight_max for b in stats.bins)
    smallest = min(b.weight_mean.value for b in stats.bins)
    if largest <= HIGH_WEIGHT and smallest >= LOW_WEIGHT:
        return None
    return Finding(
        "extreme_window_weights",
        "warning",
        "The weight that the window leaves to the return is extreme.",
        f"Pi_k at window {stats.settings.window} and c_clip {stats.settings.c_clip:g}: largest {largest:.3g}, smallest "
        f"mean of a bin {smallest:.3g}.",
        "Take the recommended window; with large weights also c_clip = 1, which keeps them at most 1.",
        {"largest": largest, "smallest_mean": smallest},
    )


def poor_critic(stats: Statistics) -> Finding | None:
    """A constant would predict the return better."""
    if stats.critic is None or not stats.critic.explained_variance.high < LOW_EXPLAINED:
        return None
    return Finding(
        "poor_critic",
        _severity("warning", stats),
        "The critic predicts the return worse than a constant.",
        f"explained variance {interval(stats.critic.explained_variance)}; mean G - V is "
        f"{interval(stats.critic.value_error)}.",
        "Give it warm-up steps or a larger learning rate, and check the findings on values first: a shifted column "
        "looks the same.",
        {"explained_variance": stats.critic.explained_variance.value},
    )


def critic_stale(stats: Statistics) -> Finding | None:
    """What the tool was asked."""
    found = verdict(stats)
    if found.state != "stale":
        return None
    return Finding(
        "critic_stale",
        "warning",
        "The critic is stale: it is fitted to returns of the sampling policy, and those of the current one differ.",
        found.sentence,
        "Fit it to the BRACE target with the window and clips recommended here, or lower the staleness.",
        {} if stats.reward is None or stats.reward.bias is None else {"b_hat": stats.reward.bias.value},
    )
