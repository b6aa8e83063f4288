"""SkyRL's own trainers with another value target and advantage. Imports SkyRL."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from skyrl.backends.skyrl_train.utils.ppo_utils import masked_whiten  # type: ignore[import-not-found]
from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer  # type: ignore[import-not-found]
from skyrl.train.trainer import RayPPOTrainer  # type: ignore[import-not-found]

from brace_rl.integrations.skyrl.checks import refuse_errors
from brace_rl.integrations.skyrl.estimate import right_aligned, skyrl_estimates
from brace_rl.integrations.skyrl.options import options_from_algorithm

ACTION_MASKS = "brace_action_masks"
"""Where the generator's masks are kept in its output, one list per response."""

ACTION_MASK = "brace_action_mask"
"""The same as a tensor of the batch."""


class BraceTargets:
    """Goes before one of SkyRL's trainers in the order of bases."""

    all_metrics: dict[str, float]

    def __init__(self, cfg: Any, *args: Any, **kwargs: Any) -> None:
        config = asdict(cfg)
        refuse_errors(config)
        self._brace_options = options_from_algorithm(config["trainer"]["algorithm"])
        super().__init__(cfg, *args, **kwargs)  # type: ignore[call-arg]

    def _skip_policy_forward(self, training_input: Any) -> bool:
        """SkyRL leaves pi out for losses that do without it, which in fully asynchronous training are all."""
        if self._brace_options.needs_ratios:
            return False
        return bool(super()._skip_policy_forward(training_input))  # type: ignore[misc]

    def postprocess_generator_output(self, generator_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Keep the masks that SkyRL's filter of groups overwrites here."""
        written = [list(mask) for mask in generator_output["loss_masks"]]
        generator_output, uids = super().postprocess_generator_output(  # type: ignore[misc]
            generator_output, *args, **kwargs
        )
        generator_output[ACTION_MASKS] = written
        return generator_output, uids

    def convert_to_training_input(self, generator_output: Any, uids: list[str]) -> Any:
        """Bring the kept masks into the batch; rows that fill it up are nobody's actions."""
        written = generator_output.pop(ACTION_MASKS, generator_output["loss_masks"])
        data = super().convert_to_training_input(generator_output, uids)  # type: ignore[misc]
        rows, width = data["loss_mask"].shape
        data[ACTION_MASK] = right_aligned(written, rows=rows, width=width)
        return data

    @torch.no_grad()
    def compute_advantages_and_returns(self, data: Any) -> Any:
        """Let SkyRL do all it does here, then put BRACE's numbers in place of its ``advantages`` and ``returns``."""
        action_mask = data.pop(ACTION_MASK, None)
        if action_mask is None:
            action_mask = data["loss_mask"] > 0
        estimates = skyrl_estimates(
            rewards=data["rewards"],
            values=data.get("values"),
            rollout_logprobs=data.get("rollout_logprobs"),
            action_log_probs=data.get("action_log_probs"),
            action_mask=action_mask,
            loss_mask=data["loss_mask"],
            options=self._brace_options,
            whiten=masked_whiten,
        )
        data = super().compute_advantages_and_returns(data)  # type: ignore[misc]
        data["advantages"], data["returns"] = estimates.advantages, estimates.returns
        taken = estimates.advantages[action_mask]
        mean, size = (float(x.sum() / max(taken.numel(), 1)) for x in (taken, taken.abs()))
        data.metadata["metrics"] |= {"avg_advantages": mean, "avg_advantages_abs": size}
        self.all_metrics |= {"loss/avg_raw_advantages": mean, "loss/avg_raw_advantages_abs": size, **estimates.metrics}
        return data


class BraceRayPPOTrainer(BraceTargets, RayPPOTrainer):  # type: ignore[misc]
    """Of synchronous training."""


class BraceFullyAsyncRayPPOTrainer(BraceTargets, FullyAsyncRayPPOTrainer):  # type: ignore[misc]
    """Of fully asynchronous training."""
