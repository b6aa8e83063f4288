"""KPop: keep a token while trainer and engine agree on its probability, in both directions of the KL divergence."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from brace_rl.actor.contract import ActorBatch, ActorLoss
from brace_rl.actor.surrogates import CLIP_HIGH, CLIP_LOW, check_positive, clip_anchor, clipped_surrogate


def kpop(
    batch: ActorBatch,
    *,
    edge: Literal["B", "E"] = "B",
    phi: float = 2.0,
    clip_low: float = CLIP_LOW,
    clip_high: float = CLIP_HIGH,
) -> ActorLoss:
    """``1[D(p||q) <= phi] 1[D(q||p) <= phi] * ppo_clip(target/proximal, A)`` (Ring-2.6 report, ringtech, May 2026).

    ``p`` and ``q`` are the probabilities of the sampled token under proximal and behavior, and
    ``D(p||q) = p log(p/q) + (1 - p) log((1 - p)/(1 - q))`` that of two coins: it, or any other token.

    Edges: mask on B, clip on U. With ``edge = "E"``, ``p`` is target's probability and the clip is on E too.

    Published: values of ``phi`` tried from 0.1 to 2.0, 0.75 for mathematics and 2.0 for code; AReaL ships 2.0.

    Edge cases: an unlikely token (``p`` and ``q`` both small) is kept whatever its ratio, which is the point. A token
    that one policy is certain of and the other doubts is rejected. ``1 - p`` is ``-expm1(log p)``: near certainty
    ``1 - exp(log p)`` would be rounding alone. A log-prob of 0 is one that rounding took there (no softmax is certain),
    so ``1 - p`` counts as at least the resolution of the dtype computed in; otherwise every such token would be
    infinitely far from a policy that is all but certain.
    """
    check_positive(phi, "phi", rule="kpop")
    clip_from = clip_anchor(batch, edge, rule="kpop")
    if edge == "B":
        log_p = batch.need("proximal_logprobs", rule="kpop")
    else:
        log_p = batch.at_tokens(batch.target_logprobs.detach())
    log_q = batch.need("behavior_logprobs", rule="kpop")
    return clipped_surrogate(
        batch,
        anchor=clip_from,
        clip_low=clip_low,
        clip_high=clip_high,
        rejected=~((_divergence(log_p, log_q) <= phi) & (_divergence(log_q, log_p) <= phi)),
    )


def _divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    nearest = -torch.finfo(log_p.dtype).eps
    log_p, log_q = log_p.clamp(max=nearest), log_q.clamp(max=nearest)
    return _term(log_p, log_q) + _term(_log_of_the_rest(log_p), _log_of_the_rest(log_q))


def _term(log_a: Tensor, log_b: Tensor) -> Tensor:
    """``a log(a/b)``, which is 0 at ``a = 0`` whatever ``b`` is."""
    a = log_a.exp()
    return torch.where(a == 0, 0.0, a * (log_a - log_b))


def _log_of_the_rest(log_p: Tensor) -> Tensor:
    """``log(1 - p)``."""
    return (-torch.expm1(log_p)).log()
