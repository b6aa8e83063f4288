"""Settings on a command line: ``--section.key value``. Torch-free."""

from __future__ import annotations

import sys
from typing import Any

from brace_rl.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def split_overrides(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """The settings among ``arguments``, ``--section.key value`` or ``--section.key=value``, and the rest, in order.

    Raises:
        ConfigError: a setting without a value.
    """
    overrides: dict[str, str] = {}
    others: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or "." not in key:
            others.append(word)
            continue
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"--{key}: needs a value")
            value = rest.pop(0)
        overrides[key] = value
    return overrides, others


def parse_text(text: str) -> Any:
    """A setting given as text: a TOML value where it is one (numbers, booleans, lists), the text itself otherwise."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
