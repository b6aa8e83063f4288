"""verl's own trainers with another value target and advantage. Imported once verl's trainers have been."""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any, ClassVar

import transfer_queue as tq  # type: ignore[import-not-found]
from omegaconf import OmegaConf, open_dict  # type: ignore[import-not-found]
from tensordict import TensorDict  # type: ignore[import-not-found]
from verl.trainer.ppo.v1.trainer_base import register_trainer  # type: ignore[import-not-found]
from verl.utils.torch_functional import masked_whiten  # type: ignore[import-not-found]
from verl.workers.utils.padding import response_to_nested  # type: ignore[import-not-found]

from brace_rl.integrations.checking import refuse
from brace_rl.integrations.verl.checks import TRAINERS, config_findings
from brace_rl.integrations.verl.estimate import PREFIX, verl_estimates
from brace_rl.integrations.verl.options import options_from_algorithm

_log = logging.getLogger(__name__)


class BraceTargets:
    """Goes before one of verl's trainers in the order of bases, and changes two steps of it."""

    verl_mode: ClassVar[str]
    """verl's name of the trainer that this one is otherwise."""

    config: Any
    use_critic: bool
    global_steps: int

    def __init__(self, config: Any) -> None:
        refuse(config_findings(OmegaConf.to_container(config)))
        self._brace_options = options_from_algorithm(config.algorithm)
        # verl asks for its trainers by name (which replay buffer, which sub-tree of settings), so under its own name
        # this one is treated as what it is.
        with open_dict(config):
            config.trainer.v1.trainer_mode = self.verl_mode
        super().__init__(config)  # type: ignore[call-arg]

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Let verl do all it does here, then put BRACE's numbers in the place of its ``advantages`` and ``returns``."""
        # Rejection overwrites the mask, so what the policy wrote is read before.
        action_mask = _read(batch, ["response_mask"])["response_mask"]
        batch = super()._compute_advantage(batch, metrics)  # type: ignore[misc]
        rewards = "token_level_rewards" if self.config.algorithm.use_kl_in_reward else "rm_scores"
        fields = [rewards, "values", "response_mask", "old_log_probs"]
        if self._brace_options.needs_ratios:
            fields.append("rollout_log_probs")
        stored = _read(batch, fields)
        padded = stored.to_padded_tensor()
        estimates = verl_estimates(
            rewards=padded[rewards],
            values=padded.get("values"),
            rollout_log_probs=padded.get("rollout_log_probs"),
            old_log_probs=padded.get("old_log_probs"),
            action_mask=action_mask.to_padded_tensor(0),
            response_mask=padded["response_mask"],
            options=self._brace_options,
            whiten=masked_whiten,
        )
        metrics.update(estimates.metrics)
        self._warn_of_hidden_staleness(batch, estimates.metrics)
        written = {
            "advantages": response_to_nested(estimates.advantages, stored["response_mask"]),
            "returns": response_to_nested(estimates.returns, stored["response_mask"]),
        }
        return tq.kv_batch_put(
            keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict(written, batch_size=len(batch))
        )

    def _warn_of_hidden_staleness(self, batch: Any, metrics: dict[str, float]) -> None:
        """Old responses whose log-probs are exactly today's cannot carry the log-probs that they were sampled with."""
        if metrics.get(f"{PREFIX}ratio/all_one") != 1.0:
            return
        oldest = min((tag.get("min_global_steps") or 0 for tag in batch.tags if not tag.get("is_padding")), default=0)
        if oldest < self.global_steps - 1:
            _log.warning(
                "step %d: responses of version %d have exactly the log-probs of today's policy, so nothing is "
                "corrected; what overwrites rollout_log_probs?",
                self.global_steps,
                oldest,
            )


def _read(batch: Any, fields: list[str]) -> Any:
    return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)


def register(v1: ModuleType) -> None:
    """Register one trainer for each of verl's.

    Args:
        v1: ``verl.trainer.ppo.v1``.
    """
    for name, (base, verl_mode) in TRAINERS.items():
        trainer = type(f"Brace{base}", (BraceTargets, getattr(v1, base)), {"verl_mode": verl_mode})
        register_trainer(name)(trainer)
