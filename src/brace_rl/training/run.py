"""From a configuration to a finished run: builds the parts, warm-starts, trains, evaluates, reports."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from brace_rl.config import Config, ModelConfig, load_resolved_config
from brace_rl.errors import BraceError, ConfigError, DataError
from brace_rl.files import write_json_atomic
from brace_rl.report import read_run, write_report
from brace_rl.tasks import build_task
from brace_rl.tasks.base import Task
from brace_rl.training.backends.base import Backend
from brace_rl.training.backends.inline import InlineBackend
from brace_rl.training.backends.process import ProcessBackend
from brace_rl.training.backends.ray_cluster import require_ray
from brace_rl.training.backends.ray_workers import RayBackend
from brace_rl.training.checkpoint import checkpoint_step, latest_checkpoint, load_checkpoint
from brace_rl.training.data import ProblemStream
from brace_rl.training.driver_spec import DriverSpec
from brace_rl.training.engines.vllm import require_vllm
from brace_rl.training.evaluate import Evaluator
from brace_rl.training.learner import Learner
from brace_rl.training.learner_group import LearnerGroup
from brace_rl.training.loop import Trainer
from brace_rl.training.models import (
    Critic,
    check_model,
    count_parameters,
    load_actor,
    load_tokenizer,
    new_actor,
    resolve_device,
    save_actor,
)
from brace_rl.training.progress import Progress
from brace_rl.training.rank_actors import rank_actors
from brace_rl.training.rank_processes import rank_processes
from brace_rl.training.run_files import RunWriter, check_trackers
from brace_rl.training.types import derive_seed
from brace_rl.training.warm_start import warm_start

INITIAL_MODEL = "initial"
"""Folder of a run that holds the actor as it was before the first trainer step, warm start included."""


_HOW_NOT_WHAT = ("device", "gradient_checkpointing", "sharding")
"""Settings of the model that change where and how it is computed, not what it is."""

FIXED_SETTINGS = (
    *(f"model.{name}" for name in ModelConfig.model_fields if name not in _HOW_NOT_WHAT),
    "rollout.prompts_per_step",
    "rollout.samples_per_prompt",
    "rollout.temperature",
    "rollout.top_p",
    "rollout.top_k",
    "schedule.mode",
    "schedule.max_staleness",
    "optim.critic_warmup_steps",
    "run.seed",
)
"""What a checkpoint was made with and a resumed run must keep: weights, snapshots, buffered answers and the ledger of
prompts mean something else under another value. The same holds of the task's settings but for its evaluation."""


@dataclass(frozen=True)
class Outcome:
    """What :func:`run_training` leaves: ``status`` is "finished" or "interrupted"."""

    status: str
    run_dir: Path
    report: Path
    summary: dict[str, Any]


def new_run_dir(config: Config, recipe: Path | None) -> Path:
    """``root/name``; without a name the recipe's and the time."""
    name = config.run.name or f"{recipe.stem if recipe else config.task.name}-{datetime.now():%Y%m%d-%H%M%S}"
    if Path(name).name != name or name in (".", ".."):
        raise ConfigError(f"run.name: {name!r} must be a plain folder name; set run.root for the folder around it")
    return Path(config.run.root) / name


def check(config: Config) -> dict[str, str]:
    """Build the task and look at its first problem with the model's tokenizer, without training; what was found."""
    task = build_task(config.task, config.warm_start, config.run.seed)
    train, held_out = task.train_problems(), task.eval_problems()
    if config.model.path:
        check_model(config.model.path)
    tokenizer = load_tokenizer(config.model.path) if config.model.path else task.build_tokenizer()
    check_trackers(config.run.trackers)
    _check_backend(config)
    new_run_dir(config, None)
    return {
        "task": config.task.name,
        "training problems": str(len(train)),
        "held-out problems": str(len(held_out)),
        "first problem": str(train[0].prompt),
        "longest prompt": f"{_check_prompts(config, task, tokenizer)} tokens",
        "rollouts": f"{config.backend.kind}, {config.backend.workers} x {config.backend.engine}",
        "schedule": f"{config.schedule.mode}, S = {config.schedule.max_staleness}",
        "value target": f"{config.algorithm.value_target}, window {config.algorithm.window}",
        "actor": f"rule {config.actor.rule}, advantage {config.algorithm.advantage}",
    }


def run_training(config: Config, run_dir: Path, *, resume: bool = False) -> Outcome:
    """Run a recipe, or go on with an interrupted run in ``run_dir``.

    Raises:
        BraceError: anything a user can mend.
    """
    started = time.monotonic()
    _check_backend(config)
    checkpoint = _checkpoint_to_resume(config, run_dir) if resume else None
    if config.schedule.learner_threads:
        torch.set_num_threads(config.schedule.learner_threads)
    task = build_task(config.task, config.warm_start, config.run.seed)
    with ExitStack() as stack:
        stack.enter_context(_no_false_start_left(run_dir))
        progress = Progress()
        stack.callback(progress.stop)
        actor, tokenizer = _load_or_make(config, task, run_dir, resume=resume)
        _check_prompts(config, task, tokenizer)
        # A checkpoint is read in full before anything of the run is changed.
        loaded = None
        if checkpoint is not None:
            learner = _new_learner(config, actor, run_dir, stack)
            loaded = load_checkpoint(checkpoint, actor=actor, critic=learner.critic, optimizers=learner.optimizers)
        writer = stack.enter_context(
            RunWriter(
                run_dir,
                trackers=config.run.trackers,
                config=config,
                resume_step=None if checkpoint is None else checkpoint_step(checkpoint),
            )
        )
        if loaded is None:
            _warm_start(config, task, actor, tokenizer, run_dir, progress)
            learner = _new_learner(config, actor, run_dir, stack)
        backend = _backend(config, run_dir, actor)
        stack.callback(backend.close)
        trainer = Trainer(
            config,
            learner=learner,
            tokenizer=tokenizer,
            problems=ProblemStream(task.train_problems(), derive_seed(config.run.seed, "problems")),
            evaluator=Evaluator(actor, task, tokenizer, config),
            backend=backend,
            writer=writer,
            progress=progress,
        )
        if loaded is not None:
            trainer.restore(loaded)
        status = "failed"
        try:
            status = _train(trainer, progress)
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        finally:
            # A run that fails needs its summary and report most.
            summary = _summary(trainer, status, time.monotonic() - started)
            write_json_atomic(run_dir / "summary.json", summary)
            report = write_report(run_dir)
    return Outcome(status, run_dir, report, summary)


def _check_backend(config: Config) -> None:
    """Raises BraceError, before anything is done, where the rollouts need a library or GPUs that are missing."""
    if config.backend.kind == "ray":
        require_ray()
        asked = config.backend.workers * config.backend.gpus_per_worker
        if not config.backend.address and asked > torch.cuda.device_count():
            raise BraceError(
                f"backend.gpus_per_worker: {config.backend.workers} workers ask for {asked:g} GPUs, this machine has "
                f"{torch.cuda.device_count()}; lower it, or name a cluster that has them (backend.address)"
            )
    if config.backend.engine == "vllm":
        require_vllm()


def _new_learner(config: Config, actor: PreTrainedModel, run_dir: Path, stack: ExitStack) -> Learner | LearnerGroup:
    """The learner, whose other ranks, if any, end with ``stack``."""
    critic = Critic.from_actor(actor) if config.algorithm.value_target != "none" else None
    if config.optim.learner_ranks == 1:
        return Learner(actor, critic, config)
    others = rank_actors if config.backend.kind == "ray" else rank_processes
    peers, meeting = stack.enter_context(others(config, _model_dir(config, run_dir)))
    group = LearnerGroup(actor, critic, config, peers=peers, meeting=meeting)
    stack.callback(group.close)
    return group


def _check_prompts(config: Config, task: Task, tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens of the longest prompt.

    Raises:
        DataError: a prompt is longer than ``rollout.max_prompt_tokens``; names the first, before hours of training do.
    """
    longest = 0
    for problem in (*task.train_problems(), *task.eval_problems()):
        tokens = len(task.prompt_ids(problem, tokenizer))
        if tokens > config.rollout.max_prompt_tokens:
            raise DataError(
                f"problem {problem.id}: its prompt has {tokens} tokens, more than rollout.max_prompt_tokens = "
                f"{config.rollout.max_prompt_tokens}; raise that or drop the problem"
            )
        longest = max(longest, tokens)
    return longest


def _summary(trainer: Trainer, status: str, seconds: float) -> dict[str, Any]:
    return {
        "status": status,
        "parameters": count_parameters(trainer.learner.actor),
        "eval_before": trainer.evaluations.get("before"),
        "eval_after": trainer.evaluations.get("after"),
        "ledger": trainer.staleness.ledger(),
        "dropped_length_mean": trainer.staleness.dropped_mean_length,
        "steps": trainer.learner.version,
        "seconds": seconds,
    }


@contextmanager
def _no_false_start_left(run_dir: Path) -> Iterator[None]:
    """Remove the folder of a new run that ends in an error before its first step: it holds nothing to go on with."""
    is_new = not run_dir.exists() or (run_dir.is_dir() and not any(run_dir.iterdir()))
    try:
        yield
    except BaseException:
        if is_new and (run_dir / "config.json").is_file() and not read_run(run_dir).training_rows:
            shutil.rmtree(run_dir, ignore_errors=True)
        raise


def _train(trainer: Trainer, progress: Progress) -> str:
    if "before" not in trainer.evaluations:
        trainer.evaluate_before()
        progress.message(f"before training: success {trainer.evaluations['before']['eval/success']:.3f}")
    progress.start(trainer.config.optim.steps, trainer.learner.version)
    return trainer.run()


def _checkpoint_to_resume(config: Config, run_dir: Path) -> Path:
    """The newest checkpoint, once ``config`` is known to fit it; nothing of the run has been touched yet."""
    checkpoint = latest_checkpoint(run_dir)
    if checkpoint is None:
        raise BraceError(f"{run_dir}: holds no complete checkpoint to resume from; start the recipe again")
    before, now = load_resolved_config(run_dir).model_dump(), config.model_dump()
    task_settings = [f"task.{name}" for name in now["task"] if not name.startswith("eval_")]
    for section, name in (key.split(".") for key in ("task.name", *task_settings, *FIXED_SETTINGS)):
        if before[section][name] != now[section][name]:
            raise ConfigError(
                f"{section}.{name}: {run_dir} was started with {before[section][name]!r}, which a resumed run cannot "
                f"change to {now[section][name]!r}; leave it out, or start a new run"
            )
    if checkpoint_step(checkpoint) >= config.optim.steps:
        raise BraceError(
            f"{run_dir}: already finished its {config.optim.steps} steps; pass --optim.steps with more to go on"
        )
    return checkpoint


def _model_dir(config: Config, run_dir: Path) -> str:
    """Where the actor's architecture, tokenizer and first weights are found."""
    if config.model.path and not config.warm_start.steps:
        return config.model.path
    return str(run_dir / INITIAL_MODEL)


def _load_or_make(
    config: Config, task: Task, run_dir: Path, *, resume: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The actor with float32 master weights, on its device, and the tokenizer."""
    device = resolve_device(config.model.device)
    path = _model_dir(config, run_dir) if resume else config.model.path
    if path:
        return load_actor(path, dtype="float32", device=device), load_tokenizer(path)
    tokenizer = task.build_tokenizer()
    return new_actor(config.model, tokenizer, derive_seed(config.run.seed, "model")).to(device), tokenizer


def _warm_start(
    config: Config,
    task: Task,
    actor: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    run_dir: Path,
    progress: Progress,
) -> None:
    """Train on demonstrations if asked to, and save the first weights where the rollout process finds them."""
    if config.warm_start.steps:

        def report(step: int, loss: float) -> None:
            progress.message(f"warm start {step}/{config.warm_start.steps}: loss {loss:.4f}")

        warm_start(actor, tokenizer, task, config, report)
    model_dir = _model_dir(config, run_dir)
    if model_dir != config.model.path:
        save_actor(actor, tokenizer, Path(model_dir))


def _backend(config: Config, run_dir: Path, actor: PreTrainedModel) -> Backend:
    spec = DriverSpec(config, _model_dir(config, run_dir), slots=config.rollout.slots)
    if config.backend.kind == "ray":
        return RayBackend(
            spec,
            workers=config.backend.workers,
            timeout_s=config.schedule.timeout_s,
            threads=config.schedule.rollout_threads,
            gpus=config.backend.gpus_per_worker,
            address=config.backend.address,
        )
    if config.schedule.mode != "async":
        return InlineBackend(spec.build())
    return ProcessBackend(
        spec, actor.state_dict(), timeout_s=config.schedule.timeout_s, threads=config.schedule.rollout_threads
    )
