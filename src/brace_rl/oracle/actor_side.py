"""The actor's half of an update: any rule of `brace_rl.actor` on the advantages of any value target."""

from __future__ import annotations

import torch
from torch import Tensor

from brace_rl.actor.options import RULE_OPTIONS
from brace_rl.actor.rules import RULES, ActorBatch
from brace_rl.actor.weight_average import WeightAverage, beta_for_window
from brace_rl.oracle.methods import Method
from brace_rl.oracle.sampling import Paths, read_tokens
from brace_rl.oracle.settings import LearnConfig

_TABLE = "logits"


class ActorSide:
    """A rule with what it has to remember.

    Proximal is the policy just before the update, which here is made in one step, so that a ratio target / proximal is
    1 and nothing clips on that edge; for ``ppo_ewma`` it is the average of the tables after every step.
    """

    def __init__(self, method: Method, config: LearnConfig, start: Tensor) -> None:
        """Begin with the tables ``[seeds, C, A]``."""
        needs = RULE_OPTIONS[method.rule]
        given = dict(method.rule_options)
        self._rule, self._lag = RULES[method.rule], config.lag
        self._arguments = {name: x for name, x in given.items() if name not in needs.trainer_settings}
        self._needs_entropy = needs.needs_entropy
        self._average: WeightAverage | None = None
        if needs.needs_weight_average:
            beta = float(given.get("beta", beta_for_window(config.lag)))
            self._average = WeightAverage({_TABLE: start}, beta=beta)
        self._steps = 0

    def loss(
        self,
        *,
        paths: Paths,
        logprobs: Tensor,
        behavior_logprobs: Tensor,
        recorded: Tensor,
        advantages: Tensor,
        denominator: int,
    ) -> Tensor:
        """The rule's loss, summed over seeds.

        Args:
            logprobs: ``[N, H]`` of the sampled tokens, with gradient.
            recorded: ``[seeds, C, A]`` logits that the engine recorded from.
            denominator: tokens of one seed.
        """
        proximal = logprobs.detach()
        if self._average is not None:
            average = self._average.state_dict()[f"average.{_TABLE}"]
            proximal = read_tokens(average.log_softmax(-1), paths)
        entropy = None
        if self._needs_entropy:
            logs = recorded.log_softmax(-1)
            by_row = -(logs.exp() * logs).sum(-1).flatten()
            entropy = by_row[torch.div(paths.tokens, recorded.shape[-1], rounding_mode="floor")]
        batch = ActorBatch(
            target_logprobs=logprobs,
            advantages=advantages,
            loss_mask=torch.ones_like(logprobs, dtype=torch.bool),
            behavior_logprobs=behavior_logprobs,
            proximal_logprobs=proximal,
            behavior_entropy=entropy,
            version_lag=torch.full_like(paths.tokens, min(self._steps, self._lag)),
            denominator=denominator,
        )
        return self._rule(batch, **self._arguments).loss

    def stepped(self, tables: Tensor) -> None:
        """Take note of the tables after an update."""
        self._steps += 1
        if self._average is not None:
            self._average.update({_TABLE: tables.detach()})
