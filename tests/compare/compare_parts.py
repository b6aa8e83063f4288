"""Cells without training: processes that write what ``brace train`` would leave, at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from brace_rl.compare.folder import CompareFolder
from brace_rl.compare.plan import Plan, make_plan
from brace_rl.config import Config, load_config, load_resolved_config
from brace_rl.overrides import split_overrides

RECIPE = """
[task]
name = "calculator"

[warm_start]
steps = 2

[rollout]
prompts_per_step = 4

[optim]
steps = 4
critic_warmup_steps = 1

[eval]
every = 2
"""


def write_recipe(folder: Path, text: str = RECIPE) -> Path:
    path = folder / "small.toml"
    path.write_text(text)
    return path


def plan_for(tmp_path: Path, text: str = RECIPE, **changed: Any) -> Plan:
    arguments: dict[str, Any] = {"methods": ["ppo", "brace"], "staleness": [2], "seeds": [0, 1], "overrides": {}}
    return make_plan(write_recipe(tmp_path, text), out=tmp_path / "out", **{**arguments, **changed})


def folder_for(tmp_path: Path, **options: Any) -> CompareFolder:
    return CompareFolder(tmp_path / "out", **options)


class Ended:
    """A process that has ended."""

    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code

    def poll(self) -> int | None:
        return self.exit_code

    def terminate(self) -> None:
        raise AssertionError("an ended process is not stopped")

    kill = terminate


class FakeTrainer:
    """Launches ``brace train`` commands without running anything.

    Args:
        success: of a cell's configuration and step.
        fail: the error a cell ends with, or None; called with its configuration.

    Attributes:
        commands: that were launched, without the interpreter.
    """

    def __init__(
        self,
        success: Callable[[Config, int], float] = lambda config, step: 0.25 + 0.125 * step,
        fail: Callable[[Config], str | None] = lambda config: None,
    ) -> None:
        self.success, self.fail = success, fail
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], log: Path, inherited: int) -> Ended:
        words = list(command)[command.index("train") + 1 :]
        self.commands.append(words)
        if words[0] == "--resume":
            config = load_resolved_config(Path(words[1]))
        else:
            overrides, _ = split_overrides(words[3:])
            config = load_config(words[0], overrides, method=words[2])
        log.parent.mkdir(parents=True, exist_ok=True)
        error = self.fail(config)
        log.write_text(f"some output\nerror: {error}\n" if error else "report: x\n")
        if "--check" not in words:
            self._write(config, failed=error is not None)
        return Ended(2 if error else 0)

    @property
    def new_runs(self) -> list[str]:
        """Names of the runs that were started, not gone on with."""
        return [word.partition("=")[2] for words in self.commands for word in words if word.startswith("--run.name=")]

    def _write(self, config: Config, *, failed: bool) -> None:
        run = Path(config.run.root) / config.run.name
        (run / "initial").mkdir(parents=True, exist_ok=True)
        (run / "initial" / "config.json").write_text("{}")
        (run / "config.json").write_text(json.dumps(config.model_dump(mode="json")))
        checkpoint = run / "checkpoints" / "step_000004"
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / "state.json").write_text("{}")
        last = 3 if failed else config.optim.steps
        rows = [self._row(config, step) for step in range(last + 1)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        after = None if failed else {"eval/success": self.success(config, last)}
        summary = {
            "status": "failed" if failed else "finished",
            "eval_before": {"eval/success": self.success(config, 0)},
            "eval_after": after,
        }
        (run / "summary.json").write_text(json.dumps(summary))

    def _row(self, config: Config, step: int) -> Mapping[str, Any]:
        row: dict[str, Any] = {"step": step}
        if step % 2 == 0:
            row |= {"eval/success": self.success(config, step), "eval/reward": 0.5}
        if step:
            row |= {
                "value/mean": 0.25,
                "reward/mean": 0.375,
                "ratio/ess": 1 - step / 8,
                "critic/grad_norm": 2.0,
                "advantage/abs_max": float(step),
                "target/abs_gap": 0.1,
                "time/step": 0.5,
                "tokens/step": 100.0,
            }
        return row
