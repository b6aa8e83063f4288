"""Where passages come from: an index in this process, or a server that speaks Search-R1's retrieval format.

Search-R1's format (Jin et al. 2025): a POST of ``{"queries": [text], "topk": k, "return_scores": true}`` is answered by
``{"result": [[{"document": {"id": .., "contents": ..}, "score": x}, ..]]}``, one list per query; without scores the
documents stand in the list by themselves.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brace_rl.tasks.search.corpus import Document, split_title
from brace_rl.tasks.search.http import RequestFailedError, post_json
from brace_rl.tasks.search.index import Index, open_index

logger = logging.getLogger(__name__)

_ROWS_SEARCHED_AT_ONCE = 20_000
"""Up to so many documents a search is quicker than handing it to a thread."""


class RetrievalError(Exception):
    """No results could be had; the message is one line."""


class Retriever(ABC):
    """Finds documents. Picklable, and safe to share between episodes."""

    @abstractmethod
    async def search(self, query: str, count: int) -> list[Document]:
        """At most ``count`` documents, best first.

        Raises:
            RetrievalError: the search failed.
        """


class LocalRetriever(Retriever):
    """Searches an index in this process, in a thread where that may take long.

    Args:
        index: of a corpus in memory.
    """

    def __init__(self, index: Index) -> None:
        self.index = index

    async def search(self, query: str, count: int) -> list[Document]:
        if len(self.index.documents) <= _ROWS_SEARCHED_AT_ONCE:
            return self.find(query, count)
        return await asyncio.to_thread(self.find, query, count)

    async def document(self, document_id: str) -> Document | None:
        """The document with this id, or None."""
        row = self.index.documents.row_of(document_id)
        return None if row is None else self.index.documents[row]

    def find(self, query: str, count: int) -> list[Document]:
        """:meth:`search` without giving way."""
        return [self.index.documents[row] for row, _ in self.index.ranking.top(query, count)]


class FileRetriever(LocalRetriever):
    """Searches a corpus file through its saved index; a pickle holds the two paths, not the index.

    Raises:
        BraceError: as :func:`~brace_rl.tasks.search.index.open_index`.
    """

    def __init__(self, corpus: Path, folder: Path | None = None) -> None:
        super().__init__(open_index(corpus, folder))
        self._paths = corpus, folder

    def __reduce__(self) -> tuple[Any, ...]:
        return FileRetriever, self._paths


@dataclass(frozen=True)
class HttpRetriever(Retriever):
    """Asks a server, one request per query. See the module's docstring for the format.

    Attributes:
        url: of the server's retrieval call, such as ``http://127.0.0.1:8000/retrieve``.
        timeout_s: longest one attempt may take.
        retries: attempts after the first.
    """

    url: str
    timeout_s: float
    retries: int

    async def search(self, query: str, count: int) -> list[Document]:
        request = {"queries": [query], "topk": count, "return_scores": True}
        try:
            reply = await post_json(self.url, request, timeout_s=self.timeout_s, retries=self.retries)
            return [_document(entry) for entry in _only_list(reply)][:count]
        except RequestFailedError as error:
            logger.warning("search failed: %s", error)
            raise RetrievalError(str(error)) from None
        except (AttributeError, KeyError, TypeError, ValueError):
            logger.warning("search failed: the server's reply is not in Search-R1's format")
            raise RetrievalError("the server's reply is not in Search-R1's format") from None


def _only_list(reply: Any) -> list[Any]:
    (entries,) = reply["result"]
    if not isinstance(entries, list):
        raise TypeError("each query is answered by a list")
    return entries


def _document(entry: Any) -> Document:
    document = entry.get("document", entry)
    contents = document["contents"]
    if not isinstance(contents, str):
        raise TypeError("contents must be text")
    return Document(str(document.get("id", "")), *split_title(contents))
