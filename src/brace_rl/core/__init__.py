"""The method: value targets, windows and losses. Pure functions on tensors; imports torch alone.

Begin with :mod:`brace_rl.core.brace`.
"""

from brace_rl.core.brace import (
    ValueTargets,
    brace_targets,
    capped_targets,
    gae_targets,
    monte_carlo_targets,
    vtrace_targets,
)
from brace_rl.core.losses import LossResult, ppo_clip_loss, value_loss, whiten

__all__ = [
    "LossResult",
    "ValueTargets",
    "brace_targets",
    "capped_targets",
    "gae_targets",
    "monte_carlo_targets",
    "ppo_clip_loss",
    "value_loss",
    "vtrace_targets",
    "whiten",
]
