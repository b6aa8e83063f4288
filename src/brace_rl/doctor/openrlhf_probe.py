"""Ask a Python process whether OpenRLHF there has what BRACE relies on. Imports it: meant for a process of its own."""

from __future__ import annotations

from importlib import import_module
from inspect import getsource
from typing import Any

from brace_rl.doctor.fresh_process import answer
from brace_rl.doctor.seam import differences, found_here
from brace_rl.integrations.openrlhf.hook import TRAINER_MODULE, install
from brace_rl.integrations.openrlhf.versions import DISTRIBUTION, check_openrlhf

MAKER = "openrlhf.trainer.ppo_utils.experience_maker:RemoteExperienceMaker"

SEAM = {
    f"{MAKER}.compute_advantages_and_returns": ("self", "experiences"),
    f"{MAKER}.get_advantages_and_returns": ("self", "values", "rewards", "action_mask", "gamma", "lambd"),
}


def probe() -> dict[str, Any]:
    """What this process finds: see :func:`~brace_rl.doctor.seam.found_here`."""
    return found_here(DISTRIBUTION, check_version=check_openrlhf, look=lambda: [*differences(SEAM), *_trainers()])


def _trainers() -> list[str]:
    """Whether the hook reaches the trainers, and they make their experience maker by the name it sets."""
    install()
    trainers = import_module(TRAINER_MODULE)
    here = f"{TRAINER_MODULE}.RemoteExperienceMaker"
    if trainers.RemoteExperienceMaker.__name__ != "BraceExperienceMaker":
        return [f"{here}: the hook has not reached it"]
    if "RemoteExperienceMaker(" not in getsource(trainers.BasePPOTrainer.__init__):
        return [f"{here}: not what the trainers call"]
    return []


if __name__ == "__main__":
    answer(probe())
