"""What ``brace bench`` runs and prints."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from brace_rl.bench import scaling, schedules
from brace_rl.bench.generation import compare_generation
from brace_rl.bench.targets import SHAPE, measure_targets
from brace_rl.config import load_config
from brace_rl.errors import BraceError
from brace_rl.training.backends.ray_cluster import require_ray
from brace_rl.training.models import resolve_device

PARTS = ("targets", "generation", "schedules", "ray")
Rows = list[dict[str, Any]]


def run_bench(
    parts: Iterable[str], *, recipe: Path, device_name: str, steps: int, echo: Callable[[str], None]
) -> dict[str, Any]:
    """Measure the named parts, print a table for each, and return everything as JSON-able data."""
    device = resolve_device(device_name)
    results: dict[str, Any] = {"machine": describe_machine(device)}
    echo(" | ".join(f"{name}: {value}" for name, value in results["machine"].items()))
    for part in parts:
        measured = {"targets": _targets, "generation": _generation, "schedules": _schedules, "ray": _ray}[part](
            recipe, device, steps
        )
        for title, rows in measured.items():
            echo("")
            echo(render(title, rows))
        results[part] = measured
    return results


def _targets(recipe: Path, device: torch.device, steps: int) -> dict[str, Rows]:
    rows = measure_targets(device=device)
    by_name = {str(row["target"]): float(row["milliseconds"]) for row in rows}
    ratio = by_name["BRACE, window 1000"] / by_name["BRACE, window 10"]
    title = f"value targets, [{SHAPE[0]}, {SHAPE[1]}] float32, one thread (window 1000 takes {ratio:.2f} x window 10)"
    return {title: rows}


def _generation(recipe: Path, device: torch.device, steps: int) -> dict[str, Rows]:
    return {"generation, mixed lengths": compare_generation(device=device)}


def _schedules(recipe: Path, device: torch.device, steps: int) -> dict[str, Rows]:
    config = load_config(recipe)
    variants = schedules.schedule_variants(max(1, config.schedule.max_staleness), os.cpu_count() or 1)
    with TemporaryDirectory() as folder:
        model = schedules.warm_started_model(recipe, Path(folder))
        rows = schedules.measure(recipe, variants, steps=steps, model=model)
        fastest = {
            mode: max((row for row in rows if row["run"].startswith(mode)), key=lambda row: row["tokens/s"])
            for mode in ("sync", "async")
        }
        base = next(variant for variant in variants if variant.name == fastest["async"]["run"])
        targets = schedules.measure(recipe, schedules.target_variants(base), steps=steps, model=model)
    gain = fastest["async"]["tokens/s"] / fastest["sync"]["tokens/s"]
    best = f"{fastest['async']['run']} makes {gain:.2f} x the tokens/s of {fastest['sync']['run']}"
    return {
        f"schedules on {recipe} ({best})": rows,
        f"value target's share of a step ({base.name})": targets,
    }


def _ray(recipe: Path, device: torch.device, steps: int) -> dict[str, Rows]:
    try:
        require_ray()
    except BraceError as error:  # the other parts do not need it
        return {"rollouts over Ray": [{"not measured": str(error)}]}
    return {
        "rollouts over Ray, simulated engine": scaling.measure_scaling(),
        "schedules over Ray, long-tailed lengths, simulated engine and trainer": scaling.measure_long_tails(),
    }


def describe_machine(device: torch.device) -> dict[str, str]:
    """Where the numbers were measured."""
    machine = {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device.type == "cuda":
        machine["gpu"] = torch.cuda.get_device_name(device)
    return machine


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def render(title: str, rows: Rows) -> str:
    """A Markdown table, so that what is printed can be pasted into the documentation."""
    columns = list(rows[0])
    lines = [f"### {title}", "", _line(columns), _line(["---"] * len(columns))]
    return "\n".join([*lines, *(_line([_cell(row.get(column)) for column in columns]) for row in rows)])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
