"""Longer chains over pages, half of them false: the embedded form of :mod:`.web_research`.

Every fact has two pages under the same title, one a ``record`` that is true in the world, the other a ``rumour`` that
says something else. Results show ids and titles alone, so the policy opens both, at the same time, and goes on with
what the record says::

    policy        <search>bako boss</search><information>
    environment   p17 bako boss ; p204 bako boss ; p90 bako friend ;</information>
    policy        <open>p17</open><open>p204</open><information>
    environment   bako boss rumour tema  bako boss record rilu</information>

**Demonstrations** with a mistake end in a wrong answer; the kinds, equally likely, are: stopping one hop early, opening
and believing the rumour alone, and following another relation.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from brace_rl.errors import ConfigError
from brace_rl.tasks.base import TranscriptPiece
from brace_rl.tasks.search.corpus import Document
from brace_rl.tasks.search.environment import INFORMATION_OPENING
from brace_rl.tasks.search.facts import END, POSSESSIVE, RELATIONS, Chain, World, make_world, names
from brace_rl.tasks.search.generated import GeneratedTask, answer, information, plan, policy
from brace_rl.tasks.search.retrievers import LocalRetriever
from brace_rl.tasks.search.settings import WebFactsSettings
from brace_rl.tasks.search.tools import OPEN_TAG, SEARCH_TAG, OpenTool, SearchTool, Shown
from brace_rl.tasks.tools import Tool, tagged

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RECORD, RUMOUR = "record", "rumour"
_SEPARATOR = ";"
_WHOLE_PAGE = 10_000


def render_titles(documents: Sequence[Document]) -> str:
    """``p17 bako boss ; p204 bako boss ;``."""
    return " ".join(f"{document.id} {document.title} {_SEPARATOR}" for document in documents)


class WebFactsTask(GeneratedTask):
    """See the module's docstring.

    Raises:
        ConfigError: fewer than two calls are allowed in a turn, which the demonstrations need.
    """

    Settings = WebFactsSettings
    tags = (SEARCH_TAG, OPEN_TAG)

    def __init__(self, settings: WebFactsSettings, *, seed: int) -> None:
        if settings.max_calls_per_turn < 2:
            raise ConfigError("task.max_calls_per_turn: web_facts opens two pages at once; use 2 or more")
        super().__init__(settings, seed=seed)

    def documents(self, world: World, key: str) -> list[Document]:
        rumours = make_world(people=len(world.people), relations=len(world.facts), key=f"{key}/rumours")
        pages = [
            (f"{person} {relation}", f"{person} {relation} {kind} {other}")
            for kind, facts in ((RECORD, world.facts), (RUMOUR, rumours.facts))
            for relation, of in facts.items()
            for person, other in of.items()
        ]
        # Shuffled, since equally good documents are returned in the order of the corpus.
        random.Random(f"documents/{key}").shuffle(pages)
        return [Document(_page_id(row), title, text) for row, (title, text) in enumerate(pages)]

    def tools(self, retriever: LocalRetriever) -> dict[str, Tool]:
        shown = Shown()
        return {
            SEARCH_TAG: SearchTool(retriever, self._settings.top_k, render_titles, shown),
            OPEN_TAG: OpenTool(retriever, page=_WHOLE_PAGE, headed=False, shown=shown),
        }

    def solve(
        self, chain: Chain, world: World, retriever: LocalRetriever, rng: random.Random, *, mistaken: bool
    ) -> list[TranscriptPiece]:
        path, kind, wrong_hop = plan(chain, world, rng, mistaken=mistaken, own_mistake="rumour")
        person, pieces = chain.start, []
        for hop, relation in enumerate(path):
            title = f"{person} {relation}"
            results = retriever.find(title, self._settings.top_k)
            pages = [document for document in results if document.title == title]
            if kind == "rumour" and hop == wrong_hop:
                pages = [page for page in pages if RUMOUR in page.text.split()]
            believed = next((page for page in pages if RECORD in page.text.split()), pages[0])
            pieces += [
                policy(tagged(SEARCH_TAG, title) + INFORMATION_OPENING),
                information(render_titles(results), opened=True),
                policy("".join(tagged(OPEN_TAG, page.id) for page in pages) + INFORMATION_OPENING),
                information("".join(f"{page.text}\n" for page in pages), opened=True),
            ]
            person = believed.text.split()[-1]
        return [*pieces, answer(person)]

    def build_tokenizer(self) -> PreTrainedTokenizerBase:
        from brace_rl.tasks.search.words import build_word_tokenizer

        people, relations = self._settings.people, RELATIONS[: self._settings.relations]
        pages = [_page_id(row) for row in range(2 * people * len(relations))]
        return build_word_tokenizer(
            self.tags, [POSSESSIVE, END, _SEPARATOR, RECORD, RUMOUR, *relations, *names()[:people], *pages]
        )


def _page_id(row: int) -> str:
    return f"p{row}"
