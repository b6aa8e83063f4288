"""Ask a Python process whether TorchRL there has what BRACE relies on. Imports it: meant for a process of its own."""

from __future__ import annotations

from dataclasses import fields
from inspect import signature
from typing import Any

from brace_rl.doctor.fresh_process import answer
from brace_rl.doctor.seam import differences, found_here
from brace_rl.integrations.torchrl.options import NODE
from brace_rl.integrations.torchrl.versions import check_torchrl

ESTIMATOR = "torchrl.objectives.value:ValueEstimatorBase"

SEAM = {
    f"{ESTIMATOR}.set_keys": ("self",),
    f"{ESTIMATOR}._get_time_dim": ("self", "time_dim", "data"),
    f"{ESTIMATOR}._call_value_nets": (
        "self",
        "data",
        "params",
        "next_params",
        "single_call",
        "value_key",
        "detach_next",
        "vmap_randomness",
    ),
    "torchrl.objectives.utils:hold_out_net": ("network",),
    "torchrl.objectives.utils:register_value_estimator": ("value_type",),
    "tensordict.nn:set_skip_existing.__init__": ("self", "mode"),
    "tensordict.nn:set_composite_lp_aggregate.__init__": ("self", "mode"),
}

ARGUMENTS = (
    "value_network",
    "shifted",
    "skip_existing",
    "device",
    "deactivate_vmap",
    "value_chunk_size",
    "num_chunks",
    "value_chunk_dim",
    "shifted_budget",
)
"""Of TorchRL's estimators, which ours passes on by name."""

KEYS = (
    "advantage",
    "value_target",
    "value",
    "reward",
    "done",
    "terminated",
    "steps_to_next_obs",
    "sample_log_prob",
)
"""Entries whose names ours asks for."""


def probe() -> dict[str, Any]:
    """What this process finds: see :func:`~brace_rl.doctor.seam.found_here`."""
    return found_here("torchrl", "tensordict", check_version=check_torchrl, look=_look)


def _look() -> list[str]:
    found = [*differences(SEAM), *_contents()]
    if not found:
        import brace_rl.integrations.torchrl.estimator  # noqa: F401
    return found


def _contents() -> list[str]:
    from torchrl.objectives import PPOLoss  # type: ignore[import-not-found]
    from torchrl.objectives.value import ValueEstimatorBase  # type: ignore[import-not-found]

    taken = signature(ValueEstimatorBase.__init__).parameters
    there = {key.name for key in fields(ValueEstimatorBase.default_keys)}
    missing = [f"ValueEstimatorBase: takes no {name}" for name in ARGUMENTS if name not in taken]
    missing += [f"ValueEstimatorBase: knows no key {name}" for name in KEYS if name not in there]
    if not hasattr(PPOLoss, "SUPPORTED_VALUE_ESTIMATORS"):
        missing.append(f"PPOLoss: has no list of estimators that {NODE} could be added to")
    return missing


if __name__ == "__main__":
    answer(probe())
