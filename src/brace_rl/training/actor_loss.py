"""The configured actor rule on the trainer's batches: gathers what the rule reads and keeps what it remembers."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from brace_rl.actor import RULES, SELECTORS, ActorBatch, ActorLoss
from brace_rl.actor.weight_average import WeightAverage, beta_for_window
from brace_rl.config import Config
from brace_rl.training.batch import Batch
from brace_rl.training.estimates import Evaluation
from brace_rl.training.logprobs import TokenScorer

Scorer = Callable[[TokenScorer, Batch], Tensor]
"""``[B, L-1]`` log-probs of a batch's tokens under a model, without gradient."""


class ActorObjective:
    """Makes the loss of a micro-batch under ``actor.rule``.

    Call :meth:`begin` once per batch (once per minibatch, where there is a weight average), :meth:`select` once per
    minibatch, then :meth:`loss` for each of its micro-batches and :meth:`end` after the optimiser step.

    Attributes:
        average: the weight average of PPO-EWMA; None for the other rules.
    """

    def __init__(self, actor: TokenScorer, config: Config) -> None:
        self.options = config.actor
        self.average: WeightAverage | None = None
        self._actor = actor.model
        if self.options.needs_weight_average:
            beta = getattr(self.options, "beta", None)
            if beta is None:
                beta = beta_for_window(config.schedule.max_staleness)
            self.average = WeightAverage(self._actor.state_dict(), beta=beta)
            self._anchor = copy.deepcopy(actor).requires_grad_(False)
        self._proximal: Tensor | None = None
        self._lag: Tensor | None = None

    def begin(self, batch: Batch, before: Evaluation, *, version: int, score: Scorer) -> None:
        """Fix what optimiser steps on ``batch`` do not change, or not before the next one.

        Args:
            version: of the weights that ``before`` was made with.
            score: evaluates a model on the batch.
        """
        if self.average is not None:
            self.average.copy_to(self._anchor.model)
            self._proximal = score(self._anchor, batch)
        elif self.options.needs_proximal:
            self._proximal = before.target_logprobs
        self._lag = version - batch.versions if self.options.needs_version_lag else None

    def select(self, batch: Batch, rows: list[int], target_logprobs: Tensor) -> Tensor | None:
        """``[b, L-1]`` what a rule that looks at whole minibatches keeps of one; None for the other rules.

        Args:
            rows: the minibatch.
            target_logprobs: ``[b, L-1]`` under the weights the minibatch meets.
        """
        if not self.options.whole_minibatch:
            return None
        actor_batch = self._gather(batch, rows, target_logprobs, torch.zeros_like(target_logprobs))
        return SELECTORS[self.options.rule](actor_batch, **self.options.rule_arguments())

    def loss(
        self,
        batch: Batch,
        rows: list[int],
        target_logprobs: Tensor,
        advantages: Tensor,
        *,
        denominator: Tensor,
        keep: Tensor | None,
    ) -> ActorLoss:
        """Loss and metrics of one micro-batch; they add up over those of a minibatch.

        Args:
            batch: the whole batch.
            rows: of it, the micro-batch.
            target_logprobs: ``[b, l-1]`` with gradient, cut to the micro-batch's longest row.
            advantages: ``[B, L-1]`` of the whole batch.
            denominator: policy tokens of the minibatch.
            keep: ``[b, L-1]`` rows of what :meth:`select` gave.
        """
        width = target_logprobs.shape[1]
        kept = None if keep is None else keep[:, :width]
        actor_batch = self._gather(batch, rows, target_logprobs, advantages[rows, :width], denominator, kept)
        return RULES[self.options.rule](actor_batch, **self.options.rule_arguments())

    def end(self, active_fraction: Tensor) -> bool:
        """Take in the weights after an optimiser step; returns whether the weight average was restarted."""
        if self.average is None:
            return False
        weights = self._actor.state_dict()
        reset_below = getattr(self.options, "reset_below", None)
        if reset_below is not None and self.average.reset_if_inactive(
            weights, active_fraction=float(active_fraction), threshold=reset_below
        ):
            return True
        self.average.update(weights)
        return False

    def _gather(
        self,
        batch: Batch,
        rows: list[int],
        target_logprobs: Tensor,
        advantages: Tensor,
        denominator: Tensor | None = None,
        keep: Tensor | None = None,
    ) -> ActorBatch:
        width = target_logprobs.shape[1]

        def cut(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[rows, :width]

        return ActorBatch(
            target_logprobs=target_logprobs,
            advantages=advantages,
            loss_mask=batch.policy_mask[rows, :width],
            behavior_logprobs=cut(batch.behavior_logprobs),
            proximal_logprobs=cut(self._proximal),
            behavior_entropy=cut(batch.behavior_entropies) if self.options.needs_entropy else None,
            version_lag=cut(self._lag),
            denominator=denominator,
            keep=keep,
        )
