"""Plays on from states: the trainer's own rollout driver, started in the middle of a response.

Three thin parts let the driver do that unchanged. A task whose prompts are the states' contexts; an environment that
first hears the turns already taken; an engine that finishes a turn somebody has begun. ::

    RolloutDriver --> OpenTurnEngine --> EmbeddedEngine
         |  context         context + written part of the turn
         +---> ReplayedEnvironment --> the task's environment
                 turn 3              turns 1, 2, then 3
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from brace_rl.config import Config
from brace_rl.probe.states import State, Turns
from brace_rl.tasks.base import Environment, Problem, StepResult, Task
from brace_rl.training.engines.base import Engine
from brace_rl.training.rollout import RolloutDriver
from brace_rl.training.types import (
    NOT_A_POLICY_TOKEN,
    Generation,
    GenerationRequest,
    RolloutRequest,
    SamplingParams,
    Trajectory,
    derive_seed,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

_UNFINISHED_CHARACTER = "\ufffd"
"""What a tokenizer decodes part of a multi-byte character to."""


class PrefixTask(Task):
    """Problems that are states; made by :meth:`problem`."""

    def __init__(self, task: Task, states: Sequence[State]) -> None:
        self.stop = task.stop
        self.max_observation_tokens = task.max_observation_tokens
        self._task = task
        self._states = {self._name(index, state): state for index, state in enumerate(states)}

    @staticmethod
    def _name(index: int, state: State) -> str:
        return f"{state.problem.id} (state {index}, before policy token {state.token})"

    def problems(self) -> list[Problem]:
        """One per state, in order."""
        return [replace(state.problem, id=name) for name, state in self._states.items()]

    def train_problems(self) -> Sequence[Problem]:
        return self.problems()

    def eval_problems(self) -> Sequence[Problem]:
        return self.problems()

    def environment(self, problem: Problem) -> Environment:
        state = self._states[problem.id]
        return ReplayedEnvironment(self._task.environment(state.problem), state.actions)

    def prompt_ids(self, problem: Problem, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        return list(self._states[problem.id].context)


class ReplayedEnvironment(Environment):
    """An environment in which some turns have been taken; what they earned is not counted again."""

    def __init__(self, environment: Environment, actions: Sequence[str]) -> None:
        self._environment = environment
        self._actions = list(actions)

    async def step(self, action: str) -> StepResult:
        while self._actions:
            await self._environment.step(self._actions.pop(0))
        return await self._environment.step(action)


@dataclass
class _OpenTurn:
    """A turn being finished: the tokens it began with, what the driver asked, and what has been sampled."""

    written: tuple[int, ...]
    request: GenerationRequest
    sampled: Generation


class OpenTurnEngine(Engine):
    """Lets the first turn of every session begin with tokens that are there already.

    The driver's first requests come in the order of its prompts; to each belongs the next of ``written``. The finished
    turn is handed back whole, tokens written before included (log-prob 0, version ``NOT_A_POLICY_TOKEN``, no kept ids),
    so that the environment hears all of it.

    An engine looks for stop texts in what it has sampled itself. Where the part already written ends with the beginning
    of one, tokens are therefore asked for one at a time until that is settled; draws depend on seed and position
    alone, so nothing else changes.
    """

    def __init__(self, engine: Engine, turns: Turns, written: Iterator[tuple[int, ...]]) -> None:
        self.version = engine.version
        self.max_context_tokens = engine.max_context_tokens
        self._engine = engine
        self._turns = turns
        self._written = written
        self._begun: set[str] = set()
        self._open: dict[str, _OpenTurn] = {}

    @property
    def unfinished(self) -> int:
        return self._engine.unfinished

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        passed = []
        for request in requests:
            written = () if request.session in self._begun else next(self._written)
            self._begun.add(request.session)
            if written:
                kept: list[list[int]] | None = [] if request.sampling.truncates else None
                turn = _OpenTurn(written, request, Generation(request.session, kept_ids=kept))
                self._open[request.session] = turn
                request = self._rest(turn)
            passed.append(request)
        self._engine.submit(passed)

    def step(self) -> list[Generation]:
        finished, again = [], []
        for generation in self._engine.step():
            turn = self._open.get(generation.session)
            if turn is None:
                finished.append(generation)
                continue
            _extend(turn.sampled, generation)
            if self._is_finished(turn, generation):
                del self._open[generation.session]
                finished.append(_whole(turn))
            else:
                again.append(self._rest(turn))
        if again:
            self._engine.submit(again)
        return finished

    def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        self._engine.update_weights(weights, version)
        self.version = version

    def release(self, session: str) -> None:
        self._engine.release(session)

    def _rest(self, turn: _OpenTurn) -> GenerationRequest:
        """What is left of the turn; a single token of it while a stop text may straddle the cut."""
        tokens = (*turn.written, *turn.sampled.token_ids)
        left = self._left(turn)
        return replace(
            turn.request,
            token_ids=(*turn.request.token_ids, *tokens),
            max_new_tokens=1 if self._may_straddle(turn) else left,
        )

    def _left(self, turn: _OpenTurn) -> int:
        return turn.request.max_new_tokens - len(turn.written) - len(turn.sampled.token_ids)

    def _may_straddle(self, turn: _OpenTurn) -> bool:
        """Whether a stop text may have begun without having ended yet."""
        text = self._turns.decode((*turn.written, *turn.sampled.token_ids))
        return text.endswith(_UNFINISHED_CHARACTER) or any(
            text.endswith(stop[:length]) for stop in self._turns.stop for length in range(1, len(stop))
        )

    def _is_finished(self, turn: _OpenTurn, generation: Generation) -> bool:
        """Settle whether the turn is over, and why."""
        if generation.finish_reason == "stop":
            turn.sampled.finish_reason = "stop"
            return True
        if self._turns.ends((*turn.written, *turn.sampled.token_ids)):
            turn.sampled.finish_reason = "stop"
            return True
        context = len(turn.request.token_ids) + len(turn.written) + len(turn.sampled.token_ids)
        is_full = self.max_context_tokens is not None and context >= self.max_context_tokens
        return self._left(turn) == 0 or is_full


def _extend(sampled: Generation, more: Generation) -> None:
    sampled.token_ids += more.token_ids
    sampled.logprobs += more.logprobs
    sampled.versions += more.versions
    sampled.entropies += more.entropies
    if sampled.kept_ids is not None:
        sampled.kept_ids += more.kept_ids or []


def _whole(turn: _OpenTurn) -> Generation:
    count, sampled = len(turn.written), turn.sampled
    return Generation(
        session=sampled.session,
        token_ids=[*turn.written, *sampled.token_ids],
        logprobs=[0.0] * count + sampled.logprobs,
        versions=[NOT_A_POLICY_TOKEN] * count + sampled.versions,
        entropies=[0.0] * count + sampled.entropies,
        kept_ids=None if sampled.kept_ids is None else [[] for _ in turn.written] + sampled.kept_ids,
        finish_reason=sampled.finish_reason,
    )


@dataclass(frozen=True)
class Continuations:
    """What playing on from every state gave; all ``[states, samples]``.

    Attributes:
        returns: discounted sum of the rewards after the cut; NaN where the environment could not judge the episode.
        truncated: cut at the length limit.
        failed: the environment raised; the return is 0 then.
    """

    returns: npt.NDArray[np.float64]
    truncated: npt.NDArray[np.bool_]
    failed: npt.NDArray[np.bool_]


def play_on(
    states: Sequence[State],
    *,
    engine: Engine,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    config: Config,
    samples: int,
    seed: int,
    progress: Callable[[int], None] = lambda finished: None,
) -> Continuations:
    """``samples`` continuations of every state under the engine's weights, sampled as in training.

    Continuation ``j`` of state ``i`` draws with the same random numbers whatever the weights (common random numbers),
    so that differences between two policies come from the policies. ``progress`` is told how many states are done.
    """
    rollout = config.rollout
    prefixes = PrefixTask(task, states)
    written = (state.written for state in states for _ in range(samples))
    driver = RolloutDriver(
        OpenTurnEngine(engine, Turns(task, tokenizer), written),
        prefixes,
        tokenizer,
        max_prompt_tokens=rollout.max_prompt_tokens + rollout.max_response_tokens,
        environment_timeout_s=config.schedule.timeout_s / 2,
    )
    driver.submit(
        [
            RolloutRequest(
                index=index,
                problem=problem,
                samples=samples,
                issued_version=engine.version,
                sampling=SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k),
                max_response_tokens=state.tokens_left,
                seed=derive_seed(seed, "probe", state.problem.id, state.response, state.position),
            )
            for index, (state, problem) in enumerate(zip(states, prefixes.problems(), strict=True))
        ]
    )
    found: dict[int, list[Trajectory]] = {}
    while driver.unfinished:
        for group in driver.advance():
            found[group.request.index] = group.trajectories
            progress(len(found))
    ordered = [(states[index], found[index]) for index in range(len(states))]
    gamma = config.algorithm.gamma
    return Continuations(
        returns=np.array([[_return(t, len(state.written), gamma) for t in group] for state, group in ordered]),
        truncated=np.array([[t.truncated for t in group] for _, group in ordered]),
        failed=np.array([["environment_error" in t.info for t in group] for _, group in ordered]),
    )


def _return(trajectory: Trajectory, written: int, gamma: float) -> float:
    """Discounted rewards of the policy tokens after the first ``written``; NaN for an episode that was not judged."""
    if trajectory.excluded:
        return math.nan
    later = zip(trajectory.rewards[written:], trajectory.policy_mask[written:], strict=True)
    rewards = [reward for reward, is_policy in later if is_policy]
    return math.fsum(gamma**i * reward for i, reward in enumerate(rewards))
