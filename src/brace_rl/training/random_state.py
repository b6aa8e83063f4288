"""The random states of a process as JSON: torch (CPU and GPUs), NumPy's global generator and Python's."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_state() -> dict[str, Any]:
    """Everything a later :func:`restore_random_state` needs; drawing nothing itself."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch_cpu": _to_hex(torch.get_rng_state()),
        "torch_cuda": [_to_hex(state) for state in torch.cuda.get_rng_state_all()] if _has_cuda() else [],
    }


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Go on drawing where :func:`random_state` was taken. GPUs beyond those either machine has are left alone.

    Raises:
        KeyError, TypeError, ValueError, RuntimeError: ``state`` was not made by :func:`random_state`.
    """
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_from_hex(state["torch_cpu"]))
    if _has_cuda():
        for device, text in zip(range(torch.cuda.device_count()), state["torch_cuda"], strict=False):
            torch.cuda.set_rng_state(_from_hex(text), device)


def _has_cuda() -> bool:
    # A process that never used a GPU is not made to open one here.
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _to_hex(state: Tensor) -> str:
    return bytes(state.tolist()).hex()


def _from_hex(text: str) -> Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
