"""What the embedded engine asks of a ``transformers`` model besides its forward."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from brace_rl.errors import ModelError


def max_positions(config: Any) -> int | None:
    """Longest sequence the model can take, or None for no limit."""
    limit: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        # Past this length the model changes the frequencies of the whole batch, cached keys included.
        limit = rope.get("original_max_position_embeddings", limit)
    return limit


def forward_arguments(model: Any) -> frozenset[str]:
    """Names the model's forward takes.

    Raises:
        ModelError: a key-value cache or an attention mask is not among them.
    """
    names = frozenset(inspect.signature(model.forward).parameters)
    kind = model.config.model_type
    if not names & {"cache", "past_key_values"} or "attention_mask" not in names or model.config.is_encoder_decoder:
        raise ModelError(
            f"{kind}: not a decoder with a key-value cache and an attention mask (state-space models keep their past "
            "otherwise); the embedded engine cannot run it"
        )
    return names


@torch.no_grad()
def load_weights(model: Any, weights: Mapping[str, Tensor]) -> None:
    """Copy all of a ``state_dict`` into a model, or nothing.

    Names the model ties to each other are one tensor, given under at least one of them. Values are converted to the
    model's dtype and device.

    Raises:
        ModelError: a name is missing or unknown, a shape differs, or tied names come with different values.
    """
    own: dict[str, Tensor] = model.state_dict()
    groups: dict[tuple[int, torch.Size, tuple[int, ...]], list[str]] = {}
    for name, tensor in own.items():
        groups.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()), []).append(name)
    missing = [names[0] for names in groups.values() if not any(name in weights for name in names)]
    unexpected = [name for name in weights if name not in own]
    if missing or unexpected:
        raise ModelError(f"weights do not fit the model: {_list('missing', missing)}{_list('unknown', unexpected)}")
    for name, tensor in weights.items():
        if tensor.shape != own[name].shape:
            raise ModelError(
                f"weights do not fit the model: {name} has shape {tuple(tensor.shape)}, "
                f"the model's is {tuple(own[name].shape)}"
            )
    for names in groups.values():
        given = [weights[name] for name in names if name in weights]
        if not all(_same(given[0], other) for other in given[1:]):
            raise ModelError(f"weights do not fit the model: it ties {' and '.join(names)}, which differ here")
    for names in groups.values():
        own[names[0]].copy_(next(weights[name] for name in names if name in weights))


def _same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors hold the same numbers; NaN counts, so that a diverged model is not called untied."""
    return first.data_ptr() == second.data_ptr() or torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)


def _list(what: str, names: Sequence[str], shown: int = 3) -> str:
    """``what a, b, c and 5 more; `` or nothing."""
    if not names:
        return ""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return f"{what} {', '.join(names[:shown])}{more}; "
