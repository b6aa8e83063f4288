"""M2PO: drop the fewest tokens that bring the second moment of the log-ratio under a threshold."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from brace_rl.actor.contract import ActorBatch, ActorLoss
from brace_rl.actor.surrogates import check_positive, clip_anchor, clipped_surrogate, log_ratio

NO_CLIP_LOW, NO_CLIP_HIGH = 1.0, math.inf
"""A ratio is never below 0 nor above infinity."""


def m2po(batch: ActorBatch, *, edge: Literal["B", "E"] = "E", tau: float = 0.04) -> ActorLoss:
    """``-1[kept] A target/behavior`` (second-moment trust policy optimisation, arXiv 2510.01161).

    The tokens with the largest ``(log target - log behavior)^2`` are dropped until the rest of the minibatch averages
    below ``tau``. The mask takes the place of the clip.

    Edges: mask and ratio on E. With ``edge = "B"`` the moment is that of ``log proximal - log behavior`` and the ratio
    is on U, so that the choice does not move while the batch is trained on.

    Published: ``tau = 0.04``.

    Which tokens are dropped depends on the whole minibatch: with micro-batches call :func:`select` on it once and pass
    each micro-batch its part as ``batch.keep``; without ``keep`` the tensors given are taken for the minibatch.

    Edge cases: "below" is strict. Among equal moments earlier tokens are kept first. If even the smallest moment is not
    below ``tau``, every token is dropped.
    """
    clip_from = clip_anchor(batch, edge, rule="m2po")
    keep = select(batch, edge=edge, tau=tau) if batch.keep is None else batch.keep
    return clipped_surrogate(batch, anchor=clip_from, clip_low=NO_CLIP_LOW, clip_high=NO_CLIP_HIGH, rejected=~keep)


@torch.no_grad()
def select(batch: ActorBatch, *, edge: Literal["B", "E"] = "E", tau: float = 0.04) -> Tensor:
    """``[B, T]`` bool, the tokens of a whole minibatch that :func:`m2po` keeps, under the weights as they are now."""
    check_positive(tau, "tau", rule="m2po")
    moments = log_ratio(batch, edge, rule="m2po").square()
    # What is not in the mask comes last, and is never below tau.
    ordered, order = torch.where(batch.loss_mask, moments, math.inf).flatten().sort(stable=True)
    place = torch.arange(len(ordered), device=ordered.device)
    kept = (ordered.cumsum(0) / (place + 1) < tau).sum()
    return torch.zeros_like(order, dtype=torch.bool).scatter(0, order, place < kept).view_as(batch.loss_mask)
