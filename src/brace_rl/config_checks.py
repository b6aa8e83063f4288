"""Settings that cannot go together, each refused in one line that names the key and the mend. Torch-free."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from brace_rl.config import Config

GROUP_ADVANTAGES = ("group", "dr_grpo", "rloo", "group_brace")
"""Advantages of a response against the others to its prompt; they read no critic."""

WINDOWED_TARGETS = ("brace", "capped", "vtrace")
"""Targets corrected by ratios."""

SHORT_WINDOW = 20
"""Windows below it keep their anchor under a lambda below 1; no warning is given."""


def check_combinations(config: Config) -> None:
    """Raises ValueError for the first combination that cannot be meant; warns of one that hardly can."""
    config.task.check_training(model_path=config.model.path)
    _check_schedule(config)
    _check_optim(config)
    _check_ranks(config)
    _check_backend(config)
    _check_algorithm(config)


def _check_schedule(config: Config) -> None:
    schedule = config.schedule
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


def _check_optim(config: Config) -> None:
    model = config.model
    if not model.path and model.hidden_size % (2 * model.heads):
        raise ValueError("model.hidden_size: must be an even multiple of model.heads (rotary embedding)")
    responses = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    if config.optim.minibatches > responses:
        raise ValueError(f"optim.minibatches: {config.optim.minibatches} is more than the {responses} responses a step")
    if config.optim.keep_graph and config.optim.minibatches > 1:
        raise ValueError(
            "optim.keep_graph: the graph is that of the weights before the first minibatch; set optim.minibatches "
            "to 1 or keep_graph to false"
        )
    if not all(0 <= beta < 1 for beta in config.optim.betas):
        raise ValueError(f"optim.betas: both must be at least 0 and below 1 (got {list(config.optim.betas)})")
    if config.optim.critic_warmup_steps >= config.optim.steps:
        raise ValueError("optim.critic_warmup_steps: must be below optim.steps, or the actor never learns")
    if config.optim.critic_warmup_until and not config.optim.critic_warmup_steps:
        raise ValueError(
            "optim.critic_warmup_until: ends a warm-up early, and optim.critic_warmup_steps = 0 is none; set that "
            "to 1 or more, or critic_warmup_until to 0"
        )


def _check_ranks(config: Config) -> None:
    if config.model.sharding == "none":
        return
    if config.optim.learner_ranks == 1:
        raise ValueError(
            "model.sharding: fsdp2 cuts the models over several ranks, and optim.learner_ranks is 1; raise that or "
            "use sharding = 'none'"
        )
    if config.optim.keep_graph:
        raise ValueError("optim.keep_graph: a graph over fsdp2's parts cannot be kept; set it to false")
    if config.actor.needs_weight_average:
        raise ValueError(
            f"model.sharding: {config.actor.rule} keeps a whole second copy of the actor, which fsdp2 does not cut; "
            "use sharding = 'none' or another actor rule"
        )


def _check_backend(config: Config) -> None:
    backend = config.backend
    for name in ("workers", "address", "gpus_per_worker") if backend.kind == "local" else ():
        if getattr(backend, name) != type(backend).model_fields[name].default:
            raise ValueError(f"backend.{name}: only a Ray cluster has that; set backend.kind = 'ray' or leave it out")
    if config.optim.learner_ranks > 1 and backend.address.startswith("ray://"):
        raise ValueError(
            "backend.address: the trainer is a rank of the learner, so it must run on a machine of the cluster; use "
            "'auto' there, or set optim.learner_ranks to 1"
        )
    if backend.engine == "vllm" and (config.rollout.top_p < 1 or config.rollout.top_k > 0):
        raise ValueError(
            "backend.engine: vllm does not say which tokens top-p and top-k left in; set rollout.top_p = 1 and "
            "rollout.top_k = 0, or use the embedded engine"
        )
    if backend.engine == "vllm" and config.actor.needs_entropy:
        raise ValueError(
            f"backend.engine: vllm reports no entropies, which actor rule {config.actor.rule} reads; use the "
            "embedded engine or another rule"
        )


def _check_algorithm(config: Config) -> None:
    algorithm = config.algorithm
    if algorithm.value_target == "none" and algorithm.advantage not in GROUP_ADVANTAGES:
        raise ValueError(
            f"algorithm.advantage: {algorithm.advantage} reads a critic, and algorithm.value_target = 'none' has "
            f"none; use one of {', '.join(GROUP_ADVANTAGES)}, or a value target"
        )
    if algorithm.advantage in GROUP_ADVANTAGES and config.rollout.samples_per_prompt < 2:
        raise ValueError(
            f"rollout.samples_per_prompt: algorithm.advantage = {algorithm.advantage!r} compares the responses to "
            "one prompt; set it to 2 or more"
        )
    if config.actor.fresh_only and config.schedule.max_staleness > 0:
        raise ValueError(
            f"actor.edge: {config.actor.rule} with edge = 'U' looks past staleness, and max_staleness is "
            f"{config.schedule.max_staleness}; use edge = 'E', or set max_staleness to 0"
        )
    if algorithm.advantage == "group_brace" and (algorithm.gamma < 1 or algorithm.lam < 1):
        raise ValueError(
            "algorithm.advantage: group_brace is Eq. 27 at gamma = lam = 1; set algorithm.gamma and algorithm.lam to "
            "1, or use another advantage"
        )
    windowed = algorithm.value_target in WINDOWED_TARGETS
    if not windowed or algorithm.lam == 1:
        return
    horizon = config.rollout.max_response_tokens
    if algorithm.value_target != "vtrace" and isinstance(algorithm.window, int):
        if algorithm.window < SHORT_WINDOW:
            return
        horizon = algorithm.window
    warnings.warn(
        f"algorithm.lam = {algorithm.lam:g} leaves the tail a weight of {algorithm.lam**horizon:.1e} after "
        f"{horizon} tokens, so the reward hardly reaches the target; use lam = 1 or a shorter window",
        stacklevel=2,
    )
