"""Files of mathematics problems, in the public formats, read into checked problems.

What holds the question and what the gold answer is told from the columns, whose names are read without regard to case;
of several the first counts:

* question: ``problem``, ``question``, ``prompt``, ``messages``, ``responses_create_params.input``; text or messages;
* gold answer: ``reward_model.ground_truth``, ``answer``, ``expected_answer``, ``ground_truth``, ``final_answer``, or
  the last ``\\boxed{}`` of ``solution``. An answer in GSM8K's form is what follows ``####``.

This covers DAPO-Math-17k and other verl files, AIME 2024 to 2026 as they are published, MATH and its descendants, ROLL,
AReaL and NeMo-Gym. A verl row whose ``ability`` is not mathematics is left out, and so is one that repeats an earlier
question with the same answer (DAPO-Math-17k holds each of its 17 thousand problems about a hundred times); both are
counted. Other faults, an ``ability`` that is there but says nothing among them, are an error that names the line, or
with ``bad_rows="skip"`` are left out and counted too.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from brace_rl.errors import DataError
from brace_rl.tasks.base import Messages
from brace_rl.tasks.data import GOLD_MARK, read_rows
from brace_rl.tasks.math.extract import last_box
from brace_rl.tasks.math.scoring import LONGEST_ANSWER

logger = logging.getLogger(__name__)

QUESTIONS = ("problem", "question", "prompt", "messages", "responses_create_params")
GOLD_ANSWERS = ("reward_model", "answer", "expected_answer", "ground_truth", "final_answer", "solution")
IDS = ("id", "unique_id", "problem_id", "problem_idx", "uuid", "idx")
ROLES = ("system", "user", "assistant")

REPEATED = "repeated question"
OTHER_ABILITY = "not mathematics"


@dataclass(frozen=True)
class MathRow:
    """One problem: ``messages`` end on the question, ``answer`` is the gold answer as it was written."""

    id: str
    messages: Messages
    answer: str

    @cached_property
    def question(self) -> str:
        """What two rows that ask the same have in common."""
        spoken = [message["content"] for message in self.messages if message["role"] != "system"]
        return " ".join(" ".join(spoken).casefold().split())


@dataclass
class MathFile:
    """The problems of a file, in its order, and how many rows were left out for which reason."""

    rows: list[MathRow] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


class _BadRowError(Exception):
    """What is wrong with a row: a kind to count it under, and a sentence."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def load_problems(path: str | Path, *, bad_rows: Literal["error", "skip"] = "error") -> MathFile:
    """All problems of a file, each question once.

    Raises:
        DataError: the file cannot be read, holds no problem, or (unless ``bad_rows`` is "skip") a row is malformed, in
            another format than the first, lacks its gold answer, repeats an id, or asks an earlier question with
            another answer.
    """
    path = Path(path)
    found = MathFile()
    reader = _Reader(path)
    for number, (place, row) in enumerate(read_rows(path), start=1):
        try:
            problem = reader.read(row, number, place)
        except _BadRowError as fault:
            if bad_rows == "error":
                raise DataError(f"{place}: {fault}; mend the row, or set task.bad_rows = 'skip'") from None
            found.left_out[fault.kind] += 1
            continue
        if isinstance(problem, MathRow):
            found.rows.append(problem)
        else:
            found.left_out[problem] += 1
    if found.left_out:
        counts = ", ".join(f"{count} {kind}" for kind, count in found.left_out.most_common())
        logger.warning("%s: %d problems; rows left out: %s", path, len(found.rows), counts)
    if not found.rows:
        raise DataError(f"{path}: holds no mathematics problem with a gold answer; give another file")
    return found


class _Reader:
    """Reads the rows of one file; remembers its format and what came before."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._format: tuple[str, str] | None = None
        self._ids: dict[str, str] = {}
        self._answers: dict[str, tuple[str, str]] = {}

    def read(self, row: Mapping[str, Any], number: int, place: str) -> MathRow | str:
        """The problem of a row, or why the row is rightly left out."""
        columns = {str(name).lower(): value for name, value in row.items()}
        ability = columns.get("ability", "math")
        if not isinstance(ability, str) or not ability.strip():
            raise _BadRowError("without ability", "its ability does not say whether it is mathematics; write 'math'")
        if "math" not in ability.lower():
            return OTHER_ABILITY
        row_format = _format_of(columns)
        if self._format is not None and row_format != self._format:
            was, now = (" and ".join(names) for names in (self._format, row_format))
            raise _BadRowError("of another format", f"columns {now} in a file that began with {was}")
        messages = _question(columns[row_format[0]], row_format[0])
        answer = _gold(columns[row_format[1]], row_format[1])
        problem = MathRow(_row_id(columns) or f"{self._path.name}:{number}", messages, answer)
        self._format = row_format
        return self._first_time(problem, place)

    def _first_time(self, problem: MathRow, place: str) -> MathRow | str:
        earlier = self._answers.get(problem.question)
        if earlier is not None:
            if earlier[0] == problem.answer:
                return REPEATED
            raise _BadRowError(
                "with contradicting answers",
                f"asks what {earlier[1]} asks, but answers {problem.answer!r} where that answers {earlier[0]!r}",
            )
        _check_encodable(problem)
        if problem.id in self._ids:
            raise _BadRowError("with a repeated id", f"id {problem.id!r} was used at {self._ids[problem.id]}")
        self._answers[problem.question] = (problem.answer, place)
        self._ids[problem.id] = place
        return problem


def _format_of(columns: Mapping[str, Any]) -> tuple[str, str]:
    """The columns that hold question and gold answer."""
    question = next((name for name in QUESTIONS if name in columns), None)
    gold = next((name for name in GOLD_ANSWERS if name in columns), None)
    if question is None:
        names = ", ".join(columns) or "none"
        raise _BadRowError("malformed", f"no question among its columns ({names}); name it problem, question or prompt")
    if gold is None:
        raise _BadRowError(
            "without gold answer",
            "no gold answer among its columns; name it answer or reward_model.ground_truth (verl)",
        )
    return question, gold


def _question(value: Any, column: str) -> Messages:
    if column == "responses_create_params" and isinstance(value, Mapping):
        value = value.get("input")
    if column == "messages" and isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise _BadRowError("malformed", "messages is text that is not JSON") from None
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise _BadRowError("malformed", f"{column} must be text, or a list of chat messages that is not empty")
    messages = []
    for message in value:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, str) or message.get("role") not in ROLES:
            raise _BadRowError("malformed", f"a chat message needs a role ({', '.join(ROLES)}) and text as content")
        messages.append({"role": str(message["role"]), "content": content})
    if messages[-1]["role"] != "user" or not messages[-1]["content"].strip():
        raise _BadRowError("malformed", f"{column} must end on a message of the user that is not blank")
    return tuple(messages)


def _gold(value: Any, column: str) -> str:
    if column == "reward_model":
        value = value.get("ground_truth") if isinstance(value, Mapping) else None
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    text = str(value) if is_number else value if isinstance(value, str) else ""
    if column == "solution":
        box = last_box(text)
        text = "" if box is None else box.answer
    _, mark, rest = text.rpartition(GOLD_MARK)
    text = (rest if mark else text).strip()
    if not text:
        wanted = "a \\boxed{} that is not empty" if column == "solution" else "text or a number"
        raise _BadRowError("without gold answer", f"no gold answer; {column} must hold {wanted}")
    if len(text) > LONGEST_ANSWER:
        raise _BadRowError("malformed", f"its gold answer has {len(text)} characters, more than {LONGEST_ANSWER}")
    return text


def _row_id(columns: Mapping[str, Any]) -> str:
    extra = columns.get("extra_info")
    values = [columns.get(name) for name in IDS] + [extra.get("index") if isinstance(extra, Mapping) else None]
    value = next((value for value in values if value is not None and value != ""), "")
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise _BadRowError("malformed", "its id must be text or an integer")
    return str(value)


def _check_encodable(problem: MathRow) -> None:
    # JSON can spell half of a surrogate pair, which no tokenizer and no file can hold.
    texts: list[Callable[[], bytes]] = [problem.question.encode, problem.answer.encode, problem.id.encode]
    try:
        for encode in texts:
            encode()
    except UnicodeEncodeError:
        raise _BadRowError("malformed", "holds half of a surrogate pair (\\ud800 to \\udfff)") from None
