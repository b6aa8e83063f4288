"""GSPO: one ratio per response."""

from __future__ import annotations

from typing import Literal

import torch

from brace_rl.actor.contract import ActorBatch, ActorLoss
from brace_rl.actor.surrogates import check_edge, clipped_surrogate, log_ratio, row_mean
from brace_rl.core.losses import MAX_LOG_RATIO


def gspo(
    batch: ActorBatch, *, edge: Literal["E", "U"] = "E", clip_low: float = 3e-4, clip_high: float = 4e-4
) -> ActorLoss:
    """PPO's clip on ``s = exp(mean over the response of log r)`` (Zheng et al., arXiv 2507.18071).

    Written as the paper's token form: the value of a token's ratio is ``s``, its gradient ``sg(s) d log target``. Where
    all tokens of a response share an advantage, that is the gradient of the sequence form; otherwise each token goes by
    its own advantage, and a ratio of 1 is the plain policy gradient.

    Edge: ``r`` is E, target/behavior, as in the paper, whose old policy is the one that sampled. With U,
    target/proximal, nothing corrects what was sampled by older weights.

    Published: clip 3e-4 below and 4e-4 above. The paper averages over responses; here, as in every rule, the sum over
    tokens is divided by their number, so that a long response counts more.

    Edge cases: one row is one response. In the mean each token's log-ratio is held within ``MAX_LOG_RATIO``. A token
    whose target log-prob is infinite has no gradient.
    """
    check_edge(edge, "EU", rule="gspo")
    sequence = row_mean(batch, log_ratio(batch, edge, rule="gspo").clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    target = batch.at_tokens(batch.target_logprobs)
    finite = torch.where(target.isfinite(), target, 0.0)
    return clipped_surrogate(
        batch,
        target_logprobs=sequence + (finite - finite.detach()),
        anchor=torch.zeros_like(sequence),
        clip_low=clip_low,
        clip_high=clip_high,
    )
