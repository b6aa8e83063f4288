"""Checkpoints of a run: safetensors and JSON, written out of sight and renamed, so that one is whole or not there.

``RUN/checkpoints/step_000123/`` holds

=========================  ==========================================================================================
``actor/``                 the actor and its tokenizer, an ordinary ``transformers`` folder
``critic.safetensors``     the critic's ``state_dict``, value head included, where there is a critic
``optimizer.safetensors``  tensors of the optimisers' states, named ``optimizer.parameter.entry``
``optimizer.json``         their parameter groups, remaining entries and parameter shapes
``tensors.safetensors``    whatever else the loop keeps as tensors (snapshots, a weight average)
``buffer.jsonl``           answered prompts not yet consumed, one a line
``random.json``            random states of the process
``state.json``             format, library versions, counters and the loop's own state
=========================  ==========================================================================================
"""

from __future__ import annotations

import json
import platform
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import brace_rl
from brace_rl.errors import BraceError
from brace_rl.files import TEMPORARY_SUFFIX, atomic_directory, json_text, write_json_atomic
from brace_rl.training.models import read_actor, write_actor
from brace_rl.training.random_state import random_state, restore_random_state
from brace_rl.training.serialize import group_from_dict, group_to_dict
from brace_rl.training.types import RolloutGroup

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from brace_rl.training.models import Critic

FORMAT = 2
"""Raised whenever a reader of the previous format would misread a checkpoint."""

CHECKPOINTS = "checkpoints"
"""Folder of a run that holds its checkpoints."""

_STEP_FOLDER = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True)
class Checkpoint:
    """What :func:`load_checkpoint` hands back; models, optimisers and random states it restores in place."""

    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]
    groups: list[RolloutGroup]


def save_checkpoint(
    directory: str | Path,
    *,
    step: int,
    actor: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    critic: Critic | None,
    optimizers: Mapping[str, torch.optim.Optimizer],
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    groups: Sequence[RolloutGroup],
    keep: int,
) -> Path:
    """Write ``directory/checkpoints/step_NNNNNN`` and then delete the oldest beyond ``keep``; returns its path.

    Args:
        step: completed trainer steps.
        optimizers: by name (no dot in it).
        tensors: by any name; on any device; views and shared storage are fine.
        state: JSON-able, finite numbers (NaN and infinity come back as strings).
        groups: answered prompts not yet consumed.
        keep: newest checkpoints kept, at least 1. The one just written is always among them.

    Raises:
        BraceError: it cannot be written, a full disk included; earlier checkpoints are untouched.
    """
    parent = Path(directory) / CHECKPOINTS
    path = parent / f"step_{step:06d}"
    with atomic_directory(path) as folder:
        write_actor(actor, tokenizer, folder / "actor")
        if critic is not None:
            _save_tensors(critic.state_dict(), folder / "critic.safetensors")
        _save_optimizers(optimizers, folder)
        _save_tensors(tensors, folder / "tensors.safetensors")
        with (folder / "buffer.jsonl").open("w", encoding="ascii") as file:
            file.writelines(json_text(group_to_dict(group)) + "\n" for group in groups)
        write_json_atomic(folder / "random.json", random_state())
        header = {"format": FORMAT, "step": step, "libraries": _libraries(), "groups": len(groups)}
        write_json_atomic(folder / "state.json", {**header, "state": dict(state)})
    _prune(parent, keep=keep, newest=path)
    return path


def checkpoint_step(path: Path) -> int:
    """Completed trainer steps of the checkpoint at ``path``, from its name.

    Raises:
        BraceError: ``path`` is not named like a checkpoint.
    """
    match = _STEP_FOLDER.fullmatch(Path(path).name)
    if match is None:
        raise BraceError(f"{path}: is no checkpoint; one is named like {CHECKPOINTS}/step_000123")
    return int(match[1])


def latest_checkpoint(directory: str | Path) -> Path | None:
    """The checkpoint of the run in ``directory`` with most steps, or None; unfinished ones do not count."""
    found = _complete(Path(directory) / CHECKPOINTS)
    return found[-1] if found else None


def load_checkpoint(
    path: str | Path, *, actor: PreTrainedModel, critic: Critic | None, optimizers: Mapping[str, torch.optim.Optimizer]
) -> Checkpoint:
    """Restore the two models, the optimisers and the process's random states in place; return the rest.

    Training then goes on bit for bit as it would have without the break. Tensors come back on the CPU.

    Raises:
        BraceError: no checkpoint at ``path``, another format, a damaged file, or models or optimisers of another shape.
    """
    path = Path(path)
    header = _read_json(path / "state.json")
    if header.get("format") != FORMAT:
        raise BraceError(f"{path}: has checkpoint format {header.get('format')}, this version reads {FORMAT} only")
    groups = _read_groups(path / "buffer.jsonl")
    if len(groups) != header["groups"]:
        raise BraceError(f"{path / 'buffer.jsonl'}: holds {len(groups)} prompts instead of {header['groups']}")
    tensors = _load_tensors(path / "tensors.safetensors")
    _restore_module(actor, read_actor(path / "actor", actor.dtype).state_dict(), path / "actor")
    if critic is not None:
        _restore_module(critic, _load_tensors(path / "critic.safetensors"), path / "critic.safetensors")
    _load_optimizers(optimizers, path)
    # Last, because loading a model may draw.
    try:
        restore_random_state(_read_json(path / "random.json"))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise _damaged(path / "random.json", error) from error
    return Checkpoint(step=header["step"], tensors=tensors, state=header["state"], groups=groups)


def _complete(parent: Path) -> list[Path]:
    """Checkpoints in place under ``parent``, fewest steps first."""
    if not parent.is_dir():
        return []
    named = [child for child in parent.iterdir() if _STEP_FOLDER.fullmatch(child.name)]
    return sorted((child for child in named if (child / "state.json").is_file()), key=checkpoint_step)


def _prune(parent: Path, *, keep: int, newest: Path) -> None:
    others = [path for path in _complete(parent) if path != newest]
    for path in others[: max(0, len(others) - (keep - 1))]:
        # Renamed first: half-deleted, it must not look like a checkpoint.
        path.rename(path.with_name(f".{path.name}.pruned{TEMPORARY_SUFFIX}"))
    # The pruned ones, and whatever killed processes left behind.
    for leftover in parent.glob(f".step_*{TEMPORARY_SUFFIX}"):
        shutil.rmtree(leftover, ignore_errors=True)


def _save_optimizers(optimizers: Mapping[str, torch.optim.Optimizer], folder: Path) -> None:
    """Parameters are identified by their order, which is that of the module's definition."""
    tensors: dict[str, Tensor] = {}
    described: dict[str, Any] = {}
    for name, optimizer in optimizers.items():
        saved = optimizer.state_dict()
        values: dict[str, dict[str, Any]] = {}
        for index, entries in saved["state"].items():
            values[str(index)] = {key: value for key, value in entries.items() if not isinstance(value, Tensor)}
            tensors |= {f"{name}.{index}.{key}": value for key, value in entries.items() if isinstance(value, Tensor)}
        described[name] = {"param_groups": saved["param_groups"], "values": values, "shapes": _shapes(optimizer)}
    _save_tensors(tensors, folder / "optimizer.safetensors")
    write_json_atomic(folder / "optimizer.json", described)


def _load_optimizers(optimizers: Mapping[str, torch.optim.Optimizer], path: Path) -> None:
    described = _read_json(path / "optimizer.json")
    if set(described) != set(optimizers):
        raise BraceError(f"{path}: holds optimisers {sorted(described)}, this run has {sorted(optimizers)}")
    tensors = _load_tensors(path / "optimizer.safetensors")
    for name, optimizer in optimizers.items():
        if described[name]["shapes"] != _shapes(optimizer):
            raise BraceError(f"{path}: its {name} optimiser is of a model of another shape; resume with the same model")
        state = {int(index): dict(values) for index, values in described[name]["values"].items()}
        for key, tensor in tensors.items():
            owner, index, entry = key.split(".", 2)
            if owner == name:
                state[int(index)][entry] = tensor
        # JSON turned tuples (AdamW's betas) into lists; "params" are lists in a state_dict.
        groups = [
            {key: tuple(value) if key == "betas" else value for key, value in group.items()}
            for group in described[name]["param_groups"]
        ]
        optimizer.load_state_dict({"state": state, "param_groups": groups})


def _shapes(optimizer: torch.optim.Optimizer) -> list[list[list[int]]]:
    return [[list(parameter.shape) for parameter in group["params"]] for group in optimizer.param_groups]


def _restore_module(module: nn.Module, saved: Mapping[str, Tensor], path: Path) -> None:
    own = module.state_dict()
    differing = sorted(set(own) ^ set(saved))
    if differing:
        raise BraceError(f"{path}: is another model: only one of checkpoint and run has {differing[0]}")
    for name, tensor in own.items():
        if (tensor.shape, tensor.dtype) != (saved[name].shape, saved[name].dtype):
            there, here = (f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in (saved[name], tensor))
            raise BraceError(f"{path}: is another model: {name} is {there} there and {here} in this run")
    module.load_state_dict(saved)


def _save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    # Copied, because safetensors refuses tensors that share storage.
    save_file({name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}, path)


def _load_tensors(path: Path) -> dict[str, Tensor]:
    try:
        # Copied, because the tensors read are windows on a file that may be pruned or on a disk that may go away.
        return {name: tensor.clone() for name, tensor in load_file(path).items()}
    except (OSError, safetensors.SafetensorError) as error:
        raise _damaged(path, error) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error
    if not isinstance(data, dict):
        raise _damaged(path, TypeError("must hold a JSON object"))
    return data


def _read_groups(path: Path) -> list[RolloutGroup]:
    groups = []
    line_number = 0
    try:
        with path.open(encoding="ascii") as file:
            for line_number, line in enumerate(file, start=1):  # noqa: B007 (read in the except clause)
                groups.append(group_from_dict(json.loads(line)))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise _damaged(path, error, line_number) from error
    return groups


def _damaged(path: Path, error: BaseException, line_number: int = 0) -> BraceError:
    where = f"{path}, line {line_number}" if line_number else str(path)
    reason = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
    return BraceError(
        f"{where}: checkpoint is damaged or incomplete ({reason}); delete its step folder to resume from the one before"
    )


def _libraries() -> dict[str, str]:
    return {
        "brace_rl": brace_rl.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "safetensors": safetensors.__version__,
    }
