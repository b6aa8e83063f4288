"""How measurements are taken: warm-up, repeats, the median."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import torch


def median_seconds(run: Callable[[], object], *, repeats: int, device: torch.device, warmups: int = 1) -> float:
    """Median wall-clock seconds of ``run``; on CUDA until its kernels have finished."""
    seconds = []
    for repeat in range(warmups + repeats):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if repeat >= warmups:
            seconds.append(time.perf_counter() - start)
    return median(seconds)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Run the body with ``count`` torch threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
