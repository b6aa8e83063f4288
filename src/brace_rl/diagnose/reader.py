"""Rollout files to responses: JSON lines, JSON or parquet, a row at a time, in bounded memory."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

from brace_rl.diagnose.columns import TOKEN_COLUMNS, ColumnMap
from brace_rl.diagnose.response import Response, RowError, response_from_row
from brace_rl.errors import DataError

ROLLOUTS = "rollouts.jsonl"
"""What a run folder calls its logged rollouts."""

CHUNK_TOKENS = 65_536
"""Padded tokens worked on together: whole arrays for speed, few enough to stay small."""

LARGEST_JSON = 256 * 2**20
"""Bytes of a .json file, which must be read as a whole; anything larger has to come as JSON lines."""

_PARQUET_ROWS = 64
"""Rows of a parquet file decoded together."""
_PARQUET_BUFFER = 2**20
"""Bytes of a column read ahead; without it a row group, however large, would be read as a whole."""

_FAILURES = (OSError, EOFError, zlib.error, gzip.BadGzipFile)

Progress = Callable[[int], None]
"""Told how many bytes of the current file have been read."""


def rollout_files(inputs: Sequence[Path]) -> list[Path]:
    """The files to read; a run folder stands for its ``rollouts.jsonl`` (or the same as .gz).

    Raises:
        DataError: nothing there, or a folder without rollouts.
    """
    files = []
    for path in inputs:
        if path.is_dir():
            inside = [path / name for name in (ROLLOUTS, f"{ROLLOUTS}.gz") if (path / name).is_file()]
            if not inside:
                raise DataError(
                    f"{path}: a folder without {ROLLOUTS}; name rollout files, or a run that logged its rollouts"
                )
            files.append(inside[0])
        elif path.is_file():
            files.append(path)
        else:
            raise DataError(f"{path}: " + ("not an ordinary file" if path.exists() else "no such file"))
    return files


def read_responses(path: Path, names: ColumnMap, progress: Progress = lambda _: None) -> Iterator[Response]:
    """Responses of one file, in order.

    Every row must hold the per-token columns that the first one holds.

    Raises:
        DataError: names the file, the row, the column and what was expected.
    """
    first: Response | None = None
    for number, row in _rows(path, names, progress):
        where = f"{path}: row {number}"
        if not isinstance(row, Mapping):
            raise RowError(f"{where}: expected an object with one entry per column, found {type(row).__name__}")
        response = response_from_row(row, names, where)
        first = first or response
        check_same_columns(response, first, names)
        yield response
    if first is None:
        raise DataError(f"{path}: holds no rows")


def check_same_columns(response: Response, first: Response, names: ColumnMap) -> None:
    """Raise RowError where two rows differ in which per-token columns, or which kind of reward, they hold."""
    for name in (*TOKEN_COLUMNS, "reward"):
        if name in first.columns - response.columns:
            raise RowError(
                f"{response.where}: {names.label(name)}: expected in every row, as in {first.where}; not there"
            )
        if name in response.columns - first.columns:
            raise RowError(
                f"{response.where}: {names.label(name)}: expected in every row or in none; {first.where} has none"
            )


def chunks(responses: Iterator[Response], tokens: int = CHUNK_TOKENS) -> Iterator[list[Response]]:
    """Consecutive responses whose padded tokens are at most ``tokens``; a longer one comes alone."""
    held: list[Response] = []
    longest = 0
    for response in responses:
        longest = max(longest, len(response))
        if held and longest * (len(held) + 1) > tokens:
            yield held
            held, longest = [], len(response)
        held.append(response)
    if held:
        yield held


def _rows(path: Path, names: ColumnMap, progress: Progress) -> Iterator[tuple[int, Any]]:
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if suffixes[-1:] == [".parquet"]:
        return _parquet_rows(path, names, progress)
    if suffixes[-1:] == [".json"]:
        return _json_rows(path, progress)
    return _line_rows(path, progress)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except _FAILURES as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise DataError(f"{path}: cannot be read: {reason}") from None


def _line_rows(path: Path, progress: Progress) -> Iterator[tuple[int, Any]]:
    with _readable(path), path.open("rb") as raw:
        lines: IO[bytes] = cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if path.suffix.lower() == ".gz" else raw
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            yield number, _parse(line, f"{path}: row {number}")
            progress(raw.tell())


def _json_rows(path: Path, progress: Progress) -> Iterator[tuple[int, Any]]:
    with _readable(path):
        size = path.stat().st_size
        if size > LARGEST_JSON:
            raise DataError(f"{path}: too large to be read as a whole; write JSON lines (one row per line, .jsonl)")
        content = _parse(path.read_bytes(), str(path), expected="one list of rows (JSON lines belong into .jsonl)")
    yield from enumerate(content if isinstance(content, list) else [content], start=1)
    progress(size)


def _parse(text: bytes, where: str, *, expected: str = "a JSON object on the line") -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise RowError(f"{where}: expected {expected}: nested too deeply") from None
    except ValueError as error:
        cut = "" if text.endswith(b"\n") else " (it has no end: was the writer stopped?)"
        raise RowError(f"{where}: expected {expected}: {error}{cut}") from None


def _parquet_rows(path: Path, names: ColumnMap, progress: Progress) -> Iterator[tuple[int, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        size = path.stat().st_size
        with pq.ParquetFile(path, buffer_size=_PARQUET_BUFFER, pre_buffer=False) as file:
            roots = names.roots()
            columns = [name for name in file.schema_arrow.names if name in roots]
            if not columns:  # let the row check say what is missing
                columns = file.schema_arrow.names
            number = 0
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=columns, use_threads=False):
                for row in _batch_rows(batch):
                    number += 1
                    yield number, row
                progress(size * number // max(1, file.metadata.num_rows))
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path}: not a readable parquet file: {reason}") from None


def _batch_rows(batch: Any) -> Iterator[dict[str, Any]]:
    """Rows of a record batch; flat lists of numbers stay arrays, which is many times faster than lists."""
    import pyarrow as pa

    def entries(column: Any) -> Iterator[Any]:
        kind = column.type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        item = kind.value_type if is_list else None
        if item is not None and (pa.types.is_floating(item) or pa.types.is_integer(item) or pa.types.is_boolean(item)):
            return (None if x.values is None else x.values.to_numpy(zero_copy_only=False) for x in column)
        return (x.as_py() for x in column)

    columns = [entries(column) for column in batch.columns]
    names = batch.schema.names
    for row in islice(zip(*columns, strict=True), batch.num_rows):
        yield dict(zip(names, row, strict=True))
