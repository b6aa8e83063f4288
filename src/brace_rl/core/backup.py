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


def capped(ratios: Tensor, clip: float) -> Tensor:
    """``min(clip, w)``, held finite even without a cap, so that no infinity meets a zero."""
    return ratios.clamp(max=min(clip, _ceiling(ratios.dtype)))


def trace_coefficients(ratios: Tensor, continues: Tensor, *, c_clip: float, discount: float) -> Tensor:
    """``[N]`` ``discount min(c_clip, w_t)``, 0 at the last token of a response and outside responses."""
    return capped(ratios, c_clip).mul_(continues if discount == 1.0 else continues * discount)


class Buffer(NamedTuple):
    """A sequence ``[N]`` followed by a margin of zeros, and the views of it that begin ``n`` later."""

    head: Tensor
    shifted: dict[int, Tensor]


class Workspace:
    """Buffers for sequences of one length, reused from chunk to chunk.

    A shift by ``n`` must not copy, so every buffer is longer than the sequence by the largest shift, and that margin
    stays zero. Two buffers per quantity, because an operation must not write what it still reads.

    Args:
        length: of the sequences.
        largest_shift: a power of two, from :func:`largest_shift` or :func:`largest_shift_each`.
    """

    def __init__(self, *, length: int, largest_shift: int, dtype: torch.dtype, device: torch.device) -> None:
        self.length = length
        self._shifts = [1 << i for i in range(largest_shift.bit_length())]
        self._ceiling = _ceiling(dtype)
        self._largest_coef = 0.0
        # Views are made once: on the CPU, slicing costs as much as the arithmetic on a cached chunk.
        self._coef, self._next_coef, self._offset, self._next_offset, self._u, self._next_u = (
            Buffer(head=x[:length], shifted={n: x[n : n + length] for n in self._shifts})
            for x in torch.zeros(6, length + largest_shift, dtype=dtype, device=device).unbind(0)
        )

    def load(self, backup: Backup) -> None:
        """Take the maps and the start, over sequences of this workspace's length; to be done before every apply."""
        self._coef.head.copy_(backup.coef)
        self._offset.head.copy_(backup.offset)
        self._u.head.copy_(backup.start)
        self._largest_coef = backup.largest_coef

    def apply(self, times: int) -> Buffer:
        """The loaded start after ``times`` applications, in a buffer that the next load overwrites.

        Args:
            times: at least 0; its largest shift must not exceed the workspace's.
        """
        n = 1
        while times > 0:
            # Up to three more applications are cheaper than squaring once more, which takes two passes.
            for _ in range(times if times <= 3 else times % 2):
                torch.addcmul(self._offset.head, self._coef.head, self._u.shifted[n], out=self._next_u.head)
                self._u, self._next_u = self._next_u, self._u
            if times <= 3:
                break
            self._square(n)
            times //= 2
            n *= 2
        return self._u

    def apply_each(self, times: Tensor) -> Buffer:
        """As :meth:`apply`, with a number of applications of its own for every position.

        Args:
            times: ``[N]`` int32, at least 0 and below twice the workspace's largest shift.
        """
        # What has been composed so far is x -> total + product x, and takes its argument from `position`. Beyond the
        # end of a response the product is 0, so the last position may stand for all that lie further.
        end = self.length - 1
        position = torch.arange(self.length, dtype=torch.int32, device=times.device)
        total = self._next_u.head.zero_()
        product = torch.ones_like(total)
        for n in self._shifts:
            step = times & n
            take = step > 0
            total.addcmul_(product, torch.where(take, self._offset.head.index_select(0, position), 0.0))
            product.mul_(torch.where(take, self._coef.head.index_select(0, position), 1.0)).clamp_(max=self._ceiling)
            position.add_(step).clamp_(max=end)
            self._square(n)
        total.addcmul_(product, self._u.head.index_select(0, position))
        return self._next_u

    def _square(self, n: int) -> None:
        """From the maps of ``n`` applications to those of ``2 n``."""
        torch.addcmul(self._offset.head, self._coef.head, self._offset.shifted[n], out=self._next_offset.head)
        torch.mul(self._coef.head, self._coef.shifted[n], out=self._next_coef.head)
        # A product held at the largest float keeps infinity times zero, hence NaN, out of the compositions.
        if self._largest_coef > 1.0 and 2 * n * math.log(self._largest_coef) > math.log(self._ceiling):
            self._next_coef.head.clamp_(max=self._ceiling)
        self._coef, self._next_coef = self._next_coef, self._coef
        self._offset, self._next_offset = self._next_offset, self._offset


def largest_shift(times: int) -> int:
    """Largest shift :meth:`Workspace.apply` uses for ``times`` applications: a power of two."""
    return 1 << max(0, times.bit_length() - 2)


def largest_shift_each(longest: int) -> int:
    """Largest shift :meth:`Workspace.apply_each` needs when no position asks for more than ``longest``."""
    return 1 << max(0, longest.bit_length() - 1)


def _ceiling(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max
