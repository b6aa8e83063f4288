"""From returns of continuations to figures by position, with intervals and what it would take to narrow them.

A state's figure, such as ``b = mean(R_pi) - mean(R_mu)`` over its paired continuations, is an unbiased estimate with
noise of known variance. A position's figure is the mean over its states. Its interval resamples prompts with all their
states and continuations: both sources of error move every replicate as they moved the data, so neither need be added
and none counts twice (Davison and Hinkley 1997, section 3.8).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from brace_rl.diagnose.sums import Estimate
from brace_rl.quantiles import student_quantile

Floats = npt.NDArray[np.float64]

REPLICATES = 2000
"""Bootstrap replicates."""

FIGURES = ("v_pi", "v_mu", "value", "b", "g_pi", "g_mu", "staleness")
"""``staleness`` is ``g_pi^2 - g_mu^2`` without the noise in it: above 0 where the critic is nearer to V^mu."""


@dataclass(frozen=True)
class Sample:
    """States and their continuations.

    Attributes:
        prompts, positions: ``[S]`` int, the prompt a state belongs to and where it was cut.
        tokens: ``[S]`` int, policy tokens before the state.
        values: ``[S]`` the critic.
        returns_pi, returns_mu: ``[S, N]``; entry ``j`` of both drew with the same random numbers. NaN in both where one
            was not judged; at least two pairs of every state were.
    """

    prompts: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    values: Floats
    returns_pi: Floats
    returns_mu: Floats


class StateFigure(NamedTuple):
    """``[S]`` each: unbiased estimates, and the variance of their continuation noise."""

    estimates: Floats
    noise: Floats


@dataclass(frozen=True)
class Needed:
    """What would make an interval as narrow as the effect is large; None where it cannot be had that way.

    Attributes:
        prompts: in all, with as many continuations of each state as now.
        continuations: per state and policy, with as many prompts as now.
    """

    prompts: int | None
    continuations: int | None


@dataclass(frozen=True)
class Measured:
    """A mean over states.

    Attributes:
        estimate: with its 95 % interval; NaN bounds for a single prompt.
        noise_share: of the variance of the estimate, what more continuations would remove; NaN if nothing varies. The
            rest is the spread from prompt to prompt.
        needed: None where the interval is no wider, to either side, than the estimate is large.
    """

    estimate: Estimate
    noise_share: float
    needed: Needed | None

    @property
    def is_resolved(self) -> bool:
        """Whether the interval is known and lies on one side of 0."""
        return self.estimate.excludes(0.0)


@dataclass(frozen=True)
class Group:
    """All figures of one position, or of all positions together."""

    label: str
    states: int
    prompts: int
    token_mean: float
    figures: Mapping[str, Measured]
    pairing: float
    """Continuation noise in b, as a share of what it would be if pi and mu drew independently; NaN without noise."""


def state_figures(sample: Sample) -> dict[str, StateFigure]:
    """Every figure of every state."""
    pi, mu, both = (_mean(x) for x in (sample.returns_pi, sample.returns_mu, sample.returns_pi - sample.returns_mu))
    value = StateFigure(sample.values, np.zeros_like(sample.values))
    g_pi = StateFigure(sample.values - pi.estimates, pi.noise)
    g_mu = StateFigure(sample.values - mu.estimates, mu.noise)
    # The square of a noisy estimate is too large by the noise's variance. The noise of the difference of squares is
    # that of its linear part, -2 g_pi e_pi + 2 g_mu e_mu, continuation by continuation.
    staleness = g_pi.estimates**2 - pi.noise - g_mu.estimates**2 + mu.noise
    linear = g_mu.estimates[:, None] * sample.returns_mu - g_pi.estimates[:, None] * sample.returns_pi
    return {
        "v_pi": pi,
        "v_mu": mu,
        "value": value,
        "b": both,
        "g_pi": g_pi,
        "g_mu": g_mu,
        "staleness": StateFigure(staleness, 4 * _mean(linear).noise),
    }


def by_position(sample: Sample, labels: list[str], *, seed: int) -> tuple[Group, list[Group]]:
    """All states together, and the states of every position; the replicates are the same throughout."""
    figures = state_figures(sample)
    prompts = int(sample.prompts.max()) + 1
    drawn = np.random.default_rng(seed).multinomial(prompts, [1 / prompts] * prompts, size=REPLICATES)
    weights = drawn.astype(np.float64)
    everything = np.ones(len(sample.values), dtype=bool)
    groups = [
        _group(label, sample, figures, sample.positions == position, weights) for position, label in enumerate(labels)
    ]
    return _group("all", sample, figures, everything, weights), groups


def measure(figure: StateFigure, prompts: npt.NDArray[np.int64], weights: Floats, continuations: int) -> Measured:
    """The mean of a figure over states.

    Args:
        prompts: ``[S]`` the prompt of each state.
        weights: ``[replicates, prompts]`` how often a replicate drew a prompt.
        continuations: per state and policy.
    """
    size = weights.shape[1]
    count, total, noise = (
        np.bincount(prompts, weights=x, minlength=size)
        for x in (np.ones_like(figure.estimates), figure.estimates, figure.noise)
    )
    value = float(total.sum() / count.sum())
    seen = count > 0
    clusters = int(seen.sum())
    if clusters == 1:
        return Measured(Estimate(value), math.nan, None)
    drawn = weights @ count
    replicates = (weights @ total)[drawn > 0] / drawn[drawn > 0]
    low, high = np.quantile(replicates, _percentiles(clusters))
    # A prompt's share of the mean's deviation, and of its continuation noise.
    spread = float(np.square(total[seen] - value * count[seen]).sum()) * clusters / (clusters - 1)
    share = min(1.0, float(noise.sum()) / spread) if spread > 0 else math.nan
    estimate = Estimate(value, float(low), float(high))
    return Measured(estimate, share, _needed(estimate, share, clusters, continuations))


def _group(
    label: str,
    sample: Sample,
    figures: Mapping[str, StateFigure],
    chosen: npt.NDArray[np.bool_],
    weights: Floats,
) -> Group:
    prompts = sample.prompts[chosen]
    continuations = sample.returns_pi.shape[1]
    apart = float((figures["v_pi"].noise + figures["v_mu"].noise)[chosen].sum())
    return Group(
        label=label,
        states=int(chosen.sum()),
        prompts=len(np.unique(prompts)),
        token_mean=float(sample.tokens[chosen].mean()),
        figures={
            name: measure(StateFigure(f.estimates[chosen], f.noise[chosen]), prompts, weights, continuations)
            for name, f in figures.items()
        },
        pairing=float(figures["b"].noise[chosen].sum()) / apart if apart > 0 else math.nan,
    )


def _mean(returns: Floats) -> StateFigure:
    return StateFigure(np.nanmean(returns, 1), np.nanvar(returns, 1, ddof=1) / (~np.isnan(returns)).sum(1))


def _percentiles(clusters: int) -> tuple[float, float]:
    """Of the replicates, for a 95 % interval from few clusters.

    The bootstrap's spread is too small by ``sqrt((n - 1) / n)`` and has the normal's tails instead of Student's; both
    are made up for by going further out (Hesterberg 2015, section 3.3).
    """
    reach = math.sqrt(clusters / (clusters - 1)) * student_quantile(clusters - 1)
    tail = NormalDist().cdf(-reach)
    return tail, 1 - tail


def _needed(estimate: Estimate, noise_share: float, prompts: int, continuations: int) -> Needed | None:
    half = (estimate.high - estimate.low) / 2
    if half <= abs(estimate.value) or math.isnan(noise_share):
        return None
    if estimate.value == 0:
        return Needed(None, None)
    factor = (half / estimate.value) ** 2
    # Variance now is spread + noise, in shares of 1; it must come down to 1 / factor.
    room = 1 / factor - (1 - noise_share)
    more = math.ceil(continuations * noise_share / room) if room > 0 else None
    return Needed(math.ceil(prompts * factor), more)
