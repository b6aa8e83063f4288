"""Tools a policy calls in text, and the environment that runs them: shared by every task that uses tools.

The policy writes ``<name>argument</name>``; the environment answers ``<result>...</result>``. An answer ends the
episode. What an answer is worth is a :class:`Verifier`'s business, what a tool does a :class:`Tool`'s.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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


class Block(NamedTuple):
    """``<tag>content</tag>`` as it stood in a turn."""

    tag: str
    content: str


def blocks(text: str, tags: Iterable[str]) -> Iterator[Block]:
    """The complete blocks of ``text`` that do not overlap, in the order they close. Linear in the text's length.

    A block that was opened and not closed is none, nor is one inside another.
    """
    closings = {tag: (f"<{tag}>", f"</{tag}>") for tag in tags}
    starts = {tag: text.find(opening) for tag, (opening, _) in closings.items()}
    ends = dict.fromkeys(closings, -1)
    place = 0
    while True:
        for tag, (opening, closing_text) in closings.items():
            if 0 <= starts[tag] < place:
                starts[tag] = text.find(opening, place)
            if starts[tag] >= 0 and ends[tag] < starts[tag] + len(opening):
                ends[tag] = text.find(closing_text, starts[tag] + len(opening))
                starts[tag] = starts[tag] if ends[tag] >= 0 else -1
        complete = [tag for tag in closings if starts[tag] >= 0]
        if not complete:
            return
        tag = min(complete, key=ends.__getitem__)
        opening, closing_text = closings[tag]
        yield Block(tag, text[starts[tag] + len(opening) : ends[tag]])
        place = ends[tag] + len(closing_text)


def first_block(text: str, tags: Iterable[str]) -> Block | None:
    """The complete block that closes first, or None."""
    return next(blocks(text, tags), None)


class ToolError(Exception):
    """A call the tool cannot serve; the message becomes the observation."""


class Tool(ABC):
    """Something a policy may call. Picklable, and safe to share between episodes."""

    @abstractmethod
    async def call(self, argument: str) -> str:
        """The observation for ``argument``.

        Must give way while it waits: a client that blocks goes into ``asyncio.to_thread`` and bounds its own time,
        since a thread cannot be stopped.

        Raises:
            ToolError: the call cannot be served; the message is what the policy reads.
        """


@dataclass
class ToolFigures:
    """How often tools were called in an episode, and how it went.

    Attributes:
        calls: served or not.
        errors: calls the tool refused (the policy's mistake).
        failures: calls that raised anything else (the tool's own fault).
        timeouts: calls that took too long.
    """

    calls: int = 0
    errors: int = 0
    failures: int = 0
    timeouts: int = 0

    def info(self) -> dict[str, float]:
        """For :attr:`StepResult.info <brace_rl.tasks.base.StepResult>`."""
        return {
            "tool_calls": float(self.calls),
            "tool_errors": float(self.errors),
            "tool_failures": float(self.failures),
            "tool_timeouts": float(self.timeouts),
        }


async def run_calls(
    calls: Sequence[Block], tools: Mapping[str, Tool], *, figures: ToolFigures, timeout_s: float | None = None
) -> list[str]:
    """Serve several calls at once; their observations in the order of the calls.

    A call never raises: what a tool refuses, an unexpected exception and a call that takes longer than ``timeout_s``
    are observations that say so, counted in ``figures``.
    """

    async def serve(block: Block) -> str:
        figures.calls += 1
        try:
            return await asyncio.wait_for(tools[block.tag].call(block.content), timeout_s)
        except ToolError as error:
            figures.errors += 1
            return str(error)
        except asyncio.TimeoutError:
            figures.timeouts += 1
            return f"error: no answer within {timeout_s:g} s" if timeout_s is not None else "error: timed out"
        except Exception as error:
            figures.failures += 1
            return f"error: the tool failed ({type(error).__name__})"

    # Most turns hold one call, which needs no task of its own.
    return [await serve(calls[0])] if len(calls) == 1 else list(await asyncio.gather(*map(serve, calls)))


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
    """What a final turn is worth.

    Attributes:
        answered: False where the policy gave no answer that could be read.
        excluded: no verdict could be had (a judge that does not answer); the episode then counts nowhere.
        info: further figures, such as an F1 score.
    """

    reward: float
    success: bool
    answered: bool
    excluded: bool = False
    info: Mapping[str, float] = field(default_factory=dict)


UNANSWERED = Verdict(reward=0.0, success=False, answered=False)


class Verifier(ABC):
    """Judges the turn that ends an episode. Picklable."""

    @abstractmethod
    async def judge(self, turn: str) -> Verdict:
        """The verdict on the text of the last turn."""


class ToolEnvironment(Environment):
    """An episode of tool calls that ends with an answer.

    A turn is decided by the first complete block in it: a tool's name makes it a turn of calls, ``answer`` ends the
    episode. A turn with neither also ends it, as do calls in the last turn allowed, which are not served. Of the calls
    that stand before an answer in one turn the first ``max_calls`` are served, all at once; the others are refused. (A
    turn ends at a stop text, so a task whose policy may call several tools at once must not stop at each call's end.)

    Reported figures: those of :class:`ToolFigures` per episode, ``answered`` 1 or 0, and the verdict's own.

    Args:
        tools: by the tag that calls them.
        verifier: judges the last turn.
        max_turns: turns of the policy, at least 1.
        max_calls: calls served per turn, at least 1; with 1, calls after the first are ignored.
        tool_timeout_s: longest one call may take; None: no limit.
    """

    def __init__(
        self,
        *,
        tools: Mapping[str, Tool],
        verifier: Verifier,
        max_turns: int,
        max_calls: int = 1,
        tool_timeout_s: float | None = None,
    ) -> None:
        self._tools = dict(tools)
        self._verifier = verifier
        self._max_turns = max_turns
        self._max_calls = max_calls
        self._tool_timeout_s = tool_timeout_s
        self._turns = 0
        self._figures = ToolFigures()

    async def step(self, action: str) -> StepResult:
        self._turns += 1
        calls = self._calls(action)
        if not calls:
            return self._finish(await self._verifier.judge(action))
        if self._turns >= self._max_turns:
            return self._finish(UNANSWERED)
        served = calls[: self._max_calls]
        results = await run_calls(served, self._tools, figures=self._figures, timeout_s=self._tool_timeout_s)
        refused = len(calls) - len(served)
        self._figures.calls += refused
        self._figures.errors += refused
        results += [f"error: at most {self._max_calls} calls per turn"] * refused
        text = "".join(tagged(RESULT_TAG, result) for result in results)
        end = closing(RESULT_TAG)
        return StepResult(observation=text.removesuffix(end), observation_end=end, info=self._figures.info())

    def _calls(self, action: str) -> list[Block]:
        found: list[Block] = []
        for block in blocks(action, (*self._tools, ANSWER_TAG)):
            if block.tag == ANSWER_TAG:
                break
            found.append(block)
            if self._max_calls == 1:
                break
        return found

    def _finish(self, verdict: Verdict) -> StepResult:
        return StepResult(
            reward=verdict.reward,
            done=True,
            success=verdict.success,
            info={**self._figures.info(), "answered": float(verdict.answered), **verdict.info},
            excluded=verdict.excluded,
        )
