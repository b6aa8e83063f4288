"""The configuration of a run: frozen, torch-free, one door in (:func:`load_config`).

A recipe is a TOML file whose tables are the sections below. ``--section.key value`` overrides one key. Unknown keys,
wrong types and impossible combinations are a :class:`~brace_rl.errors.ConfigError` of one line that names the key and
says how to mend it. Nothing here imports torch, so a bad recipe is refused before anything heavy is loaded.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SerializeAsAny, ValidationError, field_validator, model_validator

from brace_rl.actor.options import PPOOptions, RuleOptions, rule_options
from brace_rl.config_checks import check_combinations
from brace_rl.errors import ConfigError
from brace_rl.methods import with_method
from brace_rl.overrides import parse_text
from brace_rl.section import Section, first_problem
from brace_rl.tasks.calculator import CalculatorSettings
from brace_rl.tasks.registry import DEFAULT_TASK, parse_settings, settings_class
from brace_rl.tasks.settings import TaskSettings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


_SHARED_TABLE = ("data", "eval_data", "eval_split", "operands", "max_number", "max_turns", "operations_per_call")
"""Keys of [task] in saved runs from when all families shared one table; those a family does not have meant nothing."""


DEFAULT_RULE = "ppo"
"""The actor rule of a recipe that names none."""

LONGEST_WINDOW = 1_000_000
"""Policy tokens."""


class ModelConfig(Section):
    """The actor; the critic starts from the same backbone."""

    path: str = Field("", description="model folder or hub name; empty: a Llama of the size below, random start")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="dtype of forward passes; the learner keeps float32 weights"
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    gradient_checkpointing: bool = Field(
        False, description="compute each layer's activations again in the backward pass: less memory, one more forward"
    )
    sharding: Literal["none", "fsdp2"] = Field(
        "none", description="optim.learner_ranks above 1: every rank holds all of a model, or a part of it (FSDP2)"
    )
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
        description="sync; lag (one process, batches max_staleness old, the first less); async (rollouts in a process)",
    )
    max_staleness: int = Field(4, ge=0, description="S: largest age, in trainer steps, of any consumed token")
    too_old: Literal["wait", "drop"] = Field("wait", description="async: wait for stragglers, or drop what is too old")
    sync_every: int = Field(1, ge=1, description="trainer steps between weight updates sent to the engine")
    rollout_threads: int = Field(1, ge=1, le=1024, description="async: torch threads of the rollout process")
    learner_threads: int = Field(0, ge=0, le=1024, description="torch threads of the trainer; 0: leave as it is")
    timeout_s: float = Field(300.0, gt=0, description="longest any wait may last")


class BackendConfig(Section):
    """Where rollouts are made, and by what."""

    kind: Literal["local", "ray"] = Field(
        "local", description="local: this process, or one of its own (async); ray: actors of a cluster, ranks as well"
    )
    workers: int = Field(1, ge=1, le=4096, description="ray: rollout actors")
    engine: Literal["embedded", "vllm"] = Field("embedded", description="what generates: embedded or vllm")
    address: str = Field("", description="ray: cluster to join, or auto; empty: start one here, on loopback alone")
    gpus_per_worker: float = Field(0.0, ge=0, le=64, description="ray: GPUs each actor asks for; may be a fraction")


ValueTarget = Literal["brace", "capped", "vtrace", "gae", "monte_carlo", "none"]
Advantage = Literal["eq27", "gae", "group", "dr_grpo", "rloo", "group_brace"]

AUTOMATIC_WINDOWS = ("auto", "auto_path")
"""Windows chosen from the ratios of each batch."""


class AlgorithmConfig(Section):
    """The critic's target, the actor's advantage and the value loss. Defaults are the paper's."""

    value_target: ValueTarget = Field("brace", description="the critic's regression target; none: no critic")
    window: int | Literal["auto", "auto_path"] = Field(
        100,
        description="k: policy tokens corrected before the Monte-Carlo tail; auto: from the batch's drift; auto_path: "
        "from the ratios ahead of each token",
    )
    auto_eps: float = Field(0.01, gt=0, lt=1, description="window = auto: weight the tail keeps on average (Eq. 45)")
    auto_budget: float = Field(4.0, ge=0, description="window = auto_path: sum of |log min(c_clip, w)| that closes it")
    rho_clip: float = Field(1.2, gt=0, description="cap of the residual's ratio")
    c_clip: float = Field(1.1, gt=0, description="cap of the trace's ratio")
    gamma: float = Field(1.0, gt=0, le=1, description="discount per policy token")
    lam: float = Field(1.0, ge=0, le=1, description="lambda of the target, multiplies every trace coefficient")
    advantage: Advantage = Field(
        "eq27", description="eq27: from the target; gae: lambda of its own; the others: against the prompt's group"
    )
    policy_lam: float = Field(0.95, ge=0, le=1, description="advantage = gae: its lambda")
    policy_lam_alpha: float = Field(
        0.0, ge=0, description="advantage = gae: lambda 1 - 1/(alpha l) for l policy tokens; 0: policy_lam for all"
    )
    whiten_advantages: bool = Field(True, description="zero mean and unit variance over the batch's policy tokens")
    value_clip: float = Field(0.5, gt=0, description="value clip eps_v of Eq. 28")
    bootstrap_truncated: bool = Field(
        False, description="bootstrap a response cut at the length limit from the critic (paper: no)"
    )

    @field_validator("window", mode="before")
    @classmethod
    def _number_or_automatic(cls, value: Any) -> Any:
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if value not in AUTOMATIC_WINDOWS and not (is_number and 0 <= value <= LONGEST_WINDOW):
            raise ValueError(f"must be a whole number from 0 to {LONGEST_WINDOW}, or {' or '.join(AUTOMATIC_WINDOWS)}")
        return value


class OptimConfig(Section):
    """Optimisation. Learning rates default to the paper's."""

    steps: int = Field(100, ge=1, description="trainer steps, critic warm-up included")
    actor_lr: float = Field(1e-6, ge=0, le=1, description="actor learning rate")
    critic_lr: float = Field(1e-5, ge=0, le=1, description="critic learning rate")
    critic_warmup_steps: int = Field(5, ge=0, description="first steps update the critic alone (value pre-training)")
    critic_warmup_until: float = Field(
        0.0, ge=0, lt=1, description="end that sooner, once the critic explains this share of the variance; 0: never"
    )
    critic_updates: int = Field(1, ge=1, description="optimiser steps of the critic per minibatch, the actor's is one")
    freeze_critic_attention: bool = Field(False, description="train the critic without its attention layers")
    lr_warmup_steps: int = Field(0, ge=0, description="actor steps of linear learning-rate warm-up")
    lr_reference_staleness: float = Field(
        0.0, ge=0, description="actor_lr holds up to this S; above, it is actor_lr * reference / S. 0: no scaling"
    )
    lr_ess_scaling: bool = Field(False, description="actor_lr times the root of the batch's effective sample share")
    minibatches: int = Field(1, ge=1, description="optimiser steps per batch; targets are computed once before them")
    micro_batch_tokens: int = Field(
        16_384, ge=1, description="padded tokens per forward pass; the loss does not depend on it"
    )
    keep_graph: bool = Field(
        False, description="keep the evaluation's graph for the update: one forward pass less, more memory"
    )
    learner_ranks: int = Field(
        1, ge=1, le=1024, description="processes (ray: actors) that train together, each on its share of a batch's rows"
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

    task: SerializeAsAny[TaskSettings] = CalculatorSettings()
    model: ModelConfig = ModelConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    rollout: RolloutConfig = RolloutConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    backend: BackendConfig = BackendConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    actor: SerializeAsAny[RuleOptions] = PPOOptions()
    optim: OptimConfig = OptimConfig()
    eval: EvalConfig = EvalConfig()
    run: RunConfig = RunConfig()

    @field_validator("task", mode="before")
    @classmethod
    def _task_of_its_family(cls, value: Any) -> Any:
        return parse_settings(value) if isinstance(value, Mapping) else value

    @field_validator("actor", mode="before")
    @classmethod
    def _options_of_the_rule(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        options = rule_options(str(value.get("rule", DEFAULT_RULE)))
        try:
            return options.model_validate(value)
        except ValidationError as error:
            problem = first_problem(error, prefix="actor", known=lambda _: [f"actor.{x}" for x in options.model_fields])
            raise ConfigError(problem) from None

    @model_validator(mode="after")
    def _combinations(self) -> Config:
        check_combinations(self)
        return self


def load_config(
    recipe: str | Path | None, overrides: Mapping[str, str] | None = None, *, method: str | None = None
) -> Config:
    """Read ``recipe`` (a TOML file, or None for all defaults) and apply ``overrides`` ("section.key" -> text).

    Args:
        method: a name of :mod:`brace_rl.methods`, whose settings come between the recipe's and the overrides.

    Raises:
        ConfigError: missing or unreadable file, unknown key, wrong type or impossible combination; one line.
    """
    data: dict[str, Any] = _read_toml(Path(recipe)) if recipe is not None else {}
    where = str(recipe) if recipe is not None else "configuration"
    if method:
        data = with_method(data, method)
    return config_from_dict(_with_overrides(data, overrides), where=where)


def _with_overrides(data: dict[str, Any], overrides: Mapping[str, str] | None) -> dict[str, Any]:
    overrides = dict(overrides or {})
    # First, since these decide which other settings their sections have.
    first = {key: overrides.pop(key) for key in ("task.name", "actor.rule") if key in overrides}
    for key, text in (first | overrides).items():
        section, _, name = key.partition(".")
        if not name or section not in Config.model_fields:
            raise ConfigError(f"--{key}: no such setting; sections are {', '.join(Config.model_fields)}")
        table = data.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{section}: must be a table [{section}] in the recipe")
        field = section_class(section, data).model_fields.get(name)
        table[name] = text if field is not None and field.annotation is str else parse_text(text)
    return data


def section_class(section: str, data: Mapping[str, Any]) -> type[Section]:
    """The class of a section of ``data``; for ``task`` and ``actor`` it depends on the name the section holds.

    Raises:
        ConfigError: there is no such task.
    """
    if section == "task":
        table = data.get("task")
        return settings_class(str(table.get("name", DEFAULT_TASK)) if isinstance(table, Mapping) else DEFAULT_TASK)
    if section == "actor":
        table = data.get("actor")
        return rule_options(str(table.get("rule", DEFAULT_RULE)) if isinstance(table, Mapping) else DEFAULT_RULE)
    return type(Config.model_fields[section].default)


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
    if isinstance(data, dict) and isinstance(data.get("task"), dict):
        known = section_class("task", data).model_fields
        data["task"] = {key: v for key, v in data["task"].items() if key in known or key not in _SHARED_TABLE}
    return config_from_dict(_with_overrides(data, overrides), where=str(path))


def config_from_dict(data: Mapping[str, Any], where: str = "configuration") -> Config:
    """Validate a nested mapping; ``where`` names its origin in the error."""
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{where}: {first_problem(error, known=_known_keys)}") from None
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


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


def _known_keys(key: str) -> Sequence[str]:
    section, _, name = key.partition(".")
    if name and section in Config.model_fields:
        return [f"{section}.{field}" for field in section_class(section, {}).model_fields]
    return list(Config.model_fields)
