"""Means over seeds with bootstrap intervals, and which method is best where the seeds support saying so."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from statistics import NormalDist, fmean, stdev

import numpy as np
import numpy.typing as npt

from brace_rl.diagnose.sums import Estimate
from brace_rl.quantiles import student_quantile

REPLICATES = 20_000
"""Bootstrap replicates; for few seeds the interval lies far out in their tails."""

FEWEST_SEEDS = 2
"""From one seed nothing can be said about the next."""

BOOTSTRAP_SEED = 0
"""The same seeds give the same interval whenever it is computed."""

BySeed = Mapping[int, float]
"""Seed -> figure of a method."""


def mean_over_seeds(values: Sequence[float]) -> Estimate:
    """The mean of one figure per seed and its 95 % interval, which resamples seeds; NaN bounds for a single seed.

    Percentiles are taken further out for few seeds (Hesterberg 2015, section 3.3), because the bootstrap's spread is
    too small by ``sqrt((n - 1) / n)`` and has the normal's tails. Up to four seeds that is the whole range of them,
    which holds the true mean less often than in 95 % (of two seeds, every second time).

    Raises:
        ValueError: no seed.
    """
    x = np.asarray(values, dtype=np.float64)
    if len(x) == 0:
        raise ValueError("values must hold one figure per seed, got none")
    if len(x) < FEWEST_SEEDS:
        return Estimate(float(x[0]))
    tail = _tail(len(x))
    low, high = np.quantile(_resampled(len(x)) @ x, (tail, 1 - tail))
    return Estimate(float(x.mean()), float(low), float(high))


def paired_difference(a: BySeed, b: BySeed) -> Estimate | None:
    """Mean of ``a - b`` over the seeds both have, with its interval; None where they share none."""
    differences = _differences(a, b)
    return mean_over_seeds(differences) if differences else None


def student_low(values: Sequence[float]) -> float:
    """Lower end of Student's 95 % interval of the mean; NaN below two values, and of two that are equal.

    Successes are multiples of ``1 / problems``, so two differences are now and then equal by chance; their spread of 0
    would say that nothing is left to chance.
    """
    count = len(values)
    if count < FEWEST_SEEDS or (count == FEWEST_SEEDS and math.isclose(*values)):
        return math.nan
    return fmean(values) - student_quantile(count - 1) * stdev(values) / math.sqrt(count)


def leader(figures: Mapping[str, BySeed]) -> str | None:
    """The method with the largest mean; the first of equals. None where no method has a seed."""
    means = {method: sum(values.values()) / len(values) for method, values in figures.items() if values}
    return max(means, key=lambda method: means[method]) if means else None


def best(figures: Mapping[str, BySeed]) -> str | None:
    """The leader, if Student's 95 % interval of its paired difference to every other method lies above 0; else None.

    Student's, because a bootstrap of two to four seeds does not reach past their range, and would mark one of two equal
    methods as often as all differences happen to have one sign: every second time with two seeds.

    The runner-up is one of the others. Asking it of all of them keeps a method from being called best over one that
    scatters so much that it may be better still.
    """
    first = leader(figures)
    others = [values for method, values in figures.items() if method != first and values]
    if first is None or not others:
        return None
    return first if all(student_low(_differences(figures[first], other)) > 0 for other in others) else None


def area(points: Sequence[tuple[float, float]], *, steps: int) -> float:
    """Mean success over the steps of a run: the area under the evaluation curve by trapezoids, divided by ``steps``.

    Args:
        points: (step, success), ascending. The last holds to the end, for runs that failed before it.
        steps: of a whole run.

    Raises:
        ValueError: no point.
    """
    if not points:
        raise ValueError("points must hold an evaluation, got none")
    first, last = points[0], points[-1]
    whole = [(0.0, first[1]), *points, (float(steps), last[1])]
    total = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(whole))
    return total / steps


def _differences(a: BySeed, b: BySeed) -> list[float]:
    return [a[seed] - b[seed] for seed in sorted(set(a) & set(b))]


@cache
def _resampled(count: int) -> npt.NDArray[np.float64]:
    """``[REPLICATES, count]`` shares of every seed in every replicate."""
    drawn = np.random.default_rng(BOOTSTRAP_SEED).multinomial(count, [1 / count] * count, size=REPLICATES)
    return drawn / count


def _tail(count: int) -> float:
    """Share of the replicates below a 95 % interval's lower end."""
    reach = math.sqrt(count / (count - 1)) * student_quantile(count - 1)
    return NormalDist().cdf(-reach)
