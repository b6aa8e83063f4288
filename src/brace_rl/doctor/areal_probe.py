"""Ask a Python process whether AReaL there has what BRACE relies on. Imports AReaL: meant for a process of its own."""

from __future__ import annotations

from dataclasses import fields
from inspect import getsource
from typing import Any

from brace_rl.doctor.fresh_process import answer
from brace_rl.doctor.seam import differences, found_here
from brace_rl.integrations.areal.versions import DISTRIBUTION, check_areal

SEAM = {
    "areal.trainer.ppo.actor:PPOActor.__init__": ("self", "config", "engine"),
    "areal.trainer.ppo.actor:PPOActor._compute_advantages": ("self", "data"),
    "areal.trainer.rl_trainer:PPOTrainer._create_train_engine": ("self", "actor_config", "alloc"),
    "areal.engine.fsdp_engine:FSDPPPOActor.__init__": ("self", "config"),
    "areal.engine.fsdp_engine:FSDPPPOActor.as_controller": ("config", "scheduler"),
    "areal.utils.environ:is_single_controller": (),
    "areal.utils.stats_tracker:scope": ("name",),
}

SETTINGS = ("discount", "gae_lambda", "adv_norm", "use_decoupled_loss", "recompute_logprob", "prox_logp_method")
"""Of ``actor``, which the checks and the adapter read."""

TENSORS = ("tot_rewards", "returns", "advantages", "loss_mask", "prox_logp", "logprobs", "values")
"""What AReaL's own advantages read and write by these names."""


def probe() -> dict[str, Any]:
    """What this process finds: see :func:`~brace_rl.doctor.seam.found_here`."""
    return found_here(DISTRIBUTION, check_version=check_areal, look=_look)


def _look() -> list[str]:
    found = [*differences(SEAM), *_contents()]
    if not found:
        import brace_rl.integrations.areal.fsdp
        import brace_rl.integrations.areal.trainer  # noqa: F401
    return found


def _contents() -> list[str]:
    from areal.api.cli_args import PPOActorConfig  # type: ignore[import-not-found]
    from areal.trainer.ppo.actor import PPOActor  # type: ignore[import-not-found]

    there = {setting.name for setting in fields(PPOActorConfig)}
    source = getsource(PPOActor._compute_advantages)
    settings = [f"actor.{name}: no such setting" for name in SETTINGS if name not in there]
    return settings + [f"{name}: not among AReaL's tensors" for name in TENSORS if f'"{name}"' not in source]


if __name__ == "__main__":
    answer(probe())
