"""Learning rates that know about staleness.

The bias that a gradient step takes from samples ``S`` steps old grows with ``S eta`` (arXiv 2607.01083): the helpers
keep that product, and the metrics ``actor/staleness_lr`` and ``actor/lr_total`` show it and ``T eta``.
"""

from __future__ import annotations

from torch import Tensor


def staleness_scaled_lr(lr: float, *, staleness: float, reference: float) -> float:
    """``eta(S) = eta_ref min(1, S_ref / S)`` (arXiv 2607.01083, there without the minimum).

    Args:
        lr: ``eta_ref``, what was found to work at ``reference``.
        staleness: S; at or below the reference the rate is left as it is, so that S = 0 does not make it infinite.
        reference: ``S_ref``, above 0.
    """
    return lr * min(1.0, reference / staleness) if staleness > 0 else lr


def ess_scaled_lr(lr: float, ess: Tensor) -> Tensor:
    """``lr`` times the square root of the effective sample size as a share of the batch (VCPO, arXiv 2602.17616).

    Args:
        ess: scalar in (0, 1]; here that of the tokens' ratios, where the paper takes those of whole responses.
    """
    return lr * ess.clamp(0.0, 1.0).sqrt()
