"""The folder of a comparison: what of it is done, how each part is started, what is kept of its end.

================  =====================================================================================
``recipe.toml``   the recipe as it was when the comparison was started; cells read this copy
``starts/``       one warm-started actor per seed
``cells/``        one run folder per cell, as ``brace train`` writes it
``failures/``     exit code and error of the cells that ended in one
``logs/``         what the last process of each part printed
================  =====================================================================================

Names hold a digest of all settings, so a comparison with other settings in the same folder neither reads these cells
nor touches them.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from brace_rl.compare.plan import Cell, Plan, Start, identity, start_model
from brace_rl.config import load_resolved_config
from brace_rl.errors import BraceError, ConfigError
from brace_rl.files import write_json_atomic, write_text_atomic

Status = Literal["finished", "failed", "half done", "not run"]

FINISHED = "finished"

LOG_TAIL = 4096
"""Bytes of a log that are searched for the error at its end."""

UNREADABLE = "its files cannot be read"
"""Begins the error of a cell that has failed because of that."""

LONGEST_ERROR = 400
"""Characters kept of an error."""

# Where `brace train` leaves its files.
INITIAL_MODEL, CONFIG, SUMMARY, CHECKPOINTS = "initial", "config.json", "summary.json", "checkpoints"
LINES = ("metrics.jsonl", "samples.jsonl")
_STEP_FOLDER = re.compile(r"step_(\d{6,})")


class Failure(NamedTuple):
    """How a process ended that did not finish; the exit code of one ended by a signal is the signal's, negative."""

    exit_code: int
    error: str


class CompareFolder:
    """See the module's table.

    Args:
        keep_models: keep the last checkpoint of finished cells.
    """

    def __init__(self, out: Path, *, keep_models: bool = False) -> None:
        self.out = out
        self.keep_models = keep_models

    def prepare(self, recipe: Path) -> None:
        """Make the folder and take a copy of the recipe.

        Raises:
            BraceError: it cannot be written.
        """
        write_text_atomic(self.recipe, recipe.read_text(encoding="utf-8"))

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Hold the folder; yields a descriptor that keeps it held as long as any process that inherited it lives.

        Raises:
            BraceError: it is a file or cannot be made; or another comparison, or a cell that one left behind, is at
                work in it.
        """
        if self.out.exists() and not self.out.is_dir():
            raise BraceError(f"--out: {self.out} is a file; name a folder")
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.out / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise BraceError(f"--out: {self.out} cannot be made: {error.strerror}") from None
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise BraceError(
                    f"{self.out}: another brace compare, or a cell that one left behind, is at work in it; wait for it"
                ) from None
            yield descriptor
        finally:
            os.close(descriptor)

    def check_there(self) -> None:
        """There is something to report on.

        Raises:
            BraceError: no such folder.
        """
        if not self.out.is_dir():
            what = "is a file; name a folder" if self.out.exists() else "no such folder; name the one of a comparison"
            raise BraceError(f"--report: {self.out}: {what}")

    @property
    def recipe(self) -> Path:
        """The copy of the recipe."""
        return self.out / "recipe.toml"

    def run_dir(self, cell: Cell) -> Path:
        """The run folder of a cell."""
        return self.out / "cells" / cell.name

    def others(self, plan: Plan) -> int:
        """Cells in the folder that are none of the plan's."""
        ours = {cell.name for cell in plan.cells}
        return sum(path.name not in ours for path in (self.out / "cells").glob("*"))

    def log(self, name: str) -> Path:
        """What the last process of a start or cell printed."""
        return self.out / "logs" / f"{name}.txt"

    def has_start(self, start: Start) -> bool:
        """Whether the warm-started actor is there."""
        return (start_model(self.out, start.name) / "config.json").is_file()

    def status(self, cell: Cell) -> Status:
        """How far a cell is; one whose files cannot be read has failed.

        Raises:
            BraceError: a finished run of that name has other settings than the cell's.
        """
        run_dir = self.run_dir(cell)
        if self.unreadable(cell):
            return "failed"
        if _read(run_dir / SUMMARY).get("status") == FINISHED:
            if identity(load_resolved_config(run_dir)) != identity(cell.config):
                raise BraceError(f"{run_dir}: is not the cell its name says; delete it and the cell is run again")
            return "finished"
        if self._failure_file(cell).exists():
            return "failed"
        return "half done" if run_dir.exists() else "not run"

    def failure(self, cell: Cell) -> Failure | None:
        """How a failed cell ended."""
        if reason := self.unreadable(cell):
            return Failure(0, f"{UNREADABLE}: {reason}")
        if not self._failure_file(cell).exists():
            return None
        found = _read(self._failure_file(cell))
        exit_code, error = found.get("exit_code"), found.get("error")
        if isinstance(exit_code, int) and isinstance(error, str):
            return Failure(exit_code, error)
        return Failure(0, f"the record of how it ended is damaged: {self._failure_file(cell)}")

    def unreadable(self, cell: Cell) -> str:
        """Why the files of a cell's run cannot be read; empty where they can, or are not written yet."""
        run_dir = self.run_dir(cell)
        try:
            for path in (run_dir / CONFIG, run_dir / SUMMARY):
                if path.exists() and not isinstance(json.loads(path.read_bytes()), dict):
                    return f"{path.name} holds no JSON object"
            for path in (run_dir / name for name in LINES):
                if path.exists():
                    path.open("rb").close()
            if _read(run_dir / SUMMARY).get("status") == FINISHED:
                load_resolved_config(run_dir)
        except (ValueError, RecursionError):
            return f"{path.name} is not valid JSON"
        except OSError as error:
            return f"{path.name}: {error.strerror}"
        except ConfigError as error:
            return str(error)
        return ""

    def start_command(self, start: Start) -> list[str]:
        """The command that makes a warm start; what an earlier try left is removed."""
        shutil.rmtree(self.out / "starting" / start.name, ignore_errors=True)
        return _train(self.recipe, start.settings, method="ppo")

    def cell_command(self, cell: Cell) -> list[str]:
        """The command that runs a cell or goes on with it; what cannot be gone on with, or failed, is removed."""
        run_dir = self.run_dir(cell)
        if self.status(cell) == "half done" and 0 < _saved_step(run_dir) < cell.config.optim.steps:
            return [*_BRACE, "train", "--resume", str(run_dir)]
        self._failure_file(cell).unlink(missing_ok=True)
        shutil.rmtree(run_dir, ignore_errors=True)
        return _train(self.recipe, cell.settings, method=cell.base)

    def settle_start(self, start: Start, exit_code: int) -> None:
        """Put a warm start in its place.

        Raises:
            BraceError: its run failed, so that no cell of its seed can be run.
        """
        run_dir = self.out / "starting" / start.name
        if exit_code or not (run_dir / INITIAL_MODEL).is_dir():
            raise BraceError(f"warm start of seed {start.seed}: {self.error(start.name, exit_code)}")
        model = start_model(self.out, start.name)
        model.parent.mkdir(parents=True, exist_ok=True)
        os.replace(run_dir / INITIAL_MODEL, model)
        shutil.rmtree(run_dir, ignore_errors=True)

    def settle_cell(self, cell: Cell, exit_code: int) -> Failure | None:
        """Take in the end of a cell's process: None if it finished, else how it failed, which is kept."""
        if exit_code == 0 and self.status(cell) == "finished":
            self.drop_models(cell)
            return None
        failure = Failure(exit_code, self.error(cell.name, exit_code))
        write_json_atomic(self._failure_file(cell), failure._asdict())
        return failure

    def drop_models(self, cell: Cell) -> None:
        """Delete the checkpoints of a finished cell, unless models are kept."""
        if not self.keep_models:
            shutil.rmtree(self.run_dir(cell) / CHECKPOINTS, ignore_errors=True)

    def success(self, cell: Cell) -> float:
        """Success of a finished cell on the held-out problems; NaN where it was not evaluated."""
        after = _read(self.run_dir(cell) / SUMMARY).get("eval_after") or {}
        return float(after.get("eval/success", math.nan))

    def error(self, name: str, exit_code: int) -> str:
        """The error line a process ended with."""
        if exit_code < 0:
            return f"ended by {_signal_name(-exit_code)}, as when memory runs out"
        with suppress(OSError):
            with self.log(name).open("rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - LOG_TAIL))
                lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
            if lines:
                return lines[-1].removeprefix("error: ")[:LONGEST_ERROR]
        return f"ended with exit code {exit_code} and without a word"

    def _failure_file(self, cell: Cell) -> Path:
        return self.out / "failures" / f"{cell.name}.json"


_BRACE = (sys.executable, "-m", "brace_rl")


def check_command(plan: Plan, recipe: Path) -> list[str]:
    """``brace train --check`` of the first cell, for comparisons without a warm start to fail first."""
    return [*_train(recipe, plan.cells[0].settings, method=plan.cells[0].base), "--check"]


def _train(recipe: Path, settings: Mapping[str, str], *, method: str) -> list[str]:
    # key=value in one word: a value may begin with a dash.
    words = [f"--{key}={value}" for key, value in settings.items()]
    return [*_BRACE, "train", str(recipe), "--method", method, *words]


def _saved_step(run_dir: Path) -> int:
    """Step of the newest complete checkpoint; 0 without one."""
    complete = (path.parent.name for path in (run_dir / CHECKPOINTS).glob("step_*/state.json"))
    steps: Sequence[int] = [int(match[1]) for name in complete if (match := _STEP_FOLDER.fullmatch(name))]
    return max(steps, default=0)


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
