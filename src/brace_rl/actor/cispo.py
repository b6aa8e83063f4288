"""CISPO: clip the weight, not the update, so that every token keeps its gradient."""

from __future__ import annotations

from typing import Literal

from brace_rl.actor.contract import ActorBatch, ActorLoss
from brace_rl.actor.surrogates import capped_weight, check_edge, check_positive, log_ratio, weighted_likelihood


def cispo(batch: ActorBatch, *, edge: Literal["E", "U"] = "E", cap: float = 5.0) -> ActorLoss:
    """``-sg(clip(r, 0, cap)) A log target`` (MiniMax-M1, arXiv 2506.13585).

    Edge: ``r`` is E, target/behavior. With U, target/proximal, nothing corrects what was sampled by older weights.

    Published: no bound below; a cap of 5 above.

    Edge cases: no token is rejected, and none is clipped; ``capped_fraction`` counts the weights that met the cap.
    """
    check_positive(cap, "cap", rule="cispo")
    check_edge(edge, "EU", rule="cispo")
    weight, capped = capped_weight(log_ratio(batch, edge, rule="cispo"), cap)
    return weighted_likelihood(batch, weight=weight, capped=capped)
