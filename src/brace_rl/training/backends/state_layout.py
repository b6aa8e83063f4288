"""Where the tensors of a state dict lie in one run of bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

_ALIGNMENT = 64
"""Bytes; a cache line, and a multiple of every dtype's size."""


@dataclass(frozen=True)
class Place:
    """Where a tensor lies; ``start`` and ``stop`` in bytes."""

    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class StateLayout:
    """Places of the tensors of a state dict, by name, and the bytes they take together (at least one)."""

    places: Mapping[str, Place]
    size: int

    @staticmethod
    def of(template: Mapping[str, torch.Tensor]) -> StateLayout:
        """A layout for tensors like those of ``template``, whatever device they are on."""
        places: dict[str, Place] = {}
        end = 0
        for name, tensor in template.items():
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + tensor.numel() * tensor.element_size()
            places[name] = Place(start, end, tuple(tensor.shape), tensor.dtype)
        return StateLayout(places, max(end, 1))

    def write(self, weights: Mapping[str, torch.Tensor], buffer: torch.Tensor) -> None:
        """Copy ``weights`` into ``buffer``, ``[size]`` uint8.

        Raises:
            ValueError: names, shapes or dtypes are not those of the layout.
        """
        if weights.keys() != self.places.keys():
            odd = sorted(weights.keys() ^ self.places.keys())
            raise ValueError(f"weights must have the template's names; {odd[:3]} are in one of them only")
        views = self.tensors(buffer)
        for name, tensor in weights.items():
            place = self.places[name]
            if tuple(tensor.shape) != place.shape or tensor.dtype != place.dtype:
                raise ValueError(
                    f"weights[{name!r}] must be {place.dtype} {place.shape}, got {tensor.dtype} {tuple(tensor.shape)}"
                )
            views[name].copy_(tensor.detach())

    def tensors(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors, as views of ``buffer``."""
        return {
            name: buffer[place.start : place.stop].view(place.dtype).view(place.shape)
            for name, place in self.places.items()
        }
