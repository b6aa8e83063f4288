"""BM25 over a corpus, with ``bm25s``; built once and kept beside the corpus.

The saved index is a folder: bm25s's own arrays and vocabulary (``.npy`` without pickle, JSON), the places of the
documents (safetensors), and ``fingerprint.json`` with a hash of the corpus. An index whose fingerprint is not that of
its corpus is refused. A whole corpus's tokens are held while it is indexed, four bytes each.

Text is compared as words: letters and digits, without case, accents and compatibility forms; a few very common English
words are left out, and nothing is stemmed. Scripts written without spaces are not split.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import unicodedata
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from brace_rl.errors import BraceError, ConfigError, DataError
from brace_rl.files import atomic_directory, write_json_atomic
from brace_rl.tasks.search.corpus import (
    CorpusFile,
    Document,
    Documents,
    ListedDocuments,
    corpus_digest,
    id_hash,
    read_corpus,
)

SUFFIX = ".bm25"
"""Added to the corpus's name where no folder is given."""
FINGERPRINT = "fingerprint.json"
PLACES = "places.safetensors"
FORMAT = 1
"""Raised whenever an older folder must not be read: another layout, or words cut differently."""

_WORD = re.compile(r"[^\W_]+")
_LEFT_OUT = re.compile(
    r"a|an|and|are|as|at|be|but|by|for|if|in|into|is|it|no|not|of|on|or|such|that|the|their|then|there|these|they|this"
    r"|to|was|will|with"
)
"""Lucene's list."""


def words_of(text: str) -> list[str]:
    """The words of a text or query, in order, as they are indexed."""
    if not text.isascii():
        text = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    return [word for word in _WORD.findall(text.casefold()) if not _LEFT_OUT.fullmatch(word)]


@dataclass
class _Tokens:
    """What bm25s indexes: documents as lists of word numbers, made from one flat array as they are asked for."""

    vocab: dict[str, int]
    flat: array[int]
    ends: list[int]

    @property
    def ids(self) -> _Tokens:
        return self

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        for end in self.ends:
            yield self.flat[start:end].tolist()
            start = end


class Bm25:
    """Ranks documents by Lucene's variant of BM25 (k1 = 1.5, b = 0.75)."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @classmethod
    def build(cls, texts: Iterable[str]) -> Bm25:
        """Index ``texts``; rows are numbered as they come."""
        tokens = _Tokens({}, array("i"), [])
        for text in texts:
            tokens.flat.extend(tokens.vocab.setdefault(word, len(tokens.vocab)) for word in words_of(text))
            tokens.ends.append(len(tokens.flat))
        tokens.vocab.setdefault("", len(tokens.vocab))
        model = _bm25s().BM25()
        model.index(tokens, create_empty_token=False, show_progress=False)
        return cls(model)

    @classmethod
    def load(cls, folder: Path) -> Bm25:
        """Read what :meth:`save` wrote; the arrays stay on the disk and are read as they are needed."""
        return cls(_bm25s().BM25.load(str(folder), mmap=True, allow_pickle=False))

    def save(self, folder: Path) -> None:
        self._model.save(str(folder), allow_pickle=False)

    def top(self, query: str, count: int) -> list[tuple[int, float]]:
        """The best ``count`` rows with their scores, best first; equal scores in order of the rows.

        Documents that share no word with the query are left out, so fewer may come back.
        """
        ids = self._model.get_tokens_ids(words_of(query))
        if not ids:
            return []
        scores: npt.NDArray[np.float32] = self._model.get_scores_from_ids(ids)
        count = min(count, int(np.count_nonzero(scores > 0)))
        if count == 0:
            return []
        # argpartition chooses freely among equals, so take what is above the border and the first rows on it.
        border = np.partition(scores, len(scores) - count)[len(scores) - count]
        above = np.flatnonzero(scores > border)
        rows = np.concatenate([above, np.flatnonzero(scores == border)[: count - len(above)]])
        order = np.lexsort((rows, -scores[rows]))
        return [(int(row), float(scores[row])) for row in rows[order]]


def _bm25s() -> Any:
    try:
        import bm25s
    except ImportError:
        raise ConfigError("task.name: searching a corpus needs bm25s; pip install 'brace-rl[tasks]'") from None
    return bm25s


@dataclass(frozen=True)
class Index:
    """Documents and their ranking."""

    documents: Documents
    ranking: Bm25


def index_documents(documents: Iterable[Document]) -> Index:
    """An index in memory.

    Raises:
        DataError: there are no documents, or two have the same id.
    """
    listed = ListedDocuments(tuple(documents))
    if not len(listed):
        raise DataError("an index needs at least one document")
    return Index(listed, Bm25.build(listed[row].contents for row in range(len(listed))))


@functools.lru_cache(maxsize=8)
def open_index(corpus: Path, folder: Path | None = None) -> Index:
    """The index of a corpus file, built and saved on first use; kept for later calls in this process.

    Args:
        folder: where the index is or will be; None for ``CORPUS.bm25`` beside the corpus.

    Raises:
        DataError: the corpus cannot be used, repeats an id, or is not the one the index was made from.
        ConfigError: bm25s is not installed.
        BraceError: the index cannot be written.
    """
    folder = folder or corpus.with_name(corpus.name + SUFFIX)
    if not folder.exists():
        _build(corpus, folder)
        return _load(corpus, folder)
    _check_fingerprint(corpus, folder)
    return _load(corpus, folder)


def _build(corpus: Path, folder: Path) -> None:
    digest, offsets, hashes = hashlib.blake2b(), array("q"), array("Q")

    def texts() -> Iterator[str]:
        for offset, document in read_corpus(corpus, digest):
            offsets.append(offset)
            hashes.append(id_hash(document.id))
            yield document.contents

    ranking = Bm25.build(texts())
    places = _places(corpus, np.array(offsets, np.int64), np.array(hashes, np.uint64))
    with atomic_directory(folder) as temporary:
        ranking.save(temporary)
        save_file(places, temporary / PLACES)
        fingerprint = {"format": FORMAT, "corpus": digest.hexdigest(), "documents": len(offsets)}
        write_json_atomic(temporary / FINGERPRINT, fingerprint)


def _places(
    corpus: Path, offsets: npt.NDArray[np.int64], hashes: npt.NDArray[np.uint64]
) -> dict[str, npt.NDArray[Any]]:
    rows = np.argsort(hashes, kind="stable")
    hashes = hashes[rows]
    documents = CorpusFile(corpus, offsets, hashes, rows)
    for place in np.flatnonzero(hashes[1:] == hashes[:-1]).tolist():
        first, second = int(rows[place]), int(rows[place + 1])
        if documents[first].id == documents[second].id:
            raise DataError(
                f"{corpus}: documents {first + 1} and {second + 1} have the same id {documents[first].id!r}; ids must "
                f"be unique"
            )
    return {"offsets": offsets, "hashes": hashes, "rows": rows}


def _check_fingerprint(corpus: Path, folder: Path) -> None:
    try:
        found = json.loads((folder / FINGERPRINT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{folder}: not an index of this program; give another folder as task.index") from None
    except (OSError, ValueError):
        raise DataError(
            f"{folder}: a damaged index ({FINGERPRINT}); delete the folder, and it is built again"
        ) from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise DataError(f"{folder}: an index of another version; delete the folder, and it is built again")
    if found.get("corpus") != corpus_digest(corpus):
        raise DataError(
            f"{folder}: does not match {corpus}; delete the folder, and it is built again, or give the corpus it was "
            f"made from"
        )


def _load(corpus: Path, folder: Path) -> Index:
    try:
        places = load_file(folder / PLACES)
        documents = CorpusFile(corpus, places["offsets"], places["hashes"], places["rows"])
        return Index(documents, Bm25.load(folder))
    except BraceError:
        raise
    except Exception as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{folder}: a damaged index ({first}); delete the folder, and it is built again") from None
