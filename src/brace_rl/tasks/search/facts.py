"""A generated world: people, relations between them, questions that follow several relations. Standard library only.

Each person has one mother, one boss and so on, all of them different people and none of them that person, and is
exactly one other person's mother, boss and so on. A question is a person and a path of different relations,
``bako 's boss 's friend ?``: first bako's boss, then that person's friend.

**Splits.** Training, dev and test questions are about different worlds (the same names, other facts), and the hash of
a question's text puts it into the train (8 in 10), dev or test bucket (1 in 10 each). So no question is in two splits,
and remembering facts helps with none that is held out. Training is about several worlds that contradict each other, so
that facts are read and not remembered there either. The training worlds depend on the seed, the other two do not.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from brace_rl.errors import ConfigError

Split = Literal["train", "dev", "test"]

RELATIONS = ("boss", "friend", "mother", "doctor", "teacher", "rival", "tailor", "pilot")
POSSESSIVE, END = "'s", "?"
MOST_PEOPLE = 1000

_BUCKETS: tuple[Split, ...] = ("train",) * 8 + ("dev", "test")
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_MOST_REJECTIONS = 20_000
"""Draws in a row without a new question after which the split counts as exhausted."""


@functools.cache
def names() -> tuple[str, ...]:
    """All names, four letters each, in an order that is the same in every run."""
    syllables = [consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS]
    every = [first + second for first in syllables for second in syllables if first != second]
    return tuple(random.Random("names").sample(every, MOST_PEOPLE))


@dataclass(frozen=True)
class Chain:
    """A question: ``path`` is followed from ``start``, its first relation first."""

    start: str
    path: tuple[str, ...]

    @property
    def text(self) -> str:
        """``bako 's boss 's friend ?`` for ``("boss", "friend")`` from ``bako``."""
        return f" {POSSESSIVE} ".join((self.start, *self.path)) + f" {END}"


@dataclass(frozen=True)
class World:
    """Who is whose boss.

    Attributes:
        facts: ``facts[relation][person]`` is that person's boss, friend, ...
    """

    people: tuple[str, ...]
    facts: Mapping[str, Mapping[str, str]]

    def visited(self, chain: Chain) -> list[str]:
        """The people on the way, the start first and the answer last."""
        people = [chain.start]
        for relation in chain.path:
            people.append(self.facts[relation][people[-1]])
        return people


def make_world(*, people: int, relations: int, key: str) -> World:
    """The world that ``key`` names."""
    rng = random.Random(f"world/{key}")
    everyone = names()[:people]
    taken = {person: {person} for person in everyone}
    facts = {}
    for relation in RELATIONS[:relations]:
        facts[relation] = dict(zip(everyone, _matching(everyone, taken, rng), strict=True))
        for person, other in facts[relation].items():
            taken[person].add(other)
    return World(everyone, facts)


def _matching(people: tuple[str, ...], taken: Mapping[str, set[str]], rng: random.Random) -> list[str]:
    """``people`` in an order in which nobody stands at the place of one he is ``taken`` with."""
    order = rng.sample(people, len(people))
    for place, person in enumerate(people):
        while order[place] in taken[person]:
            # A swap that leaves both in order; with fewer relations than half the people there is always one.
            other = rng.randrange(len(order))
            if order[other] not in taken[person] and order[place] not in taken[people[other]]:
                order[place], order[other] = order[other], order[place]
    return order


def make_questions(
    *, people: Sequence[str], relations: Sequence[str], split: Split, hops: tuple[int, int], count: int, key: str
) -> list[Chain]:
    """``count`` different questions of one split, in an order that depends on ``key``.

    Raises:
        ConfigError: there are not that many.
    """
    rng = random.Random(f"questions/{key}")
    chains: dict[str, Chain] = {}
    rejections = 0
    while len(chains) < count:
        chain = Chain(rng.choice(people), tuple(rng.sample(relations, rng.randint(*hops))))
        if chain.text in chains or split_of(chain.text) != split:
            rejections += 1
            if rejections > _MOST_REJECTIONS:
                raise ConfigError(
                    f"task.{'train' if split == 'train' else 'eval'}_problems: task.people, task.relations and "
                    f"task.hops admit only about {len(chains)} different {split} questions, not {count}; ask for "
                    f"fewer or raise them"
                )
            continue
        rejections = 0
        chains[chain.text] = chain
    return list(chains.values())


def split_of(text: str) -> Split:
    """The split a question belongs to."""
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return _BUCKETS[int.from_bytes(digest, "little") % len(_BUCKETS)]
