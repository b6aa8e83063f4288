"""What probes of a framework share: which version is there, and does it still have what an adapter relies on?

For processes of their own: what is asked here is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from inspect import Parameter, signature
from typing import Any

from brace_rl.integrations.versions import UnsupportedVersionError, installed_version

Seam = Mapping[str, Sequence[str]]
"""``module:path.to.function`` -> names of the arguments it begins with; it must ask for no others."""


def found_here(
    framework: str, *others: str, check_version: Callable[[str], object], look: Callable[[], list[str]]
) -> dict[str, Any]:
    """What a probe answers.

    Args:
        framework: its distribution.
        others: distributions whose versions are told too.
        check_version: raises UnsupportedVersionError where the adapter does not support this version of the framework;
            nothing of it is imported then.
        look: imports the framework and returns what is not there or other than expected, one line each.

    Returns:
        The installed version of each distribution and of ``brace``, None where not installed; ``error``: why the
        framework cannot be imported, or None; ``seam``: what ``look`` returned.
    """
    found: dict[str, Any] = {name: installed_version(name) for name in (framework, *others)}
    found |= {"brace": installed_version("brace-rl"), "error": None, "seam": []}
    try:
        check_version(found[framework] or "")
    except UnsupportedVersionError:
        return found
    try:
        found["seam"] = look()
    except Exception as error:
        found["error"] = one_line(error)
    return found


def differences(seam: Seam, *, may_ask_for_more: Collection[str] = ()) -> list[str]:
    """What a call with those arguments would stumble over, one line each.

    Args:
        may_ask_for_more: names in ``seam`` whose further arguments are handed on, whatever they are.

    Raises:
        Exception: whatever importing a module raises.
    """
    found = {name: _difference(name, tuple(wanted), name in may_ask_for_more) for name, wanted in seam.items()}
    return [f"{name}: {line}" for name, line in found.items() if line]


def one_line(error: Exception) -> str:
    """An error as a probe answers it."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _difference(name: str, wanted: tuple[str, ...], may_ask_for_more: bool) -> str | None:
    function = _at(name)
    if function is None:
        return "not there"
    parameters = list(signature(function).parameters.values())
    begin = tuple(parameter.name for parameter in parameters[: len(wanted)])
    if begin != wanted:
        return f"takes ({', '.join(begin)}), expected ({', '.join(wanted)})"
    variadic = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    more = [x.name for x in parameters[len(wanted) :] if x.default is Parameter.empty and x.kind not in variadic]
    return f"asks for {', '.join(more)} too" if more and not may_ask_for_more else None


def _at(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = import_module(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found
