"""Generated sums, solved by writing out every step: the mathematics family for a model of some 100 thousand weights.

A prompt is a worksheet with a blank after every term, ``+7=__;+6=__;-9=__;``. The policy writes it again with the value
in hand filled in, ``+7=07;+6=13;-9=04;``, and ends on ``\\boxed{04}``, which the family's own verifier scores: reward 1
for the right value. With the default settings a response takes 113 tokens.

**Splits.** Two sums count as the same when sorting their signed terms makes them equal. The hash of that form puts a
sum into the train (8 in 10), dev (1 in 10) or test (1 in 10) bucket, so the splits are disjoint for every seed, size
and setting. Tune on ``dev``; ``test`` is what is reported.

**Demonstrations.** A share ``mistakes`` of them holds one planted mistake, is consistent with it from there on and ends
in a wrong answer, so that a policy that imitates them errs about as often. The kinds are: a wrong digit in a value, a
carry or borrow not taken up, a sign turned round, a term miscopied, a term passed over (its blank repeats the value
before).
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

from brace_rl.errors import ConfigError
from brace_rl.tasks.base import Environment, Problem, Task, Transcript, TranscriptPiece
from brace_rl.tasks.math.overlong import OverlongTask
from brace_rl.tasks.math.scoring import AnswerEnvironment, MathVerifier
from brace_rl.tasks.math.settings import ArithmeticStepsSettings
from brace_rl.tasks.tokenizer import build_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Split = Literal["train", "dev", "test"]

BOX = "\\boxed{"
BLANK = "_"
CHARACTERS = f"0123456789+-=;}}{BLANK}"
_BUCKETS: tuple[Split, ...] = ("train",) * 8 + ("dev", "test")
_MOST_REJECTIONS = 20_000
"""Draws in a row without a new sum after which the split counts as exhausted."""
_MISTAKES = ("digit", "carry", "sign", "miscopied", "passed over")


class ArithmeticStepsTask(OverlongTask, Task):
    """See the module's docstring. The answers are numbers, so the verifier needs no math-verify here.

    Args:
        seed: of the training problems and their order; the held-out problems are the same for every seed.

    Raises:
        ConfigError: the settings admit fewer distinct sums than problems are asked for.
    """

    Settings = ArithmeticStepsSettings
    settings: ArithmeticStepsSettings

    def __init__(self, settings: ArithmeticStepsSettings, *, seed: int) -> None:
        self.settings = settings
        self._train = generate_problems(settings, split="train", count=settings.train_problems, seed=seed)
        self._eval = generate_problems(settings, split=settings.eval_split, count=settings.eval_problems, seed=0)

    def train_problems(self) -> Sequence[Problem]:
        return self._train

    def eval_problems(self) -> Sequence[Problem]:
        return self._eval

    def environment(self, problem: Problem) -> Environment:
        return AnswerEnvironment(MathVerifier(problem.answer, answer_format="boxed"))

    def demonstrations(self, seed: int, *, mistakes: float = 0.0) -> Iterator[Transcript]:
        rng = random.Random(f"demonstrations/{seed}")
        while True:
            problem = rng.choice(self._train)
            terms: tuple[int, ...] = problem.metadata["terms"]
            if rng.random() < mistakes:
                text = _mistaken_solution(terms, self.settings, rng)
            else:
                text = solution(terms, self.settings)[0]
            yield Transcript(problem, (TranscriptPiece(text, is_policy=True),))

    def build_tokenizer(self) -> PreTrainedTokenizerBase:
        return build_steps_tokenizer()


def generate_problems(settings: ArithmeticStepsSettings, *, split: Split, count: int, seed: int) -> list[Problem]:
    """``count`` distinct problems of one split. ``metadata["terms"]`` holds the signed terms.

    Raises:
        ConfigError: there are not that many.
    """
    rng = random.Random(f"arithmetic_steps/{split}/{seed}")
    seen: set[str] = set()
    problems: list[Problem] = []
    rejections = 0
    while len(problems) < count:
        terms = _random_terms(rng, settings)
        key = canonical_form(terms)
        if key in seen or _bucket(key) != split:
            rejections += 1
            if rejections > _MOST_REJECTIONS:
                raise ConfigError(
                    f"task.{'train' if split == 'train' else 'eval'}_problems: task.terms and task.max_term admit "
                    f"only about {len(problems)} distinct {split} sums, not {count}; ask for fewer or raise them"
                )
            continue
        rejections = 0
        seen.add(key)
        sheet = "".join(_step(term, BLANK * settings.digits, settings) for term in terms)
        name = "".join(f"{term:+d}" for term in terms)
        problems.append(Problem(f"arithmetic_steps/{name}", sheet, str(sum(terms)), {"terms": terms}))
    return problems


def canonical_form(terms: Sequence[int]) -> str:
    """Text that equals another's when only the order of the terms differs."""
    return "".join(f"{term:+d}" for term in sorted(terms))


def _step(term: int, value: str, settings: ArithmeticStepsSettings) -> str:
    """A term and what is written after it; of the same length for every term."""
    width = len(str(settings.max_term))
    return f"{'-' if term < 0 else '+'}{abs(term):0{width}d}={value};"


def _bucket(key: str) -> Split:
    digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
    return _BUCKETS[int.from_bytes(digest, "little") % len(_BUCKETS)]


def _random_terms(rng: random.Random, settings: ArithmeticStepsSettings) -> tuple[int, ...]:
    """Terms up to ``max_term`` whose partial sums have at most ``digits`` digits and are not negative."""
    largest = 10**settings.digits - 1
    value = rng.randint(1, settings.max_term)
    terms = [value]
    for _ in range(rng.randint(*settings.terms) - 1):
        # Half and half where both fit, so that no problem drifts to one end.
        sign = rng.choice([1] * (value < largest) + [-1] * (value > 0))
        terms.append(sign * rng.randint(1, min(settings.max_term, largest - value if sign > 0 else value)))
        value += terms[-1]
    return tuple(terms)


def solution(
    terms: Sequence[int], settings: ArithmeticStepsSettings, slips: Mapping[int, int] | None = None
) -> tuple[str, int]:
    """The filled-in worksheet with its box, and the answer.

    Args:
        slips: by place of the term, a wrong value written there and gone on with.
    """
    value = 0
    steps: list[str] = []
    for place, term in enumerate(terms):
        value = (slips or {}).get(place, value + term)
        steps.append(_step(term, f"{value:0{settings.digits}d}", settings))
    return f"{''.join(steps)}{BOX}{value:0{settings.digits}d}}}", value


def _mistaken_solution(terms: tuple[int, ...], settings: ArithmeticStepsSettings, rng: random.Random) -> str:
    """A solution with one planted mistake and a wrong answer, no value of which is negative or too long."""
    values = list(accumulate(terms))
    while True:
        place = rng.randrange(1, len(terms))
        term, before = terms[place], values[place - 1]
        kind = rng.choice(_MISTAKES)
        changed, slips = terms, {}
        if kind == "digit":
            slips = {place: _change_a_digit(values[place], settings.digits, rng)}
        elif kind == "carry":
            slips = {place: _without_carry(before, term)}
        elif kind == "passed over":
            slips = {place: before}
        else:
            other = -term if kind == "sign" else rng.choice((1, -1)) * rng.randint(1, settings.max_term)
            changed = (*terms[:place], other, *terms[place + 1 :])
        text, answer = solution(changed, settings, slips)
        if answer != values[-1] and _WELL_FORMED.fullmatch(text) and len(text) == len(solution(terms, settings)[0]):
            return text


_WELL_FORMED = re.compile(r"(?:[+-]\d+=\d+;)+\\boxed\{\d+\}", re.ASCII)


def _change_a_digit(number: int, digits: int, rng: random.Random) -> int:
    unit: int = 10 ** rng.randrange(digits)
    digit = number // unit % 10
    return number + unit * ((digit + rng.randint(1, 9)) % 10 - digit)


def _without_carry(value: int, term: int) -> int:
    """``value`` and the term taken together digit by digit, every carry or borrow forgotten."""
    sign = 1 if term > 0 else -1
    result, unit = 0, 1
    while unit <= max(value, abs(term)):
        result += (value // unit % 10 + sign * (abs(term) // unit % 10)) % 10 * unit
        unit *= 10
    return result


def build_steps_tokenizer() -> PreTrainedTokenizerBase:
    """Characters and ``\\boxed{``: 21 tokens, the same ids in every run; anything else becomes ``<unk>``.

    Decoding what was encoded gives the same text back, with no spaces added.
    """
    from tokenizers import Regex, decoders, pre_tokenizers

    split = pre_tokenizers.Split(Regex(r"\\boxed\{|[\s\S]"), behavior="isolated")
    return build_tokenizer([BOX, *CHARACTERS], split, decoders.Fuse())
