"""Sums over responses with bootstrap replicates beside them, so that any figure made of sums gets an interval.

The bootstrap is the Poisson one, which streams: in every replicate each prompt (each response, where prompts are not
known) counts as often as a Poisson(1) draw says, and all sums are kept for the data and for each replicate. Draws
depend on the prompt's name alone, so responses to a prompt stay together wherever they stand in the files.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from brace_rl.diagnose.response import Floats

REPLICATES = 400
"""Bootstrap replicates: enough that 2.5 % of them are ten."""

INTERVAL = (2.5, 97.5)
"""Percentiles of the 95 % interval."""

ROUNDING = 1e-10
"""Variance, relative to the mean square, that cannot be told from rounding."""

Lookup = Mapping[str, Floats]
"""Sum by name; each a scalar (the data) or ``[REPLICATES]``."""

Figure = Callable[[Lookup], Floats]
"""A figure of sums, which works on both alike."""


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95 % bootstrap interval; NaN where it cannot be had."""

    value: float
    low: float = math.nan
    high: float = math.nan

    def excludes(self, x: float, widened: float = 1.0) -> bool:
        """Whether the interval, ``widened`` about its value, is known and lies on one side of ``x``."""
        low = self.value - widened * (self.value - self.low)
        high = self.value + widened * (self.high - self.value)
        return low > x or high < x


def cluster_weights(clusters: Sequence[str], seed: int) -> Floats:
    """``[B, REPLICATES]`` Poisson(1) draws, the same for the same name and seed."""
    drawn = {}
    for name in dict.fromkeys(clusters):
        digest = hashlib.blake2b(f"{seed}:{name}".encode("utf-8", "backslashreplace"), digest_size=16).digest()
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
        drawn[name] = generator.poisson(1.0, REPLICATES)
    return np.stack([drawn[name] for name in clusters]).astype(np.float64)


class Sums:
    """Named sums over responses, for the data and for every replicate."""

    def __init__(self) -> None:
        self._index: dict[str, int] = {}
        self._sums: Floats = np.zeros((REPLICATES + 1, 0))

    def add(self, columns: Mapping[str, Floats], weights: Floats) -> None:
        """Add ``[B]`` columns, each summed within its response already.

        Args:
            weights: ``[B, REPLICATES]`` from :func:`cluster_weights`.
        """
        for name in columns:
            if name not in self._index:
                self._index[name] = len(self._index)
        missing = len(self._index) - self._sums.shape[1]
        if missing:
            self._sums = np.pad(self._sums, ((0, 0), (0, missing)))
        table = np.stack(list(columns.values()), axis=1)
        at = [self._index[name] for name in columns]
        self._sums[0, at] += table.sum(0)
        self._sums[1:, at] += weights.T @ table

    def scale(self, names: Sequence[str], factor: float) -> None:
        """Multiply sums that are kept relative to a moving reference."""
        at = [self._index[name] for name in names if name in self._index]
        self._sums[:, at] *= factor

    def __contains__(self, name: object) -> bool:
        return name in self._index

    def value(self, name: str) -> float:
        """The sum over the data; 0 for one that nothing was added to."""
        return float(self._sums[0, self._index[name]]) if name in self._index else 0.0

    def estimate(self, figure: Figure) -> Estimate:
        """The figure of the data, with the interval that its replicates give."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            value = float(figure(_View(self._sums[0], self._index)))
            replicates = np.broadcast_to(figure(_View(self._sums[1:].T, self._index)), (REPLICATES,))
        finite = replicates[np.isfinite(replicates)]
        if len(finite) < REPLICATES // 2:  # too few prompts: most replicates drew none
            return Estimate(value)
        low, high = np.percentile(finite, INTERVAL)
        return Estimate(value, float(low), float(high))


class _View(Mapping[str, Floats]):
    def __init__(self, rows: Floats, index: Mapping[str, int]) -> None:
        self._rows, self._index = rows, index

    def __getitem__(self, name: str) -> Floats:
        if name not in self._index:
            return np.zeros_like(self._rows[0]) if len(self._rows) else np.zeros(())
        return np.asarray(self._rows[self._index[name]])

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)


def mean(total: str, count: str) -> Figure:
    """``total / count``."""
    return lambda s: s[total] / s[count]


def slope(prefix: str, x: str, y: str) -> Figure:
    """Least-squares slope of y on x, from the sums ``n``, ``x``, ``xx``, ``y`` and ``xy`` behind the prefix.

    NaN where x does not vary by more than rounding.
    """

    def figure(s: Lookup) -> Floats:
        n = s[f"{prefix}/n"]
        square = s[f"{prefix}/{x}{x}"]
        spread = square - s[f"{prefix}/{x}"] ** 2 / n
        product = s[f"{prefix}/{x}{y}"] - s[f"{prefix}/{x}"] * s[f"{prefix}/{y}"] / n
        return np.where(spread > ROUNDING * square, product / spread, np.nan)

    return figure


def variance(prefix: str, x: str) -> Figure:
    """Variance of x from its sums ``prefix/n``, ``prefix/x`` and ``prefix/xx``; 0 where it is lost in rounding."""

    def figure(s: Lookup) -> Floats:
        square = s[f"{prefix}/{x}{x}"] / s[f"{prefix}/n"]
        found = square - (s[f"{prefix}/{x}"] / s[f"{prefix}/n"]) ** 2
        return np.where(found > ROUNDING * square, found, 0.0)

    return figure


def correlation(prefix: str, x: str, y: str) -> Figure:
    """Pearson's, from the sums; NaN where either does not vary."""

    def figure(s: Lookup) -> Floats:
        n = s[f"{prefix}/n"]
        product = s[f"{prefix}/{x}{y}"] / n - s[f"{prefix}/{x}"] * s[f"{prefix}/{y}"] / n**2
        size = variance(prefix, x)(s) * variance(prefix, y)(s)
        return np.where(size > 0, product / np.sqrt(size), np.nan)

    return figure
