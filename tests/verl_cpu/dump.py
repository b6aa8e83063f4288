"""Write what a verl trainer holds in each step, without changing it: one safetensors file per update."""

import functools
import os
from pathlib import Path

import torch
from safetensors.torch import save_file

FIELDS = ("advantages", "returns", "response_mask", "rollout_log_probs", "old_log_probs", "values", "rm_scores")


def install(module):
    """Wrap two steps of verl's base trainer: before its advantages, and after.

    Args:
        module: ``verl.trainer.ppo.v1.trainer_base``.
    """
    tq = module.tq
    folder = Path(os.environ["VERL_CPU_DUMP"])
    compute_values, update_critic = module.PPOTrainer._compute_values, module.PPOTrainer._update_critic

    def read(batch, fields):
        return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(fields))

    @functools.wraps(compute_values)
    def after_values(self, batch, metrics):
        batch = compute_values(self, batch, metrics)
        self.dumped_action_mask = read(batch, ["response_mask"])["response_mask"].to_padded_tensor(0)
        return batch

    @functools.wraps(update_critic)
    def before_update(self, batch, metrics):
        padded = read(batch, [*FIELDS, "responses"]).to_padded_tensor(0)
        tensors = {name: padded[name].contiguous() for name in [*FIELDS, "responses"]}
        tensors["action_mask"] = self.dumped_action_mask
        versions = [[int(tag.get(f"{end}_global_steps") or 0) for end in ("min", "max")] for tag in batch.tags]
        tensors["versions"] = torch.tensor(versions)
        tensors["step"] = torch.tensor([self.global_steps, self.local_trigger_step])
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / f"{self.global_steps:03d}-{self.local_trigger_step}.safetensors")
        return update_critic(self, batch, metrics)

    module.PPOTrainer._compute_values = after_values
    module.PPOTrainer._update_critic = before_update
