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
from brace_rl.config import Config
from brace_rl.diagnostics import batch as diagnostics
from brace_rl.errors import DivergedError, StalenessError
from brace_rl.training.actor_loss import ActorObjective
from brace_rl.training.batch import Batch, micro_batches, minibatch_rows, token_counts
from brace_rl.training.clock import PhaseClock
from brace_rl.training.estimates import Estimates, Evaluation, estimates, group_rewards
from brace_rl.training.learning_rate import ess_scaled_lr, staleness_scaled_lr
from brace_rl.training.logprobs import TokenLogprobs, token_logprobs
from brace_rl.training.models import Critic
from brace_rl.training.types import derive_seed

NO_ACTOR_STEP = ("actor/loss", "actor/clip_fraction", "actor/grad_norm")
"""Figures that are 0 while the critic warms up, so that every row of the metrics has them."""


class Pass(NamedTuple):
    """Actor and critic on one micro-batch, with what a backward pass needs where gradients were on.

    Attributes:
        rows: of the batch.
        part: those rows.
        scored: the actor's log-probs and entropies, ``[b, l-1]``.
        after: ``[b, l]`` the critic after every token; None without a critic.
    """

    rows: list[int]
    part: Batch
    scored: TokenLogprobs
    after: Tensor | None


class Learner:
    """Holds actor, critic and their optimisers.

    Attributes:
        critic: None where ``algorithm.value_target = "none"``.
        version: completed updates, critic warm-up included; the version of the actor's present weights.
        clock: seconds spent evaluating, computing targets and metrics, and updating.
        latest: policy and critic on the batch of the last :meth:`update`, before it; None before the first.
        moved_version: newest version whose actor differs from the one before it.
        warmup_ended: version at which the critic's warm-up ended; None while it lasts.
        lr_total: sum of the actor's learning rates so far.
    """

    def __init__(self, actor: PreTrainedModel, critic: Critic | None, config: Config) -> None:
        self.actor = actor
        self.critic = critic
        self.config = config
        self.version = 0
        self.clock = PhaseClock(actor.device)
        self.latest: Evaluation | None = None
        self.moved_version = 0
        self.lr_total = 0.0
        self.warmup_ended: int | None = None if critic and config.optim.critic_warmup_steps else 0
        if critic is not None and config.optim.freeze_critic_attention:
            critic.freeze_attention()
        self.objective = ActorObjective(actor, config)
        self.actor_optimizer = self._optimizer(actor, config.optim.actor_lr)
        self.critic_optimizer = None if critic is None else self._optimizer(critic, config.optim.critic_lr)

    def _optimizer(self, module: torch.nn.Module, lr: float) -> torch.optim.AdamW:
        optim = self.config.optim
        parameters = [p for p in module.parameters() if p.requires_grad]
        return torch.optim.AdamW(parameters, lr=lr, betas=optim.betas, weight_decay=optim.weight_decay)

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """By the name of what they train."""
        named = {"actor": self.actor_optimizer, "critic": self.critic_optimizer}
        return {name: optimizer for name, optimizer in named.items() if optimizer is not None}

    def counters(self) -> dict[str, Any]:
        """What a checkpoint keeps of the learner besides models, optimisers and :attr:`tensors`."""
        return {name: getattr(self, name) for name in ("version", "moved_version", "warmup_ended", "lr_total")}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What the actor rule remembers, for a checkpoint."""
        return {} if self.objective.average is None else self.objective.average.state_dict()

    def restore(self, counters: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Take over :meth:`counters` and :attr:`tensors`, and give the optimisers the configured rates and betas."""
        for name in self.counters():
            setattr(self, name, counters[name])
        if self.objective.average is not None:
            self.objective.average.load_state_dict(tensors)
        optim = self.config.optim
        for name, lr in (("actor", optim.actor_lr), ("critic", optim.critic_lr)):
            if name in self.optimizers:  # a loaded checkpoint brings rates of its own
                for group in self.optimizers[name].param_groups:
                    group.update(lr=lr, betas=optim.betas, weight_decay=optim.weight_decay)

    @property
    def device(self) -> torch.device:
        """Where the actor lives."""
        return torch.device(self.actor.device)

    @property
    def warming_up(self) -> bool:
        """Whether the next update leaves the actor alone."""
        return self.warmup_ended is None

    def update(self, batch: Batch) -> dict[str, float]:
        """Fit the critic to the corrected targets and improve the actor; returns the step's metrics.

        Log-probs, values, targets and advantages are computed once, before the first optimiser step.

        Raises:
            StalenessError: tokens are stale, yet their behaviour log-probs equal the current policy's.
            DivergedError: values, log-probs or gradients are not finite.
        """
        with self.clock("evaluate"):
            passes = list(self._passes(batch)) if self.config.optim.keep_graph else None
            before = self.latest = self.evaluate(batch, passes)
            self._refuse_fake_behavior(batch, before.target_logprobs)
            if not self.warming_up:
                self.objective.begin(batch, before, version=self.version, score=self.score)
        with self.clock("targets"):
            estimate = self._estimates(batch, before)
        with self.clock("metrics"):
            metrics = self._batch_metrics(batch, before, estimate)
        advantages = estimate.advantages
        if self.config.algorithm.whiten_advantages:
            advantages = core.whiten(advantages, batch.policy_mask)
        lr = self._set_actor_lr(metrics["ratio/ess"])

        optim = self.config.optim
        parts = minibatch_rows(len(batch), optim.minibatches, derive_seed("minibatch", self.version))
        sums: list[dict[str, Tensor]] = []
        with self.clock("update"):
            for rows in parts:
                if sums and self.objective.average is not None and not self.warming_up:
                    # The average has moved on with the minibatch before.
                    self.objective.begin(batch, before, version=self.version, score=self.score)
                sums.append(self._critic_steps(batch, rows, before.values, estimate.targets, passes))
                if self.warming_up:
                    sums[-1] |= dict.fromkeys(NO_ACTOR_STEP, torch.zeros((), device=self.device))
                else:
                    sums[-1] |= self._actor_step(batch, rows, advantages, before, passes)
        for name in sums[0]:
            metrics[name] = torch.stack([s[name] for s in sums]).mean()
        metrics |= {"actor/lr": lr, "actor/staleness_lr": lr * metrics["staleness/mean"]}
        self.version += 1
        numbers = torch.stack([v.detach().double().cpu() for v in metrics.values()]).tolist()
        figures = dict(zip(metrics, numbers, strict=True))
        return figures | token_counts(batch.lengths, parts, optim.micro_batch_tokens) | self._after_update(figures)

    def _after_update(self, figures: dict[str, float]) -> dict[str, float]:
        """Counters that follow from what the update was."""
        optim = self.config.optim
        if figures["actor/lr"] > 0 and figures.get("actor/grad_norm", 0.0) > 0:
            self.moved_version = self.version
        self.lr_total += figures["actor/lr"]
        if self.warming_up:
            explained = figures["value/explained_variance"]
            settled = 0 < optim.critic_warmup_until <= explained
            if settled or self.version >= optim.critic_warmup_steps:
                self.warmup_ended = self.version
        return {"actor/lr_total": self.lr_total} | ({"critic/lr": optim.critic_lr} if self.critic else {})

    def _estimates(self, batch: Batch, before: Evaluation) -> Estimates:
        try:
            return estimates(self.config.algorithm, batch, before)
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
            if after is not None:
                values[rows, :width] = after[:, :-1]
                last = torch.tensor(part.lengths, device=self.device) - 1
                last_values[rows] = after.gather(1, last.unsqueeze(1)).squeeze(1)
        if self.critic is None:
            values = group_rewards(batch).means[:, None].expand(shape)
        bootstrap = last_values.where(batch.truncated, 0.0) if self.config.algorithm.bootstrap_truncated else None
        return Evaluation(target_logprobs, entropies, values, bootstrap)

    @torch.no_grad()
    def score(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        """``[B, L-1]`` log-probs of ``batch`` under ``model``, NaN outside the policy mask."""
        logprobs = torch.full(batch.policy_mask.shape, float("nan"), device=self.device)
        for rows, part in self._micro(batch, range(len(batch))):
            logprobs[rows, : part.policy_mask.shape[1]] = self._score(part, model).logprobs
        return logprobs

    def _passes(self, batch: Batch) -> Iterator[Pass]:
        """Actor and critic on every micro-batch; with gradients on, for those that the coming update changes."""
        for rows, part in self._micro(batch, range(len(batch))):
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.warming_up):
                scored = self._score(part)
            yield Pass(rows, part, scored, None if self.critic is None else self._value(self.critic, part))

    def _score(self, part: Batch, model: PreTrainedModel | None = None) -> TokenLogprobs:
        """The actor, or another model, on one micro-batch."""
        with self._autocast():
            logits = (model or self.actor)(part.input_ids, attention_mask=part.attention_mask, use_cache=False).logits
        return token_logprobs(logits, part, temperature=self.config.rollout.temperature)

    def _value(self, critic: Critic, part: Batch) -> Tensor:
        """The critic on one micro-batch: ``[b, l]`` float32, after every token."""
        with self._autocast():
            after: Tensor = critic(part.input_ids, part.attention_mask)
        return after.float()

    def _critic_steps(
        self, batch: Batch, rows: list[int], old_values: Tensor, targets: Tensor, passes: list[Pass] | None
    ) -> dict[str, Tensor]:
        """``optim.critic_updates`` steps towards the same targets; metrics are those of the first."""
        if self.critic is None or self.critic_optimizer is None:
            return {}
        first: dict[str, Tensor] = {}
        for turn in range(self.config.optim.critic_updates):
            outputs: Iterator[tuple[list[int], Batch, Tensor]]
            if passes is not None and turn == 0:
                outputs = ((p.rows, p.part, p.after) for p in passes if p.after is not None)
            else:
                outputs = ((index, part, self._value(self.critic, part)) for index, part in self._micro(batch, rows))
            metrics = self._critic_step(batch, rows, old_values, targets, outputs)
            first = first or metrics
        return first

    def _critic_step(
        self,
        batch: Batch,
        rows: list[int],
        old_values: Tensor,
        targets: Tensor,
        outputs: Iterator[tuple[list[int], Batch, Tensor]],
    ) -> dict[str, Tensor]:
        assert self.critic is not None
        assert self.critic_optimizer is not None
        self.critic_optimizer.zero_grad(set_to_none=True)
        denominator = batch.policy_mask[rows].sum()
        loss, clipped = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        for index, part, after in outputs:
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
        self, batch: Batch, rows: list[int], advantages: Tensor, before: Evaluation, passes: list[Pass] | None
    ) -> dict[str, Tensor]:
        self.actor_optimizer.zero_grad(set_to_none=True)
        denominator = batch.policy_mask[rows].sum()
        keep = self._selection(batch, rows, before)
        sums: dict[str, Tensor] = {}
        outputs: Iterator[tuple[list[int], TokenLogprobs]]
        if passes is None:
            outputs = ((index, self._score(part)) for index, part in self._micro(batch, rows))
        else:
            outputs = ((p.rows, p.scored) for p in passes)
        place = {row: i for i, row in enumerate(rows)}
        for index, scored in outputs:
            kept = None if keep is None else keep[[place[row] for row in index]]
            loss, metrics = self.objective.loss(
                batch, index, scored.logprobs, advantages, denominator=denominator, keep=kept
            )
            loss.backward()  # type: ignore[no-untyped-call]
            for name, value in ({"loss": loss.detach()} | metrics).items():
                sums[name] = sums[name] + value if name in sums else value
        sums["grad_norm"] = self._clipped_norm("actor", self.actor)
        self.actor_optimizer.step()
        was_reset = self.objective.end(sums["active_fraction"])
        if self.objective.average is not None:
            sums["average_reset"] = torch.tensor(float(was_reset), device=self.device)
        return {f"actor/{name}": value for name, value in sums.items()}

    def _selection(self, batch: Batch, rows: list[int], before: Evaluation) -> Tensor | None:
        """``[b, L-1]`` tokens of a minibatch that a rule which looks at all of them keeps; None for the other rules."""
        if not self.objective.options.whole_minibatch:
            return None
        is_first = self.config.optim.minibatches == 1
        logprobs = before.target_logprobs[rows] if is_first else self.score(self.actor, batch.rows(rows))
        full = torch.full((len(rows), batch.policy_mask.shape[1]), float("nan"), device=self.device)
        full[:, : logprobs.shape[1]] = logprobs
        return self.objective.select(batch, rows, full)

    def _set_actor_lr(self, ess: Tensor) -> Tensor:
        """Give the actor's optimiser the rate of this step; 0 while the critic warms up."""
        optim = self.config.optim
        if self.warmup_ended is None:
            return torch.zeros((), device=self.device)
        actor_step = self.version - self.warmup_ended + 1
        lr = optim.actor_lr * min(1.0, actor_step / max(1, optim.lr_warmup_steps))
        if optim.lr_reference_staleness:
            staleness = self.config.schedule.max_staleness
            lr = staleness_scaled_lr(lr, staleness=staleness, reference=optim.lr_reference_staleness)
        rate = torch.tensor(lr, dtype=torch.float64, device=self.device)
        if optim.lr_ess_scaling:
            rate = ess_scaled_lr(lr, ess.double())
        for group in self.actor_optimizer.param_groups:
            group["lr"] = float(rate)
        return rate

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

    def _batch_metrics(self, batch: Batch, before: Evaluation, estimate: Estimates) -> dict[str, Tensor]:
        algorithm = self.config.algorithm
        mask = batch.policy_mask
        ratios: dict[str, Any] = {
            "behavior_logprobs": batch.behavior_logprobs,
            "target_logprobs": before.target_logprobs,
            "policy_mask": mask,
            "c_clip": algorithm.c_clip,
            "gamma": algorithm.gamma,
            "lam": algorithm.lam,
        }
        windows = estimate.windows
        if not isinstance(windows, int):
            chosen = windows.expand_as(mask) if windows.dim() == 0 else windows
            window_metrics = {"window/mean": chosen[mask].double().mean(), "window/max": chosen[mask].max()}
        else:
            window_metrics = {}
        return {
            **diagnostics.ratio_statistics(**ratios),
            **diagnostics.target_statistics(
                values=before.values, targets=estimate.targets, advantages=estimate.advantages, policy_mask=mask
            ),
            **diagnostics.window_weight_statistics(
                window_weights=core.window_weights(**ratios, window=windows), policy_mask=mask
            ),
            **window_metrics,
            **diagnostics.staleness_statistics(versions=batch.versions, policy_mask=mask, current_version=self.version),
            "entropy/mean": before.entropies[mask].mean(),
        }
