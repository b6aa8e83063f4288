"""Where a response states its final answer.

Two forms are understood: ``\\boxed{...}``, and ``Answer:`` with the answer on the rest of the line (what DAPO's prompt
asks for). What is said last counts, so a policy that changes its mind is taken at its last word and one that lists
guesses gains nothing. Everything here is linear in the length of the response.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Literal, NamedTuple

AnswerFormat = Literal["any", "boxed", "answer_line"]

_BRACES = re.compile(r"(?<!\\)\\+(?:boxed|fbox)[ \t]*\{|\\[\\{}]|[{}]")
_UNBRACED = re.compile(r"\\(?:boxed|fbox)[ \t]+([^\s{}$\\][^{}$\\\n]*|\\[a-zA-Z]+(?:\{[^{}\n]*\})*)")
"""``\\boxed 2``, as older solutions of MATH have it: up to the end of the formula."""
_FINAL, _HOPE = "the final answer is", "i hope it is correct"
"""What stands around the answer after ``Final Answer:`` in the form that Minerva's prompt asks for."""
_ANSWER_LINE = re.compile(r"\banswer[*_ \t]*[:：](.*)$", re.IGNORECASE | re.MULTILINE)
_EMPHASIS = "*_ \t"


class Stated(NamedTuple):
    """An answer and where in the response it stands."""

    start: int
    end: int
    answer: str


def extract_answer(text: str, answer_format: AnswerFormat = "any") -> str | None:
    """The final answer in ``text``, or None where it states none that can be read.

    A box counts once it is closed; of nested boxes the innermost holds the answer. An answer line that holds a box
    answers with the box; one with nothing after the colon answers with the next line that is not blank.
    """
    box = None if answer_format == "answer_line" else last_box(text)
    line = None if answer_format == "boxed" else _last_answer_line(text)
    if box is None or (line is not None and line.start > box.end):
        return None if line is None else line.answer
    return box.answer


def last_box(text: str) -> Stated | None:
    """The complete ``\\boxed{...}`` that opens last, or None."""
    opened: list[tuple[int, int] | None] = []
    found: Stated | None = None
    for match in _BRACES.finditer(text):
        brace = match[0]
        if brace == "{":
            opened.append(None)
        elif brace == "}":
            box = opened.pop() if opened else None
            if box is not None and (found is None or box[0] > found.start):
                found = Stated(box[0], match.end(), text[box[1] : match.start()].strip())
        elif len(brace) > 2:
            opened.append(match.span())
    if found is None:
        last = next(iter(deque(_UNBRACED.finditer(text), maxlen=1)), None)
        found = last and Stated(last.start(), last.end(), last[1].strip().rstrip(".,;:"))
    return found if found is not None and found.answer else None


def _last_answer_line(text: str) -> Stated | None:
    last = next(iter(deque(_ANSWER_LINE.finditer(text), maxlen=1)), None)
    if last is None:
        return None
    content = last[1].strip(_EMPHASIS)
    if not content:
        content = text[last.end() :].lstrip().partition("\n")[0].strip(_EMPHASIS)
    content = _without_minervas_words(content)
    box = last_box(content)
    content = content if box is None else box.answer
    return Stated(last.start(), last.end(), content) if content else None


def _without_minervas_words(content: str) -> str:
    if not content.casefold().startswith(_FINAL):
        return content
    content = content[len(_FINAL) :].lstrip(": \t").rstrip(". \t")
    return content[: -len(_HOPE)].rstrip(". \t") if content.casefold().endswith(_HOPE) else content
