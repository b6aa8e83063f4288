"""The processes that train together, and what passes between them.

Every rank runs the same code on the same batch. A rank sends its own share of the rows through the models; what it
learns about a token, a number or two, is given to all. From there on every rank knows the whole batch, so whatever is
said about it - targets, whitening, explained variance, which tokens a rule keeps - is said of all of it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Ranks:
    """This process among those that train together.

    Args:
        group: the processes; None where there is this one alone, and every method leaves its argument as it is.

    Attributes:
        rank: from 0; rank 0 runs the training loop.
        size: number of processes.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def add_up(self, tensor: Tensor) -> Tensor:
        """``tensor``, now the sum over ranks."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def as_on_first(self, tensor: Tensor) -> Tensor:
        """``tensor``, now that of rank 0; shapes and dtypes must agree."""
        if self.size > 1:
            dist.broadcast(tensor, group=self.group, group_src=0)
        return tensor

    def add_up_gradients(self, module: nn.Module) -> None:
        """Give every rank the sum of all ranks' gradients.

        A parameter that has no gradient on any rank still has none. Sharded parameters (FSDP2) are left out: theirs
        are added up by the backward pass.
        """
        if self.size == 1:
            return
        parameters = [p for p in module.parameters() if p.requires_grad and not isinstance(p, DTensor)]
        if not parameters:
            return
        has_one = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
        handles = []
        for parameter, somewhere in zip(parameters, self.add_up(has_one).tolist(), strict=True):
            if not somewhere:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            handles.append(dist.all_reduce(parameter.grad, group=self.group, async_op=True))
        for handle in handles:
            if handle is not None:
                handle.wait()
