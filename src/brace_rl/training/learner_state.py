"""A learner's whole state, from rank 0 to every rank and back.

Rank 0 has everything whole: it samples, evaluates and saves with ordinary models and optimisers. Where ranks hold
copies, those *are* rank 0's own. Where each holds a part (FSDP2), they are a second set, filled from the parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from brace_rl.training.learner import Learner
from brace_rl.training.models import Critic
from brace_rl.training.ranks import Ranks
from brace_rl.training.sharding import assign, whole
from brace_rl.training.wire import describe, receive, send

_STEP = "step"
"""AdamW's count of steps, one number; its other entries are of the parameter's shape."""


@dataclass(frozen=True)
class WholeModels:
    """What rank 0 samples, evaluates and saves with.

    Attributes:
        optimizers: by the name of what they train.
    """

    actor: PreTrainedModel
    critic: Critic | None
    optimizers: dict[str, torch.optim.Optimizer]

    def tensors(self) -> dict[str, Tensor]:
        """Weights and optimiser states by name, not copies."""
        return dict(_named(self.actor, self.critic, self.optimizers))


def description(models: WholeModels, learner: Learner) -> dict[str, Any]:
    """What rank 0 tells the others before :func:`send_state`, JSON-able."""
    return {
        "counters": learner.counters(),
        "tensors": describe(models.tensors()),
        "rule": describe(learner.tensors),
    }


def send_state(models: WholeModels, learner: Learner, ranks: Ranks) -> None:
    """On rank 0: give every rank the state of ``models``, and take a part of it where weights are cut."""
    sent = models.tensors()
    send(sent, ranks, learner.device)
    send(learner.tensors, ranks, learner.device)
    if models.actor is not learner.actor:
        _take(learner, sent.items())


def receive_state(described: dict[str, Any], learner: Learner, ranks: Ranks) -> None:
    """On the other ranks: take over what rank 0 sends."""
    _take(learner, receive(described["tensors"], ranks, learner.device))
    learner.restore(described["counters"], dict(receive(described["rule"], ranks, learner.device)))


@torch.no_grad()
def gather(learner: Learner, models: WholeModels | None, *, optimizers: bool) -> None:
    """On every rank: put the parts together; on rank 0, which has ``models``, copy them there.

    Args:
        optimizers: and the critic, which are wanted for a checkpoint only.
    """
    if optimizers:
        parts = _named(learner.actor, learner.critic, learner.optimizers)
    else:
        parts = _named(learner.actor, None, {})
    weights = {} if models is None else dict(_named(models.actor, models.critic, {}))
    for name, part in parts:
        full = whole(part.detach())
        if name in weights:
            weights[name].copy_(full)
        elif models is not None:
            _, model, key = name.split("|", 2)
            index, entry = key.split("|")
            parameter = _parameters(models.optimizers[model])[int(index)]
            models.optimizers[model].state[parameter][entry] = full.clone()


def _named(
    actor: PreTrainedModel, critic: Critic | None, optimizers: dict[str, torch.optim.Optimizer]
) -> Iterator[tuple[str, Tensor]]:
    """``model|actor|NAME`` of weights, ``optimizer|actor|PARAMETER|ENTRY`` of optimiser states."""
    for model, module in (("actor", actor), ("critic", critic)):
        if module is not None:
            for name, tensor in module.state_dict().items():
                yield f"model|{model}|{name}", tensor
    for model, optimizer in optimizers.items():
        for index, parameter in enumerate(_parameters(optimizer)):
            for entry, value in optimizer.state.get(parameter, {}).items():
                yield f"optimizer|{model}|{index}|{entry}", value


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@torch.no_grad()
def _take(learner: Learner, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Weights and optimiser states, whole, into a learner, which may hold parts."""
    own = {"actor": learner.actor.state_dict()}
    if learner.critic is not None:
        own["critic"] = learner.critic.state_dict()
    for name, tensor in tensors:
        kind, model, key = name.split("|", 2)
        if kind == "model":
            assign(own[model][key], tensor)
            continue
        index, entry = key.split("|")
        parameter = _parameters(learner.optimizers[model])[int(index)]
        if entry == _STEP:
            value = tensor.cpu()  # where AdamW keeps it
        else:
            value = torch.zeros_like(parameter, dtype=tensor.dtype)
            assign(value, tensor)
        learner.optimizers[model].state[parameter][entry] = value
