"""How a policy learns on an oracle. Standard library only."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from brace_rl.errors import BraceError

CRITIC_SEES = ("state", "position")


@dataclass(frozen=True)
class LearnConfig:
    """How one learning curve is made. Value clip and warm-up are the paper's; the actor's clips are its rule's options.

    Attributes:
        steps: trainer steps, warm-up included.
        batch: responses per step.
        lag: S, trainer steps between the weights that sample a batch and those it updates.
        seeds: independent runs.
        actor_lr, critic_lr: of Adam, on tables.
        critic_bins: stretches of positions the critic tells apart, at most the horizon.
        critic_sees: "state": the critic also tells all states of the task apart, so that it can be right everywhere;
            "position": it does not, and has to average over what it cannot see.
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
    critic_sees: str = "state"
    critic_warmup: int = 5
    value_clip: float = 0.5
    eval_every: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "seeds", "critic_bins", "eval_every"):
            if getattr(self, name) < 1:
                raise BraceError(f"{name} = {getattr(self, name)}: must be at least 1")
        if self.critic_sees not in CRITIC_SEES:
            raise BraceError(f"critic_sees = {self.critic_sees!r}: choose from {', '.join(CRITIC_SEES)}")
        for field in fields(self):
            if isinstance(getattr(self, field.name), str):
                continue
            if not 0 <= getattr(self, field.name) < math.inf:
                raise BraceError(f"{field.name} = {getattr(self, field.name)}: must be a number, 0 or more")
