"""What stands after a number: a unit that is dropped, or part of the answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brace_rl.tasks.math.equivalence import decide, prove
from brace_rl.tasks.math.units import is_unit

pytest.importorskip("math_verify")


def same(given_answer: str, gold: str) -> bool:
    verdict = decide(given_answer, gold)
    return prove(given_answer, gold) if verdict is None else verdict


@pytest.mark.parametrize(
    "phrase",
    ["miles", "cubic centimeters", "km/h", "m", "mph", "square inches", "(meters)", "sq. ft", "ft-lb", "dozen", "pens"],
)
def test_words_that_name_what_is_counted_are_a_unit(phrase: str) -> None:
    assert is_unit(phrase)


@pytest.mark.parametrize(
    "phrase",
    [
        "x",
        "i",
        "A x",
        "xy",
        "abc",
        "pi",
        "theta",
        "million",
        "tenths",
        "squared",
        "or six",
        "(or 8)",
        "is wrong",
        "",
        "2 m",
    ],
)
def test_variables_numbers_operations_and_sentences_are_none(phrase: str) -> None:
    assert not is_unit(phrase)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("6", "6 x"),
        ("6 x", "6"),
        ("6 x", "6 y"),
        (r"\frac{1}{2} y", r"\frac{1}{2} x"),
        ("2", "2 xy"),
        ("6", "6 i"),
        ("6", r"6\,\mathrm{i}"),
        ("2", r"2\, e"),
        ("6", "6 pi"),
        ("8", "8 million"),
        ("8", "8 squared"),
        ("8", "8 plus pi"),
        ("7", "7 tenths"),
        ("8", "8 is wrong"),
        ("16", r"16 \text{ (or 8)}"),
        ("0.3", r"0.\overline{3}"),
        (r"\frac12", r"\sin 30"),
        ("50", r"0.5\%"),
        ("B", "(A) 5"),
        ("(A,B)", "A"),
    ],
)
def test_what_changes_a_value_makes_another_answer(gold: str, answer: str) -> None:
    assert not same(answer, gold)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("8000000", r"8 \text{ million}"),
        ("3,000,000", r"\$3 million"),
        ("3000000", "3 million dollars"),
        ("12", "12 cm^2"),
        ("12", "12th"),
        ("12", r"12^{\text{th}}"),
        ("5", "5 (meters)"),
        ("5", r"\approx 5"),
        (r"\frac13", r"0.\overline{3}"),
        (r"0.1\overline{6}", r"\frac16"),
        ("0.3", "0.1+0.2"),
        (r"\sqrt2", "2^{0.5}"),
        (r"\frac{x}{2}", "0.5x"),
        (r"\frac12", r"\sin 30^\circ"),
        (r"\emptyset", r"\varnothing"),
        (r"6\pi", r"6\pi \text{ square units}"),
        ("0.5", r"50\%"),
        (r"50\%", "0.5"),
        ("5", r"\underline{5}"),
        ("5", r"\textcolor{red}{5}"),
        ("B", "(B) 5"),
        (r"\text{(D) } 12", "D"),
    ],
)
def test_what_does_not_is_the_same_answer(gold: str, answer: str) -> None:
    assert same(answer, gold)


@given(st.text(alphabet="am. /-(", max_size=40))
def test_any_phrase_gets_a_verdict(phrase: str) -> None:
    assert is_unit(phrase) in (True, False)
