"""The documents that are searched: a JSONL file read row by row, or a list in memory.

Two formats, told apart by their columns: ``{"id", "contents"}`` (Search-R1, pyserini), where the first line of
``contents`` is the title, and ``{"docid", "text", "url"}`` (BrowseComp-Plus), where the address is. A file is read
front to back when it is indexed; after that single documents are read from their place in it, so that memory holds a
few bytes a document instead of its text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from brace_rl.errors import DataError

_HASH_BYTES = 8
_CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class Document:
    """One document; ``title`` may be empty."""

    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        """What is indexed: title and text."""
        return f"{self.title}\n{self.text}" if self.title else self.text


class Documents(Protocol):
    """Documents by row, 0-based."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Document: ...

    def row_of(self, document_id: str) -> int | None:
        """The row of a document, or None where there is no such id."""
        ...


class ListedDocuments:
    """Documents in memory.

    Raises:
        DataError: two have the same id.
    """

    def __init__(self, documents: Sequence[Document]) -> None:
        self._documents = tuple(documents)
        self._rows = {document.id: row for row, document in enumerate(self._documents)}
        if len(self._rows) < len(self._documents):
            raise DataError("two documents have the same id; ids must be unique")

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, row: int) -> Document:
        return self._documents[row]

    def row_of(self, document_id: str) -> int | None:
        return self._rows.get(document_id)


class Place(NamedTuple):
    """A document and where its line begins, in bytes."""

    offset: int
    document: Document


def read_corpus(path: Path, digest: hashlib.blake2b) -> Iterator[Place]:
    """Every document of a file in order; ``digest`` is fed all bytes on the way.

    Raises:
        DataError: the file is missing, empty or unreadable, a line is not JSON or not a document, or the format
            changes on the way; the message names the line.
    """
    with _open(path) as file:
        offset, columns = 0, ""
        for number, line in enumerate(file, start=1):
            digest.update(line)
            if line.strip():
                place = f"{path}:{number}"
                row = _parse(line, place)
                kind = _columns(row, place)
                columns = columns or kind
                if kind != columns:
                    raise DataError(
                        f"{place}: a row with {kind} in a file that began with {columns}; keep one format per file"
                    )
                yield Place(offset, _document(row, place))
            offset += len(line)
    if not columns:
        raise DataError(f"{path}: holds no documents; give a file with one JSON object a line")


def corpus_digest(path: Path) -> str:
    """Hash of a file's bytes, in hexadecimal."""
    digest = hashlib.blake2b()
    with _open(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


class CorpusFile:
    """Documents of an indexed file, read from their places.

    Args:
        offsets: ``[N]`` first byte of each document's line.
        hashes: ``[N]`` :func:`id_hash` of each id, ascending.
        rows: ``[N]`` the document each entry of ``hashes`` belongs to.
    """

    def __init__(
        self,
        path: Path,
        offsets: npt.NDArray[np.int64],
        hashes: npt.NDArray[np.uint64],
        rows: npt.NDArray[np.int64],
    ) -> None:
        self._path, self._offsets, self._hashes, self._rows = path, offsets, hashes, rows

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, row: int) -> Document:
        place = f"{self._path}: document {row + 1}"
        with _open(self._path) as file:
            file.seek(int(self._offsets[row]))
            return _document(_parse(file.readline(), place), place)

    def row_of(self, document_id: str) -> int | None:
        wanted = np.uint64(id_hash(document_id))
        first, last = np.searchsorted(self._hashes, wanted, "left"), np.searchsorted(self._hashes, wanted, "right")
        for row in self._rows[first:last].tolist():
            if self[row].id == document_id:
                return int(row)
        return None


def split_title(contents: str) -> tuple[str, str]:
    """Title and text of ``contents``: the first line, without the quotes Search-R1 puts around it, and the rest.

    A single line is text without a title.
    """
    first, newline, rest = contents.partition("\n")
    return (first.strip().strip('"'), rest) if newline else ("", contents)


def id_hash(document_id: str) -> int:
    """64 bits that depend on the id alone."""
    return int.from_bytes(hashlib.blake2b(document_id.encode(), digest_size=_HASH_BYTES).digest(), "little")


def _open(path: Path) -> Any:
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise DataError(f"{path}: no such corpus; give a .jsonl file of documents") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check the path and who may read it") from None


def _parse(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise DataError(f"{place}: not UTF-8; save the file as UTF-8") from None
    except (ValueError, RecursionError):
        raise DataError(f"{place}: not valid JSON; a corpus holds one JSON object a line") from None
    if not isinstance(row, dict):
        raise DataError(f"{place}: a document must be a JSON object with named columns, not {type(row).__name__}")
    return row


def _columns(row: dict[str, Any], place: str) -> str:
    if "contents" in row and "id" in row:
        return "id and contents"
    if "text" in row and "docid" in row:
        return "docid and text"
    columns = ", ".join(map(str, row)) or "none"
    raise DataError(f"{place}: columns not understood ({columns}); use id and contents, or docid, text and url")


def _document(row: dict[str, Any], place: str) -> Document:
    if "contents" in row:
        identity, title, text = row["id"], None, row["contents"]
    else:
        identity, title, text = row.get("docid"), row.get("url", ""), row.get("text")
    is_id = isinstance(identity, (str, int)) and not isinstance(identity, bool) and str(identity).strip()
    if not is_id or not isinstance(text, str) or not isinstance(title, str | None):
        raise DataError(f"{place}: a document needs an id (text or an integer) and text; mend or drop it")
    if title is None:
        title, text = split_title(text)
    if any("\ud800" <= character <= "\udfff" for character in title + text):
        raise DataError(f"{place}: holds half of a surrogate pair (\\ud800 to \\udfff); write the whole character")
    return Document(str(identity).strip(), title, text)
