"""Questions with short gold answers, from the public files of seven data sets.

Each row is told by its columns:

===============  ==========================================================================================
format           columns
===============  ==========================================================================================
golden_answers   ``question``, ``golden_answers`` (FlashRAG and Search-R1, all seven data sets)
TriviaQA         ``question`` or ``Question``, ``answer`` or ``Answer`` with ``value`` and ``aliases``
PopQA            ``question``, ``possible_answers`` (a list, or a JSON list as text)
MuSiQue          ``question``, ``answer``, ``answer_aliases``, ``paragraphs``
HotpotQA         ``question``, ``answer``, ``context`` (2WikiMultihopQA too)
verl             ``prompt`` or ``extra_info.question``, ``reward_model.ground_truth``
BrowseComp-Plus  ``query_id``, ``query``, ``answer``, ``gold_docs``, ``evidence_docs``
plain            ``question`` or ``Question``, ``answer``, ``Answer`` or ``answers``: text or a list (NQ-open, others)
===============  ==========================================================================================

The id is the row's ``id``, ``_id``, ``question_id``, ``QuestionId``, ``query_id`` or ``idx``, else file name and row.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brace_rl.errors import DataError
from brace_rl.tasks.base import Problem
from brace_rl.tasks.data import read_rows, split_rows
from brace_rl.tasks.search.prompts import messages

logger = logging.getLogger(__name__)

_CIPHERTEXT = re.compile(r"(?:[A-Za-z0-9+/]{4}){6,}(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?")
_UNKNOWN = "<unk>"
"""What TriviaQA's test split has for an answer: it has none."""
_ID_COLUMNS = ("id", "_id", "question_id", "QuestionId", "query_id", "idx")


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        golds: accepted answers, at least one, none blank and none twice.
        evidence: ids of the documents that hold the answer or lead to it, where the file names them.
    """

    id: str
    text: str
    golds: tuple[str, ...]
    evidence: tuple[str, ...] = ()

    def problem(self, instructions: str) -> Problem:
        """What is asked of a policy: the instructions, then the question, in one message."""
        return Problem(
            id=self.id,
            prompt=messages(instructions, self.text),
            answer=self.golds[0],
            metadata={"question": self.text, "golds": self.golds, "evidence": self.evidence},
        )


def load_questions(path: str | Path, *, skip_unanswered: bool = False) -> list[Question]:
    """All questions of a file, in its order.

    Args:
        skip_unanswered: leave out rows without a gold answer (and log how many) instead of refusing the file.

    Raises:
        DataError: the file cannot be read, holds no question, changes its format on the way or repeats an id; a row is
            malformed, or lacks its gold answer and ``skip_unanswered`` is off.
    """
    path = Path(path)
    questions: list[Question] = []
    places: dict[str, str] = {}
    file_format, skipped = "", 0
    for number, (place, row) in enumerate(read_rows(path), start=1):
        row_format = detect_format(row, place)
        file_format = file_format or row_format
        if row_format != file_format:
            raise DataError(
                f"{place}: a {row_format} row in a file that began as {file_format}; keep one format per file"
            )
        question = _question(row, row_format, place, f"{path.name}:{number}")
        if not question.golds:
            # Before its id is looked at: an unanswerable question of MuSiQue has that of its answerable twin.
            if not skip_unanswered:
                raise DataError(f"{place}: no gold answer; add one, or set task.skip_unanswered = true")
            skipped += 1
            continue
        if question.id in places:
            raise DataError(f"{place}: id {question.id!r} was used at {places[question.id]}; ids must be unique")
        places[question.id] = place
        questions.append(question)
    if skipped:
        asked = len(questions) + skipped
        logger.warning("%s: %d of %d questions have no gold answer and are left out", path, skipped, asked)
    if not questions:
        raise DataError(f"{path}: holds no {'answered ' if skipped else ''}questions; give another file")
    return questions


def split_questions(
    data: str, eval_data: str, *, most_train: int, held_out: int, skip_unanswered: bool = False
) -> tuple[list[Question], list[Question]]:
    """Training and evaluation questions, no text in both (compared without regard to case and spacing).

    Evaluation questions are the first ``held_out`` of ``eval_data``, or the last ``held_out`` of ``data`` where there
    is no such file; without ``data`` there is nothing to train on. At most ``most_train`` others are trained on.

    Raises:
        DataError: as :func:`load_questions`, or nothing is left to train on.
    """
    if not data:
        return [], load_questions(eval_data, skip_unanswered=skip_unanswered)[:held_out]
    return split_rows(
        load_questions(data, skip_unanswered=skip_unanswered),
        load_questions(eval_data, skip_unanswered=skip_unanswered) if eval_data else None,
        most_train=most_train,
        held_out=held_out,
        question=_key,
        place=data,
    )


def _key(question: Question) -> str:
    return " ".join(question.text.casefold().split())


def detect_format(row: Mapping[str, Any], place: str) -> str:
    """The name of a row's format in the table above.

    Raises:
        DataError: none fits.
    """
    columns = set(row)
    answer = _first(row, "answer", "Answer")
    tests = {
        "golden_answers": {"question", "golden_answers"} <= columns,
        "verl": "reward_model" in columns,
        "BrowseComp-Plus": {"query_id", "query"} <= columns,
        "PopQA": {"question", "possible_answers"} <= columns,
        "MuSiQue": {"question", "answer_aliases"} <= columns or {"question", "paragraphs"} <= columns,
        "TriviaQA": isinstance(answer, Mapping) or "QuestionId" in columns or "question_id" in columns,
        "HotpotQA": {"question", "context"} <= columns,
        "plain": bool({"question", "Question"} & columns),
    }
    for name, fits in tests.items():
        if fits:
            return name
    known = ", ".join(map(str, row)) or "none"
    raise DataError(f"{place}: columns not understood ({known}); use question and answer, or golden_answers")


def _question(row: Mapping[str, Any], row_format: str, place: str, default_id: str) -> Question:
    if row_format == "BrowseComp-Plus" and _is_encrypted(row):
        raise DataError(f"{place}: the query is encrypted; decrypt the file with the data set's own script first")
    text, golds = _READERS[row_format](row)
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{place}: the question must be text that is not blank")
    evidence = [document for name in ("evidence_docs", "gold_docs") for document in _documents(row.get(name), place)]
    question = Question(
        _identity(row, place) or default_id,
        text.strip(),
        tuple(dict.fromkeys(_answers(golds, place))),
        tuple(dict.fromkeys(evidence)),
    )
    try:
        "".join((question.id, question.text, *question.golds)).encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(
            f"{place}: holds half of a surrogate pair (\\ud800 to \\udfff); write the whole character"
        ) from None
    return question


def _identity(row: Mapping[str, Any], place: str) -> str:
    value = _first(row, *_ID_COLUMNS)
    if value is None or value == "":
        return ""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise DataError(f"{place}: id must be text or an integer")
    return str(value)


def _first(row: Mapping[str, Any], *columns: str) -> Any:
    return next((row[column] for column in columns if row.get(column) is not None), None)


# What each format calls the question and its gold answers.


def _plain(row: Mapping[str, Any]) -> tuple[Any, Any]:
    return _first(row, "question", "Question"), _first(row, "answer", "Answer", "answers")


def _golden(row: Mapping[str, Any]) -> tuple[Any, Any]:
    return row["question"], row["golden_answers"]


def _triviaqa(row: Mapping[str, Any]) -> tuple[Any, Any]:
    answer = _first(row, "answer", "Answer")
    if not isinstance(answer, Mapping):
        return _first(row, "question", "Question"), answer
    value, aliases = _first(answer, "value", "Value"), _first(answer, "aliases", "Aliases")
    value = None if value == _UNKNOWN else value
    if not isinstance(aliases or [], list):
        return _first(row, "question", "Question"), aliases
    return _first(row, "question", "Question"), [value, *(aliases or [])]


def _popqa(row: Mapping[str, Any]) -> tuple[Any, Any]:
    answers = row["possible_answers"]
    if isinstance(answers, str) and answers.strip().startswith("["):
        try:
            answers = json.loads(answers)
        except (ValueError, RecursionError):
            answers = {}  # refused with its place
    return row["question"], answers


def _musique(row: Mapping[str, Any]) -> tuple[Any, Any]:
    if row.get("answerable") is False:
        return row["question"], []
    aliases = row.get("answer_aliases") or []
    return row["question"], [row.get("answer"), *aliases] if isinstance(aliases, list) else aliases


def _verl(row: Mapping[str, Any]) -> tuple[Any, Any]:
    extra, model = row.get("extra_info"), row["reward_model"]
    golds = model.get("ground_truth") if isinstance(model, Mapping) else None
    if isinstance(golds, Mapping):
        golds = golds.get("target")
    question = row.get("question") or (extra.get("question") if isinstance(extra, Mapping) else None)
    if question is None and isinstance(row.get("prompt"), list):
        spoken = [m.get("content") for m in row["prompt"] if isinstance(m, Mapping) and m.get("role") == "user"]
        question = spoken[-1] if spoken else None
    return question, golds


def _browsecomp(row: Mapping[str, Any]) -> tuple[Any, Any]:
    return row["query"], row.get("answer")


def _is_encrypted(row: Mapping[str, Any]) -> bool:
    """Whether the query is ciphertext, as BrowseComp-Plus publishes it."""
    query = row.get("query")
    return isinstance(query, str) and _CIPHERTEXT.fullmatch(query) is not None


_READERS: dict[str, Callable[[Mapping[str, Any]], tuple[Any, Any]]] = {
    "golden_answers": _golden,
    "verl": _verl,
    "BrowseComp-Plus": _browsecomp,
    "PopQA": _popqa,
    "MuSiQue": _musique,
    "TriviaQA": _triviaqa,
    "HotpotQA": _plain,
    "plain": _plain,
}


def _answers(value: Any, place: str) -> Iterable[str]:
    """Gold answers as texts; blank ones are left out."""
    for answer in value if isinstance(value, (list, tuple)) else [value]:
        if answer is None:
            continue
        number = isinstance(answer, (int, float)) and not isinstance(answer, bool) and math.isfinite(answer)
        if not number and not isinstance(answer, str):
            raise DataError(f"{place}: a gold answer must be text or a number, or a list of these")
        if str(answer).strip():
            yield str(answer).strip()


def _documents(value: Any, place: str) -> Iterable[str]:
    """Ids of a list of documents, or of ids."""
    for document in value if isinstance(value, (list, tuple)) else [value] if value is not None else []:
        identity = document.get("docid") if isinstance(document, Mapping) else document
        if isinstance(identity, bool) or not isinstance(identity, (str, int)):
            raise DataError(f"{place}: evidence documents must be ids, or objects with a docid")
        yield str(identity)
