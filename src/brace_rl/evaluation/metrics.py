"""Figures over repeated answers to the same problems. No torch.

The unit of chance is the problem, not the answer: intervals resample problems, since answers to one go together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import fmean
from typing import Any

import numpy as np

RESAMPLES = 2000
CONFIDENCE = 0.95


def pass_at_k(answers: int, right: int, k: int) -> float:
    """Chance that at least one of ``k`` answers, drawn from ``answers`` without replacement, is one of the ``right``.

    ``1 - C(n - c, k) / C(n, k)``, the unbiased estimator of Chen et al., arXiv 2107.03374, Eq. 1, in whole numbers.

    Raises:
        ValueError: not ``0 <= right <= answers`` and ``1 <= k <= answers``.
    """
    if not (0 <= right <= answers and 1 <= k <= answers):
        raise ValueError(f"needs 0 <= right <= answers and 1 <= k <= answers, got {answers}, {right} and k = {k}")
    return 1.0 - comb(answers - right, k) / comb(answers, k)


@dataclass(frozen=True)
class Estimate:
    """A mean over problems with its interval.

    Attributes:
        low, high: percentile bootstrap over problems, 95 %; equal to ``mean`` where there is one problem.
        problems: that entered.
    """

    mean: float
    low: float
    high: float
    problems: int


def estimate(values: Sequence[float], *, seed: int) -> Estimate:
    """Mean of one value per problem, with its bootstrap interval. Raises ValueError without values."""
    if not values:
        raise ValueError("needs at least one value")
    array = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(seed)
    means = np.array([rng.choice(array, size=array.size).mean() for _ in range(RESAMPLES)])
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(float(array.mean()), float(low), float(high), array.size)


def ks_up_to(samples: int) -> tuple[int, ...]:
    """1, 2, 4, ... and ``samples`` itself."""
    powers = [2**exponent for exponent in range(samples.bit_length()) if 2**exponent <= samples]
    return tuple(sorted({*powers, samples}))


def summarize(records: Sequence[Mapping[str, Any]], *, samples: int, seed: int) -> dict[str, Any]:
    """The figures of an evaluation.

    Args:
        records: one per answer, see :class:`~brace_rl.evaluation.records.AnswerRecord`.
        samples: answers asked for per problem.

    Returns:
        ``metrics``: name -> mean, low, high, problems. ``mean@n`` is the mean over problems of the share of right
        answers; ``pass@k`` as above, over problems with at least ``k`` judged answers; ``exact_match`` the share of
        right answers among all that were judged; ``reward``; ``task/*`` the task's own. ``counts``: problems, answers,
        excluded answers, truncated, failed environments, problems without a judged answer.
    """
    by_problem: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        by_problem.setdefault(record["problem_id"], []).append(record)
    judged = {problem: [r for r in rows if not r["excluded"]] for problem, rows in by_problem.items()}
    rows_of = [rows for rows in judged.values() if rows]
    metrics: dict[str, Estimate] = {}

    def add(name: str, values: Sequence[float]) -> None:
        if values:
            metrics[name] = estimate(values, seed=seed)

    add(f"mean@{samples}", [fmean(r["success"] for r in rows) for rows in rows_of])
    for k in ks_up_to(samples):
        enough = [rows for rows in rows_of if len(rows) >= k]
        add(f"pass@{k}", [pass_at_k(len(rows), sum(r["success"] for r in rows), k) for rows in enough])
    add("reward", [fmean(r["reward"] for r in rows) for rows in rows_of])
    for name in sorted({name for rows in rows_of for r in rows for name in r["info"]}):
        add(f"task/{name}", [fmean(r["info"].get(name, 0.0) for r in rows) for rows in rows_of])
    answers = [r for rows in rows_of for r in rows]
    return {
        "metrics": {name: vars(value) for name, value in metrics.items()},
        "exact_match": fmean(r["success"] for r in answers) if answers else None,
        "counts": {
            "problems": len(by_problem),
            "answers": len(records),
            "excluded": sum(r["excluded"] for r in records),
            "truncated": sum(r["truncated"] for r in records),
            "environment_errors": sum(bool(r["info"].get("environment_error")) for r in records),
            "problems_without_judged_answer": len(by_problem) - len(rows_of),
        },
        "response_tokens_mean": fmean(r["response_tokens"] for r in records) if records else None,
    }
