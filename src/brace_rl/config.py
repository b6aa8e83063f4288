"""The configuration of a run: frozen, torch-free, one door in (:func:`load_config`).

A recipe is a TOML file whose tables are the sections below. ``--section.key value`` overrides one key. Unknown keys,
wrong types and impossible combinations are a :class:`~brace_rl.errors.ConfigError` of one line that names the key and
says how to mend it. Nothing here imports torch, so a bad recipe is refused before anything heavy is loaded.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from brace_rl.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class Section(BaseModel):
    """Base of every section: frozen, and a key it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _whole_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic would take ``true`` and ``1e3`` for whole numbers."""
        field = cls.model_fields.get(info.field_name or "")
        if field is not None and field.annotation is int and isinstance(value, bool | float):
            raise ValueError("input should be an integer such as 3")
        return value


class TaskConfig(Section):
    """What is trained on."""

    name: Literal["calculator", "gsm8k_tool"] = Field("calculator", description="task family")
    data: str = Field("", description="training file (gsm8k_tool): GSM8K .jsonl, verl .parquet or prompt/answer rows")
    eval_data: str = Field("", description="evaluation file; empty: rows held out from data")
    train_problems: int = Field(20_000, ge=1, description="problems generated, or at most read, for training")
    eval_problems: int = Field(512, ge=1, description="held-out problems; they share no expression with training")
    eval_split: Literal["dev", "test"] = Field(
        "test", description="calculator: where held-out problems come from; dev while tuning a recipe"
    )
    operands: tuple[int, int] = Field((2, 4), description="calculator: fewest and most numbers in an expression")
    max_number: int = Field(99, ge=1, le=10**9, description="calculator: largest number in an expression")
    max_turns: int = Field(6, ge=1, description="model turns per episode; the episode ends unrewarded after the last")
    operations_per_call: int = Field(1, ge=1, description="calculator: binary operations one tool call may hold")


class ModelConfig(Section):
    """The actor; the critic starts from the same backbone."""

    path: str = Field("", description="model folder or hub name; empty: a Llama of the size below, random start")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="dtype of forward passes; the learner keeps float32 weights"
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    hidden_size: int = Field(128, ge=8, le=65_536, description="random start: width")
    layers: int = Field(3, ge=1, le=1024, description="random start: depth")
    heads: int = Field(4, ge=1, le=1024, description="random start: attention heads")
    intermediate_size: int = Field(256, ge=8, le=1_048_576, description="random start: width of the MLP")


class WarmStartConfig(Section):
    """Supervised warm start on transcripts the task generates or derives from its data; steps = 0 turns it off."""

    steps: int = Field(0, ge=0, description="optimiser steps")
    batch_size: int = Field(64, ge=1, description="transcripts per step")
    lr: float = Field(1e-3, gt=0, le=1, description="peak learning rate, linear warm-up and decay")
    mistakes: float = Field(0.0, ge=0, lt=1, description="share of transcripts with a planted mistake (calculator)")


class RolloutConfig(Section):
    """How responses are sampled."""

    prompts_per_step: int = Field(16, ge=1, description="prompts consumed by one trainer step")
    samples_per_prompt: int = Field(1, ge=1, description="responses per prompt (n)")
    max_prompt_tokens: int = Field(1024, ge=1, description="longer prompts are an error that names the problem")
    max_response_tokens: int = Field(256, ge=1, description="response length limit, tool output included")
    temperature: float = Field(1.0, gt=0, description="sampling temperature; the learner evaluates pi under the same")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus mass; below 1 the kept set is recorded and reused")
    top_k: int = Field(0, ge=0, description="keep the k likeliest tokens; 0: all")
    slots: int = Field(64, ge=1, description="sequences decoded together by the embedded engine")


class ScheduleConfig(Section):
    """Who runs when, and how old a response may be."""

    mode: Literal["sync", "lag", "async"] = Field(
        "async",
        description="sync; lag (one process, batches exactly max_staleness old); async (rollouts in a process)",
    )
    max_staleness: int = Field(4, ge=0, description="S: largest age, in trainer steps, of any consumed token")
    too_old: Literal["wait", "drop"] = Field("wait", description="async: wait for stragglers, or drop what is too old")
    sync_every: int = Field(1, ge=1, description="trainer steps between weight updates sent to the engine")
    rollout_threads: int = Field(1, ge=1, le=1024, description="async: torch threads of the rollout process")
    learner_threads: int = Field(0, ge=0, le=1024, description="torch threads of the trainer; 0: leave as it is")
    timeout_s: float = Field(300.0, gt=0, description="longest any wait may last")


class AlgorithmConfig(Section):
    """The critic's target and the two losses. Defaults are the paper's."""

    value_target: Literal["brace", "capped", "vtrace", "gae", "monte_carlo"] = Field(
        "brace", description="the critic's regression target"
    )
    window: int = Field(100, ge=0, le=1_000_000, description="k: policy tokens corrected before the Monte-Carlo tail")
    rho_clip: float = Field(1.2, gt=0, description="cap of the residual's ratio")
    c_clip: float = Field(1.1, gt=0, description="cap of the trace's ratio")
    gamma: float = Field(1.0, gt=0, le=1, description="discount per policy token")
    lam: float = Field(1.0, ge=0, le=1, description="lambda, multiplies every trace coefficient")
    whiten_advantages: bool = Field(True, description="zero mean and unit variance over the batch's policy tokens")
    clip_low: float = Field(0.20, gt=0, lt=1, description="PPO clip below 1")
    clip_high: float = Field(0.28, gt=0, description="PPO clip above 1")
    value_clip: float = Field(0.5, gt=0, description="value clip eps_v of Eq. 28")
    bootstrap_truncated: bool = Field(
        False, description="bootstrap a response cut at the length limit from the critic (paper: no)"
    )


class OptimConfig(Section):
    """Optimisation. Learning rates default to the paper's."""

    steps: int = Field(100, ge=1, description="trainer steps, critic warm-up included")
    actor_lr: float = Field(1e-6, ge=0, le=1, description="actor learning rate")
    critic_lr: float = Field(1e-5, ge=0, le=1, description="critic learning rate")
    critic_warmup_steps: int = Field(5, ge=0, description="first steps update the critic alone")
    lr_warmup_steps: int = Field(0, ge=0, description="actor steps of linear learning-rate warm-up")
    minibatches: int = Field(1, ge=1, description="optimiser steps per batch; targets are computed once before them")
    micro_batch_tokens: int = Field(
        16_384, ge=1, description="padded tokens per forward pass; the loss does not depend on it"
    )
    keep_graph: bool = Field(
        False, description="keep the evaluation's graph for the update: one forward pass less, more memory"
    )
    max_grad_norm: float = Field(1.0, gt=0, description="gradient clipping, actor and critic apart")
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW betas")


class EvalConfig(Section):
    """Success of the current policy on held-out problems, sampled as in training."""

    every: int = Field(0, ge=0, description="trainer steps between evaluations; 0: only before and after training")
    problems: int = Field(128, ge=1, description="held-out problems used during training")
    final_problems: int = Field(512, ge=1, description="held-out problems used before and after training")
    slots: int = Field(128, ge=1, description="sequences decoded together")


class RunConfig(Section):
    """Where a run goes and what it keeps."""

    name: str = Field("", description="folder under root; empty: recipe name and time")
    root: str = Field("runs", description="folder that holds all runs")
    seed: int = Field(0, ge=0, lt=2**31, description="seed of everything")
    checkpoint_every: int = Field(50, ge=0, description="trainer steps between checkpoints; 0: at the end only")
    keep_checkpoints: int = Field(2, ge=1, description="newest checkpoints kept")
    samples_per_step: int = Field(2, ge=0, description="trajectories written to samples.jsonl per step")
    rollouts_per_step: int = Field(
        0, ge=0, description="responses per step written to rollouts.jsonl with their log-probs and values"
    )
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = Field(
        ("tensorboard",), description="metric sinks beside metrics.jsonl; wandb and trackio must be installed"
    )


class Config(Section):
    """A whole run."""

    task: TaskConfig = TaskConfig()
    model: ModelConfig = ModelConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    rollout: RolloutConfig = RolloutConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optim: OptimConfig = OptimConfig()
    eval: EvalConfig = EvalConfig()
    run: RunConfig = RunConfig()

    @model_validator(mode="after")
    def _combinations(self) -> Config:
        schedule, algorithm, task, model = self.schedule, self.algorithm, self.task, self.model
        if schedule.mode == "sync" and schedule.max_staleness > 0:
            raise ValueError(
                "schedule.max_staleness: schedule.mode = 'sync' has staleness 0; set it to 0 or use 'lag' or 'async'"
            )
        if schedule.mode != "async" and schedule.sync_every != 1:
            raise ValueError("schedule.sync_every: only schedule.mode = 'async' can skip weight updates; set it to 1")
        if schedule.sync_every > schedule.max_staleness + 1:
            raise ValueError(
                f"schedule.sync_every: {schedule.sync_every} steps between weight updates can never respect "
                f"max_staleness = {schedule.max_staleness}; use at most max_staleness + 1"
            )
        if task.name == "gsm8k_tool" and not task.data:
            raise ValueError("task.data: gsm8k_tool needs a file; pass --data FILE")
        if task.name == "gsm8k_tool" and not model.path:
            raise ValueError("model.path: gsm8k_tool needs a pretrained model; pass --model DIR_OR_NAME")
        if task.name == "calculator" and task.data:
            raise ValueError("task.data: the calculator generates its problems; leave it out, or name another task")
        if task.operands[0] < 2 or task.operands[0] > task.operands[1]:
            raise ValueError("task.operands: needs 2 <= fewest <= most")
        if not model.path and model.hidden_size % (2 * model.heads):
            raise ValueError("model.hidden_size: must be an even multiple of model.heads (rotary embedding)")
        responses = self.rollout.prompts_per_step * self.rollout.samples_per_prompt
        if self.optim.minibatches > responses:
            raise ValueError(
                f"optim.minibatches: {self.optim.minibatches} is more than the {responses} responses a step"
            )
        if self.optim.keep_graph and self.optim.minibatches > 1:
            raise ValueError(
                "optim.keep_graph: the graph is that of the weights before the first minibatch; set optim.minibatches "
                "to 1 or keep_graph to false"
            )
        if not all(0 <= beta < 1 for beta in self.optim.betas):
            raise ValueError(f"optim.betas: both must be at least 0 and below 1 (got {list(self.optim.betas)})")
        if self.optim.critic_warmup_steps >= self.optim.steps:
            raise ValueError("optim.critic_warmup_steps: must be below optim.steps, or the actor never learns")
        windowed = algorithm.value_target in ("brace", "capped", "vtrace")
        if windowed and algorithm.lam < 1 and (algorithm.window >= 20 or algorithm.value_target == "vtrace"):
            horizon = algorithm.window if algorithm.value_target != "vtrace" else self.rollout.max_response_tokens
            warnings.warn(
                f"algorithm.lam = {algorithm.lam:g} leaves the tail a weight of {algorithm.lam**horizon:.1e} after "
                f"{horizon} tokens, so the reward hardly reaches the target; use lam = 1 or a shorter window",
                stacklevel=2,
            )
        return self


def load_config(recipe: str | Path | None, overrides: Mapping[str, str] | None = None) -> Config:
    """Read ``recipe`` (a TOML file, or None for all defaults) and apply ``overrides`` ("section.key" -> text).

    Raises:
        ConfigError: missing or unreadable file, unknown key, wrong type or impossible combination; one line.
    """
    data: dict[str, Any] = _read_toml(Path(recipe)) if recipe is not None else {}
    where = str(recipe) if recipe is not None else "configuration"
    return config_from_dict(_with_overrides(data, overrides), where=where)


def _with_overrides(data: dict[str, Any], overrides: Mapping[str, str] | None) -> dict[str, Any]:
    for key, text in (overrides or {}).items():
        section, _, name = key.partition(".")
        if not name or section not in Config.model_fields:
            raise ConfigError(f"--{key}: no such setting; sections are {', '.join(Config.model_fields)}")
        table = data.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{section}: must be a table [{section}] in the recipe")
        field = type(Config.model_fields[section].default).model_fields.get(name)
        table[name] = text if field is not None and field.annotation is str else _parse_override(text)
    return data


def load_resolved_config(run_dir: Path, overrides: Mapping[str, str] | None = None) -> Config:
    """The configuration a run was started with, from its ``config.json``, with ``overrides`` on top.

    Raises:
        ConfigError: not a run folder, or an override that does not fit.
    """
    path = run_dir / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ConfigError(f"{run_dir}: not a run folder (no readable config.json)") from None
    return config_from_dict(_with_overrides(data, overrides), where=str(path))


def config_from_dict(data: Mapping[str, Any], where: str = "configuration") -> Config:
    """Validate a nested mapping; ``where`` names its origin in the error."""
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{where}: {_first_problem(error)}") from None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data: dict[str, Any] = tomllib.load(file)
            return data
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such recipe; recipes shipped with the project are in recipes/") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder; name a recipe file ending in .toml") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def _parse_override(text: str) -> Any:
    """A TOML value where it parses as one (numbers, booleans, lists), the text itself otherwise."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    key = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        return f"{key}: no such setting{_did_you_mean(key)}"
    if not key:
        return message
    return f"{key}: {message[0].lower()}{message[1:]} (got {problem['input']!r})"


def _did_you_mean(key: str) -> str:
    import difflib

    section, _, name = key.partition(".")
    if name and section in Config.model_fields:
        known: Sequence[str] = [f"{section}.{field}" for field in type(getattr(Config(), section)).model_fields]
    else:
        known = list(Config.model_fields)
    close = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known here: {', '.join(known)}"
