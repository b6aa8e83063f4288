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
from brace_rl.core.windows import DriftWindow, critic_free_advantages, drift_window, path_windows, window_weights

__all__ = [
    "DriftWindow",
    "LossResult",
    "ValueTargets",
    "brace_targets",
    "capped_targets",
    "critic_free_advantages",
    "drift_window",
    "gae_targets",
    "monte_carlo_targets",
    "path_windows",
    "ppo_clip_loss",
    "value_loss",
    "vtrace_targets",
    "whiten",
    "window_weights",
]
