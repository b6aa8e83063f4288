"""What a SkyRL configuration says about BRACE: the node ``trainer.algorithm.brace``, beside ``gamma`` and ``lambd``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from brace_rl.errors import ConfigError
from brace_rl.integrations.checking import options_from_node
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
    if not isinstance(algorithm, Mapping):
        raise ConfigError(f"trainer.algorithm = {algorithm!r}: must be a section of settings")
    set_by_skyrl = {"gamma": algorithm.get("gamma", 1.0), "lam": algorithm.get("lambd", 1.0), "whiten": False}
    return options_from_node(
        algorithm.get("brace") or {}, name=NODE, elsewhere=SET_BY_SKYRL, set_by_framework=set_by_skyrl
    )
