"""Ask a Python process whether SkyRL there has what BRACE relies on. Imports SkyRL: meant for a process of its own."""

from __future__ import annotations

import sys
from importlib import import_module
from inspect import Parameter, signature
from typing import Any

from brace_rl.doctor.fresh_process import answer
from brace_rl.integrations.skyrl.versions import DISTRIBUTION, check_skyrl
from brace_rl.integrations.versions import UnsupportedVersionError, installed_version

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
    """What this process finds.

    Args:
        arguments: ``key=value`` settings to be read by SkyRL's own configuration.

    Keys:
        ``skyrl``, ``brace``: installed versions, None where not installed.
        ``error``: why SkyRL's trainers could not be imported, or None.
        ``seam``: differences from :data:`SEAM`, one line each.
        ``settings``: the configuration made of the arguments, as nested mappings, or None.
        ``refused``: why SkyRL would not read them, or None.
    """
    found: dict[str, Any] = {"skyrl": installed_version(DISTRIBUTION), "brace": installed_version("brace-rl")}
    found |= {"error": None, "seam": [], "settings": None, "refused": None}
    try:
        check_skyrl(found["skyrl"] or "")
    except UnsupportedVersionError:
        return found
    try:
        found["seam"] = [line for name, wanted in SEAM.items() for line in differences(_at(name), name, wanted)]
        from brace_rl.integrations.skyrl import launch
    except Exception as error:
        found["error"] = _line(error)
        return found
    try:
        from dataclasses import asdict

        found["settings"] = asdict(launch.config_from_arguments(arguments))
    except Exception as error:  # SkyRL's parser raises what its parts do.
        found["refused"] = _line(error)
    return found


def differences(function: Any, name: str, wanted: tuple[str, ...]) -> list[str]:
    """What a call with the wanted arguments would stumble over; one line, or none."""
    if function is None:
        return [f"{name}: not there"]
    parameters = list(signature(function).parameters.values())
    begin = tuple(parameter.name for parameter in parameters[: len(wanted)])
    if begin != wanted:
        return [f"{name}: takes ({', '.join(begin)}), expected ({', '.join(wanted)})"]
    variadic = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    more = [x.name for x in parameters[len(wanted) :] if x.default is Parameter.empty and x.kind not in variadic]
    if more and name != CHOOSES_PARTS:
        return [f"{name}: asks for {', '.join(more)} too"]
    return []


def _at(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = import_module(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


if __name__ == "__main__":
    answer(probe(sys.argv[1:]))
