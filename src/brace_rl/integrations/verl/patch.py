"""verl 0.7 and 0.8, which have no trainers to register: their ``compute_advantage`` is replaced where it is called.

A configuration without the node ``algorithm.brace`` runs as before.
"""

from __future__ import annotations

from functools import wraps
from types import ModuleType
from typing import Any

from brace_rl.errors import ConfigError
from brace_rl.integrations.verl.estimate import verl_estimates
from brace_rl.integrations.verl.options import NODE, options_from_algorithm

ACTION_MASK = "brace_action_mask"
"""Where the mask that the rollout wrote is kept in the batch."""


def keep_action_mask(module: ModuleType) -> None:
    """Make rejection leave a copy of the mask that it overwrites.

    Args:
        module: ``verl.trainer.ppo.rollout_corr_helper``.
    """
    original = module.compute_rollout_correction_and_add_to_batch

    @wraps(original)
    def correct(batch: Any, *args: Any, **kwargs: Any) -> Any:
        action_mask = batch.batch["response_mask"].clone()
        corrected, metrics = original(batch, *args, **kwargs)
        corrected.batch[ACTION_MASK] = action_mask
        return corrected, metrics

    module.compute_rollout_correction_and_add_to_batch = correct  # type: ignore[attr-defined]


def patch_advantage(module: ModuleType) -> None:
    """Make ``compute_advantage`` of this module BRACE's where the configuration asks for it.

    Args:
        module: one of verl's modules that call a ``compute_advantage`` of their own namespace.
    """
    original = module.compute_advantage
    if getattr(original, "is_brace", False):
        # Imported from a module that has been patched already.
        return

    @wraps(original)
    def compute_advantage(data: Any, adv_estimator: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        if config is None or config.get("brace") is None:
            return original(data, adv_estimator, *args, config=config, **kwargs)
        if adv_estimator != "gae":
            raise ConfigError(
                f"algorithm.adv_estimator = {adv_estimator}: {NODE} takes its place; set gae, which keeps the critic on"
            )
        from verl.utils.torch_functional import masked_whiten  # type: ignore[import-not-found]

        data = original(data, adv_estimator, *args, config=config, **kwargs)
        batch = data.batch
        estimates = verl_estimates(
            rewards=batch["token_level_rewards"],
            values=batch.get("values"),
            rollout_log_probs=batch.get("rollout_log_probs"),
            old_log_probs=batch.get("old_log_probs"),
            action_mask=batch.get(ACTION_MASK, batch["response_mask"]),
            response_mask=batch["response_mask"],
            options=options_from_algorithm(config),
            whiten=masked_whiten,
        )
        batch["advantages"], batch["returns"] = estimates.advantages, estimates.returns
        return data

    compute_advantage.is_brace = True  # type: ignore[attr-defined]
    module.compute_advantage = compute_advantage  # type: ignore[attr-defined]
