"""Weights, gradients and optimiser states cut over the ranks (torch's FSDP2), and whole tensors out of the parts.

Every decoder layer is a unit: its weights are put together for its forward pass and again for its backward pass. What
is outside the layers - embeddings, output head, the last norm - is a unit too.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from brace_rl.errors import BraceError
from brace_rl.training.logprobs import TokenScorer
from brace_rl.training.models import Critic
from brace_rl.training.ranks import Ranks


def shard(scorer: TokenScorer, critic: Critic | None, ranks: Ranks) -> None:
    """Cut both models over the ranks, in place. Every rank calls this with models of the same shapes.

    Gradients are sums over ranks, as the losses have the denominators of the whole batch.

    Raises:
        BraceError: this torch cannot add gradients up without averaging them.
    """
    if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
        raise BraceError(f"model.sharding: torch {torch.__version__} is too old for fsdp2 here; update it")
    assert ranks.group is not None
    device = next(scorer.parameters()).device.type
    mesh = DeviceMesh.from_group(ranks.group, device)
    for module in (scorer, critic):
        if module is None:
            continue
        for layer in module.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                _cut(layer, mesh, ranks.size)
        _cut(module, mesh, ranks.size)


def whole(tensor: Tensor) -> Tensor:
    """The tensor a part belongs to; itself where nothing is cut. For a part, every rank must call this."""
    if isinstance(tensor, DTensor):
        full: Tensor = tensor.full_tensor()
        return full
    return tensor


@torch.no_grad()
def assign(target: Tensor, source: Tensor) -> None:
    """Copy ``source``, whole and the same on every rank, into ``target``, which may be a part."""
    if isinstance(target, DTensor):
        own = distribute_tensor(source.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(own.to_local())
    else:
        target.copy_(source)


def _cut(module: nn.Module, mesh: DeviceMesh, ranks: int) -> None:
    # Also what is outside the layers: whole weights left over from an evaluation would outlive an optimiser step.
    unit = fully_shard(module, mesh=mesh, reshard_after_forward=True)
    assert isinstance(unit, FSDPModule)
    # Sums, then nothing divided: without this gradients would be means over ranks.
    unit.set_force_sum_reduction_for_comms(True)
    unit.set_gradient_divide_factor(1.0)
