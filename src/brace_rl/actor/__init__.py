"""Actor rules: what the policy's loss does about stale samples. One small file per rule, one contract.

``RULES[name](batch, **options)`` takes an :class:`ActorBatch` and returns an :class:`ActorLoss`. Begin with
:mod:`brace_rl.actor.contract`; ``docs/actor_rules.md`` has all rules in one table. The options of every rule as frozen
models, with what each rule needs, are in :mod:`brace_rl.actor.options`, which loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from brace_rl.actor.rules import RULES, SELECTORS, ActorBatch, ActorLoss, MissingInputError

__all__ = ["RULES", "SELECTORS", "ActorBatch", "ActorLoss", "MissingInputError"]


def __getattr__(name: str) -> Any:
    # Torch is loaded with the first rule that is asked for, not with the options, which the configuration reads.
    if name in __all__:
        from brace_rl.actor import rules

        return getattr(rules, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
