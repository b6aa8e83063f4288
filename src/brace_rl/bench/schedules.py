"""Asynchronous against synchronous, and what the value target costs: the trainer itself, measured on a recipe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from brace_rl.errors import BraceError

WARMUP_STEPS = 3
"""First steps of every run, left out of the means: processes start, caches fill."""


@dataclass(frozen=True)
class Variant:
    """One run to measure: what it is called and the settings it changes."""

    name: str
    settings: tuple[tuple[str, object], ...]


def schedule_variants(max_staleness: int, cores: int) -> list[Variant]:
    """Every schedule at each sensible number of threads, so that each can be judged at its best."""
    variants = [
        Variant(
            f"sync, {threads} thread{'s' if threads > 1 else ''}",
            (("schedule.mode", "sync"), ("schedule.max_staleness", 0), ("schedule.learner_threads", threads)),
        )
        for threads in sorted({1, cores})
    ]
    for learner in sorted({1, max(1, cores - 1), cores}):
        variants.append(
            Variant(
                f"async, {learner} + 1 threads",
                (
                    ("schedule.mode", "async"),
                    ("schedule.max_staleness", max_staleness),
                    ("schedule.learner_threads", learner),
                    ("schedule.rollout_threads", 1),
                ),
            )
        )
    return variants


def target_variants(base: Variant) -> list[Variant]:
    """The same run with GAE and with BRACE as the critic's target."""
    return [Variant(target, (*base.settings, ("algorithm.value_target", target))) for target in ("gae", "brace")]


def measure(recipe: Path, variants: list[Variant], *, steps: int, model: Path) -> list[dict[str, Any]]:
    """Train each variant for ``steps`` steps from the same ``model``; means per step after the first few.

    Rows hold seconds, tokens, tokens per second and the value target's share of a step. Tokens per second is total
    tokens over total seconds, so that seconds x tokens per second = tokens.
    """
    rows: list[dict[str, Any]] = []
    for variant in variants:
        with TemporaryDirectory() as folder:
            metrics = _train(recipe, variant, steps=steps, model=model, root=Path(folder))
        seconds = fmean(row["time/step"] for row in metrics)
        tokens = fmean(row["tokens/step"] for row in metrics)
        rows.append(
            {
                "run": variant.name,
                "s/step": seconds,
                "tokens/step": tokens,
                "tokens/s": tokens / seconds,
                "waiting for rollouts": fmean(row["time/wait_rollouts"] for row in metrics) / seconds,
                "value target": fmean(row["time/targets"] for row in metrics) / seconds,
            }
        )
    return rows


def warm_started_model(recipe: Path, folder: Path) -> Path:
    """The actor every variant starts from: the recipe's after its warm start and one trainer step."""
    run(recipe, folder, {"optim.steps": 1, "optim.critic_warmup_steps": 0, "schedule.mode": "sync"})
    return folder / "run" / "checkpoints" / "step_000001" / "actor"


def run(recipe: Path, root: Path, settings: dict[str, object]) -> Path:
    """One ``brace train`` in a process of its own, without evaluation; returns the run's folder."""
    fixed = {"run.root": root, "run.name": "run", "run.trackers": "[]", "eval.every": 0, "eval.final_problems": 1}
    if settings.get("schedule.mode") == "sync":
        fixed |= {"schedule.max_staleness": 0, "schedule.sync_every": 1}
    words = [word for key, value in (fixed | settings).items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "brace_rl", "train", str(recipe), *words]
    # The number of threads is the recipe's business here, not the environment's.
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise BraceError(f"{recipe}: the measured run ended with exit code {done.returncode}: {' '.join(last)}")
    return root / "run"


def _train(recipe: Path, variant: Variant, *, steps: int, model: Path, root: Path) -> list[dict[str, float]]:
    settings: dict[str, object] = {
        "model.path": model,
        "warm_start.steps": 0,
        "optim.steps": WARMUP_STEPS + steps,
        "optim.critic_warmup_steps": 1,
    }
    folder = run(recipe, root, settings | dict(variant.settings))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["step"] > WARMUP_STEPS]
