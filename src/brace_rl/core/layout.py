"""From ``[B, T]`` tensors with holes to flat sequences of policy tokens, and back.

Every index of the method runs over policy tokens only. Here prompts, tool output, padding and the borders of packed
responses are dealt with once, so that an estimator sees nothing but :class:`Steps`.

Rows are worked on in chunks small enough to stay in cache. Where the policy tokens of every row are contiguous
(ordinary left or right padding) a chunk is used as it lies; otherwise its policy tokens are moved together first.
Moving works everywhere and needs no look at the data; the shortcut needs one, and is only taken on the CPU, where
looking costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

CPU_CHUNK_TOKENS = 65_536
"""Tokens per chunk on the CPU: small enough to stay in cache, large enough that calls cost little beside the work."""

DEVICE_CHUNK_TOKENS = 4_194_304
"""Tokens per chunk elsewhere: enough to hide launches, few enough that temporaries stay below a large batch."""


@dataclass(frozen=True)
class Tokens:
    """Checked ``[B, T]`` input of an estimator.

    Attributes:
        behavior_logprobs, target_logprobs: None for an estimator without ratios.
        bootstrap_values: ``[B]``, or ``[B, T]`` with ``segment_ids``, or None.
        dtype: what it is computed in.
        finite: no NaN or infinity anywhere, masked or not; False when that is not known.
        rewards_unchecked: it is still to be seen whether every reward was earned by an action.
    """

    values: Tensor
    rewards: Tensor
    behavior_logprobs: Tensor | None
    target_logprobs: Tensor | None
    policy_mask: Tensor
    bootstrap_values: Tensor | None
    segment_ids: Tensor | None
    dtype: torch.dtype
    finite: bool
    rewards_unchecked: bool

    def chunks(self) -> Iterator[tuple[slice, Tokens]]:
        """Rows and their part of the batch, in pieces that together are the whole."""
        tensors = {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}
        pieces = [x.split(_rows_in_chunk(self.policy_mask)) for x in tensors.values()]
        for rows, parts in zip(row_chunks(self.policy_mask), zip(*pieces, strict=True), strict=False):
            yield rows, replace(self, **dict(zip(tensors, parts, strict=True)))


@dataclass(frozen=True)
class Steps:
    """Some rows as one flat sequence of ``N`` time steps; every tensor is ``[N]``, and finite for finite input.

    A pass over memory is what an estimator costs, so ``next_values`` and ``log_ratios`` are left unmasked where every
    use multiplies by ``continues`` or by a residual that is 0 outside policy tokens.

    Attributes:
        shape: (rows, columns) of the chunk, ``N = rows * columns``.
        values: V before the token; 0 where there is no policy token.
        next_values: V before the next policy token of the same response; meaningless where ``continues`` is 0.
        rewards: of the policy token, with the reward of non-policy tokens after it and the discounted bootstrap
            value added; 0 where there is no policy token.
        log_ratios: log pi - log mu; meaningless where ``is_policy`` is 0. Empty for an estimator without ratios.
        is_policy: 1 at policy tokens, 0 elsewhere.
        continues: 1 where another policy token of the same response follows, 0 elsewhere.
        packed: a row may hold several responses.
    """

    shape: tuple[int, int]
    values: Tensor
    next_values: Tensor
    rewards: Tensor
    log_ratios: Tensor
    is_policy: Tensor
    continues: Tensor
    packed: bool


@dataclass(frozen=True)
class Placement:
    """Where the policy tokens of ``R`` rows go, and how to get back; the identity when nothing has to move.

    Attributes:
        mask: ``[R, T]`` True at policy tokens, in the original columns.
        is_policy: ``[R, T]`` 1 at policy tokens after moving, 0 elsewhere.
        continues: ``[R, T]`` 1 where another policy token of the same response follows after moving, 0 elsewhere.
        source: ``[R, T]`` original column of every moved token, or None.
        slot: ``[R, T]`` moved column of the policy token at or before an original column (0 if there is none), or None.
        earned: ``[R, T]`` True where that token exists and is of the same response, or None.
    """

    mask: Tensor
    is_policy: Tensor
    continues: Tensor
    source: Tensor | None = None
    slot: Tensor | None = None
    earned: Tensor | None = None

    def take(self, x: Tensor) -> Tensor:
        """``[R, T]`` in original columns to moved columns; what lies outside ``is_policy`` is meaningless."""
        return x if self.source is None else x.gather(1, self.source)

    def take_masked(self, x: Tensor, *, finite: bool) -> Tensor:
        """As :meth:`take`, and 0 outside ``is_policy``; ``finite`` allows the faster product."""
        x = self.take(x)
        return x * self.is_policy if finite else torch.where(self.is_policy > 0, x, 0.0)

    def take_rewards(self, rewards: Tensor) -> Tensor:
        """As :meth:`take`, with rewards on non-policy tokens added to the preceding policy token of their response."""
        if self.slot is None or self.earned is None:
            return rewards
        return torch.zeros_like(rewards).scatter_add_(1, self.slot, torch.where(self.earned, rewards, 0.0))

    def put(self, x: Tensor) -> Tensor:
        """``[R, T]`` in moved columns, 0 outside ``is_policy``, to original columns, 0 outside ``mask``."""
        return x if self.slot is None else torch.where(self.mask, x.gather(1, self.slot), 0.0)


def row_chunks(mask: Tensor) -> Iterator[slice]:
    """Slices of rows that together are the whole batch."""
    size = _rows_in_chunk(mask)
    for first in range(0, mask.shape[0], size):
        yield slice(first, min(first + size, mask.shape[0]))


def _rows_in_chunk(mask: Tensor) -> int:
    tokens = CPU_CHUNK_TOKENS if mask.device.type == "cpu" else DEVICE_CHUNK_TOKENS
    return max(1, min(mask.shape[0], tokens // max(1, mask.shape[1])))


def place_tokens(
    mask: Tensor, *, segment_ids: Tensor | None = None, rewards: Tensor | None = None, dtype: torch.dtype
) -> Placement:
    """Decide where the policy tokens of some rows go.

    Args:
        mask: ``[R, T]`` bool.
        segment_ids: ``[R, T]`` integers, or None for one response per row.
        rewards: ``[R, T]``, if any are to be moved.
        dtype: of the indicators ``is_policy`` and ``continues``.
    """
    if segment_ids is None and mask.device.type == "cpu":
        is_policy = indicator(mask, dtype)
        continues = torch.zeros_like(is_policy)
        torch.mul(is_policy[:, :-1], is_policy[:, 1:], out=continues[:, :-1])
        contiguous = bool((is_policy.sum(1) - continues.sum(1) <= 1).all())
        if contiguous and (rewards is None or only_where(is_policy, rewards)):
            return Placement(mask=mask, is_policy=is_policy, continues=continues)
    return _move_together(mask, segment_ids, dtype)


def _move_together(mask: Tensor, segment_ids: Tensor | None, dtype: torch.dtype) -> Placement:
    columns = mask.shape[1]
    rank = mask.cumsum(1) - 1
    # Columns without a policy token write to one column too many, which is cut off.
    slots = torch.where(mask, rank, columns)
    column = torch.arange(columns, device=mask.device).expand_as(rank)
    source = rank.new_zeros(mask.shape[0], columns + 1).scatter_(1, slots, column)[:, :columns]
    is_policy, continues = column <= rank[:, -1:], column < rank[:, -1:]
    slot, earned = rank.clamp(min=0), rank >= 0
    if segment_ids is not None:
        runs = segment_runs(segment_ids)
        moved = runs.gather(1, source)
        continues = continues & (moved == _shift_left(moved))
        earned = earned & (moved.gather(1, slot) == runs)
    return Placement(
        mask=mask,
        is_policy=indicator(is_policy, dtype),
        continues=indicator(continues, dtype),
        source=source,
        slot=slot,
        earned=earned,
    )


def steps_of(tokens: Tokens, placement: Placement, gamma: float) -> Steps:
    """Lay the rows of a chunk out."""
    dtype, finite = tokens.dtype, tokens.finite
    values = placement.take_masked(tokens.values.to(dtype), finite=finite).flatten()
    # One entry longer than the sequence, so that the next values are a view of it.
    longer = torch.cat([values, values.new_zeros(1)])
    rewards = placement.take_rewards(tokens.rewards.to(dtype))
    if tokens.bootstrap_values is not None:
        # Discounted, it acts exactly as more reward on the last token: in the return, its residual and its advantage.
        bootstrap = tokens.bootstrap_values.to(dtype)
        bootstrap = bootstrap[:, None] if bootstrap.dim() == 1 else placement.take(bootstrap)
        rewards = rewards + torch.where(placement.is_policy > placement.continues, gamma * bootstrap, 0.0)
    log_ratios = values.new_empty(0)
    if tokens.behavior_logprobs is not None and tokens.target_logprobs is not None:
        log_ratios = placement.take(tokens.target_logprobs.to(dtype) - tokens.behavior_logprobs.to(dtype))
        if not finite:
            log_ratios = torch.where(placement.is_policy > 0, log_ratios, 0.0)
        log_ratios = log_ratios.flatten()
    return Steps(
        shape=(placement.mask.shape[0], placement.mask.shape[1]),
        values=longer[:-1],
        next_values=longer[1:],
        rewards=rewards.flatten(),
        log_ratios=log_ratios,
        is_policy=placement.is_policy.flatten(),
        continues=placement.continues.flatten(),
        packed=tokens.segment_ids is not None,
    )


def indicator(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """1 where ``mask`` is true, 0 elsewhere."""
    # A bool is a byte of 0 or 1; read as such it converts several times faster.
    return mask.view(torch.uint8).to(dtype)


def only_where(is_policy: Tensor, x: Tensor) -> bool:
    """Whether ``x`` is finite and zero wherever ``is_policy`` is zero."""
    # Not one product may differ from 0, NaN and infinity included; several times faster than comparing elements.
    return bool(torch.dot(x.to(is_policy.dtype).abs().flatten(), (1.0 - is_policy).flatten()) == 0.0)


def segment_runs(segment_ids: Tensor) -> Tensor:
    """``[R, T]`` ordinal, from 0, of the run of equal ids a column belongs to."""
    changes = torch.zeros_like(segment_ids, dtype=torch.int64)
    changes[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    return changes.cumsum(1)


def _shift_left(x: Tensor) -> Tensor:
    """Column ``t`` gets column ``t + 1``, the last one 0."""
    shifted = torch.zeros_like(x)
    shifted[:, :-1] = x[:, 1:]
    return shifted
