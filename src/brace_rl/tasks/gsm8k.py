"""Word problems with a calculator: GSM8K, or any file of questions with short answers.

The policy writes ``<calc>48/2</calc>`` wherever it wants something computed and reads ``<result>24</result>``; the
answer is what follows ``####`` in its last turn, or stands in ``<answer></answer>``. Answers are compared as numbers
where the gold answer is one, as text otherwise.

With ``python_tool`` it may also run Python it writes, ``<python>print(48 / 2)</python>``, and reads what that printed.

Demonstrations are GSM8K's own solutions: each annotation ``<<48/2=24>>`` becomes a call and the calculator's result.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from pydantic import model_validator

from brace_rl.errors import DataError
from brace_rl.tasks.arithmetic import ArithmeticInputError, evaluate, format_number
from brace_rl.tasks.base import Environment, Problem, Task, Transcript, TranscriptPiece
from brace_rl.tasks.data import GOLD_MARK, load_splits
from brace_rl.tasks.math.equivalence import decide
from brace_rl.tasks.math.normalize import normalize
from brace_rl.tasks.python_tool import Limits, PythonTool, check_isolation
from brace_rl.tasks.settings import DataSettings, PythonToolSettings, ToolSettings
from brace_rl.tasks.tools import (
    ANSWER_TAG,
    RESULT_TAG,
    UNANSWERED,
    CalculatorTool,
    Tool,
    ToolEnvironment,
    Verdict,
    Verifier,
    closing,
    first_block,
    tagged,
)

if TYPE_CHECKING:
    from datasets import Dataset

CALL_TAG = "calc"
PYTHON_TAG = "python"
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
    """Whether ``given`` answers ``gold``: equal numbers, or equal text but for case, spacing and a final full stop.

    Numbers are read as the mathematics family reads them (mixed numbers, LaTeX fractions, unicode signs); where that
    finds none, the one number among words counts.
    """
    number = parse_number(gold)
    if number is None:
        return _plain(given) == _plain(gold)
    if len(given) > _LONGEST_ANSWER:
        return False
    verdict = decide(given, gold)
    return only_number(normalize(given)) == number if verdict is None else verdict


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).removesuffix(".")


@dataclass(frozen=True)
class ShortAnswerVerifier(Verifier):
    """Reward 1 when the answer in the last turn is the gold answer, else 0; ``<answer>`` goes before ``####``."""

    gold: str

    async def judge(self, turn: str) -> Verdict:
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


class Gsm8kSettings(DataSettings, ToolSettings, PythonToolSettings):
    """Word problems (GSM8K, or questions with short answers) with a calculator, and Python on demand."""

    name: str = "gsm8k_tool"

    @model_validator(mode="after")
    def _python_ends_first(self) -> Gsm8kSettings:
        if self.python_tool and self.python_wall_s >= self.tool_timeout_s:
            raise ValueError(
                f"task.python_wall_s: {self.python_wall_s:g} s must be below task.tool_timeout_s = "
                f"{self.tool_timeout_s:g}, or the policy never reads what a long script printed"
            )
        return self


class Gsm8kTask(Task):
    """See the module's docstring.

    Args:
        settings: ``data`` and ``eval_data`` name the files, see :mod:`brace_rl.tasks.data`.
        seed: unused but for the order of demonstrations; problems keep the order of the file.

    Raises:
        DataError: a file cannot be used.
        ConfigError: the Python tool is asked for on a machine that does not let it be isolated.
    """

    Settings = Gsm8kSettings

    def __init__(self, settings: Gsm8kSettings, *, seed: int) -> None:
        self._seed = seed
        self._settings = settings
        self.max_observation_tokens = settings.max_observation_tokens
        self._tools: dict[str, Tool] = {CALL_TAG: CalculatorTool()}
        if settings.python_tool:
            limits = _limits(settings)
            check_isolation(limits)
            self._tools[PYTHON_TAG] = PythonTool(limits)
        self.stop = tuple(closing(tag) for tag in (*self._tools, ANSWER_TAG))
        train, evaluation = load_splits(
            settings.data, settings.eval_data, most_train=settings.train_problems, held_out=settings.eval_problems
        )
        self._train, self._eval = self._problems(train), self._problems(evaluation)

    def train_problems(self) -> Sequence[Problem]:
        return self._train

    def eval_problems(self) -> Sequence[Problem]:
        return self._eval

    def environment(self, problem: Problem) -> Environment:
        return ToolEnvironment(
            tools=self._tools,
            verifier=ShortAnswerVerifier(problem.answer),
            max_turns=self._settings.max_turns,
            tool_timeout_s=self._settings.tool_timeout_s,
        )

    def demonstrations(self, seed: int, *, mistakes: float = 0.0) -> Iterator[Transcript]:
        """Gold solutions in random order.

        Raises:
            DataError: the training file holds none.
        """
        solved = [problem for problem in self._train if problem.metadata["solution"]]
        if not solved:
            raise DataError(f"{self._settings.data}: has no worked solutions to learn from; set warm_start.steps = 0")
        rng = random.Random(f"demonstrations/{self._seed}/{seed}")
        while True:
            problem = rng.choice(solved)
            yield Transcript(
                problem, solution_pieces(problem.metadata["solution"], most_calls=self._settings.max_turns - 1)
            )

    def _problems(self, rows: Dataset) -> list[Problem]:
        instructions = _instructions(self._settings.max_turns - 1, python=PYTHON_TAG in self._tools)
        return [
            Problem(
                id=row["id"],
                prompt=_with_instructions(row["prompt"], instructions),
                answer=row["answer"],
                metadata={"solution": row["solution"]},
            )
            for row in rows
        ]


def _limits(settings: Gsm8kSettings) -> Limits:
    return Limits(
        wall_s=settings.python_wall_s,
        cpu_s=settings.python_cpu_s,
        memory_bytes=settings.python_memory_mb << 20,
        output_bytes=settings.python_output_bytes,
        isolated=settings.python_isolation,
    )


def _instructions(calls: int, *, python: bool) -> str:
    also = (
        "To run Python, write a script between <python> and </python>, for example <python>print(48 / 2)</python>; "
        "what it prints is then inserted in the same way, and the next script starts afresh. "
    )
    return (
        "Solve the problem step by step. To compute something, write an arithmetic expression between <calc> and "
        "</calc>, for example <calc>48/2</calc>; the calculator then inserts <result>24</result>. "
        f"{also if python else ''}You may use {'them' if python else 'it'} at "
        f"most {calls} times. Give the final answer as a number after '#### ' on the last line, for example: #### 24"
    )


def _with_instructions(messages: Sequence[Mapping[str, str]], instructions: str) -> tuple[Mapping[str, str], ...]:
    """The instructions as system message, after the text of the one there may be."""
    first, rest = messages[0], messages[1:]
    if first["role"] == "system":
        return ({"role": "system", "content": f"{first['content']}\n\n{instructions}"}, *map(dict, rest))
    return ({"role": "system", "content": instructions}, *map(dict, messages))


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
