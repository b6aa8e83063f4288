"""Checks that recorded turns lead where they led: a cut is a state only if the environment repeats itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from operator import eq
from typing import TYPE_CHECKING

from brace_rl.config import Config
from brace_rl.errors import BraceError
from brace_rl.probe.states import Response, Turns
from brace_rl.tasks.base import Task
from brace_rl.training.engines.base import Engine
from brace_rl.training.rollout import RolloutDriver
from brace_rl.training.types import Generation, GenerationRequest, RolloutRequest, SamplingParams, Trajectory

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


class RecordedEngine(Engine):
    """Says again what was said: the turns of ``responses``, to sessions in the order in which they begin.

    The last turn finishes with "length": no state lies after it, so the environment need not hear (and judge) it.
    """

    def __init__(self, responses: Sequence[Response], turns: Turns) -> None:
        self.version = 0
        self._turns = turns
        self._recorded = iter([self._turns_of(response) for response in responses])
        self._left: dict[str, list[Generation]] = {}
        self._finished: list[Generation] = []

    def _turns_of(self, response: Response) -> list[Generation]:
        spans = self._turns.spans(response)
        return [
            _generation(response.response_ids[begin:end], "stop" if number < len(spans) else "length")
            for number, (begin, end) in enumerate(spans, start=1)
        ]

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            if request.session not in self._left:
                self._left[request.session] = next(self._recorded)
            generation = self._left[request.session].pop(0)
            generation.session = request.session
            self._finished.append(generation)

    def step(self) -> list[Generation]:
        finished, self._finished = self._finished, []
        return finished

    def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        self.version = version

    def release(self, session: str) -> None:
        """Nothing is cached."""

    @property
    def unfinished(self) -> int:
        return len(self._finished)


def check_replay(
    responses: Sequence[Response], *, task: Task, tokenizer: PreTrainedTokenizerBase, config: Config
) -> None:
    """Take the recorded turns through the rollout driver and fresh environments, and compare what comes of it.

    Raises:
        BraceError: an environment answers otherwise than it did: continuations would start from states that never were.
    """
    longest = max((len(response.response_ids) for response in responses), default=1)
    driver = RolloutDriver(
        RecordedEngine(responses, Turns(task, tokenizer)),
        task,
        tokenizer,
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        environment_timeout_s=config.schedule.timeout_s / 2,
    )
    driver.submit(
        [
            RolloutRequest(
                index=index,
                problem=response.problem,
                samples=1,
                issued_version=0,
                sampling=SamplingParams(),
                max_response_tokens=longest,
                seed=0,
            )
            for index, response in enumerate(responses)
        ]
    )
    while driver.unfinished:
        for group in driver.advance():
            response = responses[group.request.index]
            difference = _difference(response, group.trajectories[0])
            if difference is not None:
                raise BraceError(
                    f"problem {response.problem.id}: replaying its turns {difference}; states inside responses can be "
                    "probed only where the environment repeats itself, others with --at 0"
                )


def _generation(token_ids: Sequence[int], finish_reason: str) -> Generation:
    count = len(token_ids)
    return Generation(
        session="",
        token_ids=list(token_ids),
        logprobs=[0.0] * count,
        versions=[0] * count,
        entropies=[0.0] * count,
        finish_reason=finish_reason,
    )


def _difference(response: Response, replayed: Trajectory) -> str | None:
    """How a replay departs from the record; None if it does not."""
    recorded, found = response.response_ids, tuple(replayed.response_ids)
    if found == recorded:
        return None
    same = sum(1 for _ in takewhile(bool, map(eq, recorded, found)))
    if "environment_error" in replayed.info:
        return f"failed after {same} response tokens"
    return f"gave another observation, or ended, after {same} of {len(recorded)} response tokens"
