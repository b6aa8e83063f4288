"""The calculator's parser against Python's own fractions, and its limits."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brace_rl.tasks.arithmetic import (
    MAX_DEPTH,
    MAX_LENGTH,
    ArithmeticInputError,
    count_operations,
    evaluate,
    format_number,
)


class Term:
    """A random expression: its text, its value by Python's Fraction, its binary operations, its binding strength."""

    def __init__(self, text: str, value: Fraction, operations: int, binding: int) -> None:
        self.text, self.value, self.operations, self.binding = text, value, operations, binding

    def at_least(self, binding: int) -> str:
        return self.text if self.binding >= binding else f"({self.text})"


SUM, PRODUCT, ATOM = 1, 2, 3
NUMBERS = st.one_of(
    st.integers(0, 9999).map(lambda n: Term(str(n), Fraction(n), 0, ATOM)),
    st.integers(1000, 9_999_999).map(lambda n: Term(f"{n:,}", Fraction(n), 0, ATOM)),
    st.tuples(st.integers(0, 99), st.integers(0, 999)).map(
        lambda pair: Term(f"{pair[0]}.{pair[1]:03d}", Fraction(pair[0] * 1000 + pair[1], 1000), 0, ATOM)
    ),
)


@st.composite
def combined(draw: st.DrawFn, parts: st.SearchStrategy[Term]) -> Term:
    operator = draw(st.sampled_from(["+", "-", "*", "/", "//", "%", "negate"]))
    left = draw(parts)
    if operator == "negate":
        return Term(f"-{left.at_least(ATOM)}", -left.value, left.operations, PRODUCT)
    right = draw(parts)
    binding = SUM if operator in "+-" else PRODUCT
    space = draw(st.sampled_from(["", " "]))
    # A "%" counts as a modulo only before a number or a parenthesis, so its right side is wrapped.
    right_text = f"({right.text})" if operator == "%" else right.at_least(binding + 1)
    text = f"{left.at_least(binding)}{space}{operator}{space}{right_text}"
    if right.value == 0 and operator in ("/", "//", "%"):
        return left
    value = {
        "+": lambda: left.value + right.value,
        "-": lambda: left.value - right.value,
        "*": lambda: left.value * right.value,
        "/": lambda: left.value / right.value,
        "//": lambda: Fraction(left.value // right.value),
        "%": lambda: left.value % right.value,
    }[operator]()
    return Term(text, value, left.operations + right.operations + 1, binding)


EXPRESSIONS = st.recursive(NUMBERS, combined, max_leaves=12)
NO_LIMIT = {"max_digits": 10_000, "max_length": 10_000}


@settings(max_examples=300, deadline=None)
@given(EXPRESSIONS)
def test_value_and_operation_count_equal_those_of_fraction_arithmetic(term: Term) -> None:
    assert evaluate(term.text, max_operations=term.operations, **NO_LIMIT) == term.value
    if term.operations:
        with pytest.raises(ArithmeticInputError, match="operations"):
            evaluate(term.text, max_operations=term.operations - 1, **NO_LIMIT)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="0123456789.,+-*/%^() ex\u00d7\u0663", max_size=40))
def test_any_text_gives_a_fraction_or_an_input_error(text: str) -> None:
    result: Fraction | ArithmeticInputError
    try:
        result = evaluate(text)
    except ArithmeticInputError as error:
        result = error
    assert isinstance(result, Fraction) or 0 < len(str(result)) < 80


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("(12+7)*3-5", 52),
        ("2^3^2", 512),
        ("2**3", 8),
        ("-2^2", -4),
        ("2^-2", Fraction(1, 4)),
        ("2*-3", -6),
        ("3--5", 8),
        ("+4", 4),
        ("7//2", 3),
        ("-7//2", -4),
        ("7%4", 3),
        ("50%*20", 10),
        ("200*15%", 30),
        ("10+50%", Fraction(21, 2)),
        ("1,000,000/8", 125_000),
        ("80,000*1.5", 120_000),
        (".25*30", Fraction(15, 2)),
        ("5.*2", 10),
        ("6×7÷2", 21),
        (" 1 + 2 ", 3),
    ],
)
def test_grammar(text: str, value: Fraction | int) -> None:
    assert evaluate(text) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "incomplete"),
        ("1+", "incomplete"),
        ("(1", r"missing '\)'"),
        ("1)", r"unexpected '\)'"),
        ("2 3", "unexpected '3'"),
        ("1,00", "unexpected ','"),
        ("1.2.3", "unexpected '.3'"),
        ("1e5", "unexpected 'e'"),
        ("__import__('os')", "unexpected '_'"),
        ("1/0", "division by zero"),
        ("1//0", "division by zero"),
        ("1%(2-2)", "division by zero"),
        ("0^-1", "division by zero"),
        ("2^0.5", "exponent must be an integer"),
        ("\u0663+1", "unexpected"),
    ],
)
def test_bad_input_is_an_error_that_says_why(text: str, message: str) -> None:
    with pytest.raises(ArithmeticInputError, match=message):
        evaluate(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("9^9^9^9", "too large"),
        ("9^99^99", "too large"),
        ("(10^40)", "number too large"),
        ("2^-99*2^-99", "number too large"),
        ("9" * 41, "number too large"),
        ("0." + "1" * 41, "number too large"),
        ("9" * 1_000_000, "longer than"),
        ("(" * 10_000 + "1" + ")" * 10_000, "longer than"),
        ("(" * (MAX_DEPTH + 1) + "1" + ")" * (MAX_DEPTH + 1), "nested too deeply"),
        ("-" * (MAX_LENGTH - 1) + "1", "nested too deeply"),
        ("^".join(["1"] * 140), "nested too deeply"),
    ],
)
def test_every_limit_stops_before_the_work_is_done(text: str, message: str) -> None:
    with pytest.raises(ArithmeticInputError, match=message):
        evaluate(text)


def test_limits_admit_what_lies_just_inside_them() -> None:
    assert evaluate("10^39") == 10**39
    assert evaluate("9" * 40) == 10**40 - 1
    assert evaluate("2^-100") == Fraction(1, 2**100)
    depth = MAX_DEPTH - 1
    assert evaluate("(" * depth + "1" + ")" * depth) == 1
    assert evaluate("+".join(["1"] * (MAX_LENGTH // 2))) == MAX_LENGTH // 2


@pytest.mark.parametrize(("text", "count"), [("5", 0), ("-5", 0), ("50%", 0), ("1+2*3", 2), ("2^3", 1), ("7%4", 1)])
def test_signs_and_percent_signs_are_no_operations(text: str, count: int) -> None:
    assert count_operations(text) == count


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Fraction(24), "24"),
        (Fraction(-3), "-3"),
        (Fraction(1, 2), "0.5"),
        (Fraction(-1, 4), "-0.25"),
        (Fraction(1, 3), "0.333333"),
        (Fraction(2, 3), "0.666667"),
        (Fraction(63, 4), "15.75"),
        (Fraction(1, 30_000), "0.00003333"),
        (Fraction(9_999_999_999, 10_000_000_000), "1"),
    ],
)
def test_format_number_is_short_and_positional(value: Fraction, text: str) -> None:
    assert format_number(value) == text


@settings(deadline=None)
@given(st.fractions(min_value=-10_000, max_value=10_000, max_denominator=10_000))
def test_formatted_numbers_read_back_within_half_a_unit_of_the_last_place(value: Fraction) -> None:
    assert abs(evaluate(format_number(value)) - value) <= Fraction(1, 2_000_000)
