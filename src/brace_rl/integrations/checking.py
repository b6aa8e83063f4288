"""What checks of any framework's configuration need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from brace_rl.errors import ConfigError
from brace_rl.integrations.finding import Finding
from brace_rl.integrations.token_level import WITH_WINDOW, TokenLevelOptions

LONG_WINDOW_LOSS = 0.1
"""Below this share of its weight, lambda to the power of the window leaves the return next to nothing."""


def entry(config: Mapping[str, Any], key: str, default: Any) -> Any:
    """The entry at a dotted key, or the default where any part of it is missing."""
    node: Any = config
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return default
        node = node[part]
    return node


def refuse(findings: Iterable[Finding]) -> None:
    """Stop on findings that are errors.

    Raises:
        ConfigError: all of them, each with its mend.
    """
    wrong = [finding for finding in findings if finding.severity == "error"]
    if wrong:
        raise ConfigError("; ".join(f"{finding.what}: {finding.mend}" for finding in wrong))


def options_from_node(
    node: Mapping[str, Any], *, name: str, elsewhere: Mapping[str, str], set_by_framework: Mapping[str, Any]
) -> TokenLevelOptions:
    """Options from a framework's node; what the node leaves out keeps the paper's default.

    Args:
        node: the options as the framework read them.
        name: of the node, for messages.
        elsewhere: options that the node does not take, and what to do instead.
        set_by_framework: their values.

    Raises:
        ConfigError: names the key.
    """
    if not isinstance(node, Mapping):
        raise ConfigError(f"{name} = {node!r}: must hold options, such as {name}.window=100")
    for option, mend in elsewhere.items():
        if option in node:
            raise ConfigError(f"{name}.{option}: not an option here; {mend}")
    try:
        return TokenLevelOptions.from_mapping({**node, **set_by_framework})
    except ValueError as error:
        raise ConfigError(f"{name}.{error}") from None


def window_findings(options: TokenLevelOptions, *, lam: str, window: str) -> list[Finding]:
    """A lambda below 1 that leaves a long window's return without weight.

    Args:
        lam, window: the framework's names of the two settings.
    """
    if not isinstance(options.window, int) or options.value_target not in WITH_WINDOW:
        return []
    kept = options.lam**options.window
    if kept >= LONG_WINDOW_LOSS:
        return []
    what = (
        f"{lam} = {options.lam:g} with {window} = {options.window}: the return keeps at most {kept:.2g} of its weight"
    )
    return [Finding("warning", what, f"set {lam}=1.0 (the framework's own advantage is not used), or a shorter window")]
