"""Mathematics with real data and any model: one turn, one answer, checked for equivalence with the gold answer."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from brace_rl.errors import ConfigError, DataError
from brace_rl.tasks.base import Environment, Messages, Problem, Task
from brace_rl.tasks.data import split_rows
from brace_rl.tasks.math.data import MathFile, MathRow, load_problems
from brace_rl.tasks.math.overlong import OverlongTask
from brace_rl.tasks.math.scoring import AnswerEnvironment, MathVerifier
from brace_rl.tasks.math.settings import MathSettings
from brace_rl.tasks.math.workers import Limits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INSTRUCTIONS = {
    "boxed": "Please reason step by step, and put your final answer within \\boxed{}.",
    "answer_line": "Please reason step by step, and write your final answer on the last line, after 'Answer:'.",
    "none": "",
}
_ALREADY_SAID = ("boxed", "answer:")
"""What a prompt holds that says itself how the answer is to be given."""


class MathTask(OverlongTask, Task):
    """Problems keep the order of their file; see :mod:`brace_rl.tasks.math.data` for the formats.

    Args:
        seed: unused; nothing here is random.

    Attributes:
        left_out: rows of the files that were left out, by reason.

    Raises:
        ConfigError: math-verify is not installed.
        DataError: a file cannot be used.
    """

    Settings = MathSettings
    settings: MathSettings

    def __init__(self, settings: MathSettings, *, seed: int) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError(
                "task.name: math needs math-verify; install it with: pip install 'math-verify>=0.9,<0.10'"
            )
        self.settings = settings
        self._limits = Limits(settings.answer_time_limit_s, settings.answer_memory_mb, settings.scoring_workers)
        data = load_problems(settings.data, bad_rows=settings.bad_rows) if settings.data else MathFile()
        held = load_problems(settings.eval_data, bad_rows=settings.bad_rows) if settings.eval_data else None
        self.left_out = data.left_out + (held.left_out if held is not None else Counter())
        train, evaluation = _split(settings, data, held)
        self._train, self._eval = list(map(self._problem, train)), list(map(self._problem, evaluation))

    def train_problems(self) -> Sequence[Problem]:
        return self._train

    def eval_problems(self) -> Sequence[Problem]:
        return self._eval

    def environment(self, problem: Problem) -> Environment:
        verifier = MathVerifier(problem.answer, answer_format=self.settings.answer_format, limits=self._limits)
        return AnswerEnvironment(verifier)

    def prompt_ids(self, problem: Problem, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Through the model's chat template; as plain text where the model, a base model, has none."""
        if isinstance(problem.prompt, str) or tokenizer.chat_template is not None:
            return _templated(problem, tokenizer, super().prompt_ids)
        text = "\n\n".join(message["content"] for message in problem.prompt) + "\n\n"
        return list(tokenizer.encode(text))

    def _problem(self, row: MathRow) -> Problem:
        return Problem(row.id, _with_instructions(row.messages, self.settings.instructions), row.answer)


def _split(settings: MathSettings, data: MathFile, held: MathFile | None) -> tuple[list[MathRow], list[MathRow]]:
    if not settings.data:
        if held is None:
            raise DataError("task.data: no file to read problems from; pass --data FILE")
        return [], held.rows[: settings.eval_problems]
    return split_rows(
        data.rows,
        None if held is None else held.rows,
        most_train=settings.train_problems,
        held_out=settings.eval_problems,
        question=lambda row: row.question,
        place=settings.data,
    )


def _with_instructions(messages: Messages, instructions: str) -> Messages:
    """The messages with the instructions after the question, unless they say already what form the answer takes."""
    if instructions == "auto":
        said = " ".join(message["content"] for message in messages).lower()
        instructions = "none" if any(words in said for words in _ALREADY_SAID) else "boxed"
    text = INSTRUCTIONS[instructions]
    if not text:
        return messages
    *before, question = messages
    return (*before, {"role": "user", "content": f"{question['content'].rstrip()}\n\n{text}"})


def _templated(
    problem: Problem,
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Callable[[Problem, PreTrainedTokenizerBase], list[int]],
) -> list[int]:
    """Token ids through the chat template. Some templates refuse a system message; its text then opens the next."""
    from jinja2.exceptions import TemplateError

    try:
        return prompt_ids(problem, tokenizer)
    except TemplateError:
        system, following, *rest = (dict(message) for message in problem.prompt if not isinstance(message, str))
        if system["role"] != "system":
            raise
        merged = {"role": following["role"], "content": f"{system['content']}\n\n{following['content']}"}
        return prompt_ids(replace(problem, prompt=(merged, *rest)), tokenizer)
