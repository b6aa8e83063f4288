"""A state dict in memory that two processes share."""

from __future__ import annotations

import mmap
import multiprocessing.reduction
import os
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import torch

from brace_rl.training.backends.state_layout import StateLayout


class SharedWeights:
    """Room for one state dict, written by one process and read by another that it spawned.

    The memory has no name: it is handed to the child as an open file and goes away with the last process that holds
    it, however that process ends. It does not come out of ``/dev/shm``, which containers keep small.
    """

    def __init__(self, template: Mapping[str, torch.Tensor]) -> None:
        """Make room for tensors like those of ``template``, whatever device they are on."""
        self._layout = StateLayout.of(template)
        self._file = _anonymous_file(self._layout.size)
        self._bytes = _map(self._file, self._layout.size)

    def write(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy ``weights`` in.

        Raises:
            ValueError: names, shapes or dtypes are not those of the template.
        """
        self._layout.write(weights, self._bytes)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors, as views of the shared memory."""
        return self._layout.tensors(self._bytes)

    def __getstate__(self) -> dict[str, Any]:
        """For a child that is being spawned, and for nothing else."""
        return {"layout": self._layout, "file": multiprocessing.reduction.DupFd(self._file)}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self._layout = state["layout"]
        self._file = state["file"].detach()
        self._bytes = _map(self._file, self._layout.size)

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
