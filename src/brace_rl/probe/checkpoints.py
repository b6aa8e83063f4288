"""Finds the checkpoints of pi and mu in a run folder and reads models from them; writes nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors
import torch
from safetensors.torch import load_file

from brace_rl.errors import BraceError
from brace_rl.training.checkpoint import CHECKPOINTS, FORMAT, checkpoint_step
from brace_rl.training.models import Critic, load_actor

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Pair:
    """The checkpoint folders of the target policy pi and the behaviour policy mu."""

    target: Path
    behavior: Path

    @property
    def step(self) -> int:
        """Completed trainer steps of pi."""
        return checkpoint_step(self.target)

    @property
    def behavior_step(self) -> int:
        """Completed trainer steps of mu."""
        return checkpoint_step(self.behavior)


def choose_pair(run_dir: Path, *, step: int | None, behavior_step: int | None, max_staleness: int) -> Pair:
    """pi: the newest checkpoint or that of ``step``. mu: that of ``behavior_step``, or the older one whose age, in
    trainer steps, is closest to ``max_staleness`` (of two equally close the younger).

    Raises:
        BraceError: a checkpoint that is not there, or none that could be mu.
    """
    saved = _saved(run_dir)
    if not saved:
        raise BraceError(f"{run_dir}: holds no complete checkpoint; set run.checkpoint_every and let the run save one")
    target = _at(run_dir, saved, saved[-1] if step is None else step, "--step")
    if behavior_step is not None:
        behavior = _at(run_dir, saved, behavior_step, "--behavior-step")
        if behavior > target:
            raise BraceError(f"--behavior-step: mu (step {behavior}) must not be newer than pi (step {target})")
        return Pair(_folder(run_dir, target), _folder(run_dir, behavior))
    older = [candidate for candidate in saved if candidate < target]
    if not older:
        raise BraceError(
            f"{run_dir}: holds no checkpoint older than step {target} that could be mu; train with a smaller "
            "run.checkpoint_every and a larger run.keep_checkpoints"
        )
    closest = min(older, key=lambda candidate: (abs(target - candidate - max_staleness), target - candidate))
    return Pair(_folder(run_dir, target), _folder(run_dir, closest))


def load_critic(checkpoint: Path, device: torch.device) -> Critic:
    """The critic of a checkpoint in float32, in eval mode.

    Raises:
        BraceError: it has none, it is damaged, or it is of another shape than the actor beside it.
    """
    path = checkpoint / "critic.safetensors"
    if not path.is_file():
        raise BraceError(
            f"{checkpoint}: has no critic (critic.safetensors), as runs with algorithm.value_target none have none; "
            "probe a run that trains one"
        )
    critic = Critic.from_actor(load_actor(checkpoint / "actor", dtype="float32", device=torch.device("cpu")))
    try:
        critic.load_state_dict(load_file(path))
    except (OSError, safetensors.SafetensorError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise BraceError(f"{path}: is damaged or not the critic of the actor beside it ({reason})") from error
    return critic.to(device).eval()


def check_format(checkpoint: Path) -> None:
    """Raise BraceError for a checkpoint that this version would misread."""
    path = checkpoint / "state.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["format"]
    except (OSError, ValueError, KeyError, TypeError):
        raise BraceError(f"{path}: is damaged; name another checkpoint with --step") from None
    if found != FORMAT:
        raise BraceError(f"{checkpoint}: has checkpoint format {found}, this version reads {FORMAT} only")


def _saved(run_dir: Path) -> list[int]:
    """Steps of the complete checkpoints, ascending."""
    steps = []
    for state in (run_dir / CHECKPOINTS).glob("step_*/state.json"):
        try:
            steps.append(checkpoint_step(state.parent))
        except BraceError:  # somebody's own folder
            continue
    return sorted(steps)


def _folder(run_dir: Path, step: int) -> Path:
    return run_dir / CHECKPOINTS / f"step_{step:06d}"


def _at(run_dir: Path, saved: Sequence[int], step: int, option: str) -> int:
    if step not in saved:
        listed = ", ".join(map(str, saved))
        raise BraceError(f"{option}: {run_dir} holds no checkpoint of step {step}; it holds {listed}")
    return step
