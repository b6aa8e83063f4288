"""A framework's settings as nested mappings, from a file and ``key=value`` pairs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from brace_rl.errors import BraceError

LARGEST_BYTES = 2**20
"""A configuration is some thousand bytes; YAML of millions takes minutes to read."""


def read_settings(path: Path) -> dict[str, Any]:
    """Read a YAML or JSON file.

    Raises:
        BraceError: names the file.
    """
    yaml = _yaml()
    if not path.is_file():
        raise BraceError(f"{path}: {'is no file; name one' if path.exists() else 'no such file'}")
    try:
        size = path.stat().st_size
        if size > LARGEST_BYTES:
            raise BraceError(f"{path}: has {size:,} bytes, more than any configuration; is it another file?")
        text = path.read_text(encoding="utf-8")
        settings = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, ValueError, yaml.YAMLError) as error:
        raise BraceError(f"{path}: cannot be read as settings ({' '.join(str(error).split())})") from None
    except RecursionError:
        raise BraceError(f"{path}: cannot be read as settings (nested too deeply)") from None
    if not isinstance(settings, dict):
        raise BraceError(f"{path}: holds {type(settings).__name__}, must be a mapping of settings")
    return settings


def with_overrides(settings: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Lay ``a.b=value`` over settings, which are changed; Hydra's marks ``+`` and ``++`` before a key are ignored.

    Raises:
        BraceError: names the pair.
    """
    yaml = _yaml()
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
        except (yaml.YAMLError, RecursionError):
            raise BraceError(f"{pair}: the value cannot be read") from None
    return settings


def _yaml() -> Any:
    try:
        import yaml  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise BraceError("reading settings needs PyYAML; run: pip install pyyaml") from None
    return yaml
