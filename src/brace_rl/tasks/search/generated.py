"""What ``search_facts`` and ``web_facts`` share: worlds, questions, an index per world, demonstrations."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

from brace_rl.tasks.base import Environment, Problem, Task, Transcript, TranscriptPiece
from brace_rl.tasks.search.corpus import Document
from brace_rl.tasks.search.environment import (
    INFORMATION_CLOSING,
    INFORMATION_OPENING,
    Layout,
    SearchEnvironment,
    stop_texts,
)
from brace_rl.tasks.search.facts import RELATIONS, Chain, Split, World, make_questions, make_world
from brace_rl.tasks.search.index import index_documents
from brace_rl.tasks.search.judge import AnswerVerifier, RuleJudge
from brace_rl.tasks.search.retrievers import LocalRetriever
from brace_rl.tasks.search.settings import SearchFactsSettings, WebFactsSettings
from brace_rl.tasks.tools import ANSWER_TAG, Tool, tagged


class GeneratedTask(Task):
    """Questions about generated worlds; a family says what the documents, tools and demonstrations are.

    Args:
        seed: of the training worlds and the training questions. The world and questions held out depend on the split
            alone.

    Raises:
        ConfigError: the settings admit fewer questions than are asked for.
    """

    tags: ClassVar[tuple[str, ...]]

    def __init__(self, settings: SearchFactsSettings | WebFactsSettings, *, seed: int) -> None:
        self._settings = settings
        self.max_observation_tokens = settings.max_observation_tokens
        self.stop = stop_texts(self.tags, max_calls=settings.max_calls_per_turn)
        self._worlds: dict[str, World] = {}
        self._retrievers: dict[str, LocalRetriever] = {}
        train = [self._new_world(f"train/{seed}/{number}") for number in range(settings.worlds)]
        held_out = [self._new_world(settings.eval_split)]
        self._train = self._problems("train", settings.train_problems, f"train/{seed}", train)
        self._eval = self._problems(settings.eval_split, settings.eval_problems, settings.eval_split, held_out)

    def _new_world(self, key: str) -> str:
        world = make_world(people=self._settings.people, relations=self._settings.relations, key=key)
        self._worlds[key] = world
        self._retrievers[key] = LocalRetriever(index_documents(self.documents(world, key)))
        return key

    def _problems(self, split: Split, count: int, key: str, worlds: Sequence[str]) -> list[Problem]:
        settings = self._settings
        chains = make_questions(
            people=self._worlds[worlds[0]].people,
            relations=RELATIONS[: settings.relations],
            split=split,
            hops=settings.hops,
            count=count,
            key=key,
        )
        problems = []
        for number, chain in enumerate(chains):
            world = worlds[number % len(worlds)]
            problems.append(
                Problem(
                    id=f"{settings.name}/{world}/{chain.text}",
                    prompt=chain.text,
                    answer=self._worlds[world].visited(chain)[-1],
                    metadata={"start": chain.start, "path": chain.path, "world": world},
                )
            )
        return problems

    def train_problems(self) -> Sequence[Problem]:
        return self._train

    def eval_problems(self) -> Sequence[Problem]:
        return self._eval

    def environment(self, problem: Problem) -> Environment:
        settings = self._settings
        return SearchEnvironment(
            tools=self.tools(self._retrievers[problem.metadata["world"]]),
            verifier=AnswerVerifier(RuleJudge(), str(problem.prompt), (problem.answer,)),
            layout=Layout(),
            stop=self.stop,
            max_turns=settings.max_turns,
            max_calls=settings.max_calls_per_turn,
            tool_timeout_s=settings.tool_timeout_s,
        )

    def demonstrations(self, seed: int, *, mistakes: float = 0.0) -> Iterator[Transcript]:
        rng = random.Random(f"demonstrations/{seed}")
        while True:
            problem = rng.choice(self._train)
            chain = Chain(problem.metadata["start"], tuple(problem.metadata["path"]))
            mistaken, pieces = rng.random() < mistakes, [answer(problem.answer)]
            # A false page may happen to say what is true; such a draw is no mistake.
            while (pieces[-1] == answer(problem.answer)) == mistaken or len(pieces) == 1:
                key = problem.metadata["world"]
                pieces = self.solve(chain, self._worlds[key], self._retrievers[key], rng, mistaken=mistaken)
            yield Transcript(problem, tuple(pieces))

    @abstractmethod
    def documents(self, world: World, key: str) -> list[Document]:
        """What can be searched; ``key`` seeds what is not given by the world."""

    @abstractmethod
    def tools(self, retriever: LocalRetriever) -> dict[str, Tool]:
        """The tools of one episode, by tag."""

    @abstractmethod
    def solve(
        self, chain: Chain, world: World, retriever: LocalRetriever, rng: random.Random, *, mistaken: bool
    ) -> list[TranscriptPiece]:
        """A demonstration, with one planted mistake where ``mistaken``."""


def plan(
    chain: Chain, world: World, rng: random.Random, *, mistaken: bool, own_mistake: str
) -> tuple[list[str], str, int]:
    """The relations a demonstration follows, the kind of its mistake (empty: none) and the hop it is made at.

    Two kinds are planned here: one relation taken for another, and ``early``, the last hop left out.

    Args:
        own_mistake: a third kind, which is the family's affair.
    """
    kinds = ("early", own_mistake, "relation") if len(chain.path) > 1 else (own_mistake, "relation")
    kind = rng.choice(kinds) if mistaken else ""
    path = list(chain.path[:-1] if kind == "early" else chain.path)
    hop = rng.randrange(len(path))
    if kind == "relation":
        path[hop] = rng.choice([relation for relation in world.facts if relation not in chain.path[: hop + 1]])
    return path, kind, hop


def policy(text: str) -> TranscriptPiece:
    """What the policy wrote."""
    return TranscriptPiece(text, is_policy=True)


def information(text: str, *, opened: bool) -> TranscriptPiece:
    """What the environment answers; ``opened``: the policy wrote the opening tag."""
    opening = "" if opened else INFORMATION_OPENING
    return TranscriptPiece(f"{opening}{text}{INFORMATION_CLOSING}", is_policy=False)


def answer(name: str) -> TranscriptPiece:
    """The policy's last turn."""
    return policy(tagged(ANSWER_TAG, name))
