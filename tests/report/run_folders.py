"""Run folders written by hand, so that the reader is tested against files and not against its writer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

CONFIG: Mapping[str, Any] = {
    "task": {"name": "calculator"},
    "model": {"path": "", "layers": 3, "hidden_size": 128},
    "schedule": {"mode": "async", "max_staleness": 4},
    "algorithm": {"value_target": "brace", "window": 100, "rho_clip": 1.2, "c_clip": 1.1},
    "optim": {"steps": 40, "critic_warmup_steps": 2},
    "run": {"seed": 0},
}

HEALTHY: Mapping[str, float] = {
    "reward/mean": 0.5,
    "reward/std": 0.5,
    "success/train": 0.5,
    "response/truncated": 0.01,
    "staleness/mean": 2.0,
    "staleness/max": 4.0,
    "ratio/ess": 0.8,
    "ratio/mean": 1.0,
    "ratio/log_abs_max": 0.7,
    "drift/m": -0.01,
    "target/abs_gap": 0.1,
    "window_weight/mean": 0.5,
    "window_weight/max": 2.0,
    "value/explained_variance": 0.4,
    "time/update": 0.6,
    "time/wait_rollouts": 0.3,
    "time/step": 1.0,
    "throughput/tokens_per_s": 900.0,
    "tokens/step": 900.0,
    "ledger/issued": 100.0,
    "ledger/consumed": 80.0,
    "ledger/dropped": 4.0,
    "ledger/in_flight": 16.0,
    "backend/restarts": 0.0,
}


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_run(
    directory: Path,
    *,
    rows: Iterable[Mapping[str, Any]] = (),
    samples: Iterable[Mapping[str, Any]] = (),
    summary: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] = CONFIG,
) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    write_lines(directory / "metrics.jsonl", rows)
    write_lines(directory / "samples.jsonl", samples)
    if summary is not None:
        (directory / "summary.json").write_text(json.dumps(summary))
    return directory


def healthy_rows(steps: int, **changed: Any) -> list[dict[str, Any]]:
    """An evaluation before training and ``steps`` unremarkable steps; ``changed`` replaces metrics ("/" as "__")."""
    replaced = {key.replace("__", "/"): value for key, value in changed.items()}
    before = {"step": 0, "eval/success": 0.25, "eval/problems": 512}
    return [before, *({"step": step, **HEALTHY, **replaced} for step in range(1, steps + 1))]


FINISHED: Mapping[str, Any] = {
    "status": "finished",
    "eval_before": {"eval/success": 0.25, "eval/problems": 512},
    "eval_after": {"eval/success": 0.75, "eval/problems": 512},
    "ledger": {"issued": 100, "consumed": 80, "dropped": 4, "in_flight": 16},
    "seconds": 90.0,
    "parameters": 870_912,
}
