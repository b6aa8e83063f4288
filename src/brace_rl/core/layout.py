"""From ``[B, T]`` tensors with holes to flat sequences of policy tokens, and back.

Every index of the method runs over policy tokens only. Here prompts, tool output, padding and the borders of packed
responses are dealt with once, so that an estimator sees nothing but :class:`Steps`.

Rows are worked on in chunks small enough to stay in cache. Where the policy tokens of every row are contiguous
(ordinary left or right padding) a chunk is used as it lies; otherwise its policy tokens are moved together first. Moving
works everywhere and needs no look at the data; the shortcut needs one, and is only taken where looking costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

CPU_CHUNK_TOKENS = 32_768
"""Tokens per chunk on the CPU: a dozen float32 vectors of this length are about a level-2 cache."""

DEVICE_CHUNK_TOKENS = 4_194_304
"""Tokens per chunk elsewhere: enough to hide launches, few enough to keep temporaries below the size of a large batch."""


@dataclass(frozen=True)
class Tokens:
    """Checked ``[B, T]`` input of an estimator; ``dtype`` is what it is computed in.

    Attributes:
        log_ratios: whether ratios are wanted; the two log-prob tensors are None when they are not.
        bootstrap_values: ``[B]`` or ``[B, T]`` or None.
        segment_ids: ``[B, T]`` or None.
    """

    values: Tensor
    rewards: Tensor
    behavior_logprobs: Tensor | None
    target_logprobs: Tensor | None
    policy_mask: Tensor
    bootstrap_values: Tensor | None
    segment_ids: Tensor | None
    dtype: torch.dtype


@dataclass(frozen=True)
class Steps:
    """Some rows as one flat sequence of ``N`` time steps; every tensor is ``[N]`` and finite.

    Attributes:
        shape: (rows, columns) of the chunk, ``N = rows * columns``.
        values: V before the token; 0 where there is no policy token.
        next_values: V before the next policy token of the same response; 0 after the last one.
        rewards: of the policy token, with the reward of non-policy tokens after it and the discounted bootstrap
            value added; 0 where there is no policy token.
        log_ratios: log pi - log mu; 0 where there is no policy token. Empty when the estimator needs no ratios.
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


def row_chunks(mask: Tensor) -> Iterator[slice]:
    """Slices of rows that together are the whole batch."""
    rows, columns = mask.shape
    tokens = CPU_CHUNK_TOKENS if mask.device.type == "cpu" else DEVICE_CHUNK_TOKENS
    size = max(1, min(rows, tokens // max(1, columns)))
    for first in range(0, rows, size):
        yield slice(first, min(first + size, rows))


def needs_moving(mask: Tensor, rewards: Tensor | None, segment_ids: Tensor | None) -> bool:
    """Whether rows have holes, rewards outside the mask, or several responses."""
    if segment_ids is not None or mask.device.type != "cpu":
        return True
    beginnings = (mask[:, 1:] > mask[:, :-1]).sum(1) + mask[:, 0]
    if bool((beginnings > 1).any()):
        return True
    return rewards is not None and bool((rewards.ne(0) > mask).any())


@dataclass(frozen=True)
class Placement:
    """Where the policy tokens of some rows go, and how to get back; the identity when nothing has to move.

    Attributes:
        mask: ``[R, T]`` True at policy tokens, in the original columns.
        is_policy: ``[R, T]`` the same after moving.
        is_last: ``[R, T]`` last policy token of its response, after moving.
        source: ``[R, T]`` original column of every moved token, or None.
        rank: ``[R, T]`` number of policy tokens at or before an original column, less one; or None.
        runs: ``[R, T]`` ordinal of the response in its row by original column, or None.
    """

    mask: Tensor
    is_policy: Tensor
    is_last: Tensor
    source: Tensor | None = None
    rank: Tensor | None = None
    runs: Tensor | None = None

    @staticmethod
    def identity(mask: Tensor) -> Placement:
        return Placement(mask=mask, is_policy=mask, is_last=mask & ~_shift_left(mask))

    @staticmethod
    def moving(mask: Tensor, segment_ids: Tensor | None) -> Placement:
        columns = mask.shape[1]
        rank = mask.cumsum(1) - 1
        # Columns without a policy token are written to one column too many, which is cut off.
        slots = torch.where(mask, rank, columns)
        column = torch.arange(columns, device=mask.device).expand_as(rank)
        source = rank.new_zeros(mask.shape[0], columns + 1).scatter_(1, slots, column)[:, :columns]
        is_policy = column < rank[:, -1:] + 1
        is_last = is_policy & ~_shift_left(is_policy)
        runs = None
        if segment_ids is not None:
            runs = segment_runs(segment_ids)
            moved = runs.gather(1, source)
            is_last = is_last | (is_policy & (moved != _shift_left(moved)))
        return Placement(mask, is_policy, is_last, source, rank, runs)

    def take(self, x: Tensor) -> Tensor:
        """``[R, T]`` in original columns to moved columns; what lies outside ``is_policy`` is meaningless."""
        return x if self.source is None else x.gather(1, self.source)

    def take_rewards(self, rewards: Tensor) -> Tensor:
        """As :meth:`take`, with rewards on non-policy tokens added to the preceding policy token of their response."""
        if self.source is None or self.rank is None:
            return rewards
        slots = self.rank.clamp(min=0)
        counted = self.rank >= 0
        if self.runs is not None:
            counted = counted & (self.runs.gather(1, self.source.gather(1, slots)) == self.runs)
        return torch.zeros_like(rewards).scatter_add_(1, slots, torch.where(counted, rewards, 0.0))

    def put(self, x: Tensor) -> Tensor:
        """``[R, T]`` in moved columns, zero outside ``is_policy``, to original columns, zero outside ``mask``."""
        return x if self.rank is None else torch.where(self.mask, x.gather(1, self.rank.clamp(min=0)), 0.0)


def place(mask: Tensor, segment_ids: Tensor | None, *, moving: bool) -> Placement:
    """The placement of a chunk of rows."""
    return Placement.moving(mask, segment_ids) if moving else Placement.identity(mask)


def steps_of(tokens: Tokens, rows: slice, placement: Placement, gamma: float) -> Steps:
    """Lay out the given rows of a batch."""
    dtype, is_policy = tokens.dtype, placement.is_policy
    values = torch.where(is_policy, placement.take(tokens.values[rows]).to(dtype), 0.0)
    rewards = placement.take_rewards(tokens.rewards[rows].to(dtype))
    if tokens.bootstrap_values is not None:
        # Discounted, it acts exactly as more reward on the last token: in the return, its residual and its advantage.
        bootstrap = tokens.bootstrap_values[rows].to(dtype)
        bootstrap = bootstrap[:, None] if bootstrap.dim() == 1 else placement.take(bootstrap)
        rewards = rewards + torch.where(placement.is_last, gamma * bootstrap, 0.0)
    log_ratios = values.new_empty(0)
    if tokens.behavior_logprobs is not None and tokens.target_logprobs is not None:
        log_ratios = log_ratios_of(
            tokens.behavior_logprobs[rows], tokens.target_logprobs[rows], placement=placement, dtype=dtype
        )
    policy = is_policy.to(dtype)
    continues = policy - placement.is_last.to(dtype)
    return Steps(
        shape=(values.shape[0], values.shape[1]),
        values=values.flatten(),
        next_values=next_of(values.flatten(), continues.flatten()),
        rewards=rewards.flatten(),
        log_ratios=log_ratios.flatten(),
        is_policy=policy.flatten(),
        continues=continues.flatten(),
        packed=tokens.segment_ids is not None,
    )


def log_ratios_of(
    behavior_logprobs: Tensor, target_logprobs: Tensor, *, placement: Placement, dtype: torch.dtype
) -> Tensor:
    """``[R, T]`` log pi - log mu after moving, 0 outside policy tokens."""
    log_ratios = target_logprobs.to(dtype) - behavior_logprobs.to(dtype)
    return torch.where(placement.is_policy, placement.take(log_ratios), 0.0)


def next_of(x: Tensor, continues: Tensor) -> Tensor:
    """``[N]`` the entry of the next policy token of the same response, 0 after the last one."""
    following = torch.zeros_like(x)
    torch.mul(x[1:], continues[:-1], out=following[:-1])
    return following


def segment_runs(segment_ids: Tensor) -> Tensor:
    """``[R, T]`` ordinal, from 0, of the run of equal ids a column belongs to."""
    changes = torch.zeros_like(segment_ids, dtype=torch.int64)
    changes[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    return changes.cumsum(1)


def _shift_left(x: Tensor) -> Tensor:
    """Column ``t`` gets column ``t + 1``; the last one gets zero (False)."""
    shifted = torch.zeros_like(x)
    shifted[:, :-1] = x[:, 1:]
    return shifted
