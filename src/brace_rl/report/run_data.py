"""Reads the folder of a run, however far the run got."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from brace_rl.errors import BraceError

Series = list[tuple[float, float]]
"""(step, value) pairs, steps ascending; a value that was not finite is NaN."""


@dataclass(frozen=True)
class Evaluation:
    """Success on held-out problems at one step; ``problems`` is 0 when the count is unknown."""

    step: int
    success: float
    problems: int = 0

    def interval(self) -> tuple[float, float] | None:
        """95 % interval of the success rate (:func:`wilson_interval`); None when the count is unknown."""
        return wilson_interval(self.success, self.problems) if self.problems > 0 else None


@dataclass(frozen=True)
class RunData:
    """What was found.

    Attributes:
        config: ``config.json``, section -> key -> value.
        rows: ``metrics.jsonl``, one mapping per step, ascending; numbers only, NaN where a figure was not finite.
        samples: ``samples.jsonl`` in file order.
        summary: ``summary.json``; empty while the run goes on, or when it was killed.
        damage: sentences about lines that could not be read.
    """

    directory: Path
    config: Mapping[str, Any]
    rows: Sequence[Mapping[str, float]] = ()
    samples: Sequence[Mapping[str, Any]] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)
    damage: Sequence[str] = ()

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.directory.resolve().name

    @property
    def status(self) -> str:
        """What the summary says; "unfinished" without one."""
        return str(self.summary.get("status", "unfinished"))

    @property
    def training_rows(self) -> list[Mapping[str, float]]:
        """Rows of trainer steps; the evaluation before training is not one."""
        return [row for row in self.rows if row["step"] > 0]

    @property
    def keys(self) -> list[str]:
        """Every metric that occurs, in order of appearance."""
        return [key for key in dict.fromkeys(key for row in self.rows for key in row) if key != "step"]

    def setting(self, key: str, default: Any = "") -> Any:
        """``setting("schedule.mode")``; ``default`` when this run's configuration does not hold it."""
        section, _, name = key.partition(".")
        table = self.config.get(section)
        return table.get(name, default) if isinstance(table, dict) else default

    def series(self, key: str) -> Series:
        """The steps that logged ``key``."""
        return [(row["step"], row[key]) for row in self.rows if key in row]

    def last(self, key: str) -> float | None:
        """The newest finite value of ``key``."""
        return next((value for _, value in reversed(self.series(key)) if math.isfinite(value)), None)

    def ledger(self) -> dict[str, float]:
        """Prompts issued, consumed, dropped and in flight (and what else was counted), at the end or last seen."""
        from_summary = self.summary.get("ledger")
        if isinstance(from_summary, dict):
            return {str(name): float(value) for name, value in from_summary.items() if _is_number(value)}
        names = [key for key in self.keys if key.startswith("ledger/")]
        found = {name.removeprefix("ledger/"): self.last(name) for name in names}
        return {name: value for name, value in found.items() if value is not None}

    def evaluations(self) -> list[Evaluation]:
        """Every evaluation, ascending; those before and after training may be in the summary alone."""
        found = {int(row["step"]): _evaluation(int(row["step"]), row) for row in self.rows}
        last_step = int(self.rows[-1]["step"]) if self.rows else 0
        for key, step in (("eval_before", 0), ("eval_after", last_step)):
            figures = self.summary.get(key)
            if isinstance(figures, dict):
                found[step] = _evaluation(step, figures) or found.get(step)
        return [evaluation for _, evaluation in sorted(found.items()) if evaluation is not None]


def read_run(directory: Path | str) -> RunData:
    """Read a run folder.

    A run that was killed, that is going on, or that never finished a step can be read; a half-written line is left out
    and noted in ``damage``.

    Raises:
        BraceError: not a run folder, or its ``config.json`` or ``summary.json`` is not what a run writes.
    """
    directory = Path(directory)
    if not (directory / "config.json").is_file():
        raise BraceError(f"{directory}: not a run folder (no config.json in it); name a folder such as runs/NAME")
    damage: list[str] = []
    rows: dict[int, dict[str, float]] = {}
    for row in _read_lines(directory / "metrics.jsonl", damage):
        numbers = _numbers(row)
        rows.setdefault(int(row["step"]), {}).update(numbers)
    return RunData(
        directory=directory,
        config=_read_object(directory / "config.json"),
        rows=[rows[step] for step in sorted(rows)],
        samples=_read_lines(directory / "samples.jsonl", damage),
        summary=_read_object(directory / "summary.json") if (directory / "summary.json").is_file() else {},
        damage=damage,
    )


def wilson_interval(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval for a share of ``count`` independent trials; ``z = 1.96`` gives 95 %.

    Unlike the textbook interval it stays inside [0, 1] and keeps a width at 0 and 1.
    """
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def _evaluation(step: int, figures: Mapping[str, Any]) -> Evaluation | None:
    """From a metrics row or a summary entry, whose keys may or may not carry the ``eval/`` prefix."""
    success = figures.get("eval/success", figures.get("success"))
    problems = figures.get("eval/problems", figures.get("problems", 0))
    if not _is_number(success) or not 0 <= success <= 1:
        return None
    return Evaluation(step, float(success), int(problems) if _is_number(problems) else 0)


def _read_lines(path: Path, damage: list[str]) -> list[dict[str, Any]]:
    """Whole lines that are objects with an integer "step"; what is left out is told in ``damage``."""
    if not path.is_file():
        return []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise BraceError(f"{path}: cannot be read: {error.strerror}") from None
    found, bad = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict) and type(row.get("step")) is int:
            found.append(row)
        else:
            bad.append(number)
    if bad == [len(lines)]:
        damage.append(f"The last line of {path.name} is half-written, as after a crash; it is left out.")
    elif bad:
        damage.append(f"{len(bad)} line(s) of {path.name} cannot be read and are left out, first line {bad[0]}.")
    return found


def _read_object(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BraceError(f"{path}: not valid JSON ({error}); it was not written by a run, or was edited") from None
    except OSError as error:
        raise BraceError(f"{path}: cannot be read: {error.strerror}") from None
    if not isinstance(data, dict):
        raise BraceError(f"{path}: must hold a JSON object; it was not written by a run, or was edited")
    return data


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {
        key: math.nan if value is None else float(value)
        for key, value in row.items()
        if value is None or _is_number(value)
    }


def _is_number(value: Any) -> bool:
    """An int or a float that fits a float; True and False are not numbers here."""
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**1000)
