"""The one loop under every estimator: lay a chunk of rows out, back up, hand the correction over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor

from brace_rl.core.backup import Backup, Workspace, largest_shift, largest_shift_each
from brace_rl.core.layout import Placement, Steps, Tokens, place_tokens, row_chunks, steps_of


class Correction(NamedTuple):
    """What :func:`corrections` yields for the given rows.

    Attributes:
        correction: ``[N]`` the start after the backups, 0 outside policy tokens; overwritten when the loop goes on.
    """

    rows: slice
    placement: Placement
    steps: Steps
    correction: Tensor

    def put(self, x: Tensor) -> Tensor:
        """``[N]``, 0 outside policy tokens, to ``[R, T]`` in original columns."""
        return self.placement.put(x.view(self.steps.shape))


def corrections(
    tokens: Tokens, backup: Callable[[Steps], Backup], *, times: int | Tensor, gamma: float
) -> Iterator[Correction]:
    """Apply ``backup`` ``times`` times to every response, in chunks of rows.

    Args:
        backup: the estimator: affine maps and start for a chunk.
        times: applications, at least 0: an int, or ``[B, T]`` int64 with a number for each position.
        gamma: discount of the bootstrap value.
    """
    mask, segment_ids = tokens.policy_mask, tokens.segment_ids
    longest = mask.shape[1]
    if isinstance(times, int):
        times = min(times, longest)
        shift = largest_shift(times)
    else:
        times = times.clamp(min=0, max=longest)
        if times.device.type == "cpu" and times.numel():
            longest = int(times.max())
        shift = largest_shift_each(longest)
    workspace: Workspace | None = None
    for rows in row_chunks(mask):
        placement = place_tokens(
            mask[rows],
            segment_ids=None if segment_ids is None else segment_ids[rows],
            rewards=tokens.rewards[rows],
            dtype=tokens.dtype,
        )
        steps = steps_of(tokens, rows, placement, gamma)
        length = steps.values.numel()
        if workspace is None or workspace.length != length:
            workspace = Workspace(length=length, largest_shift=shift, dtype=tokens.dtype, device=mask.device)
        if isinstance(times, int):
            correction = workspace.apply(backup(steps), times)
        else:
            correction = workspace.apply_each(backup(steps), placement.take(times[rows]).flatten())
        yield Correction(rows=rows, placement=placement, steps=steps, correction=correction)
