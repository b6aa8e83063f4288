"""What a SkyRL configuration says about BRACE: the node ``trainer.algorithm.brace``, beside ``gamma`` and ``lambd``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from brace_rl.errors import ConfigError
from brace_rl.integrations.token_level import TokenLevelOptions

NODE = "trainer.algorithm.brace"

SET_BY_SKYRL = {
    "gamma": "set trainer.algorithm.gamma",
    "lam": "set trainer.algorithm.lambd",
    "whiten": "advantages are whitened by SkyRL's function, as its own GAE does it",
}
"""Options that the node does not take, and what to do instead."""


def options_from_algorithm(algorithm: Mapping[str, Any]) -> TokenLevelOptions:
    """Options from SkyRL's ``trainer.algorithm`` section; what the node leaves out keeps the paper's default.

    Raises:
        ConfigError: names the key.
    """
    node = dict(algorithm.get("brace") or {})
    for name, mend in SET_BY_SKYRL.items():
        if name in node:
            raise ConfigError(f"{NODE}.{name}: not an option here; {mend}")
    try:
        return TokenLevelOptions.from_mapping(
            {**node, "gamma": algorithm.get("gamma", 1.0), "lam": algorithm.get("lambd", 1.0), "whiten": False}
        )
    except ValueError as error:
        raise ConfigError(f"{NODE}.{error}") from None
