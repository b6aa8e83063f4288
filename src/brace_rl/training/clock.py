"""Seconds per phase of a step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class PhaseClock:
    """Adds up wall-clock seconds under names; on CUDA a phase ends when its kernels have."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time the body under ``phase``."""
        start = time.perf_counter()
        try:
            yield
            if self._device is not None and self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        finally:
            self._seconds[phase] += time.perf_counter() - start

    def pop(self) -> dict[str, float]:
        """``time/PHASE`` -> seconds since the last call."""
        seconds = {f"time/{phase}": value for phase, value in self._seconds.items()}
        self._seconds.clear()
        return seconds
