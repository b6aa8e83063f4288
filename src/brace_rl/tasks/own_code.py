"""Imports a user's own Python file: code they wrote and named, never a model's or a data set's."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from brace_rl.errors import ConfigError

_own_files: dict[str, Path] = {}
"""Files imported so far, by their resolved paths, as they were named."""


def own_module(path: Path, *, setting: str, form: str) -> ModuleType:
    """The module in ``path``, imported once per process.

    Args:
        setting: that named it, for the errors.
        form: what the setting should look like.

    Raises:
        ConfigError: no such file, or importing it fails; names the line.
    """
    if not path.is_file():
        raise ConfigError(f"{setting}: {path}: no such file; write {form}")
    resolved = path.resolve()
    # A name that depends on the path alone, so that objects of the module can be pickled within a run.
    module_name = f"brace_rl_task_{resolved.stem}_{hashlib.blake2b(str(resolved).encode(), digest_size=6).hexdigest()}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, resolved)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{setting}: {path}: not a Python file; write {form}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    _own_files[str(resolved)] = path
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise ConfigError(f"{setting}: {fault_in_own_code(error) or f'{path}: {_spoken(error)}'}") from error
    return module


def fault_in_own_code(error: BaseException) -> str | None:
    """``file:line: what happened`` for an error raised on the way through a user's file; None for any other."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in _own_files]
    return f"{_own_files[frames[-1].filename]}:{frames[-1].lineno}: {_spoken(error)}" if frames else None


def _spoken(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
