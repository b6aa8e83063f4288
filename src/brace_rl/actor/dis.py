"""DIS: importance weights inside a band, nothing outside it, on both sides and for either sign of the advantage."""

from __future__ import annotations

from typing import Literal

from brace_rl.actor.contract import ActorBatch, ActorLoss
from brace_rl.actor.surrogates import check_edge, check_positive, log_ratio, weighted_likelihood


def dis(batch: ActorBatch, *, edge: Literal["E", "U"] = "E", eps_low: float = 0.3, eps_high: float = 5.0) -> ActorLoss:
    """``-sg(f(r)) A log target``, ``f(r) = r`` if ``1 - eps_low < r < 1 + eps_high`` and 0 otherwise.

    Direct double-sided importance sampling (GLM-5, arXiv 2602.15763; SAO, arXiv 2607.07508).

    Edge: ``r`` is E, target/behavior. With U, target/proximal, nothing corrects what was sampled by older weights.

    Published: ``eps_low`` / ``eps_high`` 0.3 / 5.0 for mathematics (the defaults) and 0.8 / 3.0 for code.

    Edge cases: the bounds do not belong to the band. ``eps_low = 1`` puts no bound below (a ratio of 0 counts nothing
    anyway). Unlike a PPO clip, it drops a token also where the gradient would bring its ratio back.
    """
    if not 0 < eps_low <= 1:
        raise ValueError(f"dis: eps_low = {eps_low}; must be above 0 and at most 1")
    check_positive(eps_high, "eps_high", rule="dis")
    check_edge(edge, "EU", rule="dis")
    ratio = log_ratio(batch, edge, rule="dis").exp()
    rejected = ~((ratio > 1 - eps_low) & (ratio < 1 + eps_high))
    return weighted_likelihood(batch, weight=ratio, rejected=rejected)
