"""What an AReaL configuration says about BRACE: the node ``actor.brace``, beside ``discount`` and ``gae_lambda``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from brace_rl.errors import ConfigError
from brace_rl.integrations.checking import options_from_node
from brace_rl.integrations.token_level import TokenLevelOptions

NODE = "actor.brace"

SET_BY_AREAL = {
    "gamma": "set actor.discount",
    "lam": "set actor.gae_lambda",
    "whiten": "set actor.adv_norm, which AReaL whitens advantages by",
}
"""Options that the node does not take, and what to do instead."""


def options_from_actor(actor: Mapping[str, Any]) -> TokenLevelOptions:
    """Options from AReaL's ``actor`` section.

    Raises:
        ConfigError: names the key.
    """
    if not isinstance(actor, Mapping):
        raise ConfigError(f"actor = {actor!r}: must be a section of settings")
    set_by_areal = {"gamma": actor.get("discount", 1.0), "lam": actor.get("gae_lambda", 1.0), "whiten": False}
    return options_from_node(actor.get("brace") or {}, name=NODE, elsewhere=SET_BY_AREAL, set_by_framework=set_by_areal)
