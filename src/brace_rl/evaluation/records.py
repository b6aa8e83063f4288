"""Records of answers on disk: a file that grows while the evaluation runs, and a table when it is done.

``records.jsonl`` holds one line per finished problem, flushed as it is written, so an interrupted evaluation goes on
where it stopped; a last line cut short by a crash is dropped. ``records.parquet`` has one row per answer.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from brace_rl.errors import DataError
from brace_rl.files import json_text

LINES = "records.jsonl"
TABLE = "records.parquet"
_FLOATS = ("reward",)


class RecordLog:
    """The growing file.

    Raises:
        DataError: the file cannot be read, or holds something else.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LINES
        self.finished: dict[str, list[dict[str, Any]]] = {}
        """Answers of finished problems, by the problem's id."""
        whole = self._read() if self._path.exists() else 0
        self._file = self._path.open("ab")
        self._file.truncate(whole)

    def add(self, problem_id: str, answers: Sequence[Mapping[str, Any]]) -> None:
        """Write a finished problem."""
        rows = [dict(answer) for answer in answers]
        self.finished[problem_id] = rows
        line = json_text({"problem_id": problem_id, "answers": rows}) + "\n"
        self._file.write(line.encode())
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _read(self) -> int:
        """Take in what is there; the number of bytes of whole lines."""
        content = self._path.read_bytes()
        whole = content.rfind(b"\n") + 1
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            try:
                row = json.loads(line)
                answers = [{**answer, **{key: float(answer[key]) for key in _FLOATS}} for answer in row["answers"]]
                self.finished[row["problem_id"]] = answers
            except (ValueError, KeyError, TypeError):
                raise DataError(f"{self._path}:{number}: not a record of an evaluation; choose another --out") from None
        return whole


def write_table(folder: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    """All answers as Parquet, in the order given; replaces the file in one step.

    Columns: problem_id, sample, gold, response (text with special tokens), success, reward, excluded, truncated, turns,
    prompt_tokens, response_tokens, and info (a JSON object of the task's figures).
    """
    import pyarrow
    import pyarrow.parquet

    rows = [{**record, "info": json_text(record["info"])} for record in records]
    path = folder / TABLE
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
