"""Repeated one-step backups as compositions of affine maps.

Every estimator of this package is ``k`` applications of a backup to the whole sequence at once,

    u_t <- f_t(u_{t+1}),    f_t(x) = offset_t + coef_t x,

with ``coef_t = 0`` at the last policy token of a response, so that nothing crosses from one response to the next and
many responses can stand behind each other in one flat sequence. Composition of affine maps is associative: ``n``
applications are again an affine map per position, and the map of ``2 n`` applications is

    f^{2n}_t = f^n_t o f^n_{t+n},

so ``k`` applications cost O(log k) operations on the whole sequence: exponentiation by squaring.

The subtraction ``x_s - P_s x_{s+k}`` of two full-horizon recursions would be cheaper still and is wrong in floating
point: with trace coefficients above 1 both terms grow without bound and cancel.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Backup(NamedTuple):
    """The affine maps of one flat sequence, and what they are applied to; all ``[N]``, all finite.

    Attributes:
        coef: trace coefficient, discount included; 0 at the last token of a response and outside responses.
        offset: one-step corrected residual; 0 outside responses.
        start: what the window hands over to: the Monte-Carlo residual, or 0.
        largest_coef: an upper bound of ``coef``, known without looking at the data.
    """

    coef: Tensor
    offset: Tensor
    start: Tensor
    largest_coef: float


def finished(start: Tensor) -> Backup:
    """Maps for an estimator whose correction is ``start`` itself: to be applied no times."""
    nothing = torch.zeros_like(start)
    return Backup(coef=nothing, offset=nothing, start=start, largest_coef=0.0)


class Workspace:
    """Buffers for sequences of one length, reused from chunk to chunk.

    A shift by ``n`` must not copy, so every buffer is longer than the sequence by the largest shift, and that margin
    stays zero. Two buffers per quantity, because an operation must not write what it still reads.
    """

    def __init__(self, *, length: int, largest_shift: int, dtype: torch.dtype, device: torch.device) -> None:
        self.length = length
        buffers = torch.zeros(6, length + largest_shift, dtype=dtype, device=device).unbind(0)
        shifts = [1 << i for i in range(largest_shift.bit_length())]
        # Views are made once: on the CPU, slicing costs as much as the arithmetic on a cached chunk.
        self._heads = [b[:length] for b in buffers]
        self._shifted = [{n: b[n : n + length] for n in shifts if n <= largest_shift} for b in buffers]

    def apply(self, backup: Backup, times: int) -> Tensor:
        """``u`` after ``times`` applications to ``backup.start``; a view that the next call overwrites.

        Args:
            backup: maps over sequences of this workspace's length.
            times: number of applications, at least 0; shifts reach ``times / 2`` rounded up to a power of two.
        """
        coef, next_coef, offset, next_offset, u, next_u = range(6)
        head, shifted = self._heads, self._shifted
        head[coef].copy_(backup.coef)
        head[offset].copy_(backup.offset)
        head[u].copy_(backup.start)
        ceiling = _ceiling(head[coef].dtype)
        n = 1
        while times > 0:
            # The last power is applied twice rather than squared: one pass instead of two.
            for _ in range(times if times <= 3 else times % 2):
                torch.addcmul(head[offset], head[coef], shifted[u][n], out=head[next_u])
                u, next_u = next_u, u
            if times <= 3:
                break
            torch.addcmul(head[offset], head[coef], shifted[offset][n], out=head[next_offset])
            torch.mul(head[coef], shifted[coef][n], out=head[next_coef])
            if _may_overflow(backup.largest_coef, 2 * n, ceiling):
                head[next_coef].clamp_(max=ceiling)
            coef, next_coef, offset, next_offset = next_coef, coef, next_offset, offset
            times //= 2
            n *= 2
        return head[u]

    def apply_each(self, backup: Backup, times: Tensor) -> Tensor:
        """As :meth:`apply`, with a number of applications of its own for every position.

        Args:
            backup: maps over sequences of this workspace's length.
            times: ``[N]`` int64, at least 0. Its cost grows with the logarithm of the largest shift the workspace was made for.
        """
        coef, next_coef, offset, next_offset, start, _ = range(6)
        head, shifted = self._heads, self._shifted
        head[coef].copy_(backup.coef)
        head[offset].copy_(backup.offset)
        head[start].copy_(backup.start)
        ceiling = _ceiling(head[coef].dtype)
        # `position` is where the part composed so far, x -> total + product x, expects its argument from.
        position = torch.arange(self.length, device=times.device)
        total = torch.zeros_like(backup.offset)
        product = torch.ones_like(backup.coef)
        for n in shifted[coef]:
            take = (times & n) != 0
            here = position.clamp(max=self.length - 1)
            past_end = position >= self.length
            step_offset = head[offset][here].masked_fill(past_end, 0.0)
            step_coef = head[coef][here].masked_fill(past_end, 0.0)
            total = torch.where(take, torch.addcmul(total, product, step_offset), total)
            product = torch.where(take, (product * step_coef).clamp(max=ceiling), product)
            position = position + (times & n)
            torch.addcmul(head[offset], head[coef], shifted[offset][n], out=head[next_offset])
            torch.mul(head[coef], shifted[coef][n], out=head[next_coef])
            if _may_overflow(backup.largest_coef, 2 * n, ceiling):
                head[next_coef].clamp_(max=ceiling)
            coef, next_coef, offset, next_offset = next_coef, coef, next_offset, offset
        tail = head[start][position.clamp(max=self.length - 1)]
        return torch.addcmul(total, product, tail)


def largest_shift(times: int) -> int:
    """Largest shift :meth:`Workspace.apply` uses for ``times`` applications: a power of two."""
    return 1 << max(0, times.bit_length() - 2)


def largest_shift_each(longest: int) -> int:
    """Largest shift :meth:`Workspace.apply_each` needs when no position asks for more than ``longest``."""
    return 1 << max(0, longest.bit_length() - 1)


def _ceiling(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max


def _may_overflow(largest_coef: float, length: int, ceiling: float) -> bool:
    # A product held at the largest float keeps infinity times zero, hence NaN, out of the compositions.
    return largest_coef > 1.0 and length * math.log(largest_coef) > math.log(ceiling)
