"""Generated multi-hop questions answered with a search tool: the embedded form of :mod:`.search_qa`.

``bako 's boss 's friend ?`` takes two searches, ``bako boss`` and then the friend of whoever that is. A document is one
fact, ``bako boss rilu``. Besides it a search returns distractors: the fact in which bako is somebody else's boss holds
the same three words and ranks as high, and facts that share two of them fill up the list.

**Demonstrations** with a mistake end in a wrong answer; the kinds, equally likely, are: stopping one hop early, going
on with a person out of another result, and searching for another relation.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from brace_rl.tasks.base import TranscriptPiece
from brace_rl.tasks.search.corpus import Document
from brace_rl.tasks.search.facts import END, POSSESSIVE, RELATIONS, Chain, World, names
from brace_rl.tasks.search.generated import GeneratedTask, answer, information, plan, policy
from brace_rl.tasks.search.retrievers import LocalRetriever
from brace_rl.tasks.search.settings import SearchFactsSettings
from brace_rl.tasks.search.tools import SEARCH_TAG, SearchTool
from brace_rl.tasks.tools import Tool, tagged

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SEPARATOR = ";"


def render_facts(documents: Sequence[Document]) -> str:
    """``bako boss rilu ; tema boss bako ;``."""
    return " ".join(f"{document.text} {_SEPARATOR}" for document in documents)


class SearchFactsTask(GeneratedTask):
    """See the module's docstring."""

    Settings = SearchFactsSettings
    tags = (SEARCH_TAG,)

    def documents(self, world: World, key: str) -> list[Document]:
        facts = [f"{person} {relation} {other}" for relation, of in world.facts.items() for person, other in of.items()]
        # Shuffled, since equally good documents are returned in the order of the corpus.
        random.Random(f"documents/{key}").shuffle(facts)
        return [Document(str(row), "", fact) for row, fact in enumerate(facts)]

    def tools(self, retriever: LocalRetriever) -> dict[str, Tool]:
        return {SEARCH_TAG: SearchTool(retriever, self._settings.top_k, render_facts)}

    def solve(
        self, chain: Chain, world: World, retriever: LocalRetriever, rng: random.Random, *, mistaken: bool
    ) -> list[TranscriptPiece]:
        path, kind, wrong_hop = plan(chain, world, rng, mistaken=mistaken, own_mistake="person")
        person, pieces = chain.start, []
        for hop, relation in enumerate(path):
            documents = retriever.find(f"{person} {relation}", self._settings.top_k)
            pieces.append(policy(tagged(SEARCH_TAG, f"{person} {relation}")))
            pieces.append(information(render_facts(documents), opened=self._settings.max_calls_per_turn > 1))
            following = world.facts[relation][person]
            if kind == "person" and hop == wrong_hop:
                seen = {word for document in documents for word in document.text.split()} - {*world.facts, following}
                following = rng.choice(sorted(seen))
            person = following
        return [*pieces, answer(person)]

    def build_tokenizer(self) -> PreTrainedTokenizerBase:
        from brace_rl.tasks.search.words import build_word_tokenizer

        relations = RELATIONS[: self._settings.relations]
        return build_word_tokenizer(
            self.tags, [POSSESSIVE, END, _SEPARATOR, *relations, *names()[: self._settings.people]]
        )
