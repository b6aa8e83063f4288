"""Trajectories to padded tensors, and padded tensors to micro-batches.

Sequences ``prompt_ids + response_ids`` are right-padded to ``[B, L]``. Everything said *about* a token lives in
``L - 1`` columns: column ``i`` is about token ``i + 1``, the one predicted from position ``i``. Columns of prompt, tool
and padding tokens lie outside ``policy_mask`` and hold NaN where nothing may read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from brace_rl.training.types import NOT_A_POLICY_TOKEN, Trajectory


@dataclass(frozen=True)
class Batch:
    """A batch of responses.

    Attributes:
        input_ids: ``[B, L]`` prompt and response, right-padded.
        attention_mask: ``[B, L]`` 1 at real tokens.
        policy_mask: ``[B, L-1]`` True where token ``i + 1`` was sampled by the policy.
        behavior_logprobs: ``[B, L-1]`` NaN outside ``policy_mask``.
        behavior_entropies: ``[B, L-1]`` of the distribution sampled from, before any cut, nats; NaN likewise.
        rewards: ``[B, L-1]`` reward received on emitting token ``i + 1``.
        versions: ``[B, L-1]`` weight version that sampled the token, -1 outside ``policy_mask``.
        groups: ``[B]`` issue number of the prompt: responses to one prompt share it.
        truncated: ``[B]`` cut at the length limit rather than ended by the environment.
        lengths: number of real tokens per row, on the host.
        kept_ids: per row and column the token ids that survived top-k and top-p; None when nothing was cut.
    """

    input_ids: Tensor
    attention_mask: Tensor
    policy_mask: Tensor
    behavior_logprobs: Tensor
    behavior_entropies: Tensor
    rewards: Tensor
    versions: Tensor
    groups: Tensor
    truncated: Tensor
    lengths: tuple[int, ...]
    kept_ids: tuple[tuple[tuple[int, ...], ...], ...] | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def rows(self, index: Sequence[int]) -> Batch:
        """The given rows, cut to their longest sequence."""
        lengths = tuple(self.lengths[i] for i in index)
        longest = max(lengths)
        rows = torch.as_tensor(index, device=self.input_ids.device)
        return replace(
            self,
            input_ids=self.input_ids[rows, :longest],
            attention_mask=self.attention_mask[rows, :longest],
            policy_mask=self.policy_mask[rows, : longest - 1],
            behavior_logprobs=self.behavior_logprobs[rows, : longest - 1],
            behavior_entropies=self.behavior_entropies[rows, : longest - 1],
            rewards=self.rewards[rows, : longest - 1],
            versions=self.versions[rows, : longest - 1],
            groups=self.groups[rows],
            truncated=self.truncated[rows],
            lengths=lengths,
            kept_ids=None if self.kept_ids is None else tuple(self.kept_ids[i][: longest - 1] for i in index),
        )

    def without_tokens(self) -> Batch:
        """The same rows with nothing in them that counts: every loss on them is 0, and so is its gradient."""
        return replace(self, policy_mask=torch.zeros_like(self.policy_mask))


def collate(trajectories: Sequence[Trajectory], *, pad_token_id: int, device: torch.device) -> Batch:
    """Pad trajectories into one batch on ``device``. Raises ValueError when there are none."""
    if not trajectories:
        raise ValueError("collate needs at least one trajectory")
    lengths = tuple(len(t.prompt_ids) + len(t.response_ids) for t in trajectories)
    longest = max(lengths)

    def about_tokens(field: str, outside: float, dtype: torch.dtype) -> Tensor:
        """``[B, L-1]``: a list the response's tokens have, moved to the columns about them."""
        rows = []
        for trajectory, length in zip(trajectories, lengths, strict=True):
            before, after = len(trajectory.prompt_ids) - 1, longest - length
            rows.append([outside] * before + getattr(trajectory, field) + [outside] * after)
        return torch.tensor(rows, dtype=dtype)

    def padded(rows: Iterator[list[int]], padding: int) -> Tensor:
        return torch.tensor([row + [padding] * (longest - len(row)) for row in rows])

    input_ids = padded((t.prompt_ids + t.response_ids for t in trajectories), pad_token_id)
    attention_mask = padded(([1] * length for length in lengths), 0)
    policy_mask = about_tokens("policy_mask", False, torch.bool)
    rewards = about_tokens("rewards", 0.0, torch.float32)
    unread = ~policy_mask
    behavior_logprobs = about_tokens("behavior_logprobs", 0.0, torch.float32).masked_fill(unread, float("nan"))
    behavior_entropies = about_tokens("behavior_entropies", 0.0, torch.float32).masked_fill(unread, float("nan"))
    versions = about_tokens("versions", NOT_A_POLICY_TOKEN, torch.long)
    return Batch(
        input_ids=input_ids.to(device),
        attention_mask=attention_mask.to(device),
        policy_mask=policy_mask.to(device),
        behavior_logprobs=behavior_logprobs.to(device),
        behavior_entropies=behavior_entropies.to(device),
        rewards=rewards.to(device),
        versions=versions.to(device),
        groups=torch.tensor([t.request_index for t in trajectories], device=device),
        truncated=torch.tensor([t.truncated for t in trajectories], device=device),
        lengths=lengths,
        kept_ids=_kept_columns(trajectories, longest - 1),
    )


def _kept_columns(trajectories: Sequence[Trajectory], columns: int) -> tuple[tuple[tuple[int, ...], ...], ...] | None:
    if all(t.kept_ids is None for t in trajectories):
        return None
    table = []
    for t in trajectories:
        if t.kept_ids is None:
            raise ValueError("either every trajectory of a batch carries kept_ids or none does")
        row: list[tuple[int, ...]] = [()] * columns
        for offset, kept in enumerate(t.kept_ids):
            row[len(t.prompt_ids) - 1 + offset] = tuple(kept)
        table.append(tuple(row))
    return tuple(table)


def micro_batches(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Row indices grouped so that each group, padded to its longest row, holds at most ``token_budget`` tokens.

    Rows of similar length go together. A single row longer than the budget forms a group of its own.
    """
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= token_budget:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def rank_shares(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Row indices of each rank: longest first, each to the rank with the fewest tokens so far.

    With fewer rows than ranks some shares are empty. For one rank the rows are in their own order.
    """
    if ranks == 1:
        return [list(range(len(lengths)))]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for row in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = tokens.index(min(tokens))
        shares[rank].append(row)
        tokens[rank] += lengths[row]
    return shares


def shared_micro_batches(lengths: Sequence[int], token_budget: int, ranks: int) -> list[list[list[int]]]:
    """Per rank its :func:`micro_batches`, as indices into ``lengths``."""
    return [
        [[share[i] for i in group] for group in micro_batches([lengths[row] for row in share], token_budget)]
        for share in rank_shares(lengths, ranks)
    ]


def padded_tokens(lengths: Sequence[int], token_budget: int, ranks: int = 1) -> int:
    """Tokens, padding included, of the forward passes of all ranks over rows of these lengths."""
    groups = [group for own in shared_micro_batches(lengths, token_budget, ranks) for group in own]
    return sum(len(group) * max(lengths[row] for row in group) for group in groups)


def token_counts(
    lengths: Sequence[int], parts: Sequence[Sequence[int]], token_budget: int, ranks: int = 1
) -> dict[str, float]:
    """Tokens, padding included, that an update's passes over a batch see: once to evaluate it, once in its parts."""
    evaluate = padded_tokens(lengths, token_budget, ranks)
    update = sum(padded_tokens([lengths[row] for row in rows], token_budget, ranks) for rows in parts)
    return {"tokens/evaluate": float(evaluate), "tokens/update": float(update)}


def minibatch_rows(size: int, parts: int, seed: int) -> list[list[int]]:
    """Split ``size`` rows into ``parts`` minibatches of nearly equal size, shuffled when there is more than one."""
    order = torch.arange(size)
    if parts > 1:
        order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    return [chunk.tolist() for chunk in order.tensor_split(parts)]
