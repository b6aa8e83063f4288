"""What a verl configuration says about BRACE: the node ``algorithm.brace``, beside verl's own ``gamma`` and ``lam``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from brace_rl.errors import ConfigError
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
    node = dict(algorithm.get("brace") or {})
    for name, mend in SET_BY_VERL.items():
        if name in node:
            raise ConfigError(f"{NODE}.{name}: not an option here; {mend}")
    try:
        return TokenLevelOptions.from_mapping(
            {**node, "gamma": algorithm.get("gamma", 1.0), "lam": algorithm.get("lam", 1.0), "whiten": False}
        )
    except ValueError as error:
        raise ConfigError(f"{NODE}.{error}") from None
