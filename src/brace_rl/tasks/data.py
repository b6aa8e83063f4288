"""Question-and-answer files, read into one checked :class:`datasets.Dataset`.

Three formats, told apart by their columns, in ``.jsonl``, ``.json`` (a list), ``.csv`` or ``.parquet``:

* *verl*: ``prompt`` (chat messages) and ``reward_model.ground_truth``;
* *plain*: ``prompt`` (text or chat messages) and ``answer``;
* *GSM8K*: ``question``, and ``answer`` that ends in ``#### N``.

Every row is checked before it is used; what is wrong is a :class:`~brace_rl.errors.DataError` of one line that names
file and line. Everything stays in memory: nothing is downloaded and no cache is written.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from brace_rl.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

Row = TypeVar("Row")

GOLD_MARK = "####"
"""What stands before the final answer in GSM8K."""
_ROLES = ("system", "user", "assistant", "tool")


def load_dataset(path: str | Path) -> Dataset:
    """All rows of a file with the columns below, in file order.

    ``id`` (text: the row's own, or file name and row), ``prompt`` (list of ``{"role", "content"}``), ``answer`` (gold,
    as text), ``solution`` (GSM8K's worked solution, else empty).

    Raises:
        DataError: the file is missing, unreadable, empty, of an unknown kind or in no known format; or a row is
            malformed, lacks its gold answer, repeats an id, or is in another format than the first.
    """
    path = Path(path)
    rows: list[dict[str, Any]] = []
    places: dict[str, str] = {}
    file_format = ""
    for number, (place, row) in enumerate(read_rows(path), start=1):
        row_format = _detect_format(row, place)
        file_format = file_format or row_format
        if row_format != file_format:
            raise DataError(
                f"{place}: a {row_format} row in a file that began as {file_format}; keep one format per file"
            )
        record = _CONVERTERS[row_format](row, place)
        record["id"] = _row_id(row, place) or f"{path.name}:{number}"
        if record["id"] in places:
            raise DataError(f"{place}: id {record['id']!r} was used at {places[record['id']]}; ids must be unique")
        places[record["id"]] = place
        _check_encodable(record, place)
        rows.append(record)
    if not rows:
        raise DataError(f"{path}: holds no rows; give a file with at least one")
    return _to_dataset(rows)


def load_splits(
    data: str | Path, eval_data: str | Path | None, *, most_train: int, held_out: int
) -> tuple[Dataset, Dataset]:
    """Training and evaluation rows, columns as :func:`load_dataset`, no question in both.

    Evaluation rows are the first ``held_out`` of ``eval_data``, or the last ``held_out`` of ``data`` where there is no
    such file. Questions are compared without regard to case and spacing; one that is in both stays in the evaluation
    rows. At most the first ``most_train`` of the remaining rows are trained on. Without ``data`` (an evaluation alone)
    there are no training rows.

    Raises:
        DataError: as :func:`load_dataset`, or nothing is left to train on.
    """
    if not data:
        if not eval_data:
            raise DataError("task.data: no file to read problems from; pass --data FILE")
        evaluation = load_dataset(eval_data)
        return evaluation.select([]), evaluation.select(range(min(held_out, len(evaluation))))
    train, evaluation = split_rows(
        list(load_dataset(data)),
        list(load_dataset(eval_data)) if eval_data else None,
        held_out=held_out,
        most_train=most_train,
        question=lambda row: _question_key(row["prompt"]),
        place=str(data),
    )
    return _to_dataset(train), _to_dataset(evaluation)


def split_rows(
    rows: Sequence[Row],
    evaluation: Sequence[Row] | None,
    *,
    most_train: int,
    held_out: int,
    question: Callable[[Row], str],
    place: str,
) -> tuple[list[Row], list[Row]]:
    """:func:`load_splits` for rows of any kind.

    Args:
        rows: of the training file, in its order.
        evaluation: of the evaluation file; None: the last ``held_out`` of ``rows``.
        question: what two rows that ask the same have in common.
        place: the training file, for the errors.
    """
    if evaluation is not None:
        held = list(evaluation[:held_out])
    else:
        if len(rows) <= held_out:
            raise DataError(
                f"{place}: {len(rows)} rows leave nothing to train on when {held_out} are held out; lower "
                f"task.eval_problems or give task.eval_data"
            )
        held, rows = list(rows[len(rows) - held_out :]), rows[: len(rows) - held_out]
    asked = {question(row) for row in held}
    kept = [row for row in rows if question(row) not in asked]
    if not kept:
        raise DataError(f"{place}: every question is also held out for evaluation; give other rows to train on")
    return kept[:most_train], held


def _check_encodable(record: Mapping[str, Any], place: str) -> None:
    # JSON can spell half of a surrogate pair, which no tokenizer and no file can hold.
    try:
        json.dumps(record, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(
            f"{place}: holds half of a surrogate pair (\\ud800 to \\udfff); write the whole character"
        ) from None


def _question_key(prompt: list[dict[str, str]]) -> str:
    spoken = [message["content"] for message in prompt if message["role"] != "system"]
    return " ".join(" ".join(spoken).casefold().split())


def _to_dataset(rows: list[dict[str, Any]]) -> Dataset:
    from datasets import Dataset, Features, Value

    text = Value("string")
    features = Features({"id": text, "prompt": [{"role": text, "content": text}], "answer": text, "solution": text})
    return Dataset.from_list(rows, features=features)


# Reading: each reader yields (place, row), where place names file and line for the errors.


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of a ``.jsonl``, ``.json``, ``.csv``, ``.tsv`` or ``.parquet`` file, each with file and line for the errors.

    Raises:
        DataError: the file is missing, unreadable, empty or of another kind, or a row is not an object.
    """
    readers: dict[str, Callable[[Path], Iterator[tuple[str, dict[str, Any]]]]] = {
        ".jsonl": _read_jsonl,
        ".json": _read_json,
        ".csv": _read_csv,
        ".tsv": lambda path: _read_csv(path, delimiter="\t"),
        ".parquet": _read_parquet,
    }
    if path.is_dir():
        raise DataError(f"{path}: is a folder; name a file")
    if not path.exists():
        raise DataError(f"{path}: no such file")
    if path.suffix.lower() not in readers:
        raise DataError(f"{path}: cannot tell the kind of file; use {', '.join(readers)}")
    try:
        if path.stat().st_size == 0:
            raise DataError(f"{path}: is empty; give a file with at least one row")
        yield from readers[path.suffix.lower()](path)
    except OSError as error:
        what = error.strerror or _first_line(error)
        raise DataError(f"{path}: cannot be read ({what}); check the path and who may read it") from None


def _read_text(path: Path) -> str:
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line}: not UTF-8; save the file as UTF-8") from None


def _parse_json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: not valid JSON: {error.msg} (column {error.colno}); mend or drop it") from None
    except (RecursionError, ValueError):
        raise DataError(f"{place}: not usable JSON: nested too deeply or a number too long; mend or drop it") from None


def _read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    # Not splitlines(): JSON text may hold U+2028 and its like, which are no line ends in JSONL.
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if line.strip():
            place = f"{path}:{number}"
            yield place, _object(_parse_json(line, place), place)


def _read_json(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    text = _read_text(path)
    first_two = list(islice((line for line in text.split("\n") if line.strip()), 2))
    if len(first_two) == 2 and all(map(_is_object, first_two)):
        raise DataError(f"{path}: holds one object per line; rename it to {path.stem}.jsonl")
    rows = _parse_json(text, str(path))
    if isinstance(rows, dict) and isinstance(rows.get("Data"), list):
        rows = rows["Data"]  # TriviaQA wraps its rows
    if not isinstance(rows, list):
        raise DataError(f"{path}: must hold a list of rows; one object per line belongs in a .jsonl file")
    for number, row in enumerate(rows, start=1):
        place = f"{path}: row {number}"
        yield place, _object(row, place)


def _object(row: Any, place: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f"{place}: a row must be a JSON object with named columns, not {type(row).__name__}")
    return row


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _read_csv(path: Path, delimiter: str = ",") -> Iterator[tuple[str, dict[str, Any]]]:
    line = 0

    # The reader's own line number lags by one when a line cannot be parsed.
    def lines() -> Iterator[str]:
        nonlocal line
        for text in io.StringIO(_read_text(path), newline=""):
            line += 1
            yield text

    try:
        reader = csv.DictReader(lines(), delimiter=delimiter, strict=True)
        names = list(filter(None, reader.fieldnames or []))
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise DataError(f"{path}:{line}: column {twice!r} is there twice; rename or drop one")
        for row in reader:
            place = f"{path}:{line}"
            if None in row or None in row.values():
                raise DataError(f"{place}: has more or fewer fields than the header; quote text that holds a delimiter")
            yield place, dict(row)
    except csv.Error as error:
        raise DataError(f"{path}:{line}: not valid CSV: {error}; mend the line") from None


def _read_parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", row
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a readable Parquet file ({_first_line(error)}); write it again") from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


# Formats: each converter checks one row and returns its prompt, answer and solution.


def _detect_format(row: Mapping[str, Any], place: str) -> str:
    if "prompt" in row and "reward_model" in row:
        return "verl"
    if "prompt" in row and "answer" in row:
        return "plain"
    if "question" in row and "answer" in row:
        return "GSM8K"
    if "prompt" in row:
        raise DataError(f"{place}: has a prompt but no gold answer; add reward_model.ground_truth (verl) or answer")
    columns = ", ".join(map(str, row)) or "none"
    raise DataError(
        f"{place}: columns not understood ({columns}); use question and answer (GSM8K), prompt and "
        f"reward_model.ground_truth (verl), or prompt and answer"
    )


def _convert_gsm8k(row: Mapping[str, Any], place: str) -> dict[str, Any]:
    question, solution = _text(row["question"], "question", place), _text(row["answer"], "answer", place)
    _, mark, answer = solution.rpartition(GOLD_MARK)
    if not mark or not answer.strip():
        raise DataError(f"{place}: answer does not end in '{GOLD_MARK} N'; add it, or rename question to prompt")
    return {"prompt": _user(question), "answer": answer.strip(), "solution": solution}


def _convert_verl(row: Mapping[str, Any], place: str) -> dict[str, Any]:
    reward_model = row["reward_model"]
    gold = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
    answer = _gold(gold, "reward_model.ground_truth", place)
    return {"prompt": _messages(row["prompt"], place), "answer": answer, "solution": ""}


def _convert_plain(row: Mapping[str, Any], place: str) -> dict[str, Any]:
    prompt = row["prompt"]
    messages = _messages(prompt, place) if isinstance(prompt, list) else _user(_text(prompt, "prompt", place))
    return {"prompt": messages, "answer": _gold(row["answer"], "answer", place), "solution": ""}


_CONVERTERS: dict[str, Callable[[Mapping[str, Any], str], dict[str, Any]]] = {
    "verl": _convert_verl,
    "plain": _convert_plain,
    "GSM8K": _convert_gsm8k,
}


def _text(value: Any, column: str, place: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{place}: {column} must be text that is not blank")
    return value


def _gold(value: Any, column: str, place: str) -> str:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    text = str(value).strip() if number or isinstance(value, str) else ""
    if not text:
        raise DataError(f"{place}: no gold answer; {column} must be text or a number")
    return text


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _messages(value: Any, place: str) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{place}: prompt must be a list of chat messages that is not empty")
    messages = []
    for message in value:
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, str) or message.get("role") not in _ROLES:
            raise DataError(f"{place}: a chat message needs a role ({', '.join(_ROLES)}) and text as content")
        messages.append({"role": message["role"], "content": content})
    if not _question_key(messages):
        raise DataError(f"{place}: prompt asks nothing; it holds no message but the system's")
    return messages


def _row_id(row: Mapping[str, Any], place: str) -> str:
    """The row's own id as text; empty where it has none."""
    value = row.get("id")
    if value is None or value == "":
        return ""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise DataError(f"{place}: id must be text or an integer")
    return str(value)
