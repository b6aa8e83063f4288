"""Tools a policy calls in text, and the environment that runs them: shared by every task that uses tools.

The policy writes ``<name>argument</name>``; the environment answers ``<result>...</result>``. An answer ends the
episode. What an answer is worth is a :class:`Verifier`'s business, what a tool does a :class:`Tool`'s.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from brace_rl.tasks.arithmetic import MAX_DIGITS, ArithmeticInputError, evaluate, format_number
from brace_rl.tasks.base import Environment, StepResult

ANSWER_TAG = "answer"
RESULT_TAG = "result"


def tagged(tag: str, content: str) -> str:
    """``<tag>content</tag>``."""
    return f"<{tag}>{content}</{tag}>"


def closing(tag: str) -> str:
    """``</tag>``, the stop text of a turn that uses ``tag``."""
    return f"</{tag}>"


def first_block(text: str, tags: Iterable[str]) -> tuple[str, str] | None:
    """Tag and content of the complete block that closes first, or None. Linear in the text's length."""
    found: tuple[int, str, str] | None = None
    for tag in tags:
        start = text.find(f"<{tag}>")
        if start < 0:
            continue
        start += len(tag) + 2
        end = text.find(f"</{tag}>", start)
        if end >= 0 and (found is None or end < found[0]):
            found = (end, tag, text[start:end])
    return None if found is None else found[1:]


class ToolError(Exception):
    """A call the tool cannot serve; the message becomes the observation."""


class Tool(ABC):
    """Something a policy may call. Picklable, and safe to share between episodes."""

    @abstractmethod
    async def call(self, argument: str) -> str:
        """The observation for ``argument``.

        Raises:
            ToolError: the call cannot be served.
        """


@dataclass(frozen=True)
class CalculatorTool(Tool):
    """Evaluates arithmetic with :func:`brace_rl.tasks.arithmetic.evaluate`.

    Attributes:
        max_operations: binary operations one call may hold; None for no limit.
        max_digits: most digits of any number involved.
        explain: whether an error says what was wrong or is the bare word ``error``.
    """

    max_operations: int | None = None
    max_digits: int = MAX_DIGITS
    explain: bool = True

    async def call(self, argument: str) -> str:
        try:
            value = evaluate(argument, max_operations=self.max_operations, max_digits=self.max_digits)
        except ArithmeticInputError as error:
            raise ToolError(f"error: {error}" if self.explain else "error") from None
        return format_number(value)


@dataclass(frozen=True)
class Verdict:
    """What a final turn is worth. ``answered`` is False where the policy gave no answer that could be read."""

    reward: float
    success: bool
    answered: bool


UNANSWERED = Verdict(reward=0.0, success=False, answered=False)


class Verifier(ABC):
    """Judges the turn that ends an episode. Picklable."""

    @abstractmethod
    def judge(self, turn: str) -> Verdict:
        """The verdict on the text of the last turn."""


class ToolEnvironment(Environment):
    """An episode of tool calls that ends with an answer.

    A turn is decided by the first complete block in it: a tool's name makes it a call, ``answer`` ends the episode. A
    turn with neither also ends it, as does a call in the last turn allowed, which is not served. Reported figures:
    ``tool_calls`` and ``tool_errors`` per episode, ``answered`` 1 or 0.

    Args:
        tools: by the tag that calls them.
        verifier: judges the last turn.
        max_turns: turns of the policy, at least 1.
    """

    def __init__(self, *, tools: Mapping[str, Tool], verifier: Verifier, max_turns: int) -> None:
        self._tools = dict(tools)
        self._verifier = verifier
        self._max_turns = max_turns
        self._turns = 0
        self._calls = 0
        self._errors = 0

    async def step(self, action: str) -> StepResult:
        self._turns += 1
        block = first_block(action, (*self._tools, ANSWER_TAG))
        if block is None or block[0] == ANSWER_TAG:
            return self._finish(self._verifier.judge(action))
        if self._turns >= self._max_turns:
            return self._finish(UNANSWERED)
        tag, argument = block
        self._calls += 1
        try:
            result = await self._tools[tag].call(argument)
        except ToolError as error:
            self._errors += 1
            result = str(error)
        return StepResult(observation=tagged(RESULT_TAG, result))

    def _finish(self, verdict: Verdict) -> StepResult:
        info = {
            "tool_calls": float(self._calls),
            "tool_errors": float(self._errors),
            "answered": float(verdict.answered),
        }
        return StepResult(reward=verdict.reward, done=True, success=verdict.success, info=info)
