"""Actor and critic on a batch: micro-batches that fit into memory, the rows of this rank alone, results for all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from brace_rl.config import Config
from brace_rl.training.batch import Batch, shared_micro_batches
from brace_rl.training.estimates import Evaluation, group_rewards
from brace_rl.training.logprobs import TokenLogprobs, TokenScorer
from brace_rl.training.models import Critic
from brace_rl.training.ranks import Ranks


class MicroBatch(NamedTuple):
    """Rows that go through a model together.

    Attributes:
        rows: of the batch.
        part: those rows.
        counts: whether they do. Ranks that have run out of rows go through the models with rows that do not, where
            others still need them for it (:attr:`Passes.in_step`), or to have figures at all.
    """

    rows: list[int]
    part: Batch
    counts: bool


class Pass(NamedTuple):
    """Actor and critic on one micro-batch, with what a backward pass needs where gradients were on.

    Attributes:
        scored: the actor's log-probs and entropies, ``[b, l-1]``.
        after: ``[b, l]`` the critic after every token; None without a critic.
    """

    micro: MicroBatch
    scored: TokenLogprobs
    after: Tensor | None


class Passes:
    """Forward passes of the two models.

    Attributes:
        scorer: the actor.
        critic: None where there is none.
        in_step: a pass of one rank waits for the same pass of the others, as with sharded weights. All ranks then make
            the same number of passes.
    """

    def __init__(
        self, scorer: TokenScorer, critic: Critic | None, config: Config, ranks: Ranks, *, in_step: bool
    ) -> None:
        self.scorer = scorer
        self.critic = critic
        self.in_step = in_step
        self._config = config
        self._ranks = ranks

    def micro(self, batch: Batch, rows: Sequence[int]) -> Iterator[MicroBatch]:
        """This rank's micro-batches of the given rows."""
        lengths = [batch.lengths[row] for row in rows]
        groups = shared_micro_batches(lengths, self._config.optim.micro_batch_tokens, self._ranks.size)
        own = groups[self._ranks.rank]
        for group in own:
            index = [rows[i] for i in group]
            yield MicroBatch(index, batch.rows(index), counts=True)
        wanted = max(len(others) for others in groups) if self.in_step else 1
        shortest = rows[lengths.index(min(lengths))]
        for _ in range(wanted - len(own)):
            yield MicroBatch([shortest], batch.rows([shortest]).without_tokens(), counts=False)

    def all(self, batch: Batch, *, actor_gradient: bool) -> Iterator[Pass]:
        """Both models on every micro-batch; the actor with a graph only where ``actor_gradient``."""
        for micro in self.micro(batch, range(len(batch))):
            with torch.set_grad_enabled(torch.is_grad_enabled() and actor_gradient):
                scored = self.score_part(micro.part)
            yield Pass(micro, scored, None if self.critic is None else self.value(micro.part))

    @torch.no_grad()
    def evaluate(self, batch: Batch, passes: Sequence[Pass] | None = None) -> Evaluation:
        """Log-probs and values of the whole batch on every rank, read off ``passes`` where those were made."""
        shape, device = batch.policy_mask.shape, batch.policy_mask.device
        dtype = torch.promote_types(self.scorer.dtype, torch.float32)
        target_logprobs, entropies, values = torch.zeros(3, *shape, dtype=dtype, device=device)
        last_values = torch.zeros(len(batch), dtype=dtype, device=device)
        for (rows, part, counts), scored, after in passes or self.all(batch, actor_gradient=False):
            if not counts:
                continue
            width = part.policy_mask.shape[1]
            target_logprobs[rows, :width] = scored.logprobs.where(part.policy_mask, 0.0)
            entropies[rows, :width] = scored.entropies.where(part.policy_mask, 0.0)
            if after is not None:
                values[rows, :width] = after[:, :-1]
                last = torch.tensor(part.lengths, device=device) - 1
                last_values[rows] = after.gather(1, last.unsqueeze(1)).squeeze(1)
        # A row went through one rank and is 0 on the others, so that the sum is exactly what that rank found.
        for tensor in (target_logprobs, entropies, values, last_values):
            self._ranks.add_up(tensor)
        nowhere = torch.tensor(float("nan"), dtype=dtype, device=device)
        if self.critic is None:
            values = group_rewards(batch).means[:, None].expand(shape)
        else:
            values = values.where(batch.attention_mask[:, 1:] > 0, nowhere)
        bootstrap = last_values.where(batch.truncated, 0.0) if self._config.algorithm.bootstrap_truncated else None
        return Evaluation(
            target_logprobs.where(batch.policy_mask, nowhere),
            entropies.where(batch.policy_mask, nowhere),
            values,
            bootstrap,
        )

    @torch.no_grad()
    def score(self, scorer: TokenScorer, batch: Batch) -> Tensor:
        """``[B, L-1]`` log-probs of the whole batch under a model, on every rank; NaN outside the policy mask."""
        dtype = torch.promote_types(scorer.dtype, torch.float32)
        logprobs = torch.zeros(batch.policy_mask.shape, dtype=dtype, device=batch.policy_mask.device)
        for rows, part, counts in self.micro(batch, range(len(batch))):
            scored = self.score_part(part, scorer)
            if counts:
                logprobs[rows, : part.policy_mask.shape[1]] = scored.logprobs.where(part.policy_mask, 0.0)
        return self._ranks.add_up(logprobs).masked_fill(~batch.policy_mask, float("nan"))

    def score_part(self, part: Batch, scorer: TokenScorer | None = None) -> TokenLogprobs:
        """The actor, or another model, on one micro-batch."""
        with self._autocast(part):
            scored: TokenLogprobs = (scorer or self.scorer)(part)
        return scored

    def value(self, part: Batch) -> Tensor:
        """The critic on one micro-batch: ``[b, l]`` float32, after every token."""
        assert self.critic is not None
        with self._autocast(part):
            after: Tensor = self.critic(part.input_ids, part.attention_mask)
        return after

    def _autocast(self, part: Batch) -> contextlib.AbstractContextManager[object]:
        if self._config.model.dtype == "float32":
            return contextlib.nullcontext()
        return torch.autocast(part.input_ids.device.type, dtype=torch.bfloat16)
