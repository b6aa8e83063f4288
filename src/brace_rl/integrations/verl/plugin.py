"""What verl loads: arranges that BRACE is there as soon as verl's trainers are.

Nothing here fails, since verl hides the errors of its plug-ins. What is wrong is said by ``brace doctor verl``, and by
a ``brace_*`` trainer that is asked for.
"""

from __future__ import annotations

import warnings
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from brace_rl.integrations.verl.versions import PATCHED_MODULES, TRAINERS_MODULE, Route, route_for
from brace_rl.integrations.versions import UnsupportedVersionError
from brace_rl.integrations.when_imported import when_imported

REJECTING_MODULE = "verl.trainer.ppo.rollout_corr_helper"


def _register(module: ModuleType) -> None:
    from brace_rl.integrations.verl import trainers

    trainers.register(module)


def _patch(module: ModuleType) -> None:
    from brace_rl.integrations.verl import patch

    patch.patch_advantage(module)


def _patch_rejection(module: ModuleType) -> None:
    from brace_rl.integrations.verl import patch

    patch.keep_action_mask(module)


def _refuse(error: UnsupportedVersionError) -> None:
    def refuse(module: ModuleType) -> None:
        warnings.warn(f"no brace_* trainers: {error}", stacklevel=2)

    when_imported(TRAINERS_MODULE, refuse)


def install(route: Route) -> None:
    """Wait for the modules that the route concerns."""
    if route == "trainers":
        when_imported(TRAINERS_MODULE, _register)
        return
    when_imported(REJECTING_MODULE, _patch_rejection)
    for name in PATCHED_MODULES:
        when_imported(name, _patch)


try:
    install(route_for(version("verl")))
except PackageNotFoundError:
    pass
except UnsupportedVersionError as error:
    _refuse(error)
