"""The figures of a diagnosis: what findings, advice and pages are made of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from brace_rl.diagnose import measures
from brace_rl.diagnose.collect import HISTOGRAM_BINS, Collector, Counts, histogram_place
from brace_rl.diagnose.response import Floats, Ints
from brace_rl.diagnose.settings import Settings
from brace_rl.diagnose.sums import Estimate, Figure, Lookup, Sums, correlation, mean, slope, variance

EXPECTATION = "self-normalised importance sampling over whole responses, all prompts together"
"""How the expectation under pi is estimated: ``E_pi[R] = sum W R / sum W``, ``W`` the product of a response's w."""

QUANTILES = (0.05, 0.5, 0.95)


@dataclass(frozen=True)
class BinFigures:
    """Policy tokens with ``low`` to ``high - 1`` policy tokens still to come.

    Attributes:
        horizon: mean number of policy tokens still to come.
        beta: by estimator (Eq. 15); empty without values and rewards.
        weight_mean, weight_max: of the window weight ``Pi_k``.
        predicted: ``exp((T - s) m)`` at the mean horizon: what the drift predicts for the full-horizon coefficient.
        predicted_window: the same with the horizon cut at the window.
        value_error: mean ``G - V``: by how much V is too low for the logged behaviour. None without values and rewards.
        shift: mean of the BRACE target less the return: what "follow pi for the window, then mu" would change.
        gap: mean ``|BRACE target - V|``.
    """

    low: int
    high: int | None
    tokens: int
    horizon: float
    beta: Mapping[str, Estimate]
    weight_mean: Estimate
    weight_max: float
    predicted: float
    predicted_window: float
    value_error: Estimate | None = None
    shift: Estimate | None = None
    gap: float = math.nan

    @property
    def label(self) -> str:
        """Range of remaining tokens."""
        return f"{self.low} and more" if self.high is None else f"{self.low} to {self.high - 1}"


@dataclass(frozen=True)
class LagFigures:
    """Ratios of the tokens of one group of version lag.

    Attributes:
        quantiles: of w, at :data:`QUANTILES`, from the histogram.
        histogram: tokens by bin of log w.
    """

    low: int
    high: int | None
    tokens: int
    mean: Estimate
    log_mean: Estimate
    log_sigma: Estimate
    log_abs_mean: float
    quantiles: tuple[float, ...]
    histogram: tuple[int, ...]

    @property
    def label(self) -> str:
        """The lags."""
        if self.high is None:
            return f"{self.low} and more"
        return str(self.low) if self.high == self.low + 1 else f"{self.low} to {self.high - 1}"


@dataclass(frozen=True)
class RatioFigures:
    """Of ``w = pi / mu`` over all policy tokens.

    Attributes:
        ess: effective sample size as a share of the tokens.
        drift, sigma: ``m`` and sigma (Eq. 13) at the settings' c_clip.
        drift_by_clip: m at every compared c_clip.
        cut_by_clip: share of pi's mass that a rho_clip cuts off, ``1 - E[min(rho_clip, w)] / E[w]``.
        temper, temper_back: slope of log pi on log mu, about the temperature by which one side is hotter, and of log mu
            on log pi; over tokens of lag 0 where there are any.
        temper_on_fresh: whether those were tokens of lag 0.
        response_ess: effective number of responses of the whole-response weights.
        halves: width of log w in the early half of responses over that in the late half, relative to their surprise.
    """

    mean: Estimate
    log_mean: Estimate
    log_sigma: Estimate
    largest_log: float
    ess: Estimate
    drift: Estimate
    sigma: Estimate
    drift_by_clip: Mapping[float, float]
    cut_by_clip: Mapping[float, float]
    temper: Estimate
    temper_back: Estimate
    temper_on_fresh: bool
    response_ess: float
    halves: Estimate
    histogram: tuple[int, ...]


@dataclass(frozen=True)
class CriticFigures:
    """V against the realised return G, over policy tokens.

    Attributes:
        mean_value: mean V over policy tokens; ``first_value``: mean V before the first one.
        explained_variance: ``1 - Var(G - V) / Var(G)``.
        alignment: correlation of value changes with the surprise of the token before, at, and after them; None without
            log-probs. ``alignment_gain``: the better neighbour's less the own token's.
        sibling_pairs, sibling_differences, sibling_earlier_pairs, sibling_earlier_difference: see
            :class:`~brace_rl.diagnose.siblings.Siblings`; means over the pairs.
        spread: standard deviation of V.
    """

    mean_value: Estimate
    first_value: Estimate
    value_error: Estimate
    explained_variance: Estimate
    spread: float
    alignment: Mapping[int, Estimate]
    alignment_gain: Mapping[int, Estimate]
    sibling_pairs: int
    sibling_differences: tuple[float, ...]
    sibling_earlier_pairs: int
    sibling_earlier_difference: float


@dataclass(frozen=True)
class RewardFigures:
    """Of the reward R of a response.

    Attributes:
        under_mu: ``E_mu[R]``, the plain mean.
        under_pi: ``E_pi[R]``, see :data:`EXPECTATION`; None without ratios, as is ``bias``.
        bias: ``b_hat = E_pi[R] - E_mu[R]``.
        critic_gap: ``g_hat = |mean V - E_pi[R]|``; ``critic_gap_first`` with V before the first policy token. None
            without values.
        low, high: smallest and largest.
        truncated: mean over truncated responses; ``truncated_last``: mean V before their last policy token.
    """

    under_mu: Estimate
    low: float
    high: float
    sigma: float
    under_pi: Estimate | None
    bias: Estimate | None
    critic_gap: Estimate | None
    critic_gap_first: Estimate | None
    truncated: float
    truncated_last: float


@dataclass(frozen=True)
class Statistics:
    """Everything that was found.

    Attributes:
        columns: our names of the columns seen.
        prompts, versions: how many different ones; 0 when not given.
        shift: mean of the BRACE target less the return over all policy tokens; ``gap``: mean ``|BRACE target - V|``.
        beta: by estimator over all policy tokens.
        surprise: mean ``-log mu``; NaN without behaviour log-probs.
    """

    settings: Settings
    counts: Counts
    columns: frozenset[str]
    prompts: int
    versions: int
    surprise: float
    ratio: RatioFigures | None
    lags: tuple[LagFigures, ...]
    bins: tuple[BinFigures, ...]
    critic: CriticFigures | None
    reward: RewardFigures | None
    shift: Estimate | None
    gap: float
    beta: Mapping[str, Estimate]

    @property
    def clusters(self) -> int:
        """What the bootstrap resamples: prompts where known, responses otherwise."""
        return self.prompts or self.counts.rows_used

    @property
    def fresh(self) -> LagFigures | None:
        """Tokens of lag 0: what engine and trainer disagree on without any staleness."""
        return next((lag for lag in self.lags if lag.low == 0), None)


def statistics_of(collector: Collector) -> Statistics:
    """Turn sums into figures. What the files cannot tell is None, empty or NaN."""
    sums = collector.sums
    ratio = _ratio(collector) if "ratio/n" in sums else None
    has_targets = "beta/all/n" in sums
    return Statistics(
        settings=collector.settings,
        counts=collector.counts,
        columns=frozenset(collector.columns),
        prompts=len(collector.prompts),
        versions=len(collector.versions),
        surprise=_ratio_of(sums.value("response/surprise"), sums.value("response/tokens"))
        if "response/surprise" in sums
        else math.nan,
        ratio=ratio,
        lags=_lags(collector) if ratio is not None else (),
        bins=_bins(collector, ratio) if ratio is not None else (),
        critic=_critic(collector) if "value/n" in sums else None,
        reward=_reward(collector) if "response/r" in sums else None,
        shift=sums.estimate(_shift("all")) if has_targets else None,
        gap=_ratio_of(sums.value("gap/all"), sums.value("beta/all/n")),
        beta=_betas(sums, "all") if has_targets else {},
    )


def _ratio(collector: Collector) -> RatioFigures:
    sums, settings = collector.sums, collector.settings
    discount = math.log(settings.gamma * settings.lam)
    fresh = sums.value("temper/fresh/n") > 0
    which = "temper/fresh" if fresh else "temper/all"
    return RatioFigures(
        mean=sums.estimate(mean("ratio/w", "ratio/n")),
        log_mean=sums.estimate(mean("ratio/l", "ratio/n")),
        log_sigma=sums.estimate(_sigma_of("ratio", "l")),
        largest_log=collector.largest_log_ratio,
        ess=sums.estimate(lambda s: s["ratio/w"] ** 2 / (s["ratio/n"] * s["ratio/ww"])),
        drift=sums.estimate(lambda s: s["ratio/c"] / s["ratio/n"] + discount),
        sigma=sums.estimate(_sigma_of("ratio", "c")),
        drift_by_clip={
            clip: _ratio_of(sums.value(f"c/{clip}"), sums.value("ratio/n")) + discount for clip in measures.C_GRID
        },
        cut_by_clip={
            clip: 1 - _ratio_of(sums.value(f"rho/{clip}"), sums.value("ratio/w")) for clip in measures.RHO_GRID
        },
        temper=sums.estimate(slope(which, "x", "y")),
        temper_back=sums.estimate(slope(which, "y", "x")),
        temper_on_fresh=fresh,
        response_ess=_ratio_of(sums.value("is/w") ** 2, sums.value("is/ww")),
        halves=sums.estimate(_halves),
        histogram=tuple(collector.histograms[0].tolist()),
    )


def _halves(s: Lookup) -> Floats:
    early = s["halves/early/ll"] / s["halves/early/surprise"]
    return np.asarray(np.sqrt(early / (s["halves/late/ll"] / s["halves/late/surprise"])))


def _lags(collector: Collector) -> tuple[LagFigures, ...]:
    sums = collector.sums
    found = []
    ends = (*measures.LAG_EDGES[1:], None)
    for group, (low, high) in enumerate(zip(measures.LAG_EDGES, ends, strict=True)):
        name = f"lag{group}"
        if f"{name}/n" not in sums:
            continue
        histogram = collector.histograms[group + 1]
        found.append(
            LagFigures(
                low=low,
                high=high,
                tokens=int(sums.value(f"{name}/n")),
                mean=sums.estimate(mean(f"{name}/w", f"{name}/n")),
                log_mean=sums.estimate(mean(f"{name}/l", f"{name}/n")),
                log_sigma=sums.estimate(_sigma_of(name, "l")),
                log_abs_mean=_ratio_of(sums.value(f"{name}/a"), sums.value(f"{name}/n")),
                quantiles=tuple(_quantile(histogram, share) for share in QUANTILES),
                histogram=tuple(histogram.tolist()),
            )
        )
    return tuple(found)


def _sigma_of(name: str, x: str) -> Figure:
    return lambda s: np.sqrt(variance(name, x)(s))


def _quantile(histogram: Ints, share: float) -> float:
    """Of w, even within a bin; a quantile beyond the histogram's end is that end."""
    reached = np.cumsum(histogram)
    target = share * reached[-1]
    i = int(np.searchsorted(reached, target))
    before = reached[i - 1] if i else 0
    within = (target - before) / max(1, histogram[i])
    return math.exp(histogram_place(min(max((i - 1 + within) / HISTOGRAM_BINS, 0.0), 1.0)))


def _bins(collector: Collector, ratio: RatioFigures) -> tuple[BinFigures, ...]:
    sums, settings = collector.sums, collector.settings
    found = []
    for low, high in measures.horizon_bins(collector.counts.most_policy_tokens):
        name = f"h{low}"
        tokens = int(sums.value(f"{name}/n"))
        if not tokens:
            continue
        horizon = sums.value(f"{name}/horizon") / tokens
        has_targets = f"beta/{name}/n" in sums
        found.append(
            BinFigures(
                low=low,
                high=high,
                tokens=tokens,
                horizon=horizon,
                beta=_betas(sums, name) if has_targets else {},
                weight_mean=sums.estimate(mean(f"{name}/pi", f"{name}/n")),
                weight_max=collector.largest_weight.get(name, math.nan),
                predicted=_exp(horizon * ratio.drift.value),
                predicted_window=_exp(min(horizon, settings.window) * ratio.drift.value),
                value_error=sums.estimate(mean(f"beta/{name}/x", f"beta/{name}/n")) if has_targets else None,
                shift=sums.estimate(_shift(name)) if has_targets else None,
                gap=_ratio_of(sums.value(f"gap/{name}"), tokens) if has_targets else math.nan,
            )
        )
    return tuple(found)


def _betas(sums: Sums, name: str) -> dict[str, Estimate]:
    return {estimator: sums.estimate(slope(f"beta/{name}", "x", estimator)) for estimator in measures.ESTIMATORS}


def _shift(name: str) -> Figure:
    """``(target - V) - (G - V)``, averaged."""
    return lambda s: (s[f"beta/{name}/brace"] - s[f"beta/{name}/x"]) / s[f"beta/{name}/n"]


def _critic(collector: Collector) -> CriticFigures:
    sums, siblings = collector.sums, collector.siblings
    aligned = "align/n" in sums
    own = correlation("align", "d", "0")
    alignment = {o: correlation("align", "d", str(o)) for o in measures.ALIGNMENTS}
    return CriticFigures(
        mean_value=sums.estimate(mean("value/v", "value/n")),
        first_value=sums.estimate(mean("response/first", "response/n")),
        value_error=sums.estimate(mean("value/e", "value/n")),
        explained_variance=sums.estimate(_explained),
        spread=sums.estimate(_sigma_of("value", "v")).value,
        alignment={o: sums.estimate(figure) for o, figure in alignment.items()} if aligned else {},
        alignment_gain={o: sums.estimate(_gain(alignment[o], own)) for o in (-1, 1)} if aligned else {},
        sibling_pairs=siblings.pairs,
        sibling_differences=tuple((siblings.differences / max(1, siblings.pairs)).tolist()),
        sibling_earlier_pairs=siblings.earlier_pairs,
        sibling_earlier_difference=siblings.earlier_difference / max(1, siblings.earlier_pairs),
    )


def _gain(neighbour: Figure, own: Figure) -> Figure:
    return lambda s: neighbour(s) - own(s)


def _explained(s: Lookup) -> Floats:
    total = variance("value", "g")(s)
    return np.where(total > 0, 1 - variance("value", "e")(s) / total, np.nan)


def _reward(collector: Collector) -> RewardFigures:
    sums, settings = collector.sums, collector.settings
    has_ratios, has_values = "is/wr" in sums, "value/n" in sums
    under_mu, under_pi = mean("response/r", "response/n"), mean("is/wr", "is/w")
    value, first = mean("value/v", "value/n"), mean("response/first", "response/n")
    truncated = sums.value("truncated/n")
    comparable = has_ratios and has_values and settings.gamma == 1
    return RewardFigures(
        under_mu=sums.estimate(under_mu),
        low=collector.reward_range[0],
        high=collector.reward_range[1],
        sigma=sums.estimate(_sigma_of("response", "r")).value,
        under_pi=sums.estimate(under_pi) if has_ratios else None,
        bias=sums.estimate(lambda s: under_pi(s) - under_mu(s)) if has_ratios else None,
        critic_gap=sums.estimate(lambda s: np.abs(value(s) - under_pi(s))) if comparable else None,
        critic_gap_first=sums.estimate(lambda s: np.abs(first(s) - under_pi(s))) if comparable else None,
        truncated=_ratio_of(sums.value("truncated/r"), truncated),
        truncated_last=_ratio_of(sums.value("truncated/last"), truncated),
    )


def _ratio_of(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf
