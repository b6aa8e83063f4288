"""What a verl configuration says about BRACE: the node ``algorithm.brace``, beside verl's own ``gamma`` and ``lam``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from brace_rl.integrations.checking import options_from_node
from brace_rl.integrations.token_level import TokenLevelOptions

NODE = "algorithm.brace"

SET_BY_VERL = {
    "gamma": "set algorithm.gamma",
    "lam": "set algorithm.lam",
    "whiten": "verl whitens advantages itself",
}
"""Options that the node does not take, and what to do instead."""


def options_from_algorithm(algorithm: Mapping[str, Any]) -> TokenLevelOptions:
    """Options from verl's ``algorithm`` section; what the node leaves out keeps the paper's default.

    Whitening is left to verl, so that a run differs from verl's own in nothing but target and advantage.

    Raises:
        ConfigError: names the key.
    """
    set_by_verl = {"gamma": algorithm.get("gamma", 1.0), "lam": algorithm.get("lam", 1.0), "whiten": False}
    return options_from_node(
        algorithm.get("brace") or {}, name=NODE, elsewhere=SET_BY_VERL, set_by_framework=set_by_verl
    )
