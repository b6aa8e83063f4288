"""One update of actor and critic from one batch. Synchronous, no threads, knows nothing of who made the batch.

On several ranks every rank has a learner and hands it the same batch; see :mod:`~brace_rl.training.ranks`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedModel

from brace_rl import core
from brace_rl.config import Config, OptimConfig
from brace_rl.errors import DivergedError
from brace_rl.training.actor_loss import ActorObjective
from brace_rl.training.batch import Batch, minibatch_rows, token_counts
from brace_rl.training.batch_figures import batch_figures, refuse_fake_behavior
from brace_rl.training.clock import PhaseClock
from brace_rl.training.estimates import Estimates, Evaluation, estimates
from brace_rl.training.learning_rate import ess_scaled_lr, staleness_scaled_lr
from brace_rl.training.logprobs import TokenLogprobs, TokenScorer
from brace_rl.training.models import Critic
from brace_rl.training.passes import MicroBatch, Pass, Passes
from brace_rl.training.ranks import Ranks
from brace_rl.training.recompute import recompute_layers
from brace_rl.training.sharding import shard
from brace_rl.training.types import derive_seed

NO_ACTOR_STEP = ("actor/loss", "actor/clip_fraction", "actor/grad_norm")
"""Figures that are 0 while the critic warms up, so that every row of the metrics has them."""


def make_optimizers(actor: nn.Module, critic: nn.Module | None, optim: OptimConfig) -> dict[str, torch.optim.Optimizer]:
    """AdamW for what there is to train, by name."""
    rates = {"actor": (actor, optim.actor_lr)} | ({} if critic is None else {"critic": (critic, optim.critic_lr)})
    return {
        name: torch.optim.AdamW(
            [p for p in module.parameters() if p.requires_grad],
            lr=lr,
            betas=optim.betas,
            weight_decay=optim.weight_decay,
        )
        for name, (module, lr) in rates.items()
    }


class Learner:
    """Holds actor, critic and their optimisers.

    Args:
        ranks: the processes that train together, each with a learner of its own that holds the same weights. With
            ``model.sharding = "fsdp2"`` each holds a part of them: the models given are cut in place.

    Attributes:
        critic: None where ``algorithm.value_target = "none"``.
        optimizers: by the name of what they train, ``actor`` and, where there is one, ``critic``.
        version: completed updates, critic warm-up included; the version of the actor's present weights.
        clock: seconds spent evaluating, computing targets and metrics, and updating.
        latest: policy and critic on the batch of the last :meth:`update`, before it; None before the first.
        moved_version: newest version whose actor differs from the one before it.
        warmup_ended: version at which the critic's warm-up ended; None while it lasts.
        lr_total: sum of the actor's learning rates over its optimiser steps so far.
    """

    def __init__(
        self, actor: PreTrainedModel, critic: Critic | None, config: Config, ranks: Ranks | None = None
    ) -> None:
        self.actor = actor
        self.critic = critic
        self.config = config
        self.ranks = ranks or Ranks()
        self.version = 0
        self.clock = PhaseClock(actor.device)
        self.latest: Evaluation | None = None
        self.moved_version = 0
        self.lr_total = 0.0
        self.warmup_ended: int | None = None if critic and config.optim.critic_warmup_steps else 0
        if critic is not None and config.optim.freeze_critic_attention:
            critic.freeze_attention()
        scorer = TokenScorer(actor, temperature=config.rollout.temperature)
        for module in (actor, critic):
            if module is not None and config.model.gradient_checkpointing:
                recompute_layers(module)
        sharded = self.ranks.size > 1 and config.model.sharding == "fsdp2"
        if sharded:
            shard(scorer, critic, self.ranks)
        self.objective = ActorObjective(scorer, config)
        self.passes = Passes(scorer, critic, config, self.ranks, in_step=sharded)
        self.optimizers = make_optimizers(actor, critic, config.optim)

    @property
    def actor_optimizer(self) -> torch.optim.Optimizer:
        """Of the actor."""
        return self.optimizers["actor"]

    @property
    def critic_optimizer(self) -> torch.optim.Optimizer:
        """Of the critic; there must be one."""
        return self.optimizers["critic"]

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
            passes = None
            if self.config.optim.keep_graph:
                passes = list(self.passes.all(batch, actor_gradient=not self.warming_up))
            before = self.latest = self.evaluate(batch, passes)
            refuse_fake_behavior(batch, before.target_logprobs, version=self.version, moved_version=self.moved_version)
            if not self.warming_up:
                self.objective.begin(batch, before, version=self.version, score=self.passes.score)
        with self.clock("targets"):
            estimate = self._estimates(batch, before)
        with self.clock("metrics"):
            metrics = batch_figures(self.config.algorithm, batch, before, estimate, version=self.version)
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
                    self.objective.begin(batch, before, version=self.version, score=self.passes.score)
                sums.append(self._critic_steps(batch, rows, before.values, estimate.targets, passes))
                if self.warming_up:
                    sums[-1] |= dict.fromkeys(NO_ACTOR_STEP, torch.zeros((), device=self.device))
                else:
                    sums[-1] |= self._actor_step(batch, rows, advantages, before, passes)
        for name in sums[0]:
            metrics[name] = torch.stack([s[name] for s in sums]).mean()
        metrics |= {"actor/lr": lr, "actor/staleness_lr": lr * metrics["staleness/mean"]}
        self.version += 1
        numbers = torch.stack([v.detach().double().to(self.device) for v in metrics.values()])
        # Counters follow from the figures, so these must be the same on every rank, rounding included.
        figures = dict(zip(metrics, self.ranks.as_on_first(numbers).tolist(), strict=True))
        counts = token_counts(batch.lengths, parts, optim.micro_batch_tokens, self.ranks.size)
        return figures | counts | self._after_update(figures)

    def _after_update(self, figures: dict[str, float]) -> dict[str, float]:
        """Counters that follow from what the update was."""
        optim = self.config.optim
        if figures["actor/lr"] > 0 and figures.get("actor/grad_norm", 0.0) > 0:
            self.moved_version = self.version
        self.lr_total += figures["actor/lr"] * optim.minibatches
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

    def _clipped_norm(self, name: str, module: nn.Module) -> Tensor:
        """The norm of the gradients of all ranks before they are clipped."""
        self.ranks.add_up_gradients(module)
        norm = clip_grad_norm_(module.parameters(), self.config.optim.max_grad_norm)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if not torch.isfinite(norm):
            raise self._diverged(f"the {name}'s gradient has norm {float(norm)}")
        return norm

    def gather(self) -> None:
        """Have models and optimisers whole here, for a checkpoint. They always are, but see ``LearnerGroup``."""

    def evaluate(self, batch: Batch, passes: list[Pass] | None = None) -> Evaluation:
        """Log-probs and values of ``batch`` under the present weights, read off ``passes`` where those were made."""
        return self.passes.evaluate(batch, passes)

    def _critic_steps(
        self, batch: Batch, rows: list[int], old_values: Tensor, targets: Tensor, passes: list[Pass] | None
    ) -> dict[str, Tensor]:
        """``optim.critic_updates`` steps towards the same targets; metrics are those of the first."""
        if self.critic is None:
            return {}
        first: dict[str, Tensor] = {}
        for turn in range(self.config.optim.critic_updates):
            outputs: Iterable[tuple[MicroBatch, Tensor]]
            if passes is not None and turn == 0:
                outputs = ((p.micro, p.after) for p in passes if p.after is not None)
            else:
                outputs = ((micro, self.passes.value(micro.part)) for micro in self.passes.micro(batch, rows))
            metrics = self._critic_step(batch, rows, old_values, targets, outputs)
            first = first or metrics
        return first

    def _critic_step(
        self,
        batch: Batch,
        rows: list[int],
        old_values: Tensor,
        targets: Tensor,
        outputs: Iterable[tuple[MicroBatch, Tensor]],
    ) -> dict[str, Tensor]:
        assert self.critic is not None
        self.critic_optimizer.zero_grad(set_to_none=True)
        denominator = batch.policy_mask[rows].sum().clamp(min=1)  # responses that nobody could judge have no token
        sums = torch.zeros(2, dtype=old_values.dtype, device=self.device)
        for (index, part, _), after in outputs:
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
            sums += torch.stack([result.loss.detach(), result.clip_fraction])
        norm = self._clipped_norm("critic", self.critic)
        self.critic_optimizer.step()
        loss, clipped = self.ranks.add_up(sums)
        return {"value/loss": loss, "value/clip_fraction": clipped, "critic/grad_norm": norm}

    def _actor_step(
        self, batch: Batch, rows: list[int], advantages: Tensor, before: Evaluation, passes: list[Pass] | None
    ) -> dict[str, Tensor]:
        self.actor_optimizer.zero_grad(set_to_none=True)
        denominator = batch.policy_mask[rows].sum().clamp(min=1)  # responses that nobody could judge have no token
        keep = self._selection(batch, rows, before)
        sums: dict[str, Tensor] = {}
        outputs: Iterable[tuple[MicroBatch, TokenLogprobs]]
        if passes is None:
            outputs = ((micro, self.passes.score_part(micro.part)) for micro in self.passes.micro(batch, rows))
        else:
            outputs = ((p.micro, p.scored) for p in passes)
        place = {row: i for i, row in enumerate(rows)}
        for (index, _, counts), scored in outputs:
            kept = None if keep is None else keep[[place[row] for row in index]]
            loss, metrics = self.objective.loss(
                batch if counts else batch.without_tokens(),
                index,
                scored.logprobs,
                advantages,
                denominator=denominator,
                keep=kept,
            )
            loss.backward()  # type: ignore[no-untyped-call]
            for name, value in ({"loss": loss.detach()} | metrics).items():
                sums[name] = sums[name] + value if name in sums else value
        sums = dict(zip(sums, self.ranks.add_up(torch.stack(list(sums.values()))), strict=True))
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
        logprobs = before.target_logprobs[rows]
        if not is_first:
            logprobs = self.passes.score(self.passes.scorer, batch.rows(rows))
        full = logprobs.new_full((len(rows), batch.policy_mask.shape[1]), float("nan"))
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
            rate = self.ranks.as_on_first(ess_scaled_lr(lr, ess.double()))
        for group in self.actor_optimizer.param_groups:
            group["lr"] = float(rate)
        return rate
