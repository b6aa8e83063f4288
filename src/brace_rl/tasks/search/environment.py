"""An episode in Search-R1's format: think, search, read the information, answer.

::

    policy        <think> .. </think> <search> query </search>
    environment   <information>Doc 1(Title: ..) ..</information>
    policy        <answer> .. </answer>

Where one call a turn is allowed, a turn ends at the call. Where several are, the policy writes them one after the other
and ends its turn with the model's end-of-sequence token or by writing ``<information>`` itself, as it has read it so
often; the calls of a turn run at the same time and their results come in one block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from brace_rl.tasks.base import Environment, StepResult
from brace_rl.tasks.search.tools import Shown
from brace_rl.tasks.tools import (
    ANSWER_TAG,
    UNANSWERED,
    Block,
    Tool,
    ToolFigures,
    Verdict,
    Verifier,
    blocks,
    closing,
    run_calls,
)

INFORMATION_OPENING = "<information>"
INFORMATION_CLOSING = "</information>"


def stop_texts(tags: Sequence[str], *, max_calls: int) -> tuple[str, ...]:
    """What ends a turn: an answer, and a call where only one is allowed, else the opening of the information."""
    ends = tuple(map(closing, tags)) if max_calls == 1 else (INFORMATION_OPENING,)
    return (*ends, closing(ANSWER_TAG))


@dataclass(frozen=True)
class Layout:
    """The text around a block of information.

    Attributes:
        before, after: stand outside the tags.
        retry: the observation after a turn with neither call nor answer; empty: such a turn ends the episode.
        chat: prompts are chat messages, so that after the model's end-of-sequence token the information is a message of
            the user.
    """

    before: str = ""
    after: str = ""
    retry: str = ""
    chat: bool = False


class SearchEnvironment(Environment):
    """See the module's docstring. A turn with an answer ends the episode, whatever else stands in it.

    Calls in the last turn allowed are not served; the episode ends unanswered. Reported figures: those of
    :class:`~brace_rl.tasks.tools.ToolFigures`, ``<tag>_calls`` per tool, ``invalid_turns``, ``answered``, the verdict's
    own and ``evidence_recall`` where the problem names its evidence.

    Args:
        tools: by the tag that calls them.
        stop: the task's stop texts.
        evidence: ids of the documents that ought to be found.
    """

    def __init__(
        self,
        *,
        tools: Mapping[str, Tool],
        verifier: Verifier,
        layout: Layout,
        stop: Sequence[str],
        max_turns: int,
        max_calls: int,
        tool_timeout_s: float,
        shown: Shown | None = None,
        evidence: Sequence[str] = (),
    ) -> None:
        self._tools = dict(tools)
        self._verifier = verifier
        self._layout = layout
        self._stop = tuple(stop)
        self._max_turns = max_turns
        self._max_calls = max_calls
        self._tool_timeout_s = tool_timeout_s
        self._shown = shown or Shown()
        self._evidence = tuple(evidence)
        self._turns = 0
        self._invalid_turns = 0
        self._called: Counter[str] = Counter()
        self._figures = ToolFigures()

    async def step(self, action: str) -> StepResult:
        self._turns += 1
        found = list(blocks(action, (*self._tools, ANSWER_TAG)))
        if any(block.tag == ANSWER_TAG for block in found):
            return self._finish(await self._verifier.judge(action))
        if self._turns >= self._max_turns or not (found or self._layout.retry):
            return self._finish(UNANSWERED)
        opened = action.endswith(INFORMATION_OPENING)
        closing_text = INFORMATION_CLOSING + self._layout.after
        if not found:
            self._invalid_turns += 1
            return self._say(self._layout.retry, closing_text if opened else "", action)
        opening = "" if opened else self._layout.before + INFORMATION_OPENING
        return self._say(opening + await self._information(found), closing_text, action)

    async def _information(self, calls: Sequence[Block]) -> str:
        served, refused = calls[: self._max_calls], len(calls) - self._max_calls
        self._called.update(call.tag for call in served)
        results = await run_calls(served, self._tools, figures=self._figures, timeout_s=self._tool_timeout_s)
        if refused > 0:
            self._figures.calls += refused
            self._figures.errors += refused
            results.append(f"error: {refused} more calls were not served; at most {self._max_calls} fit in one turn\n")
        return "".join(results)

    def _say(self, text: str, end: str, action: str) -> StepResult:
        ended_by_model = not action.endswith(self._stop)
        if self._layout.chat and ended_by_model:
            message = {"role": "user", "content": (text + end).strip()}
            return StepResult(observation=(message,), info=self._info())
        return StepResult(observation=text, observation_end=end, info=self._info())

    def _info(self) -> dict[str, float]:
        info = self._figures.info() | {f"{tag}_calls": float(self._called[tag]) for tag in self._tools}
        info["invalid_turns"] = float(self._invalid_turns)
        if self._evidence:
            info["evidence_recall"] = self._shown.recall(self._evidence)
        return info

    def _finish(self, verdict: Verdict) -> StepResult:
        return StepResult(
            reward=verdict.reward,
            done=True,
            success=verdict.success,
            info={**self._info(), "answered": float(verdict.answered), **verdict.info},
            excluded=verdict.excluded,
        )
