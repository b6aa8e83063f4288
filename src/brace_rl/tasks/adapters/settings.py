"""Settings of the adapters. Torch-free, and without the packages they adapt."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, model_validator

from brace_rl.tasks.settings import TaskSettings


class ReasoningGymSettings(TaskSettings):
    """Any data set of the package reasoning-gym, with its own scorer (pip install 'brace-rl[tasks]')."""

    needs_model: ClassVar[bool] = True

    name: str = "reasoning_gym"
    dataset: str = Field("", description="name of the data set, such as chain_sum")
    options: dict[str, Any] = Field({}, description="settings of the data set, such as {min_terms = 3}")
    success_score: float = Field(1.0, gt=0, le=1, description="score from which a problem counts as solved")

    @model_validator(mode="after")
    def _named(self) -> ReasoningGymSettings:
        if not self.dataset:
            raise ValueError("task.dataset: reasoning_gym needs the name of a data set, such as chain_sum")
        for key in ("size", "seed"):
            if key in self.options:
                raise ValueError(
                    f"task.options: {key} is set by the trainer; use task.train_problems, task.eval_problems, run.seed"
                )
        return self


class VerifiersSettings(TaskSettings):
    """An environment for the package verifiers 0.1 (pip install 'verifiers>=0.1.10,<0.2')."""

    needs_model: ClassVar[bool] = True

    name: str = "verifiers"
    environment: str = Field("", description="id of an installed environment, or path/to/file.py with load_environment")
    arguments: dict[str, Any] = Field({}, description="arguments of its load_environment")
    success_reward: float = Field(1.0, description="reward from which a problem counts as solved")
    max_observation_tokens: int = Field(0, ge=0, description="longer answers of the environment are cut; 0: no limit")

    @model_validator(mode="after")
    def _named(self) -> VerifiersSettings:
        if not self.environment:
            raise ValueError("task.environment: verifiers needs the id of an environment, or a path to its file")
        return self
