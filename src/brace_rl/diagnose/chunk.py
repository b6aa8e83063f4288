"""Some responses as padded tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from brace_rl.diagnose.response import NO_VERSION, Floats, Response


@dataclass(frozen=True)
class Chunk:
    """``[B, T]`` float64 tensors, right-padded, all finite, and 0 outside ``policy_mask`` (but for ``rewards``).

    Attributes:
        after: policy tokens still to come after each policy token.
        bootstrap: ``[B]``.
        lags: ``current_version - versions``, :data:`UNKNOWN_LAG` where either is unknown.
        values, rewards, behavior_logprobs, target_logprobs: None when the files do not hold them.
    """

    responses: Sequence[Response]
    policy_mask: Tensor
    after: Tensor
    lags: Tensor
    versions: Tensor
    bootstrap: Tensor
    behavior_logprobs: Tensor | None
    target_logprobs: Tensor | None
    values: Tensor | None
    rewards: Tensor | None

    @property
    def log_ratios(self) -> Tensor | None:
        """log pi - log mu; None without both."""
        if self.behavior_logprobs is None or self.target_logprobs is None:
            return None
        return self.target_logprobs - self.behavior_logprobs


UNKNOWN_LAG = -(2**62)
"""Marks tokens whose age is not known."""


def collate(responses: Sequence[Response]) -> Chunk:
    """Pad responses that hold the same columns."""
    policy_mask = _padded([r.policy_mask for r in responses], False)
    versions = _padded(
        [np.full(len(r), NO_VERSION) if r.versions is None else r.versions for r in responses], NO_VERSION
    )
    current = torch.tensor([NO_VERSION if r.current_version is None else r.current_version for r in responses])[:, None]
    known = (versions != NO_VERSION) & (current != NO_VERSION)
    return Chunk(
        responses=responses,
        policy_mask=policy_mask,
        after=policy_mask.flip(1).cumsum(1).flip(1) - 1,
        lags=torch.where(known, current - versions, UNKNOWN_LAG),
        versions=versions,
        bootstrap=torch.tensor([r.bootstrap for r in responses], dtype=torch.float64),
        behavior_logprobs=_numbers([r.behavior_logprobs for r in responses], policy_mask),
        target_logprobs=_numbers([r.target_logprobs for r in responses], policy_mask),
        values=_numbers([r.values for r in responses], policy_mask),
        rewards=_numbers([r.rewards for r in responses], None),
    )


def _numbers(rows: Sequence[Floats | None], mask: Tensor | None) -> Tensor | None:
    arrays = [row for row in rows if row is not None]
    if len(arrays) < len(rows):
        return None
    padded = _padded(arrays, 0.0)
    return padded if mask is None else torch.where(mask, padded, 0.0)


def _padded(rows: Sequence[npt.NDArray[Any]], fill: float | bool) -> Tensor:
    padded = np.full((len(rows), max((len(row) for row in rows), default=0)), fill, dtype=rows[0].dtype)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return torch.from_numpy(padded)
