"""Does a framework still have the functions that an adapter overrides or calls, and do they take what they took?

For probes: what is asked here is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from inspect import Parameter, signature
from typing import Any

Seam = Mapping[str, Sequence[str]]
"""``module:path.to.function`` -> names of the arguments it begins with; it must ask for no others."""


def differences(seam: Seam) -> list[str]:
    """What a call with those arguments would stumble over, one line each.

    Raises:
        Exception: whatever importing a module raises.
    """
    return [line for name, wanted in seam.items() for line in _differences(name, tuple(wanted))]


def one_line(error: Exception) -> str:
    """An error as a probe answers it."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _differences(name: str, wanted: tuple[str, ...]) -> list[str]:
    function = _at(name)
    if function is None:
        return [f"{name}: not there"]
    parameters = list(signature(function).parameters.values())
    begin = tuple(parameter.name for parameter in parameters[: len(wanted)])
    if begin != wanted:
        return [f"{name}: takes ({', '.join(begin)}), expected ({', '.join(wanted)})"]
    variadic = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    more = [x.name for x in parameters[len(wanted) :] if x.default is Parameter.empty and x.kind not in variadic]
    return [f"{name}: asks for {', '.join(more)} too"] if more else []


def _at(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = import_module(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found
