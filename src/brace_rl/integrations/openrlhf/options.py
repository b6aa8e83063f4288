"""BRACE's options on OpenRLHF's command line, ``--brace.NAME VALUE``, and on their way to its workers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from brace_rl.errors import ConfigError
from brace_rl.integrations.checking import entry, options_from_node
from brace_rl.integrations.token_level import TokenLevelOptions

NODE = "brace"
FLAG = f"--{NODE}."

VARIABLE = "BRACE_OPENRLHF_OPTIONS"
"""Environment variable that carries the node, as JSON, to the processes of a run."""

ADVANTAGE = "algo.advantage"
"""OpenRLHF's section of discount, lambda and estimator."""

SET_BY_OPENRLHF = {
    "gamma": f"set --{ADVANTAGE}.gamma",
    "lam": f"set --{ADVANTAGE}.lambd",
    "whiten": f"advantages are whitened as OpenRLHF's own, see --{ADVANTAGE}.no_std_norm",
}
"""Options that the node does not take, and what to do instead."""


def split_arguments(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """BRACE's node and OpenRLHF's own arguments.

    Args:
        arguments: of the command line; a value of BRACE's follows its flag, or an equals sign.

    Raises:
        ConfigError: a flag without a value.
    """
    node: dict[str, Any] = {}
    rest: list[str] = []
    waiting = iter(arguments)
    for argument in waiting:
        if not argument.startswith(FLAG):
            rest.append(argument)
            continue
        name, equals, text = argument.removeprefix(FLAG).partition("=")
        if not equals:
            text = next(waiting, "")
        if not text or text.startswith("--"):
            raise ConfigError(f"{FLAG}{name}: has no value; give one after it")
        node[name] = _value(text)
    return node, rest


def settings_from_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """OpenRLHF's settings as nested mappings, as far as they are on its command line."""
    settings: dict[str, Any] = {}
    given: list[Any] = []
    for argument in arguments:
        if not argument.startswith("--"):
            given.append(_value(argument))
            continue
        name, equals, text = argument.removeprefix("--").partition("=")
        given = [_value(text)] if equals else []
        *parents, last = name.split(".")
        node = settings
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = given
    flat: dict[str, Any] = _flat(settings)
    return flat


def node_from_environment() -> dict[str, Any]:
    """The node as the launcher put it there; empty where there is none."""
    node: dict[str, Any] = json.loads(os.environ.get(VARIABLE) or "{}")
    return node


def options_from_settings(node: Mapping[str, Any], settings: Mapping[str, Any]) -> TokenLevelOptions:
    """Options from BRACE's node and OpenRLHF's settings.

    Raises:
        ConfigError: names the key.
    """
    gamma, lam = (_number(settings, f"{ADVANTAGE}.{name}") for name in ("gamma", "lambd"))
    set_by_openrlhf = {"gamma": gamma, "lam": lam, "whiten": False}
    return options_from_node(node, name=NODE, elsewhere=SET_BY_OPENRLHF, set_by_framework=set_by_openrlhf)


def _number(settings: Mapping[str, Any], key: str) -> float:
    given = entry(settings, key, 1.0)
    try:
        return float(given)
    except (TypeError, ValueError):
        raise ConfigError(f"{key} = {given!r}: must be a number") from None


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _flat(node: Any) -> Any:
    """Flags without a value are true, those with one are that, those with several keep a list."""
    if isinstance(node, dict):
        return {name: _flat(below) for name, below in node.items()}
    return True if not node else node[0] if len(node) == 1 else node
