"""PPO-EWMA as revised for asynchronous training: the weight on what has happened becomes a mask."""

from __future__ import annotations

from brace_rl.actor.contract import ActorBatch, ActorLoss
from brace_rl.actor.ppo_ewma import SCORE_WITH_THE_AVERAGE
from brace_rl.actor.surrogates import CLIP_HIGH, CLIP_LOW, check_band, clipped_surrogate, log_ratio, outside


def ppo_ewma_revised(
    batch: ActorBatch, *, low: float, high: float, clip_low: float = CLIP_LOW, clip_high: float = CLIP_HIGH
) -> ActorLoss:
    """``1[low <= proximal/behavior <= high] * ppo_clip(target/proximal, A)`` (Guan et al., arXiv 2605.12070).

    ``proximal`` is the policy of the averaged weights, with decay about ``W / (W + 2)`` for a staleness window of ``W``
    versions (:func:`brace_rl.actor.weight_average.beta_for_window`). The average restarts from the current weights when
    the ``active_fraction`` of a batch falls below 0.9
    (:meth:`brace_rl.actor.weight_average.WeightAverage.reset_if_inactive`).

    Edges: mask on B, clip on U. No weight.

    Published: decay and reset. Not published: the band, so ``low`` and ``high`` have no default. We know the rule from
    what others write about it; "active" is our reading: neither rejected by the band nor clipped.

    Edge cases: both bounds belong to the band.
    """
    check_band(low, high, rule="ppo_ewma_revised")
    proximal = batch.need("proximal_logprobs", rule="ppo_ewma_revised", how=SCORE_WITH_THE_AVERAGE)
    return clipped_surrogate(
        batch,
        anchor=proximal,
        clip_low=clip_low,
        clip_high=clip_high,
        rejected=outside(log_ratio(batch, "B", rule="ppo_ewma_revised").exp(), low, high),
    )
