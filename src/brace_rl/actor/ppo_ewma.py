"""PPO-EWMA as first published: decoupled PPO around an average of weights."""

from __future__ import annotations

import math

import torch

from brace_rl.actor.contract import ActorBatch, ActorLoss
from brace_rl.actor.surrogates import CLIP_HIGH, CLIP_LOW, clipped_surrogate
from brace_rl.core.losses import MAX_LOG_RATIO

SCORE_WITH_THE_AVERAGE = "score the batch with the averaged weights (brace_rl.actor.weight_average.WeightAverage)"
"""How a rule around a weight average gets its proximal log-probs."""


def ppo_ewma(
    batch: ActorBatch, *, ratio_cap: float = 100.0, clip_low: float = CLIP_LOW, clip_high: float = CLIP_HIGH
) -> ActorLoss:
    """``sg(proximal/mu') * ppo_clip(target/proximal, A)`` (Hilton, Cobbe and Schulman, arXiv 2110.00641).

    ``proximal`` is the policy of the exponentially weighted average of the weights
    (:class:`brace_rl.actor.weight_average.WeightAverage`, updated after every optimiser step), and
    ``log mu' = max(log mu, sg(log target) - log ratio_cap)`` caps the total importance ratio ``target/behavior``.

    Edges: weight on B, clip on U; the cap is on E and only lowers the weight.

    Published: ``ratio_cap = 100`` (the authors' code). The decay ``beta`` of the average has no default there; it is a
    setting of the trainer. Their clip is 0.2 on both sides.

    Edge cases: a token that behaviour never samples (``mu = 0``) counts as if its ratio were ``ratio_cap``. The
    weight's logarithm is held below ``MAX_LOG_RATIO``.
    """
    if not 1 <= ratio_cap < math.inf:
        raise ValueError(f"ppo_ewma: ratio_cap = {ratio_cap}; must be at least 1 and finite")
    proximal = batch.need("proximal_logprobs", rule="ppo_ewma", how=SCORE_WITH_THE_AVERAGE)
    behavior = batch.need("behavior_logprobs", rule="ppo_ewma")
    lowest = batch.at_tokens(batch.target_logprobs.detach()) - math.log(ratio_cap)
    log_weight = proximal - torch.maximum(behavior, lowest)
    return clipped_surrogate(
        batch,
        anchor=proximal,
        clip_low=clip_low,
        clip_high=clip_high,
        weight=log_weight.clamp(max=MAX_LOG_RATIO).exp(),
        capped=behavior < lowest,
    )
