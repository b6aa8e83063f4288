"""Success of the current policy on held-out problems, sampled as in training."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from brace_rl.config import Config
from brace_rl.errors import BraceError
from brace_rl.tasks.base import Problem, Task
from brace_rl.training.engines.embedded import EmbeddedEngine
from brace_rl.training.rollout import RolloutDriver
from brace_rl.training.types import RolloutRequest, SamplingParams, Trajectory, derive_seed


class Evaluator:
    """Answers held-out problems with the learner's own actor, in float32; makes no second copy of the weights."""

    def __init__(self, actor: PreTrainedModel, task: Task, tokenizer: PreTrainedTokenizerBase, config: Config) -> None:
        self._actor = actor
        self._task = task
        self._tokenizer = tokenizer
        self._config = config
        self._problems = task.eval_problems()

    def run(self, version: int, problems: int) -> dict[str, float]:
        """``eval/*`` figures over the first ``problems`` held-out problems (fewer if there are fewer).

        Every evaluation of a run draws with the same seeds, so that differences come from the policy.

        Raises:
            BraceError: not one response could be judged.
        """
        trajectories = self._sample(self._problems[:problems], version)
        judged = [t for t in trajectories if not t.excluded]
        if not judged:
            raise BraceError(f"evaluation: none of {len(trajectories)} responses could be judged; see to the judge")
        return {
            "eval/success": fmean(t.success for t in judged),
            "eval/reward": fmean(t.reward for t in judged),
            "eval/excluded": fmean(t.excluded for t in trajectories),
            "eval/length_mean": fmean(len(t.response_ids) for t in trajectories),
            "eval/truncated": fmean(t.truncated for t in trajectories),
            "eval/problems": float(len(trajectories)),
            "tokens/eval": float(sum(len(t.prompt_ids) + len(t.response_ids) for t in trajectories)),
        }

    def _sample(self, problems: Sequence[Problem], version: int) -> list[Trajectory]:
        rollout, run = self._config.rollout, self._config.run
        was_training = self._actor.training
        engine = EmbeddedEngine(self._actor, self._tokenizer, slots=self._config.eval.slots)
        engine.version = version
        driver = RolloutDriver(
            engine,
            self._task,
            self._tokenizer,
            max_prompt_tokens=rollout.max_prompt_tokens,
            environment_timeout_s=self._config.schedule.timeout_s / 2,
        )
        driver.submit(
            [
                RolloutRequest(
                    index=index,
                    problem=problem,
                    samples=1,
                    issued_version=version,
                    sampling=SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k),
                    max_response_tokens=rollout.max_response_tokens,
                    seed=derive_seed(run.seed, "evaluation", problem.id),
                )
                for index, problem in enumerate(problems)
            ]
        )
        trajectories: list[Trajectory] = []
        while driver.unfinished:
            trajectories += [t for group in driver.advance() for t in group.trajectories]
        self._actor.train(was_training)
        return trajectories
