"""How documents look to the policy, and what is taken out of them first."""

from __future__ import annotations

import re
from collections.abc import Sequence

from brace_rl.tasks.search.corpus import Document

HARMLESS = "‹"
"""Stands in for a ``<`` that begins something like a tag."""
_TAG_LIKE = re.compile(rf"<(?=[^\s\d=<{HARMLESS}])")


def sanitize(text: str) -> str:
    """``text`` in which nothing reads as a tag, and no special token of a tokenizer in angle brackets is left.

    Documents are other people's words: ``</information>`` in one must not end the block, ``<answer>`` must not answer,
    and ``<|im_end|>`` must not end the turn. Every ``<`` that something other than a space, a digit, ``=`` or ``<``
    follows becomes ``‹``; ``3 < 4`` and ``x <= 2`` stay.
    """
    return _TAG_LIKE.sub(HARMLESS, text)


def cut(text: str, limit: int) -> str:
    """The first ``limit`` characters, with an ellipsis where something was cut off; 0: no limit."""
    return text if not limit or len(text) <= limit else text[:limit].rstrip() + " ..."


def render_passages(documents: Sequence[Document], *, limit: int = 0) -> str:
    """Search results in Search-R1's layout: ``Doc 1(Title: ..) ..``, one line each.

    Args:
        limit: characters of each text that are shown; 0: all.
    """
    return "".join(
        f"Doc {rank}(Title: {_line(document.title)}) {cut(sanitize(document.text).strip(), limit)}\n"
        for rank, document in enumerate(documents, start=1)
    )


def render_results(documents: Sequence[Document], *, limit: int) -> str:
    """Search results with the ids that ``<open>`` takes: ``[id] title: beginning of the text``, one line each."""
    return "".join(
        f"[{_line(document.id)}] {_line(document.title)}: {_line(cut(document.text, limit))}\n"
        for document in documents
    )


def _line(text: str) -> str:
    return " ".join(sanitize(text).split())
