"""The order in which problems are issued, and the weights each batch is sampled from."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch

from brace_rl.tasks.base import Problem
from brace_rl.training.types import derive_seed


class ProblemStream:
    """An endless, seeded shuffle: every epoch visits each problem once, in an order of its own.

    ``stream[i]`` is the problem of issue number ``i``; it depends on the seed and ``i`` alone, so a resumed run and a
    prompt issued twice see the same problem.
    """

    def __init__(self, problems: Sequence[Problem], seed: int) -> None:
        self.problems = problems
        self.seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def __getitem__(self, index: int) -> Problem:
        epoch, offset = divmod(index, len(self.problems))
        if epoch != self._epoch:
            self._order = list(range(len(self.problems)))
            random.Random(derive_seed(self.seed, "order", epoch)).shuffle(self._order)
            self._epoch = epoch
        return self.problems[self._order[offset]]


class SnapshotRing:
    """The actor's last ``max_staleness + 1`` versions, for the ``lag`` schedule."""

    def __init__(self, max_staleness: int) -> None:
        self.max_staleness = max_staleness
        self.snapshots: dict[int, dict[str, torch.Tensor]] = {}

    def store(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Copy ``weights`` as ``version`` and forget what no later batch can be sampled from."""
        self.snapshots[version] = {name: tensor.detach().clone() for name, tensor in weights.items()}
        for old in [v for v in self.snapshots if v < version - self.max_staleness]:
            del self.snapshots[old]

    def lagged(self, version: int) -> tuple[dict[str, torch.Tensor], int]:
        """Weights and version the batch consumed at ``version`` is sampled from: ``max(0, version - S)``.

        Raises:
            KeyError: that version was never stored.
        """
        source = max(0, version - self.max_staleness)
        return self.snapshots[source], source

    def tensors(self) -> dict[str, torch.Tensor]:
        """Flat, for a checkpoint."""
        return {f"snapshot.{v}.{name}": t for v, weights in self.snapshots.items() for name, t in weights.items()}

    def load_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Inverse of :meth:`tensors`; other names are ignored."""
        self.snapshots = {}
        for key, tensor in tensors.items():
            kind, _, rest = key.partition(".")
            if kind == "snapshot":
                version, _, name = rest.partition(".")
                self.snapshots.setdefault(int(version), {})[name] = tensor
