"""The tools of the search families: ``search`` and ``open``. One of each per episode; they note what was shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from brace_rl.tasks.search.corpus import Document
from brace_rl.tasks.search.passages import sanitize
from brace_rl.tasks.search.retrievers import LocalRetriever, Retriever
from brace_rl.tasks.tools import Tool, ToolError

SEARCH_TAG = "search"
OPEN_TAG = "open"

_LONGEST_QUERY = 1000
"""Characters; the rest of a longer query is ignored."""
_MOST_PAGE_DIGITS = 6

Rendering = Callable[[Sequence[Document]], str]
"""Turns documents into the text the policy reads; picklable."""


@dataclass
class Shown:
    """Ids of the documents an episode has seen in results, opened or not."""

    ids: set[str] = field(default_factory=set)

    def recall(self, evidence: Sequence[str]) -> float:
        """Share of ``evidence`` that was shown."""
        return sum(document_id in self.ids for document_id in evidence) / len(evidence)


@dataclass(frozen=True)
class SearchTool(Tool):
    """A query becomes a list of documents.

    Attributes:
        count: documents returned at most.
        render: what the policy reads of them.
    """

    retriever: Retriever
    count: int
    render: Rendering
    shown: Shown = field(default_factory=Shown)

    async def call(self, argument: str) -> str:
        query = " ".join(argument[:_LONGEST_QUERY].split())
        if not query:
            raise ToolError("error: the query is empty\n")
        documents = await self.retriever.search(query, self.count)
        self.shown.ids.update(document.id for document in documents)
        return self.render(documents) if documents else "No results.\n"


@dataclass(frozen=True)
class OpenTool(Tool):
    """``<open>id</open>`` shows a document, ``<open>id 2</open>`` the second page of a long one.

    Attributes:
        page: characters of a page.
        headed: whether a line with id, title and page number comes first.
    """

    store: LocalRetriever
    page: int
    headed: bool = True
    shown: Shown = field(default_factory=Shown)

    async def call(self, argument: str) -> str:
        wanted, number = " ".join(argument.split()), 1
        document = await self.store.document(wanted)
        if document is None and " " in wanted:
            wanted, _, last = wanted.rpartition(" ")
            number = int(last) if last.isdecimal() and len(last) <= _MOST_PAGE_DIGITS else 0
            document = await self.store.document(wanted)
        if document is None or number < 1:
            raise ToolError("error: no such document; open takes an id from the search results\n")
        self.shown.ids.add(document.id)
        return self._page(document, number)

    def _page(self, document: Document, number: int) -> str:
        text = sanitize(document.text).strip()
        pages = max(1, -(-len(text) // self.page))
        if number > pages:
            raise ToolError(f"error: the document has {pages} pages\n")
        shown = text[(number - 1) * self.page : number * self.page]
        if not self.headed:
            return f"{shown}\n"
        place = f" (page {number} of {pages})" if pages > 1 else ""
        return f"[{sanitize(document.id)}] {sanitize(document.title)}{place}\n{shown}\n"
