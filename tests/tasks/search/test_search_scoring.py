"""Exact match and F1, on answers checked by hand and on properties."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brace_rl.tasks.search.scoring import exact_match, f1_score, normalize_answer

ITEMS = json.loads((Path(__file__).parents[2] / "data" / "qa_scoring.json").read_text(encoding="utf-8"))
"""Gold answers of public data sets with answers of a real model or of ours; the figures were worked out by hand."""

words = st.text(st.sampled_from("ab the,.-'é"), max_size=20)


def test_there_are_at_least_eighty_items_and_no_two_are_the_same():
    assert len({(item["prediction"], *item["golds"]) for item in ITEMS}) == len(ITEMS) >= 80


@pytest.mark.parametrize("item", ITEMS, ids=[f"{n}-{item['why']}" for n, item in enumerate(ITEMS)])
def test_agrees_with_the_answer_worked_out_by_hand(item):
    assert exact_match(item["prediction"], item["golds"]) is item["exact_match"]
    assert f1_score(item["prediction"], item["golds"]) == pytest.approx(float(Fraction(item["f1"])))


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Beatles!", "beatles"),
        ("An apple a day", "apple day"),
        ("theory", "theory"),
        ("U.S.A.", "usa"),
        ("Jean-Luc", "jeanluc"),
        ("4,000", "4000"),
        ("the", ""),
    ],
)
def test_normalisation(text, normal):
    assert normalize_answer(text) == normal


@given(words)
def test_normalising_twice_changes_nothing_once_articles_are_gone(text):
    once = normalize_answer(text)
    assert normalize_answer(once) == once


@given(words, st.lists(words, min_size=1, max_size=3))
def test_exact_match_means_f1_of_one_and_f1_is_a_share(prediction, golds):
    assert 0 <= f1_score(prediction, golds) <= 1
    if exact_match(prediction, golds):
        assert f1_score(prediction, golds) == 1


@given(words, st.lists(words, min_size=2, max_size=4))
def test_the_best_gold_answer_counts_whatever_the_order(prediction, golds):
    assert (
        f1_score(prediction, golds)
        == f1_score(prediction, golds[::-1])
        == max(f1_score(prediction, [g]) for g in golds)
    )
    assert exact_match(prediction, golds) == any(exact_match(prediction, [gold]) for gold in golds)


def test_a_prediction_of_nothing_matches_not_even_nothing():
    assert not exact_match("the", ["The"])
    assert f1_score("", [""]) == 0


@pytest.mark.parametrize("golds", [[], "Paris"])
def test_gold_answers_are_a_list_that_is_not_empty(golds):
    with pytest.raises(ValueError, match="list of at least one"):
        exact_match("Paris", golds)
    with pytest.raises(ValueError, match="list of at least one"):
        f1_score("Paris", golds)
