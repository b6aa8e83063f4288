"""The one loop under every estimator: lay a chunk of rows out, back up, hand the correction over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from brace_rl.core.backup import Backup, Workspace, largest_shift, largest_shift_each
from brace_rl.core.checks import check_earned
from brace_rl.core.layout import Placement, Steps, Tokens, place_tokens, row_chunks, steps_of


class Correction(NamedTuple):
    """What :func:`corrections` yields for the given rows.

    Attributes:
        correction: ``[N]`` the start after the backups, 0 outside policy tokens; overwritten when the loop goes on.
        next_correction: ``[N]`` that of the next position, meaningless where ``steps.continues`` is 0.
    """

    rows: slice
    placement: Placement
    steps: Steps
    correction: Tensor
    next_correction: Tensor

    def put(self, x: Tensor) -> Tensor:
        """``[N]``, 0 outside policy tokens, to ``[R, T]`` in original columns."""
        return self.placement.put(x.view(self.steps.shape))


def corrections(
    tokens: Tokens, backup: Callable[[Steps], Backup], *, times: int | Tensor, gamma: float
) -> Iterator[Correction]:
    """Apply ``backup`` ``times`` times to every response, in chunks of rows.

    Args:
        backup: the estimator: affine maps and start for a chunk.
        times: applications, at least 0: an int, or ``[B, T]`` integers with a number for each position.
        gamma: discount of the bootstrap value.
    """
    mask = tokens.policy_mask
    longest = mask.shape[1]
    if isinstance(times, int):
        times = min(times, longest)
        shift = largest_shift(times)
    else:
        if mask.device.type == "cpu" and mask.numel():
            asked = max(int((times[rows] * mask[rows]).max()) for rows in row_chunks(mask))
            longest = min(longest, max(0, asked))
        shift = largest_shift_each(longest)
    workspace: Workspace | None = None
    for rows, chunk in tokens.chunks():
        placement = place_tokens(
            chunk.policy_mask, segment_ids=chunk.segment_ids, rewards=chunk.rewards, dtype=tokens.dtype
        )
        if tokens.rewards_unchecked and placement.source is not None:
            check_earned(chunk.rewards, chunk.policy_mask, chunk.segment_ids, first_row=rows.start)
        steps = steps_of(chunk, placement, gamma)
        length = steps.values.numel()
        if workspace is None or workspace.length != length:
            workspace = Workspace(length=length, largest_shift=shift, dtype=tokens.dtype, device=mask.device)
        workspace.load(backup(steps))
        if isinstance(times, int):
            result = workspace.apply(times)
        else:
            each = torch.where(chunk.policy_mask, times[rows], 0).clamp_(min=0, max=longest)
            each = placement.take(each.to(torch.int32)).flatten()
            result = workspace.apply_each(each)
        yield Correction(
            rows=rows,
            placement=placement,
            steps=steps,
            correction=result.head,
            next_correction=result.shifted[1],
        )
