"""The verifier of the family, and its environment: one turn, judged."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from brace_rl.tasks.base import Environment, StepResult
from brace_rl.tasks.math.equivalence import decide
from brace_rl.tasks.math.extract import AnswerFormat, extract_answer
from brace_rl.tasks.math.workers import DEFAULT_LIMITS, Limits, Outcome, shared_workers
from brace_rl.tasks.tools import UNANSWERED, Verdict, Verifier

LONGEST_ANSWER = 1000
"""Characters; a longer answer is wrong unread. The longest gold answer of the sets in docs/tasks_math.md has 159."""


@dataclass(frozen=True)
class MathVerifier(Verifier):
    """Reward 1 when the answer a response ends on is the gold answer, else 0.

    Attributes:
        gold: the gold answer.
        answer_format: where the answer is looked for.
        limits: of math-verify, in processes shared by all episodes of this process.

    Reported: ``answer_limit_hit``, 1 where an answer ran into a limit and was judged wrong for it. An answer that
    cannot be judged, because no worker can be started, excludes the episode.
    """

    gold: str
    answer_format: AnswerFormat = "any"
    limits: Limits = DEFAULT_LIMITS

    async def judge(self, turn: str) -> Verdict:
        answer = extract_answer(turn, self.answer_format)
        if answer is None:
            return UNANSWERED
        outcome = await self._compare(answer)
        right = outcome is Outcome.SAME
        return Verdict(
            reward=float(right),
            success=right,
            answered=True,
            excluded=outcome is Outcome.UNJUDGED,
            info={"answer_limit_hit": float(outcome is Outcome.LIMIT)},
        )

    async def _compare(self, answer: str) -> Outcome:
        if len(answer) > LONGEST_ANSWER:
            return Outcome.DIFFERENT
        verdict = decide(answer, self.gold)
        if verdict is not None:
            return Outcome.SAME if verdict else Outcome.DIFFERENT
        workers = shared_workers(self.limits)
        return await asyncio.wrap_future(workers.submit(answer, self.gold))


class AnswerEnvironment(Environment):
    """An episode of one turn, which the verifier judges. Reports ``answered`` beside the verifier's figures."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier

    async def step(self, action: str) -> StepResult:
        verdict = await self._verifier.judge(action)
        return StepResult(
            reward=verdict.reward,
            done=True,
            success=verdict.success,
            excluded=verdict.excluded,
            info={"answered": float(verdict.answered), **verdict.info},
        )
