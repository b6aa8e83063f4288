"""Figures over repeated answers, against brute force and by hand."""

from __future__ import annotations

import itertools
import math
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brace_rl.evaluation.metrics import estimate, ks_up_to, pass_at_k, summarize


def record(problem: str, success: bool, **others: Any) -> dict[str, Any]:
    return {
        "problem_id": problem,
        "success": success,
        "reward": float(success),
        "excluded": False,
        "truncated": False,
        "response_tokens": 10,
        "info": {},
        **others,
    }


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_mean_over_all_subsets(answers: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(answers)))
    brute = fmean(any(subset) for subset in itertools.combinations(answers, k))
    assert math.isclose(pass_at_k(len(answers), sum(answers), k), brute, abs_tol=1e-12)


def test_pass_at_one_is_the_share_of_right_answers() -> None:
    assert pass_at_k(32, 8, 1) == 0.25


@pytest.mark.parametrize(("answers", "right", "k"), [(4, 5, 1), (4, 2, 5), (4, 2, 0), (4, -1, 1)])
def test_pass_at_k_refuses_what_cannot_be(answers: int, right: int, k: int) -> None:
    with pytest.raises(ValueError, match="needs 0 <= right"):
        pass_at_k(answers, right, k)


def test_intervals_hold_the_mean_and_repeat() -> None:
    values = [0.0, 1.0, 1.0, 0.0, 1.0, 0.5]
    first = estimate(values, seed=3)
    assert first == estimate(values, seed=3)
    assert first.low < first.mean < first.high
    assert (first.mean, first.problems) == (fmean(values), 6)


def test_the_interval_covers_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(60):
        found = estimate(list(rng.binomial(1, 0.4, size=60).astype(float)), seed=trial)
        covered += found.low <= 0.4 <= found.high
    # 60 draws of 0.95 have standard deviation 0.028; the percentile bootstrap is a little short at this size.
    assert covered / 60 > 0.85


def test_a_single_problem_has_no_interval_but_its_value() -> None:
    found = estimate([0.25], seed=0)
    assert (found.low, found.high) == (0.25, 0.25)


@pytest.mark.parametrize(("samples", "ks"), [(1, (1,)), (4, (1, 2, 4)), (6, (1, 2, 4, 6)), (32, (1, 2, 4, 8, 16, 32))])
def test_ks_are_powers_of_two_and_the_number_of_answers(samples: int, ks: tuple[int, ...]) -> None:
    assert ks_up_to(samples) == ks


def test_a_summary_by_hand() -> None:
    records = [record("a", True), record("a", False), record("b", False), record("b", False)]
    found = summarize(records, samples=2, seed=0)
    assert found["metrics"]["mean@2"]["mean"] == 0.25
    assert found["metrics"]["pass@1"]["mean"] == 0.25
    assert found["metrics"]["pass@2"]["mean"] == 0.5
    assert found["exact_match"] == 0.25
    assert found["counts"]["problems"] == 2


def test_excluded_answers_count_in_no_mean_and_are_counted() -> None:
    records = [
        record("a", True),
        record("a", False, excluded=True),
        record("b", False, excluded=True),
        record("b", False, excluded=True),
    ]
    found = summarize(records, samples=2, seed=0)
    assert (found["metrics"]["mean@2"]["mean"], found["metrics"]["mean@2"]["problems"]) == (1.0, 1)
    assert "pass@2" not in found["metrics"]
    assert (found["counts"]["excluded"], found["counts"]["problems_without_judged_answer"]) == (3, 1)


def test_the_tasks_own_figures_are_averaged_and_missing_ones_are_zero() -> None:
    records = [record("a", True, info={"f1": 0.5}), record("b", False)]
    assert summarize(records, samples=1, seed=0)["metrics"]["task/f1"]["mean"] == 0.25
