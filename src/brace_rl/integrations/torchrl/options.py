"""What a user says to the estimator, and what in it keeps BRACE from working. Imports no TorchRL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from brace_rl.errors import ConfigError
from brace_rl.integrations.checking import window_findings
from brace_rl.integrations.finding import Finding
from brace_rl.integrations.token_level import TokenLevelOptions

NODE = "brace"
"""Of a settings file that ``brace doctor torchrl`` is given, and the estimator's name in TorchRL's registry."""

DEFAULTS = {"gamma": 0.99, "whiten": False}
"""TorchRL's: its losses discount by this, and standardise advantages themselves if asked to."""

RENAMED = {
    "rho_thresh": "rho_clip",
    "c_thresh": "c_clip",
    "lmbda": "lam",
    "average_adv": "whiten",
}
"""Name in TorchRL's estimators -> name here."""


def options_from(given: Mapping[str, Any]) -> TokenLevelOptions:
    """Options of the estimator; what is left out keeps the paper's default, or TorchRL's of ``DEFAULTS``.

    Raises:
        ConfigError: names the option.
    """
    for theirs, ours in RENAMED.items():
        if theirs in given:
            raise ConfigError(f"{theirs}: no such option; it is called {ours} here")
    try:
        return TokenLevelOptions.from_mapping({**DEFAULTS, **given})
    except ValueError as error:
        raise ConfigError(str(error)) from None


def check_not_differentiable(differentiable: bool) -> None:
    """Refuse to promise a gradient.

    Raises:
        ConfigError: the option is set.
    """
    if differentiable:
        raise ConfigError("differentiable = True: targets and advantages carry no gradient; set differentiable=False")


def config_findings(settings: Mapping[str, Any]) -> list[Finding]:
    """Findings about the node ``brace``, which holds arguments of the estimator."""
    node = settings.get(NODE)
    if node is None:
        return [Finding("warning", f"{NODE}: not there, so there is nothing to look at", f"add it: {NODE}.window=16")]
    if not isinstance(node, Mapping):
        return [Finding("error", f"{NODE} = {node}: must hold the estimator's arguments", f"write {NODE}.window=16")]
    given = dict(node)
    try:
        check_not_differentiable(bool(given.pop("differentiable", False)))
        options = options_from(given)
    except ConfigError as error:
        return [Finding("error", f"{NODE}.{error}", "see docs/torchrl.md for the options")]
    return window_findings(options, lam=f"{NODE}.lam", window=f"{NODE}.window")
