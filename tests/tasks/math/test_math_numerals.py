"""Exact values of answers that are numbers."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brace_rl.tasks.math.normalize import normalize, without_unit
from brace_rl.tasks.math.numerals import Numeral, parse_numeral, same_number


def value(text: str) -> Fraction | None:
    number = parse_numeral(without_unit(normalize(text)))
    return None if number is None else number.value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("34", "34"),
        ("-34", "-34"),
        ("+34", "34"),
        ("−34", "-34"),
        ("034", "34"),
        ("1,234", "1234"),
        ("1,234,567.5", "1234567.5"),
        ("10,\\!080", "10080"),
        ("10{,}080", "10080"),
        ("10 080", "10080"),
        (".5", "1/2"),
        ("5.", "5"),
        ("3/4", "3/4"),
        ("-3/4", "-3/4"),
        ("\\frac{3}{4}", "3/4"),
        ("\\dfrac34", "3/4"),
        ("-\\frac{3}{4}", "-3/4"),
        ("\\frac{-3}{4}", "-3/4"),
        ("1\\frac{4}{5}", "9/5"),
        ("-1 \\frac{4}{5}", "-9/5"),
        ("1 4/5", "9/5"),
        ("1½", "3/2"),
        ("½", "1/2"),
        ("1.5 \\times 10^{3}", "1500"),
        ("1.5e-3", "3/2000"),
        ("\\$18.90", "18.9"),
        ("90^\\circ", "90"),
        ("90°", "90"),
        ("20 miles", "20"),
        ("15\\mbox{ cm}^2", "15"),
        ("5 m", "5"),
        ("\\text{60}", None),
        ("2\\frac{7}{5}", None),
        ("3/0", None),
        ("1,23", None),
        ("1,2,3", None),
        ("12,34,567", None),
        ("5 or six", None),
        ("5m", None),
        ("2k", None),
        ("x", None),
        ("", None),
        ("9" * 201, None),
        ("1e999", None),
    ],
)
def test_a_number_has_its_value_however_it_is_written(text: str, expected: str | None) -> None:
    assert value(text) == (None if expected is None else Fraction(expected))


@given(st.integers(-(10**12), 10**12))
def test_separators_never_change_an_integer(number: int) -> None:
    assert value(f"{number:,}") == value(str(number)) == number


@given(st.decimals(allow_nan=False, allow_infinity=False, places=4, min_value=-(10**6), max_value=10**6))
def test_decimals_are_exact(number: object) -> None:
    assert value(str(number)) == Fraction(str(number))


def test_a_long_decimal_stands_for_the_fraction_it_rounds_and_a_short_one_does_not() -> None:
    third = Numeral(Fraction(1, 3))
    for text, same in [
        ("0.333333", True),
        ("0.3333333333", True),
        ("0.33333", False),
        ("0.333334", True),
        ("0.333335", False),
    ]:
        number = parse_numeral(text)
        assert number is not None
        assert same_number(number, third) is same
    # Two decimals are compared exactly, however small their difference.
    assert not same_number(Numeral(Fraction(672, 10**7), 7), Numeral(Fraction(671, 10**7), 7))


@pytest.mark.parametrize(
    ("given", "gold", "same"),
    [
        ("17\\%", "17", True),
        ("17", "17\\%", True),
        ("0.17", "17\\%", True),
        ("0.17", "17", False),
        ("17", "0.17", False),
    ],
)
def test_percent_signs_are_ignored_and_hundredths_answer_a_gold_percent(given: str, gold: str, same: bool) -> None:
    numbers = [parse_numeral(normalize(text)) for text in (given, gold)]
    assert numbers[0] is not None
    assert numbers[1] is not None
    assert same_number(numbers[0], numbers[1]) is same
