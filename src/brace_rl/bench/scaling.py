"""Rollouts over Ray with a simulated engine: how they scale with workers, and what asynchrony gains on long tails.

The engine decodes at a fixed rate and costs this machine nothing, so two cores show the system and not a model.
docs/ray.md derives the bounds that the figures are held against.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from brace_rl.config import Config
from brace_rl.tasks import build_task
from brace_rl.training.backends.base import Backend
from brace_rl.training.backends.ray_workers import RayBackend
from brace_rl.training.data import ProblemStream
from brace_rl.training.engines.simulated import ResponseLengths, SimulatedSpec
from brace_rl.training.staleness import StalenessController
from brace_rl.training.types import RolloutGroup, RolloutRequest, SamplingParams, derive_seed

TIMEOUT_S = 120.0
_PROBLEMS = 256
_BOUND_DRAWS = 2000
"""Batches drawn to estimate the mean of their longest response."""


@dataclass(frozen=True)
class Workload:
    """What is measured.

    Attributes:
        slots: responses one worker decodes together.
        tokens_per_s: of one response.
        weights: elements of the float32 state dict that is published after every step.
    """

    slots: int
    tokens_per_s: float
    lengths: ResponseLengths
    weights: int = 1_000_000


EVEN = Workload(slots=64, tokens_per_s=50.0, lengths=ResponseLengths(median=100, spread=0.0, longest=100))
LONG_TAILED = Workload(slots=32, tokens_per_s=100.0, lengths=ResponseLengths(median=60, spread=0.8, longest=400))


def measure_scaling(
    workload: Workload = EVEN, *, workers: tuple[int, ...] = (1, 2, 4), rounds: int = 8
) -> list[dict[str, Any]]:
    """Tokens per second with each number of workers, one row each.

    Every worker's slots are filled ``rounds`` times; twice that many prompts are kept outstanding and weights are
    published after every round. Ideal: ``workers x slots x tokens_per_s``.
    """
    return [_scaling_row(workload, count, rounds) for count in workers]


def _scaling_row(workload: Workload, workers: int, rounds: int) -> dict[str, Any]:
    capacity = workers * workload.slots
    state = {"weights": torch.zeros(workload.weights)}
    with _backend(workload, workers) as (backend, prompts):
        prompts.submit(capacity, version=0)
        _collect(backend, capacity)  # all workers are up
        left, tokens, answered, version = rounds * capacity, 0, 0, 0
        started = time.perf_counter()
        left -= len(prompts.submit(min(left, 2 * capacity), version=0))
        while answered < rounds * capacity:
            groups = backend.collect()
            answered += len(groups)
            tokens += _tokens(groups)
            if answered >= (version + 1) * capacity:
                version += 1
                backend.publish(state, version)
            left -= len(prompts.submit(min(left, len(groups)), version=version))
        seconds = time.perf_counter() - started
    ideal = capacity * workload.tokens_per_s
    return {
        "workers": workers,
        "tokens/s": tokens / seconds,
        "ideal tokens/s": ideal,
        "share of ideal": tokens / seconds / ideal,
    }


def _collect(backend: Backend, count: int) -> None:
    while count > 0:
        count -= len(backend.collect())


def _tokens(groups: list[RolloutGroup]) -> int:
    return sum(len(trajectory.response_ids) for group in groups for trajectory in group.trajectories)


def measure_long_tails(
    workload: Workload = LONG_TAILED, *, workers: int = 2, max_staleness: int = 8, train_s: float = 0.2, steps: int = 24
) -> list[dict[str, Any]]:
    """Synchronous and asynchronous steps on long-tailed lengths, a row each, and their ratio in a third.

    A step consumes as many responses as the workers decode together, and the simulated trainer takes ``train_s``.
    """
    bounds = _bounds(workload, workers * workload.slots, train_s)
    rows: list[dict[str, Any]] = []
    for name, staleness, warmup in (("synchronous", 0, 1), ("asynchronous", max_staleness, max_staleness + 2)):
        rate = _rate_of_steps(workload, workers, staleness, train_s, warmup=warmup, steps=warmup + steps)
        rows.append({"schedule": name, "tokens/s": rate, "bound": bounds[name], "share of bound": rate / bounds[name]})
    gain = rows[1]["tokens/s"] / rows[0]["tokens/s"]
    bound = bounds["asynchronous"] / bounds["synchronous"]
    return [*rows, {"schedule": "ratio", "tokens/s": gain, "bound": bound, "share of bound": gain / bound}]


def _bounds(workload: Workload, batch: int, train_s: float) -> dict[str, float]:
    """Most tokens per second of either schedule, with a batch that fills every slot once."""
    drawn = [[workload.lengths.of(derive_seed("bound", draw, i)) for i in range(batch)] for draw in range(_BOUND_DRAWS)]
    mean = fmean(fmean(lengths) for lengths in drawn)
    longest = fmean(max(lengths) for lengths in drawn)
    return {
        "synchronous": batch * mean / (longest / workload.tokens_per_s + train_s),
        "asynchronous": batch * mean / max(mean / workload.tokens_per_s, train_s),
    }


def _rate_of_steps(
    workload: Workload, workers: int, max_staleness: int, train_s: float, *, warmup: int, steps: int
) -> float:
    """Tokens per second consumed by the steps after the first ``warmup``."""
    state = {"weights": torch.zeros(workload.weights)}
    staleness = StalenessController(
        batch_size=workers * workload.slots, max_staleness=max_staleness, lookahead=max_staleness
    )
    tokens, started = 0, 0.0
    with _backend(workload, workers) as (backend, prompts):
        for version in range(steps):
            if version == warmup:
                tokens, started = 0, time.perf_counter()
            for request in prompts.submit(staleness.admissible(version), version=version):
                staleness.issued(request)
            while (batch := staleness.take_batch(version)) is None:
                for group in backend.collect():
                    staleness.arrived(group)
            tokens += _tokens(batch)
            time.sleep(train_s)
            backend.publish(state, version + 1)
        seconds = time.perf_counter() - started
    staleness.ledger()
    return tokens / seconds


class _Prompts:
    """Issues single-response prompts of the calculator."""

    def __init__(self, config: Config, backend: Backend, longest: int) -> None:
        task = build_task(config.task, config.warm_start, config.run.seed)
        self._problems = ProblemStream(task.train_problems(), config.run.seed)
        self._backend = backend
        self._longest = longest
        self._next = 0

    def submit(self, count: int, *, version: int) -> list[RolloutRequest]:
        requests = [
            RolloutRequest(
                index=index,
                problem=self._problems[index],
                samples=1,
                issued_version=version,
                sampling=SamplingParams(),
                max_response_tokens=self._longest,
                seed=derive_seed("scaling", index),
            )
            for index in range(self._next, self._next + count)
        ]
        self._next += count
        self._backend.submit(requests)
        return requests


@contextmanager
def _backend(workload: Workload, workers: int) -> Iterator[tuple[Backend, _Prompts]]:
    """A backend that holds version 0."""
    # One turn each: the calculator would answer a response without a call, which then went on past its length.
    task = {"train_problems": _PROBLEMS, "max_turns": 1}
    config = Config.model_validate({"rollout": {"slots": workload.slots}, "task": task})
    spec = SimulatedSpec(config, workload.tokens_per_s, workload.lengths)
    backend = RayBackend(spec, workers=workers, timeout_s=TIMEOUT_S)
    try:
        backend.publish({"weights": torch.zeros(workload.weights)}, 0)
        # One token more than any turn has, so that none is cut off at the limit.
        yield backend, _Prompts(config, backend, workload.lengths.longest + 1)
    finally:
        backend.close()
