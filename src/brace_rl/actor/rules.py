"""All actor rules by name."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from brace_rl.actor.a3po import a3po
from brace_rl.actor.cispo import cispo
from brace_rl.actor.contract import ActorBatch, ActorLoss, MissingInputError
from brace_rl.actor.decoupled import decoupled
from brace_rl.actor.dis import dis
from brace_rl.actor.estr import estr
from brace_rl.actor.gspo import gspo
from brace_rl.actor.icepop import icepop
from brace_rl.actor.kpop import kpop
from brace_rl.actor.m2po import m2po
from brace_rl.actor.m2po import select as select_m2po
from brace_rl.actor.ppo import ppo
from brace_rl.actor.ppo_ewma import ppo_ewma
from brace_rl.actor.ppo_ewma_revised import ppo_ewma_revised
from brace_rl.actor.tis import tis

__all__ = ["RULES", "SELECTORS", "ActorBatch", "ActorLoss", "MissingInputError", "Rule", "Selector"]


Rule = Callable[..., ActorLoss]
"""``rule(batch, **options)``: the loss on ``batch``. Options are keyword-only, those of each rule are in
:mod:`brace_rl.actor.options`. Raises MissingInputError for an input that is not there, ValueError for an option."""

Selector = Callable[..., Tensor]
"""``selector(batch, **options)``: ``[B, T]`` bool for ``ActorBatch.keep``, chosen on a whole minibatch under the rule's
own options, without gradient."""

RULES: dict[str, Rule] = {
    "ppo": ppo,
    "decoupled": decoupled,
    "a3po": a3po,
    "ppo_ewma": ppo_ewma,
    "ppo_ewma_revised": ppo_ewma_revised,
    "icepop": icepop,
    "kpop": kpop,
    "estr": estr,
    "dis": dis,
    "tis": tis,
    "gspo": gspo,
    "cispo": cispo,
    "m2po": m2po,
}
"""Name -> rule."""

SELECTORS: dict[str, Selector] = {"m2po": select_m2po}
"""Name -> selector, for the rules that decide on a token by looking at the whole minibatch."""
