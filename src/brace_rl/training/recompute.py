"""Gradient checkpointing: a layer's activations are made again in the backward pass instead of being kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from brace_rl.errors import ModelError


def recompute_layers(model: nn.Module) -> None:
    """Keep, of every decoder layer of ``model``, its inputs alone until the backward pass.

    Figures and gradients do not change. The switch that ``transformers`` has for this works in training mode only,
    where dropout is on; a policy's log-probs are those without. Without gradients nothing is different.

    Raises:
        ModelError: the model has no layers that ``transformers`` marks as fit for it.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ModelError(
            f"{type(model).__name__}: has no layers that can be computed again; set model.gradient_checkpointing to "
            "false"
        )
    for layer in layers:
        layer.forward = _Recomputed(layer.forward)


class _Recomputed:
    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        return checkpoint(self._forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
