"""Puts BRACE's experience maker in the place of OpenRLHF's, in whichever process makes experiences.

Ray runs :func:`install` in every worker as it starts. Nothing of OpenRLHF is imported before OpenRLHF does.
"""

from __future__ import annotations

from types import ModuleType

from brace_rl.integrations.when_imported import when_imported

TRAINER_MODULE = "openrlhf.trainer.ppo_trainer"
"""Where OpenRLHF's trainers, synchronous and asynchronous, make their experience maker."""

HOOK = "brace_rl.integrations.openrlhf.hook.install"
"""As Ray's ``worker_process_setup_hook`` takes it."""


def install() -> None:
    """Wait for OpenRLHF's trainers."""
    when_imported(TRAINER_MODULE, _put_in_place)


def _put_in_place(module: ModuleType) -> None:
    from brace_rl.integrations.openrlhf.maker import BraceExperienceMaker

    module.RemoteExperienceMaker = BraceExperienceMaker  # type: ignore[attr-defined]
