"""Drives episodes: the policy's turn, the environment's answer, the next turn, until the episode ends.

::

    RolloutRequest --> n episodes --> turn --> Engine --> action text --> Environment
                                       ^                                     |
                                       +---- observation, tokenised once <---+--> done: RolloutGroup
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from brace_rl.errors import DataError
from brace_rl.tasks.base import Environment, Problem, StepResult, Task
from brace_rl.training.answers import check_answer, checked_reward, finite_number
from brace_rl.training.engines.base import Engine
from brace_rl.training.environments import EnvironmentRunner
from brace_rl.training.observations import observation_ids
from brace_rl.training.types import (
    NOT_A_POLICY_TOKEN,
    Generation,
    GenerationRequest,
    RolloutGroup,
    RolloutRequest,
    Trajectory,
    derive_seed,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass
class _Group:
    """A prompt that is being answered; ``remaining`` counts its unfinished responses."""

    request: RolloutRequest
    trajectories: list[Trajectory]
    remaining: int


@dataclass
class _Episode:
    """A response that is being made."""

    session: str
    group: _Group
    trajectory: Trajectory
    seed: int
    max_response_tokens: int
    environment: Environment | None = None
    counted: dict[str, float] = field(default_factory=dict)
    """What the driver adds to the environment's figures."""

    @property
    def tokens_left(self) -> int:
        """Tokens that still fit, of the policy or of the environment."""
        return self.max_response_tokens - len(self.trajectory.response_ids)


class RolloutDriver:
    """Answers prompts with an engine and a task's environments.

    Token-exact: ``response_ids`` are the sampled ids and the ids of the observations, in order; nothing that was
    sampled is tokenised again. A turn's reward lies on its last token. A turn's text is its tokens without the
    end-of-sequence token that may close it, decoded with special tokens kept, since a task's tags may be some.

    A response ends

    * when the environment says so;
    * at the length limit, which observations count towards: in the middle of a turn, after a turn that fills it, or
      before an observation that would leave no room for another policy token (it is left out, and
      ``info["observation_too_long"]`` is 1). ``truncated`` is True, and no reward but the task's for length is added;
    * when the environment raises: reward 0, no success, ``info = {"environment_error": 1.0}``, logged once per problem.
      A run survives a broken problem. A reward that is not finite is an error of the run.

    Observations longer than the task's ``max_observation_tokens`` are cut (``info["observation_cut"]`` counts them). An
    episode the environment excludes has no policy tokens and reward 0.

    The engine goes on while environments wait. Turns of environments that need not wait are answered in the step that
    finished them, in the order the responses were submitted, so results depend on the requests and the engine's steps
    alone; with environments that do wait, which turns are decoded together depends on time. Calls come from one
    thread, in which no event loop is running.

    Args:
        max_prompt_tokens: longer prompts are refused.
        environment_timeout_s: longest one environment step may await; beyond it counts as raising. None: no limit.
    """

    def __init__(
        self,
        engine: Engine,
        task: Task,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_prompt_tokens: int,
        environment_timeout_s: float | None = None,
    ) -> None:
        self._engine = engine
        self._task = task
        self._tokenizer = tokenizer
        self._max_prompt_tokens = max_prompt_tokens
        self._stop_token_ids = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
        self._episodes: dict[str, _Episode] = {}
        self._sessions = 0
        self._unfinished = 0
        self._failed_problems: set[str] = set()
        self._dropped_figures: set[str] = set()
        self._environments = EnvironmentRunner(environment_timeout_s)

    @property
    def unfinished(self) -> int:
        """Prompts not yet answered in full."""
        return self._unfinished

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Queue prompts, in this order.

        Raises:
            DataError: a prompt is empty or longer than ``max_prompt_tokens``; nothing is queued then.
        """
        prompts = [self._prompt_ids(request.problem) for request in requests]
        episodes = [
            episode
            for request, prompt_ids in zip(requests, prompts, strict=True)
            for episode in self._new_episodes(request, prompt_ids)
        ]
        self._engine.submit([self._turn(episode) for episode in episodes])
        self._episodes.update((episode.session, episode) for episode in episodes)
        self._unfinished += len(requests)

    def advance(self) -> list[RolloutGroup]:
        """One engine step and what follows from it; returns the prompts it completed, possibly none.

        With nothing for the engine to do, waits a moment for the environments.

        Raises:
            DataError: an environment gave a reward that is not finite.
        """
        if not self._episodes:
            return []
        finished = {generation.session: generation for generation in self._engine.step()}
        ended: list[_Episode] = []
        # In order of submission, whatever the engine's order: the next turns are queued in this order.
        for session, episode in self._episodes.items():
            if session not in finished:
                continue
            generation = finished[session]
            _append_turn(episode.trajectory, generation)
            if generation.finish_reason == "stop":
                self._environments.start(session, self._answer(episode, self._action_text(generation.token_ids)))
            else:
                episode.trajectory.truncated = True
                ended.append(episode)
        answers = self._environments.finished(wait=not (self._engine.unfinished or ended))
        going_on: list[_Episode] = []
        for session, episode in self._episodes.items():
            if session in answers:
                (going_on if self._apply(episode, answers[session]) else ended).append(episode)
        if going_on:
            self._engine.submit([self._turn(episode) for episode in going_on])
        return self._finish(ended)

    def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Replace the engine's weights; responses in flight go on under them."""
        self._engine.update_weights(weights, version)

    def abandon(self) -> None:
        """Forget every unfinished prompt; turns the engine still returns for them are ignored."""
        self._environments.cancel()
        for session, episode in self._episodes.items():
            self._engine.release(session)
            _close(episode)
        self._episodes.clear()
        self._unfinished = 0

    def _prompt_ids(self, problem: Problem) -> list[int]:
        ids = self._task.prompt_ids(problem, self._tokenizer)
        if not ids:
            raise DataError(f"problem {problem.id}: its prompt has no tokens; drop the problem")
        if len(ids) > self._max_prompt_tokens:
            raise DataError(
                f"problem {problem.id}: its prompt has {len(ids)} tokens, more than rollout.max_prompt_tokens = "
                f"{self._max_prompt_tokens} (brace eval: --max-prompt-tokens); raise that or drop the problem"
            )
        if self._engine.max_context_tokens is not None and len(ids) >= self._engine.max_context_tokens:
            raise DataError(
                f"problem {problem.id}: its prompt has {len(ids)} tokens, which leaves no room for a response in the "
                f"model's {self._engine.max_context_tokens}; drop the problem"
            )
        return ids

    def _new_episodes(self, request: RolloutRequest, prompt_ids: list[int]) -> list[_Episode]:
        limit = request.max_response_tokens
        if self._engine.max_context_tokens is not None:
            limit = min(limit, self._engine.max_context_tokens - len(prompt_ids))
        group = _Group(request, [], request.samples)
        episodes: list[_Episode] = []
        for sample_index in range(request.samples):
            trajectory = Trajectory(request.index, sample_index, request.problem.id, list(prompt_ids))
            trajectory.kept_ids = [] if request.sampling.truncates else None
            group.trajectories.append(trajectory)
            # Numbered per driver, so that a turn left over from an abandoned prompt is never taken for another's.
            session = f"{request.index}.{sample_index}.{self._sessions}"
            episodes.append(_Episode(session, group, trajectory, derive_seed(request.seed, sample_index), limit))
            self._sessions += 1
        return episodes

    def _turn(self, episode: _Episode) -> GenerationRequest:
        trajectory = episode.trajectory
        return GenerationRequest(
            session=episode.session,
            token_ids=(*trajectory.prompt_ids, *trajectory.response_ids),
            max_new_tokens=episode.tokens_left,
            seed=episode.seed,
            sampling=episode.group.request.sampling,
            stop=self._task.stop,
            stop_token_ids=self._stop_token_ids,
        )

    async def _answer(self, episode: _Episode, action: str) -> StepResult:
        if episode.environment is None:
            episode.environment = self._task.environment(episode.group.request.problem)
        return await episode.environment.step(action)

    def _action_text(self, token_ids: Sequence[int]) -> str:
        token_ids = token_ids[:-1] if token_ids[-1] in self._stop_token_ids else token_ids
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _apply(self, episode: _Episode, result: StepResult | Exception) -> bool:
        """Enter the environment's answer into the response; whether the response goes on."""
        trajectory = episode.trajectory
        if isinstance(result, Exception):
            self._log_failure(trajectory.problem_id, result)
            trajectory.rewards = [0.0] * len(trajectory.rewards)
            trajectory.info = {"environment_error": 1.0}
            return False
        result = check_answer(result, trajectory.problem_id)
        trajectory.rewards[-1] += checked_reward(result.reward, trajectory.problem_id, source="its environment")
        goes_on = not result.done and self._observe(episode, result)
        if result.info or episode.counted:
            trajectory.info = {**trajectory.info, **self._figures(result.info), **episode.counted}
        if result.done:
            trajectory.success = bool(result.success)
            if result.excluded:
                _exclude(trajectory)
        return goes_on

    def _observe(self, episode: _Episode, result: StepResult) -> bool:
        """Insert the observation; False, with the response truncated, where it leaves no room for another token."""
        trajectory = episode.trajectory
        token_ids, was_cut = observation_ids(
            result,
            self._tokenizer,
            last_token=trajectory.response_ids[-1],
            most_tokens=self._task.max_observation_tokens,
        )
        if was_cut:
            episode.counted["observation_cut"] = episode.counted.get("observation_cut", 0.0) + 1.0
        if len(token_ids) >= episode.tokens_left:
            episode.counted["observation_too_long"] = float(bool(token_ids))
            trajectory.truncated = True
            return False
        _append_observation(trajectory, token_ids)
        return True

    def _figures(self, info: Mapping[str, float]) -> dict[str, float]:
        """Those that are finite numbers under a name; of the others each is reported once."""
        numbers = {name: finite_number(value) for name, value in info.items()}
        figures = {name: x for name, x in numbers.items() if x is not None and isinstance(name, str)}
        for name in info.keys() - figures.keys() - self._dropped_figures:
            logger.warning(
                "figure %r of an environment's info is %r; left out, it must be a finite number under a name",
                name,
                info[name],
            )
            self._dropped_figures.add(name)
        return figures

    def _log_failure(self, problem_id: str, error: Exception) -> None:
        if problem_id not in self._failed_problems:
            self._failed_problems.add(problem_id)
            logger.warning("problem %s: its environment failed; the response gets reward 0", problem_id, exc_info=error)

    def _finish(self, episodes: Sequence[_Episode]) -> list[RolloutGroup]:
        groups: list[RolloutGroup] = []
        for episode in episodes:
            del self._episodes[episode.session]
            self._engine.release(episode.session)
            _close(episode)
            if not (episode.trajectory.excluded or "environment_error" in episode.trajectory.info):
                tokens, limit = len(episode.trajectory.response_ids), episode.max_response_tokens
                reward = self._task.length_reward(tokens, limit=limit)
                problem_id = episode.trajectory.problem_id
                episode.trajectory.rewards[-1] += checked_reward(reward, problem_id, source="its length")
            episode.group.remaining -= 1
            if episode.group.remaining == 0:
                self._unfinished -= 1
                groups.append(RolloutGroup(episode.group.request, episode.group.trajectories))
        return groups


def _close(episode: _Episode) -> None:
    if episode.environment is not None:
        try:
            episode.environment.close()
        except Exception as error:
            logger.warning("%s: its environment could not be closed", episode.trajectory.problem_id, exc_info=error)
        episode.environment = None


def _append_turn(trajectory: Trajectory, generation: Generation) -> None:
    """Append the sampled tokens of a turn."""
    count = len(generation.token_ids)
    lengths = {len(generation.logprobs), len(generation.versions), len(generation.entropies)}
    if count == 0 or lengths != {count}:
        raise ValueError(f"the engine returned a turn of {count} tokens with figures for {sorted(lengths)}")
    trajectory.turns += 1
    trajectory.response_ids += generation.token_ids
    trajectory.policy_mask += [True] * count
    trajectory.behavior_logprobs += generation.logprobs
    trajectory.behavior_entropies += generation.entropies
    trajectory.versions += generation.versions
    trajectory.rewards += [0.0] * count
    if trajectory.kept_ids is not None:
        if generation.kept_ids is None or len(generation.kept_ids) != count:
            raise ValueError("the engine sampled under top-k or top-p without recording the tokens kept")
        trajectory.kept_ids += generation.kept_ids


def _append_observation(trajectory: Trajectory, token_ids: Sequence[int]) -> None:
    """Append what the environment said, as tokens the policy did not sample."""
    count = len(token_ids)
    trajectory.response_ids += token_ids
    trajectory.policy_mask += [False] * count
    trajectory.behavior_logprobs += [0.0] * count
    trajectory.behavior_entropies += [0.0] * count
    trajectory.versions += [NOT_A_POLICY_TOKEN] * count
    trajectory.rewards += [0.0] * count
    if trajectory.kept_ids is not None:
        trajectory.kept_ids += [[] for _ in token_ids]


def _exclude(trajectory: Trajectory) -> None:
    """Take a response out of training and of every mean: it keeps its tokens, none of them the policy's."""
    trajectory.excluded = True
    trajectory.success = False
    count = len(trajectory.response_ids)
    trajectory.policy_mask = [False] * count
    trajectory.behavior_logprobs = [0.0] * count
    trajectory.behavior_entropies = [0.0] * count
    trajectory.versions = [NOT_A_POLICY_TOKEN] * count
    trajectory.rewards = [0.0] * count
    if trajectory.kept_ids is not None:
        trajectory.kept_ids = [[] for _ in trajectory.response_ids]
