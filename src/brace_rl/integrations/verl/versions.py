"""Which verl can be had, and by which of the two routes."""

from __future__ import annotations

from typing import Literal

from brace_rl.integrations.versions import UnsupportedVersionError, release

SUPPORTED = "0.9.x (trainers brace_sync, brace_colocate_async, brace_separate_async) and 0.7 to 0.8 (patched in place)"

Route = Literal["trainers", "patch"]

TRAINERS_MODULE = "verl.trainer.ppo.v1"
"""Where the trainers of 0.9 are."""

PATCHED_MODULES = ("verl.trainer.ppo.ray_trainer", "verl.experimental.separation.ray_trainer")
"""Where the trainers before 0.9 call ``compute_advantage``."""


def route_for(version: str) -> Route:
    """How BRACE gets into this verl: by trainers of its own, or by patching ``compute_advantage``.

    Raises:
        UnsupportedVersionError: any other version; names the supported ones.
    """
    numbers = release(version)
    if numbers == (0, 9):
        return "trainers"
    if numbers in ((0, 7), (0, 8)):
        return "patch"
    raise UnsupportedVersionError(f"verl {version}: brace-rl supports {SUPPORTED}; install one of them")
