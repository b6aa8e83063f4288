"""What goes into an actor rule and what comes out.

Three log-probs of the same token: *behavior* ``mu`` (recorded when it was sampled), *proximal* (an anchor in the
trainer: the weights just before the update, or an average of weights) and *target* ``pi`` (the weights being trained).
A rule looks at ratios on the edges between them:

====  ========================  =====================================================================
edge  ratio                     meaning
====  ========================  =====================================================================
B     ``proximal / behavior``   has already happened: masked or weighted, always detached
U     ``target / proximal``     drift of this update: clipped, differentiable
E     ``target / behavior``     both, ``E = B U``
====  ========================  =====================================================================

A *mask* is 0 or 1 and detached, a *weight* is non-negative and detached, a *clip* is differentiable and depends on the
sign of the advantage. No rule puts a weight on E and a clip on E into one loss: the clip holds the ratio already.

Every loss is a sum over the tokens of ``loss_mask`` divided by their number *before* any rejection. Nothing outside
``loss_mask`` reaches a loss, a metric or a gradient, NaN included. Gradient flows into ``target_logprobs`` alone.
A log-ratio of plus or minus infinity gives a finite loss and gradient: a rule rejects or caps it, and a clip holds
log-ratios within :data:`brace_rl.core.losses.MAX_LOG_RATIO`. A target log-prob that is not a number, and a clip of two
log-probs that are the same infinity, make the loss not a number, rejected or not. No mask keeps a token whose behavior
or proximal log-prob or entropy is not a number. Half-precision inputs are computed in float32.

Micro-batches: give each the ``denominator`` of the whole minibatch, and losses and metrics add up to those of the
minibatch. A rule that looks at the whole minibatch to decide on a token has an entry in
:data:`brace_rl.actor.rules.SELECTORS`: call it once on the whole minibatch and hand every micro-batch its part as
``keep``. Without ``keep`` the rule decides from the tensors it is given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from brace_rl.errors import BraceError

_HOW_TO_GET = {
    "behavior_logprobs": "they are recorded by the engine when a token is sampled",
    "proximal_logprobs": "score the batch with the weights it meets, without gradient, before the first optimiser step",
    "behavior_entropy": (
        "the embedded engine records it with every token; for an engine that does not, pass the trainer's own entropy "
        "and report it as that"
    ),
    "version_lag": "it is the trainer's version minus the version that sampled the token",
}


class MissingInputError(BraceError):
    """A rule was not given something it needs; the message says how to get it."""


class ActorLoss(NamedTuple):
    """A scalar loss with its gradient, and scalar metrics without one.

    ``metrics`` are sums over tokens divided by the same denominator as the loss, so they add up over micro-batches:

    ``clip_fraction``: tokens at which the clip decided, so that they carry no gradient.
    ``rejected_fraction``: tokens whose mask is 0.
    ``capped_fraction``: tokens whose weight met its cap.
    ``active_fraction``: tokens neither rejected nor clipped.
    ``weight_mean``: the detached weight, 0 at rejected tokens, 1 where a rule has none.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class ActorBatch:
    """The tokens of a minibatch, or of one micro-batch of it.

    Attributes:
        target_logprobs: ``[B, T]`` log-prob of the sampled token under the weights being trained, with gradient.
        advantages: ``[B, T]``.
        loss_mask: ``[B, T]`` bool, tokens that are trained on. Rules read it and leave it as it is: rejection is theirs
            alone, and value targets are computed on the mask of all policy tokens.
        behavior_logprobs: ``[B, T]`` recorded when the token was sampled.
        proximal_logprobs: ``[B, T]`` under the anchor.
        behavior_entropy: ``[B, T]`` nats, of the distribution the token was sampled from, before top-k and top-p.
        version_lag: ``[B, T]`` weight versions between the one that sampled the token and the trainer's; 0: none.
        denominator: tokens of the *whole minibatch* before rejection, when these tensors are one micro-batch of it, so
            that the micro-batches' losses and metrics add up exactly to those of the unsplit minibatch; None when these
            tensors are the minibatch.
        keep: ``[B, T]`` bool, this part of what the rule's selector chose on the whole minibatch; None to choose here.

    One row is one response where a rule looks at sequences (``tis``, ``gspo``). Unless a rule needs it, each of the
    optional tensors may be None; what a rule needs and lacks is a :class:`MissingInputError`.

    Raises:
        ValueError: a shape or dtype that cannot be meant; names the tensor.
    """

    target_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor
    behavior_logprobs: Tensor | None = None
    proximal_logprobs: Tensor | None = None
    behavior_entropy: Tensor | None = None
    version_lag: Tensor | None = None
    denominator: Tensor | float | None = None
    keep: Tensor | None = None

    def __post_init__(self) -> None:
        mask = self.loss_mask
        for name in ("loss_mask", "target_logprobs", "advantages"):
            if not isinstance(getattr(self, name), Tensor):
                raise ValueError(f"{name}: got {type(getattr(self, name)).__name__}, must be a tensor")
        if mask.dim() != 2 or mask.dtype != torch.bool:
            raise ValueError(f"loss_mask: got {list(mask.shape)} {mask.dtype}, must be [batch, tokens] bool")
        if self.keep is not None and self.keep.dtype != torch.bool:
            raise ValueError(f"keep: got {self.keep.dtype}, must be bool")
        for name in ("target_logprobs", "advantages", *_HOW_TO_GET, "keep"):
            x: Tensor | None = getattr(self, name)
            if x is None:
                continue
            if x.shape != mask.shape:
                raise ValueError(f"{name}: got {list(x.shape)}, must be {list(mask.shape)} like loss_mask")
            if name not in ("keep", "version_lag") and not x.is_floating_point():
                raise ValueError(f"{name}: got {x.dtype}, must be floating point")
        if isinstance(self.denominator, int | float) and not 0 < self.denominator < math.inf:
            raise ValueError(f"denominator: got {self.denominator}, must be above 0 and finite")

    @property
    def count(self) -> Tensor | float:
        """What sums are divided by; 1 for a batch without tokens, whose sums are 0."""
        return self.loss_mask.sum().clamp(min=1) if self.denominator is None else self.denominator

    def at_tokens(self, x: Tensor) -> Tensor:
        """``x`` in float32 or better, 0 outside the mask; so is its gradient, whatever stands there."""
        return torch.where(self.loss_mask, x.to(torch.promote_types(x.dtype, torch.float32)), 0.0)

    def need(self, name: str, *, rule: str, how: str | None = None) -> Tensor:
        """The optional tensor ``name``, detached, 0 outside the mask.

        Raises:
            MissingInputError: it is None; ``how`` to get it replaces what is said of that tensor in general.
        """
        x: Tensor | None = getattr(self, name)
        if x is None:
            raise MissingInputError(f"{rule}: {name} missing from the batch; {how or _HOW_TO_GET[name]}")
        return self.at_tokens(x.detach())
