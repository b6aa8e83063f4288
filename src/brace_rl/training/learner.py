"""One update of actor and critic from one batch. Synchronous, no threads, knows nothing of who made the batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedModel

from brace_rl import core
from brace_rl.config import AlgorithmConfig, Config
from brace_rl.diagnostics import batch as diagnostics
from brace_rl.errors import DivergedError, StalenessError
from brace_rl.training.batch import Batch, micro_batches, minibatch_rows, padded_tokens
from brace_rl.training.clock import PhaseClock
from brace_rl.training.logprobs import TokenLogprobs, token_logprobs
from brace_rl.training.models import Critic
from brace_rl.training.types import derive_seed


class Evaluation(NamedTuple):
    """The policy and the critic before the update; all ``[B, L-1]``, column ``i`` about token ``i + 1``.

    Attributes:
        target_logprobs: pi of the sampled tokens, under the sampling temperature and kept sets.
        entropies: of pi at the sampling temperature, nats.
        values: the critic *before* the token.
        bootstrap_values: ``[B]`` the critic after the last token of truncated rows, 0 for the others; None when off.
    """

    target_logprobs: Tensor
    entropies: Tensor
    values: Tensor
    bootstrap_values: Tensor | None


class Pass(NamedTuple):
    """Actor and critic on one micro-batch, with what a backward pass needs where gradients were on.

    Attributes:
        rows: of the batch.
        part: those rows.
        scored: the actor's log-probs and entropies, ``[b, l-1]``.
        after: ``[b, l]`` the critic after every token.
    """

    rows: list[int]
    part: Batch
    scored: TokenLogprobs
    after: Tensor


class Learner:
    """Holds actor, critic and their optimisers.

    Attributes:
        version: completed updates, critic warm-up included; the version of the actor's present weights.
        clock: seconds spent evaluating, computing targets and metrics, and updating.
        latest: policy and critic on the batch of the last :meth:`update`, before it; None before the first.
        moved_version: newest version whose actor differs from the one before it.
    """

    def __init__(self, actor: PreTrainedModel, critic: Critic, config: Config) -> None:
        self.actor = actor
        self.critic = critic
        self.config = config
        self.version = 0
        self.clock = PhaseClock(actor.device)
        self.latest: Evaluation | None = None
        self.moved_version = 0
        self.actor_optimizer = self._optimizer(actor, config.optim.actor_lr)
        self.critic_optimizer = self._optimizer(critic, config.optim.critic_lr)

    def _optimizer(self, module: torch.nn.Module, lr: float) -> torch.optim.AdamW:
        optim = self.config.optim
        parameters = [p for p in module.parameters() if p.requires_grad]
        return torch.optim.AdamW(parameters, lr=lr, betas=optim.betas, weight_decay=optim.weight_decay)

    def apply_settings(self) -> None:
        """Give the optimisers the configured rates and betas; a loaded checkpoint brings its own."""
        optim = self.config.optim
        for optimizer, lr in ((self.actor_optimizer, optim.actor_lr), (self.critic_optimizer, optim.critic_lr)):
            for group in optimizer.param_groups:
                group.update(lr=lr, betas=optim.betas, weight_decay=optim.weight_decay)

    @property
    def device(self) -> torch.device:
        """Where the actor lives."""
        return torch.device(self.actor.device)

    @property
    def warming_up(self) -> bool:
        """Whether the next update leaves the actor alone."""
        return self.version < self.config.optim.critic_warmup_steps

    def update(self, batch: Batch) -> dict[str, float]:
        """Fit the critic to the corrected targets and improve the actor; returns the step's metrics.

        Log-probs, values, targets and advantages are computed once, before the first optimiser step.

        Raises:
            StalenessError: tokens are stale, yet their behaviour log-probs equal the current policy's.
            DivergedError: values, log-probs or gradients are not finite.
        """
        algorithm = self.config.algorithm
        with self.clock("evaluate"):
            passes = list(self._passes(batch)) if self.config.optim.keep_graph else None
            before = self.latest = self.evaluate(batch, passes)
            self._refuse_fake_behavior(batch, before.target_logprobs)
        with self.clock("targets"):
            estimate = self._targets(batch, before)
        with self.clock("metrics"):
            metrics = self._batch_metrics(batch, before, estimate)
        advantages = estimate.advantages
        if algorithm.whiten_advantages:
            advantages = core.whiten(advantages, batch.policy_mask)

        parts = minibatch_rows(len(batch), self.config.optim.minibatches, derive_seed("minibatch", self.version))
        sums: list[dict[str, Tensor]] = []
        with self.clock("update"):
            for rows in parts:
                sums.append(self._critic_step(batch, rows, before.values, estimate.targets, passes))
                if self.warming_up:
                    sums[-1] |= self._no_actor_step()
                else:
                    sums[-1] |= self._actor_step(batch, rows, advantages, passes)
        for name in sums[0]:
            metrics[name] = torch.stack([s[name] for s in sums]).mean()
        budget = self.config.optim.micro_batch_tokens
        metrics["tokens/evaluate"] = torch.tensor(float(padded_tokens(batch.lengths, budget)))
        metrics["tokens/update"] = torch.tensor(
            float(sum(padded_tokens([batch.lengths[row] for row in rows], budget) for rows in parts))
        )
        metrics["critic/lr"] = torch.tensor(self.config.optim.critic_lr)
        metrics["actor/lr"] = torch.tensor(0.0 if self.warming_up else self._actor_lr())
        self.version += 1
        numbers = torch.stack([v.detach().double().cpu() for v in metrics.values()]).tolist()
        figures = dict(zip(metrics, numbers, strict=True))
        if figures["actor/lr"] > 0 and figures["actor/grad_norm"] > 0:
            self.moved_version = self.version
        return figures

    def _targets(self, batch: Batch, before: Evaluation) -> core.ValueTargets:
        try:
            return value_targets(self.config.algorithm, batch, before)
        except ValueError as error:  # what the core finds in log-probs and values came out of the two models
            raise self._diverged(str(error)) from None

    def _diverged(self, what: str) -> DivergedError:
        return DivergedError(
            f"step {self.version + 1}: {what}; training has diverged, lower optim.critic_lr or optim.actor_lr"
        )

    def _clipped_norm(self, name: str, module: torch.nn.Module) -> Tensor:
        """The norm of the gradients before they are clipped."""
        norm = clip_grad_norm_(module.parameters(), self.config.optim.max_grad_norm)
        if not torch.isfinite(norm):
            raise self._diverged(f"the {name}'s gradient has norm {float(norm)}")
        return norm

    @torch.no_grad()
    def evaluate(self, batch: Batch, passes: list[Pass] | None = None) -> Evaluation:
        """Log-probs and values of ``batch`` under the present weights, read off ``passes`` where those were made."""
        shape = batch.policy_mask.shape
        target_logprobs = torch.full(shape, float("nan"), device=self.device)
        entropies = torch.full(shape, float("nan"), device=self.device)
        values = torch.full(shape, float("nan"), device=self.device)
        last_values = torch.zeros(len(batch), device=self.device)
        for rows, part, scored, after in passes or self._passes(batch):
            width = part.policy_mask.shape[1]
            target_logprobs[rows, :width] = scored.logprobs
            entropies[rows, :width] = scored.entropies
            values[rows, :width] = after[:, :-1]
            last = torch.tensor(part.lengths, device=self.device) - 1
            last_values[rows] = after.gather(1, last.unsqueeze(1)).squeeze(1)
        bootstrap = last_values.where(batch.truncated, 0.0) if self.config.algorithm.bootstrap_truncated else None
        return Evaluation(target_logprobs, entropies, values, bootstrap)

    def _passes(self, batch: Batch) -> Iterator[Pass]:
        """Actor and critic on every micro-batch; with gradients on, for those that the coming update changes."""
        for rows, part in self._micro(batch, range(len(batch))):
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.warming_up):
                scored = self._score(part)
            yield Pass(rows, part, scored, self._value(part))

    def _score(self, part: Batch) -> TokenLogprobs:
        """The actor on one micro-batch."""
        with self._autocast():
            logits = self.actor(part.input_ids, attention_mask=part.attention_mask, use_cache=False).logits
        return token_logprobs(logits, part, temperature=self.config.rollout.temperature)

    def _value(self, part: Batch) -> Tensor:
        """The critic on one micro-batch: ``[b, l]`` float32, after every token."""
        with self._autocast():
            after: Tensor = self.critic(part.input_ids, part.attention_mask)
        return after.float()

    def _critic_step(
        self, batch: Batch, rows: list[int], old_values: Tensor, targets: Tensor, passes: list[Pass] | None
    ) -> dict[str, Tensor]:
        self.critic_optimizer.zero_grad(set_to_none=True)
        denominator = batch.policy_mask[rows].sum()
        loss, clipped = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        fresh = ((index, part, self._value(part)) for index, part in self._micro(batch, rows))
        for index, part, after in fresh if passes is None else ((p.rows, p.part, p.after) for p in passes):
            width = part.policy_mask.shape[1]
            result = core.value_loss(
                values=after[:, :-1],
                old_values=old_values[index, :width],
                targets=targets[index, :width],
                policy_mask=part.policy_mask,
                value_clip=self.config.algorithm.value_clip,
                denominator=denominator,
            )
            result.loss.backward()
            loss, clipped = loss + result.loss.detach(), clipped + result.clip_fraction
        norm = self._clipped_norm("critic", self.critic)
        self.critic_optimizer.step()
        return {"value/loss": loss, "value/clip_fraction": clipped, "critic/grad_norm": norm}

    def _actor_step(
        self, batch: Batch, rows: list[int], advantages: Tensor, passes: list[Pass] | None
    ) -> dict[str, Tensor]:
        algorithm = self.config.algorithm
        for group in self.actor_optimizer.param_groups:
            group["lr"] = self._actor_lr()
        self.actor_optimizer.zero_grad(set_to_none=True)
        denominator = batch.policy_mask[rows].sum()
        loss, clipped = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        fresh = ((index, part, self._score(part)) for index, part in self._micro(batch, rows))
        for index, part, scored in fresh if passes is None else ((p.rows, p.part, p.scored) for p in passes):
            result = core.ppo_clip_loss(
                target_logprobs=scored.logprobs,
                behavior_logprobs=part.behavior_logprobs,
                advantages=advantages[index, : part.policy_mask.shape[1]],
                policy_mask=part.policy_mask,
                clip_low=algorithm.clip_low,
                clip_high=algorithm.clip_high,
                denominator=denominator,
            )
            result.loss.backward()
            loss, clipped = loss + result.loss.detach(), clipped + result.clip_fraction
        norm = self._clipped_norm("actor", self.actor)
        self.actor_optimizer.step()
        return {"actor/loss": loss, "actor/clip_fraction": clipped, "actor/grad_norm": norm}

    def _no_actor_step(self) -> dict[str, Tensor]:
        return dict.fromkeys(("actor/loss", "actor/clip_fraction", "actor/grad_norm"), torch.zeros(()))

    def _actor_lr(self) -> float:
        optim = self.config.optim
        actor_step = self.version - optim.critic_warmup_steps + 1
        return optim.actor_lr * min(1.0, actor_step / max(1, optim.lr_warmup_steps))

    def _micro(self, batch: Batch, rows: range | list[int]) -> Iterator[tuple[list[int], Batch]]:
        """Micro-batches of the given rows: (their indices in ``batch``, their tensors)."""
        members = list(rows)
        for group in micro_batches([batch.lengths[i] for i in members], self.config.optim.micro_batch_tokens):
            index = [members[i] for i in group]
            yield index, batch.rows(index)

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        if self.config.model.dtype == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def _refuse_fake_behavior(self, batch: Batch, target_logprobs: Tensor) -> None:
        """Stop when tokens sampled before the actor last moved have the current policy's log-probs to the last bit.

        Those were scored by the current policy, not when they were sampled. A token the policy was certain of (log-prob
        0, as where top-k leaves one) proves nothing.
        """
        stale = batch.policy_mask & (batch.versions < self.moved_version) & (target_logprobs != 0)
        identical = (batch.behavior_logprobs == target_logprobs) | ~stale
        if bool(stale.any() & identical.all()):
            raise StalenessError(
                f"step {self.version + 1}: {int(stale.sum())} stale tokens have behaviour log-probs identical to the "
                "current policy's, so every ratio is 1 and nothing is corrected; log the log-probs when tokens are "
                "sampled, do not recompute them"
            )

    def _batch_metrics(self, batch: Batch, before: Evaluation, estimate: core.ValueTargets) -> dict[str, Tensor]:
        algorithm = self.config.algorithm
        mask = batch.policy_mask
        ratios: dict[str, Any] = {
            "behavior_logprobs": batch.behavior_logprobs,
            "target_logprobs": before.target_logprobs,
        }
        weights = core.window_weights(
            **ratios,
            policy_mask=mask,
            window=algorithm.window,
            c_clip=algorithm.c_clip,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
        )
        return {
            **diagnostics.ratio_statistics(
                **ratios, policy_mask=mask, c_clip=algorithm.c_clip, gamma=algorithm.gamma, lam=algorithm.lam
            ),
            **diagnostics.target_statistics(
                values=before.values, targets=estimate.targets, advantages=estimate.advantages, policy_mask=mask
            ),
            **diagnostics.window_weight_statistics(window_weights=weights, policy_mask=mask),
            **diagnostics.staleness_statistics(versions=batch.versions, policy_mask=mask, current_version=self.version),
            "entropy/mean": before.entropies[mask].mean(),
        }


def value_targets(algorithm: AlgorithmConfig, batch: Batch, before: Evaluation) -> core.ValueTargets:
    """The configured regression target and advantage, ``[B, L-1]`` each, zero outside ``policy_mask``."""
    common: dict[str, Any] = {
        "values": before.values,
        "rewards": batch.rewards,
        "policy_mask": batch.policy_mask,
        "gamma": algorithm.gamma,
        "bootstrap_values": before.bootstrap_values,
    }
    if algorithm.value_target == "monte_carlo":
        return core.monte_carlo_targets(**common)
    if algorithm.value_target == "gae":
        return core.gae_targets(**common, lam=algorithm.lam)
    common |= {
        "behavior_logprobs": batch.behavior_logprobs,
        "target_logprobs": before.target_logprobs,
        "rho_clip": algorithm.rho_clip,
        "c_clip": algorithm.c_clip,
        "lam": algorithm.lam,
    }
    if algorithm.value_target == "vtrace":
        return core.vtrace_targets(**common)
    estimator = core.brace_targets if algorithm.value_target == "brace" else core.capped_targets
    return estimator(**common, window=algorithm.window)
