"""Tensors from rank 0 to the other ranks: bytes by ``torch.distributed``, what they are as JSON, nothing pickled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from brace_rl.training.batch import Batch
from brace_rl.training.ranks import Ranks

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.bool, torch.uint8, torch.int32, torch.int64, torch.bfloat16, torch.float32, torch.float64)
}
_KEPT_SIZES, _KEPT_IDS = "kept_sizes", "kept_ids"


def describe(tensors: Mapping[str, Tensor]) -> list[list[Any]]:
    """``[name, dtype, shape]`` of each, in order: what :func:`receive` needs."""
    return [[name, str(x.dtype).removeprefix("torch."), list(x.shape)] for name, x in tensors.items()]


def send(tensors: Mapping[str, Tensor], ranks: Ranks, device: torch.device) -> None:
    """From rank 0, to whoever calls :func:`receive`."""
    for tensor in tensors.values():
        ranks.as_on_first(_bytes(tensor.detach().to(device).contiguous()))


def receive(described: list[list[Any]], ranks: Ranks, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """On the other ranks: what rank 0 sends, one tensor after the other, on ``device``. All must be taken."""
    for name, dtype, shape in described:
        tensor = torch.empty(shape, dtype=_DTYPES[dtype], device=device)
        ranks.as_on_first(_bytes(tensor))
        yield name, tensor


def batch_tensors(batch: Batch) -> dict[str, Tensor]:
    """A batch as tensors by name; :func:`batch_from_tensors` is the way back."""
    tensors = {field.name: value for field in fields(batch) if isinstance(value := getattr(batch, field.name), Tensor)}
    tensors["lengths"] = torch.tensor(batch.lengths)
    if batch.kept_ids is not None:
        tensors[_KEPT_SIZES] = torch.tensor([[len(ids) for ids in row] for row in batch.kept_ids])
        tensors[_KEPT_IDS] = torch.tensor([i for row in batch.kept_ids for ids in row for i in ids], dtype=torch.long)
    return tensors


def batch_from_tensors(tensors: Mapping[str, Tensor]) -> Batch:
    """Inverse of :func:`batch_tensors`."""
    arguments: dict[str, Any] = dict(tensors)
    arguments["lengths"] = tuple(tensors["lengths"].tolist())
    if _KEPT_SIZES in tensors:
        ids = iter(tensors[_KEPT_IDS].tolist())
        sizes = arguments.pop(_KEPT_SIZES).tolist()
        arguments[_KEPT_IDS] = tuple(tuple(tuple(next(ids) for _ in range(n)) for n in row) for row in sizes)
    return Batch(**arguments)


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory, so that any dtype passes through any backend."""
    return tensor.view(-1).view(torch.uint8)
