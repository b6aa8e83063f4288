"""A state dict in memory that two processes share."""

from __future__ import annotations

import mmap
import multiprocessing.reduction
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

_ALIGNMENT = 64
"""Bytes; a cache line, and a multiple of every dtype's size."""


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies in the buffer; ``start`` and ``stop`` in bytes."""

    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class SharedWeights:
    """Room for one state dict, written by one process and read by another that it spawned.

    The memory has no name: it is handed to the child as an open file and goes away with the last process that holds
    it, however that process ends. It does not come out of ``/dev/shm``, which containers keep small.
    """

    def __init__(self, template: Mapping[str, torch.Tensor]) -> None:
        """Make room for tensors like those of ``template``, whatever device they are on."""
        self._places: dict[str, _Place] = {}
        end = 0
        for name, tensor in template.items():
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + tensor.numel() * tensor.element_size()
            self._places[name] = _Place(start, end, tuple(tensor.shape), tensor.dtype)
        self._size = max(end, 1)
        self._file = _anonymous_file(self._size)
        self._bytes = _map(self._file, self._size)

    def write(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy ``weights`` in.

        Raises:
            ValueError: names, shapes or dtypes are not those of the template.
        """
        if weights.keys() != self._places.keys():
            odd = sorted(weights.keys() ^ self._places.keys())
            raise ValueError(f"weights must have the template's names; {odd[:3]} are in one of them only")
        views = self.tensors()
        for name, tensor in weights.items():
            place = self._places[name]
            if tuple(tensor.shape) != place.shape or tensor.dtype != place.dtype:
                raise ValueError(
                    f"weights[{name!r}] must be {place.dtype} {place.shape}, got {tensor.dtype} {tuple(tensor.shape)}"
                )
            views[name].copy_(tensor.detach())

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors, as views of the shared memory."""
        return {
            name: self._bytes[place.start : place.stop].view(place.dtype).view(place.shape)
            for name, place in self._places.items()
        }

    def __getstate__(self) -> dict[str, Any]:
        """For a child that is being spawned, and for nothing else."""
        return {"places": self._places, "size": self._size, "file": multiprocessing.reduction.DupFd(self._file)}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self._places = state["places"]
        self._size = state["size"]
        self._file = state["file"].detach()
        self._bytes = _map(self._file, self._size)

    def __del__(self) -> None:
        # Absent when __init__ failed before it.
        if hasattr(self, "_file"):
            os.close(self._file)


def _anonymous_file(size: int) -> int:
    """Descriptor of an open file of ``size`` bytes that no folder lists."""
    if sys.platform == "linux":
        descriptor = os.memfd_create("brace_rl_weights")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


def _map(descriptor: int, size: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
