"""Ask a Python process whether SkyRL there has what BRACE relies on. Imports SkyRL: meant for a process of its own."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from brace_rl.doctor.fresh_process import answer
from brace_rl.doctor.seam import differences, found_here, one_line
from brace_rl.integrations.skyrl.versions import DISTRIBUTION, check_skyrl

TRAINER = "skyrl.train.trainer:RayPPOTrainer"
ASYNCHRONOUS = "skyrl.train.fully_async_trainer:FullyAsyncRayPPOTrainer"

SEAM = {
    f"{TRAINER}.compute_advantages_and_returns": ("self", "data"),
    f"{ASYNCHRONOUS}.compute_advantages_and_returns": ("self", "data"),
    f"{TRAINER}._skip_policy_forward": ("self", "training_input"),
    f"{ASYNCHRONOUS}._skip_policy_forward": ("self", "training_input"),
    f"{TRAINER}.postprocess_generator_output": ("self", "generator_output", "uids"),
    f"{TRAINER}.convert_to_training_input": ("self", "generator_output", "uids"),
    "skyrl.train.entrypoints.main_base:BasePPOExp.get_trainer": ("self", "cfg"),
    "skyrl.backends.skyrl_train.utils.ppo_utils:masked_whiten": ("values", "mask"),
    "skyrl.train.config:SkyRLTrainConfig.from_cli_overrides": ("args",),
}
"""What is overridden or called -> the arguments it begins with; it must ask for no others that have no default."""

CHOOSES_PARTS = "skyrl.train.entrypoints.main_base:BasePPOExp.get_trainer"
"""The one whose further arguments are handed on by name, whatever they are."""


def probe(arguments: list[str]) -> dict[str, Any]:
    """What this process finds: as :func:`~brace_rl.doctor.seam.found_here`, and two things more.

    ``settings``: the configuration that SkyRL makes of the arguments, as nested mappings, or None; ``refused``: why it
    would not read them, or None.

    Args:
        arguments: ``key=value`` settings.
    """
    read: dict[str, Any] = {"settings": None, "refused": None}

    def look() -> list[str]:
        found = differences(SEAM, may_ask_for_more=(CHOOSES_PARTS,))
        from brace_rl.integrations.skyrl import launch

        try:
            read["settings"] = asdict(launch.config_from_arguments(arguments))
        except Exception as error:  # SkyRL's parser raises what its parts do.
            read["refused"] = one_line(error)
        return found

    return found_here(DISTRIBUTION, check_version=check_skyrl, look=look) | read


if __name__ == "__main__":
    answer(probe(sys.argv[1:]))
