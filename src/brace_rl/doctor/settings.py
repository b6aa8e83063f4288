"""A framework's settings as nested mappings, from a file and ``key=value`` pairs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from brace_rl.errors import BraceError


def read_settings(path: Path) -> dict[str, Any]:
    """Read a YAML or JSON file.

    Raises:
        BraceError: names the file.
    """
    import yaml  # type: ignore[import-untyped]

    try:
        text = path.read_text(encoding="utf-8")
        settings = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, ValueError, yaml.YAMLError) as error:
        raise BraceError(f"{path}: cannot be read as settings ({' '.join(str(error).split())})") from None
    if not isinstance(settings, dict):
        raise BraceError(f"{path}: holds {type(settings).__name__}, must be a mapping of settings")
    return settings


def with_overrides(settings: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Lay ``a.b=value`` over settings, which are changed; Hydra's marks ``+`` and ``++`` before a key are ignored.

    Raises:
        BraceError: names the pair.
    """
    import yaml  # type: ignore[import-untyped]

    for pair in overrides:
        key, _, text = pair.partition("=")
        *parents, last = key.lstrip("+").split(".")
        node = settings
        for parent in parents:
            below = node.setdefault(parent, {})
            if not isinstance(below, dict):
                raise BraceError(f"{pair}: {parent} holds a value, not settings")
            node = below
        try:
            node[last] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise BraceError(f"{pair}: the value cannot be read") from None
    return settings
