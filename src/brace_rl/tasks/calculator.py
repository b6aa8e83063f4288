"""Generated arithmetic, solved with a calculator over several turns.

A prompt is an expression and an equals sign, ``(12+7)*3-5=``. The policy writes ``<calc>12+7</calc>``, the environment
inserts ``<result>19</result>``, and so on until ``<answer>52</answer>``; reward 1 for exactly the right integer, 0
otherwise. Operators are ``+``, ``-`` and ``*``, and every value is an integer from 0 to ten times the largest operand
(and nine more), so that there is little to copy.

**Splits.** Two expressions count as the same when flattening sums and products (associativity) and sorting their terms
and factors (commutativity) makes them equal: ``3+4*5`` is ``5*4+3``, and ``9-(2-1)`` is ``9+1-2``. The hash of that
canonical form puts an expression into the train (8 in 10), dev (1 in 10) or test (1 in 10) bucket, so the splits are
disjoint for every seed, size and setting. Tune on ``dev``; ``test`` is what is reported.

**Demonstrations** are deliberately mediocre when ``warm_start.mistakes`` is above 0: that share of them holds one
planted mistake and ends in a wrong answer, so that a policy that imitates them errs about as often, and reinforcement
learning has something to select from. The kinds, equally likely where the expression admits them, are: operations
carried out from left to right whatever binds tighter; a digit of an operand miscopied; a digit of a result miscopied
into the next call or the answer; an intermediate result given as the answer.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import Field, model_validator

from brace_rl.errors import ConfigError
from brace_rl.tasks.base import Environment, Problem, Task, Transcript, TranscriptPiece
from brace_rl.tasks.settings import GeneratedSettings
from brace_rl.tasks.tools import (
    ANSWER_TAG,
    RESULT_TAG,
    UNANSWERED,
    CalculatorTool,
    ToolEnvironment,
    Verdict,
    Verifier,
    closing,
    first_block,
    tagged,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Split = Literal["train", "dev", "test"]

CALL_TAG = "calc"
TOOL_MAX_DIGITS = 12
"""Keeps observations short; holds every intermediate result of the largest ``max_number``."""
_BUCKETS: tuple[Split, ...] = ("train",) * 8 + ("dev", "test")
_MOST_REJECTIONS = 20_000
"""Draws in a row without a new expression after which the split counts as exhausted."""
_INTEGER = re.compile(r"-?\d{1,20}", re.ASCII)
_PRECEDENCE = {"+": 1, "-": 1, "*": 2}


class CalculatorSettings(GeneratedSettings):
    """Generated arithmetic, solved with a calculator over several turns."""

    name: str = "calculator"
    operands: tuple[int, int] = Field((2, 4), description="fewest and most numbers in an expression")
    max_number: int = Field(99, ge=1, le=10**9, description="largest number in an expression")
    max_turns: int = Field(6, ge=1, description="model turns per episode; the episode ends unrewarded after the last")
    operations_per_call: int = Field(1, ge=1, description="binary operations one tool call may hold")

    @model_validator(mode="after")
    def _ordered(self) -> CalculatorSettings:
        if self.operands[0] < 2 or self.operands[0] > self.operands[1]:
            raise ValueError("task.operands: needs 2 <= fewest <= most")
        return self


@dataclass(frozen=True)
class IntegerVerifier(Verifier):
    """Reward 1 for ``<answer>N</answer>`` with exactly this integer, written in digits."""

    answer: int

    async def judge(self, turn: str) -> Verdict:
        block = first_block(turn, (ANSWER_TAG,))
        if block is None:
            return UNANSWERED
        right = _INTEGER.fullmatch(block[1]) is not None and int(block[1]) == self.answer
        return Verdict(reward=float(right), success=right, answered=True)


class CalculatorTask(Task):
    """See the module's docstring.

    Args:
        seed: of the training problems, their order and nothing else; the held-out problems are the same for every seed.

    Raises:
        ConfigError: the settings admit fewer distinct expressions than problems are asked for.
    """

    Settings = CalculatorSettings
    stop = (closing(CALL_TAG), closing(ANSWER_TAG))

    def __init__(self, settings: CalculatorSettings, *, seed: int) -> None:
        self._settings = settings
        self._train = generate_problems(settings, split="train", count=settings.train_problems, seed=seed)
        self._eval = generate_problems(settings, split=settings.eval_split, count=settings.eval_problems, seed=0)

    def train_problems(self) -> Sequence[Problem]:
        return self._train

    def eval_problems(self) -> Sequence[Problem]:
        return self._eval

    def environment(self, problem: Problem) -> Environment:
        tool = CalculatorTool(
            max_operations=self._settings.operations_per_call, max_digits=TOOL_MAX_DIGITS, explain=False
        )
        verifier = IntegerVerifier(int(problem.answer))
        return ToolEnvironment(tools={CALL_TAG: tool}, verifier=verifier, max_turns=self._settings.max_turns)

    def demonstrations(self, seed: int, *, mistakes: float = 0.0) -> Iterator[Transcript]:
        """Raises ConfigError where a demonstration takes more turns than an episode has."""
        longest = self._settings.operands[1]
        if self._settings.max_turns < longest:
            raise ConfigError(
                f"task.max_turns: {self._settings.max_turns} is too few for a demonstration with {longest} numbers, "
                f"which takes {longest} turns; raise it or lower task.operands"
            )
        rng = random.Random(f"demonstrations/{seed}")
        while True:
            problem = rng.choice(self._train)
            if rng.random() < mistakes:
                solution = _mistaken_solution(problem, rng)
            else:
                solution = _carry_out(problem.metadata["postfix"])
            yield Transcript(problem, _pieces(solution))

    def build_tokenizer(self) -> PreTrainedTokenizerBase:
        from brace_rl.tasks.tokenizer import build_calculator_tokenizer

        return build_calculator_tokenizer()


def generate_problems(settings: CalculatorSettings, *, split: Split, count: int, seed: int) -> list[Problem]:
    """``count`` distinct problems of one split. ``metadata["postfix"]`` holds the expression in postfix order.

    Raises:
        ConfigError: there are not that many.
    """
    rng = random.Random(f"calculator/{split}/{seed}")
    largest = 10 * settings.max_number + 9
    seen: set[str] = set()
    problems: list[Problem] = []
    rejections = 0
    while len(problems) < count:
        tree = _random_tree(rng, rng.randint(*settings.operands), settings.max_number, largest)
        key = canonical_form(tree)
        if key in seen or _bucket(key) != split:
            rejections += 1
            if rejections > _MOST_REJECTIONS:
                raise ConfigError(
                    f"task.{'train' if split == 'train' else 'eval'}_problems: task.operands and task.max_number admit "
                    f"only about {len(problems)} distinct {split} expressions, not {count}; ask for fewer or raise them"
                )
            continue
        rejections = 0
        seen.add(key)
        text = _render(tree)
        metadata = {"postfix": tuple(_postfix(tree))}
        problems.append(Problem(id=f"calculator/{text}", prompt=f"{text}=", answer=str(tree.value), metadata=metadata))
    return problems


class Node(NamedTuple):
    """An expression: a number when ``operator`` is empty."""

    value: int
    operator: str = ""
    operands: tuple[Node, ...] = ()


def canonical_form(tree: Node) -> str:
    """Text that equals another's when only order and grouping of terms and factors differ."""
    if not tree.operator:
        return str(tree.value)
    if tree.operator == "*":
        return f"({'*'.join(sorted(_factors(tree)))})"
    return f"({''.join(sorted(_terms(tree, '+')))})"


def _factors(tree: Node) -> Iterator[str]:
    if tree.operator != "*":
        yield canonical_form(tree)
        return
    for operand in tree.operands:
        yield from _factors(operand)


def _terms(tree: Node, sign: str) -> Iterator[str]:
    if tree.operator not in ("+", "-"):
        yield sign + canonical_form(tree)
        return
    left, right = tree.operands
    yield from _terms(left, sign)
    yield from _terms(right, sign if tree.operator == "+" else "-" if sign == "+" else "+")


def _bucket(key: str) -> Split:
    digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
    return _BUCKETS[int.from_bytes(digest, "little") % len(_BUCKETS)]


def _random_tree(rng: random.Random, numbers: int, max_number: int, largest: int) -> Node:
    """A tree over ``numbers`` numbers with every value from 0 to ``largest``."""
    if numbers == 1:
        return Node(rng.randint(1, max_number))
    split = rng.randint(1, numbers - 1)
    left = _random_tree(rng, split, max_number, largest)
    right = _random_tree(rng, numbers - split, max_number, largest)
    operators = ["-"]
    if left.value + right.value <= largest:
        operators.append("+")
    if left.value * right.value <= largest:
        operators.append("*")
    operator = rng.choice(operators)
    if operator == "-" and left.value < right.value:
        left, right = right, left
    return Node(_apply(operator, left.value, right.value), operator, (left, right))


def _apply(operator: str, left: int, right: int) -> int:
    if operator == "+":
        return left + right
    return left - right if operator == "-" else left * right


def _render(tree: Node) -> str:
    """Infix text with the parentheses that keep the tree's own grouping, and no others."""
    if not tree.operator:
        return str(tree.value)
    left, right = tree.operands
    binding = _PRECEDENCE[tree.operator]
    left_text, right_text = _render(left), _render(right)
    if left.operator and _PRECEDENCE[left.operator] < binding:
        left_text = f"({left_text})"
    if right.operator and _PRECEDENCE[right.operator] <= binding:
        right_text = f"({right_text})"
    return f"{left_text}{tree.operator}{right_text}"


def _postfix(tree: Node) -> Iterator[str]:
    for operand in tree.operands:
        yield from _postfix(operand)
    yield tree.operator or str(tree.value)


@dataclass(frozen=True)
class _Solution:
    """Calls with the results the calculator gives, in order, and the answer."""

    calls: tuple[tuple[str, int], ...]
    answer: str


def _carry_out(postfix: Sequence[str], miscopy: tuple[int, random.Random] | None = None) -> _Solution:
    """One call per operator of ``postfix``; ``miscopy = (i, rng)`` garbles call ``i``'s result where it is used."""
    stack: list[str] = []
    calls: list[tuple[str, int]] = []
    for token in postfix:
        if token not in _PRECEDENCE:
            stack.append(token)
            continue
        right, left = stack.pop(), stack.pop()
        result = _apply(token, int(left), int(right))
        if miscopy is not None and miscopy[0] == len(calls):
            stack.append(_change_a_digit(str(result), miscopy[1]))
        else:
            stack.append(str(result))
        calls.append((f"{left}{token}{right}", result))
    return _Solution(tuple(calls), stack.pop())


def _mistaken_solution(problem: Problem, rng: random.Random) -> _Solution:
    """A solution with one planted mistake and a wrong answer; its results are those the calculator would give."""
    postfix: tuple[str, ...] = problem.metadata["postfix"]
    operations = sum(token in _PRECEDENCE for token in postfix)
    for kind in rng.sample(("order", "operand", "result", "premature"), 4):
        if kind == "order":
            solution = _carry_out(_left_to_right(problem))
        elif kind == "operand":
            place = rng.choice([place for place, token in enumerate(postfix) if token not in _PRECEDENCE])
            changed = _change_a_digit(postfix[place], rng)
            solution = _carry_out((*postfix[:place], changed, *postfix[place + 1 :]))
        elif kind == "premature":
            kept = _carry_out(postfix).calls[: rng.randint(1, max(1, operations - 1))]
            solution = _Solution(kept, str(kept[-1][1]))
        else:
            solution = _carry_out(postfix, miscopy=(rng.randrange(operations), rng))
        within = all(0 <= result < 10**TOOL_MAX_DIGITS for _, result in solution.calls)
        if within and solution.answer != problem.answer:
            return solution
    return _carry_out(postfix, miscopy=(operations - 1, rng))


def _left_to_right(problem: Problem) -> tuple[str, ...]:
    """The postfix order of somebody who ignores parentheses and precedence."""
    first, *rest = re.findall(r"\d+|[-+*]", str(problem.prompt))
    postfix = [first]
    for operator, number in zip(rest[::2], rest[1::2], strict=True):
        postfix += [number, operator]
    return tuple(postfix)


def _change_a_digit(number: str, rng: random.Random) -> str:
    """A non-negative number of as many digits that differs in one of them; no leading zero appears."""
    place = rng.randrange(len(number))
    fewest = "1" if place == 0 and len(number) > 1 else "0"
    choices = [digit for digit in "0123456789" if digit != number[place] and digit >= fewest]
    return number[:place] + rng.choice(choices) + number[place + 1 :]


def _pieces(solution: _Solution) -> tuple[TranscriptPiece, ...]:
    pieces: list[TranscriptPiece] = []
    for call, result in solution.calls:
        pieces.append(TranscriptPiece(tagged(CALL_TAG, call), is_policy=True))
        pieces.append(TranscriptPiece(tagged(RESULT_TAG, str(result)), is_policy=False))
    pieces.append(TranscriptPiece(tagged(ANSWER_TAG, solution.answer), is_policy=True))
    return tuple(pieces)
