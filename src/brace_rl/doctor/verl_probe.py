"""Ask a Python process whether BRACE has reached verl in it. Imports verl: meant for a process of its own."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from brace_rl.doctor.fresh_process import answer
from brace_rl.integrations.versions import installed_version

GROUP = "verl.plugins"


def probe() -> dict[str, Any]:
    """What this process finds.

    Keys:
        ``verl``, ``brace``: installed versions, None where not installed.
        ``plugins``: entry points that verl loads, by name.
        ``registered``: names of BRACE's trainers in verl's registry; for the older versions the patched modules.
        ``error``: why the trainers could not be imported, or None.
    """
    found: dict[str, Any] = {
        "verl": installed_version("verl"),
        "brace": installed_version("brace-rl"),
        "plugins": {point.name: point.value for point in entry_points(group=GROUP)},
        "registered": [],
        "error": None,
    }
    if found["verl"] is None:
        return found
    try:
        # verl first: whether it loads the plug-in by itself is the question.
        import verl  # type: ignore[import-not-found]  # noqa: F401

        found["registered"] = _registered()
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return found


def _registered() -> list[str]:
    from importlib import import_module

    # Not the plug-in: importing it would install it here.
    from brace_rl.integrations.verl.versions import PATCHED_MODULES, TRAINERS_MODULE, route_for

    if route_for(str(installed_version("verl"))) == "trainers":
        registry = import_module(TRAINERS_MODULE).trainer_base.TRAINER_REGISTRY
        return sorted(name for name in registry if name.startswith("brace_"))
    modules = [import_module(name) for name in PATCHED_MODULES]
    return [module.__name__ for module in modules if getattr(module.compute_advantage, "is_brace", False)]


if __name__ == "__main__":
    answer(probe())
