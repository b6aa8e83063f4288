"""Word problems with a calculator: GSM8K, or any file of questions with short answers.

The policy writes ``<calc>48/2</calc>`` wherever it wants something computed and reads ``<result>24</result>``; the
answer is what follows ``####`` in its last turn, or stands in ``<answer></answer>``. Answers are compared as numbers
where the gold answer is one, as text otherwise.

Demonstrations are GSM8K's own solutions: each annotation ``<<48/2=24>>`` becomes a call and the calculator's result.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from brace_rl.config import TaskConfig
from brace_rl.errors import DataError, ModelError
from brace_rl.tasks.arithmetic import ArithmeticInputError, evaluate, format_number
from brace_rl.tasks.base import Environment, Problem, Task, Transcript, TranscriptPiece
from brace_rl.tasks.data import GOLD_MARK, load_splits
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
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

CALL_TAG = "calc"
_ANNOTATION = re.compile(r"<<([^<>]*)>>")
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|-?\.\d+", re.ASCII)
_LONGEST_ANSWER = 200
"""Characters; anything longer is no number, and is not searched for one."""


def parse_number(text: str) -> Fraction | None:
    """The number that ``text`` is, or None: ``1,234``, ``$5``, ``24.0``, ``20%`` (20), ``3/4``, ``-7.`` are numbers."""
    text = text.replace("$", "").strip().removesuffix(".").removesuffix("%").strip()
    numerator, slash, denominator = text.partition("/")
    parts = [numerator.strip(), denominator.strip()] if slash else [numerator]
    if len(text) > _LONGEST_ANSWER or not all(_NUMBER.fullmatch(part) for part in parts):
        return None
    values = [Fraction(part.replace(",", "")) for part in parts]
    if slash and values[1] == 0:
        return None
    return values[0] / values[1] if slash else values[0]


def only_number(text: str) -> Fraction | None:
    """The one number in ``text``, words and units around it ignored; None where there is none or more than one.

    More than one is no answer, or a policy would list numbers and hope.
    """
    value = parse_number(text)
    if value is not None or len(text) > _LONGEST_ANSWER:
        return value
    found = _NUMBER.findall(text.replace("$", ""))
    return parse_number(found[0]) if len(found) == 1 else None


def same_answer(given: str, gold: str) -> bool:
    """Whether ``given`` answers ``gold``: equal numbers, or equal text but for case, spacing and a final full stop."""
    number = parse_number(gold)
    if number is not None:
        return only_number(given) == number
    return _plain(given) == _plain(gold)


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).removesuffix(".")


@dataclass(frozen=True)
class ShortAnswerVerifier(Verifier):
    """Reward 1 when the answer in the last turn is the gold answer, else 0; ``<answer>`` goes before ``####``."""

    gold: str

    def judge(self, turn: str) -> Verdict:
        block = first_block(turn, (ANSWER_TAG,))
        if block is not None:
            answer = block[1]
        else:
            _, mark, rest = turn.rpartition(GOLD_MARK)
            if not mark:
                return UNANSWERED
            answer = rest.strip().partition("\n")[0]
        right = same_answer(answer, self.gold)
        return Verdict(reward=float(right), success=right, answered=True)


class Gsm8kTask(Task):
    """See the module's docstring.

    Args:
        config: ``data`` and ``eval_data`` name the files, see :mod:`brace_rl.tasks.data`.
        seed: unused but for the order of demonstrations; problems keep the order of the file.

    Raises:
        DataError: a file cannot be used.
    """

    stop = (closing(CALL_TAG), closing(ANSWER_TAG))

    def __init__(self, config: TaskConfig, seed: int) -> None:
        self._seed = seed
        self._max_turns = config.max_turns
        self._data = config.data
        train, evaluation = load_splits(
            config.data, config.eval_data or None, most_train=config.train_problems, held_out=config.eval_problems
        )
        self._train, self._eval = self._problems(train), self._problems(evaluation)

    def train_problems(self) -> Sequence[Problem]:
        return self._train

    def eval_problems(self) -> Sequence[Problem]:
        return self._eval

    def environment(self, problem: Problem) -> Environment:
        return ToolEnvironment(
            tools={CALL_TAG: CalculatorTool()},
            verifier=ShortAnswerVerifier(problem.answer),
            max_turns=self._max_turns,
        )

    def demonstrations(self, seed: int) -> Iterator[Transcript]:
        """Gold solutions in random order.

        Raises:
            DataError: the training file holds none.
        """
        solved = [problem for problem in self._train if problem.metadata["solution"]]
        if not solved:
            raise DataError(f"{self._data}: has no worked solutions to learn from; set warm_start.steps = 0")
        rng = random.Random(f"demonstrations/{self._seed}/{seed}")
        while True:
            problem = rng.choice(solved)
            yield Transcript(problem, solution_pieces(problem.metadata["solution"], most_calls=self._max_turns - 1))

    def prompt_ids(self, problem: Problem, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Tokenise through the model's chat template.

        Raises:
            ModelError: the model has none.
        """
        if tokenizer.chat_template is None:
            raise ModelError(
                f"{tokenizer.name_or_path}: has no chat template; use an instruct model, or put a chat_template.jinja "
                f"into the model folder"
            )
        from jinja2.exceptions import TemplateError

        try:
            return super().prompt_ids(problem, tokenizer)
        except TemplateError:
            # Some templates refuse a system message; its text then opens the user's.
            return super().prompt_ids(_without_system(problem), tokenizer)

    def _problems(self, rows: Dataset) -> list[Problem]:
        instructions = _instructions(self._max_turns - 1)
        return [
            Problem(
                id=row["id"],
                prompt=_with_instructions(row["prompt"], instructions),
                answer=row["answer"],
                metadata={"solution": row["solution"]},
            )
            for row in rows
        ]


def _instructions(calls: int) -> str:
    return (
        "Solve the problem step by step. To compute something, write an arithmetic expression between <calc> and "
        "</calc>, for example <calc>48/2</calc>; the calculator then inserts <result>24</result>. You may use it at "
        f"most {calls} times. Give the final answer as a number after '#### ' on the last line, for example: #### 24"
    )


def _with_instructions(messages: Sequence[Mapping[str, str]], instructions: str) -> tuple[Mapping[str, str], ...]:
    """The instructions as system message, after the text of the one there may be."""
    first, rest = messages[0], messages[1:]
    if first["role"] == "system":
        return ({"role": "system", "content": f"{first['content']}\n\n{instructions}"}, *map(dict, rest))
    return ({"role": "system", "content": instructions}, *map(dict, messages))


def _without_system(problem: Problem) -> Problem:
    system, question, *rest = (dict(message) for message in problem.prompt if not isinstance(message, str))
    merged = {"role": question["role"], "content": f"{system['content']}\n\n{question['content']}"}
    return Problem(problem.id, (merged, *rest), problem.answer, problem.metadata)


def solution_pieces(solution: str, *, most_calls: int) -> tuple[TranscriptPiece, ...]:
    """A GSM8K solution as a transcript: ``<<48/2=24>>`` becomes a call (policy) and its result (environment).

    Annotations past ``most_calls``, and any the calculator cannot evaluate, are dropped and their text kept. The result
    is the calculator's own text (``16`` for an annotated ``16.00``), as the environment will give it.
    """
    pieces: list[TranscriptPiece] = []
    text, end = "", 0
    for annotation in _ANNOTATION.finditer(solution):
        text += solution[end : annotation.start()]
        end = annotation.end()
        expression = annotation[1].rpartition("=")[0]
        if len(pieces) >= 2 * most_calls:
            continue
        try:
            result = format_number(evaluate(expression))
        except ArithmeticInputError:
            continue
        pieces.append(TranscriptPiece(text + tagged(CALL_TAG, expression), is_policy=True))
        pieces.append(TranscriptPiece(tagged(RESULT_TAG, result), is_policy=False))
        text = ""
    return (*pieces, TranscriptPiece(text + solution[end:], is_policy=True))
