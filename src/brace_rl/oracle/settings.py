"""How a policy learns on an oracle. Standard library only."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from brace_rl.errors import BraceError


@dataclass(frozen=True)
class LearnConfig:
    """How one learning curve is made. Clips and warm-up are the paper's.

    Attributes:
        steps: trainer steps, warm-up included.
        batch: responses per step.
        lag: S, trainer steps between the weights that sample a batch and those it updates.
        seeds: independent runs.
        actor_lr, critic_lr: of Adam, on tables.
        critic_bins: stretches of positions the critic tells apart, at most the horizon.
        critic_warmup: first steps, which leave the actor alone.
        eval_every: steps between two points of the curve.
        seed: of all random numbers.
    """

    steps: int = 200
    batch: int = 16
    lag: int = 10
    seeds: int = 20
    actor_lr: float = 0.05
    critic_lr: float = 0.05
    critic_bins: int = 32
    critic_warmup: int = 5
    clip_low: float = 0.20
    clip_high: float = 0.28
    value_clip: float = 0.5
    eval_every: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "seeds", "critic_bins", "eval_every"):
            if getattr(self, name) < 1:
                raise BraceError(f"{name} = {getattr(self, name)}: must be at least 1")
        for field in fields(self):
            if not 0 <= getattr(self, field.name) < math.inf:
                raise BraceError(f"{field.name} = {getattr(self, field.name)}: must be a number, 0 or more")
