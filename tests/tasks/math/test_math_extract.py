"""Where a response states its final answer."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brace_rl.tasks.math.extract import extract_answer, last_box


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{34}.", "34"),
        ("\\boxed{1} then \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{\\sqrt{2}}}", "\\frac{1}{\\sqrt{2}}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{\\boxed{7}}", "7"),
        ("\\boxed{x = \\boxed{7}}", "7"),
        ("\\boxed {7}", "7"),
        ("\\fbox{7}", "7"),
        ("so $\\boxed 7$.", "7"),
        ("\\boxed 25", "25"),
        ("$\\boxed \\frac{1}{2}$", "\\frac{1}{2}"),
        ("Final Answer: The final answer is $7$. I hope it is correct.", "$7$"),
        ("\\\\boxed{7}", "7"),
        ("a } stray brace, then \\boxed{7}", "7"),
        ("\\boxed{7} and an open \\boxed{8", "7"),
        ("Answer: 34", "34"),
        ("The final answer: 34", "34"),
        ("**Answer:** 34", "34"),
        ("Answer: $34$", "$34$"),
        ("Answer: \\boxed{34}", "34"),
        ("Answer:\n\n34\nbye", "34"),
        ("Answer: 3\nAnswer: 4", "4"),
        ("\\boxed{3}\nAnswer: 4", "4"),
        ("Answer: 4\nno, \\boxed{3}", "3"),
        ("答案 answer：34", "34"),
    ],
)
def test_the_last_answer_stated_is_taken(text: str, answer: str) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    "text", ["", "34", "\\boxed{34", "\\boxed{}", "\\boxed34", "Answer:", "answers 34", "boxed{34}"]
)
def test_a_response_that_states_no_answer_has_none(text: str) -> None:
    assert extract_answer(text) is None


def test_the_format_asked_for_is_the_only_one_looked_for() -> None:
    text = "\\boxed{3}\nAnswer: 4"
    assert extract_answer(text, "boxed") == "3"
    assert extract_answer(text, "answer_line") == "4"
    assert extract_answer("Answer: 4", "boxed") is None
    assert extract_answer("\\boxed{3}", "answer_line") is None


@settings(deadline=None)
@given(st.text(alphabet="ab{}\\ ", max_size=30), st.text(alphabet="ab ", max_size=10))
def test_a_box_with_balanced_content_is_found_whatever_stands_before_it(before: str, content: str) -> None:
    box = last_box(f"{before} \\boxed{{{content}c}}")
    assert box is not None
    assert box.answer == f"{content}c".strip()


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{" * 150_000,
        "\\boxed{" * 75_000 + "}" * 75_000,
        "{" * 1_000_000,
        "\\" * 1_000_001 + "boxed{1}",
        "\\" * 1_000_001,
        "\\boxed" + " " * 1_000_000,
        "\\boxed 5" * 140_000,
        "Answer: the final answer is" + " " * 1_000_000 + "x",
        "answer" * 160_000,
        "answer:" * 140_000,
        "answer" + " *_" * 300_000,
        "Answer: " + "9" * 1_000_000,
    ],
    ids=[
        "open",
        "nested",
        "braces",
        "backslashes",
        "backslashes alone",
        "spaces",
        "unbraced",
        "blank line",
        "words",
        "colons",
        "emphasis",
        "digits",
    ],
)
def test_a_million_hostile_characters_take_a_time_linear_in_them(text: str) -> None:
    started = time.process_time()
    extract_answer(text)
    # A loop that is quadratic here takes hours; the bound only tells the two apart.
    assert time.process_time() - started < 20
