"""What a person sees while cells run: a live panel on a terminal, a line per cell anywhere else."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

TAIL = 16_384
"""Bytes at the end of ``metrics.jsonl`` that hold its last row."""

REFRESH_S = 1.0
"""Seconds between looks at how far running cells are."""


class CompareProgress:
    """Counts cells and says how long the rest will take; a context manager.

    The time left is the mean duration of the cells that ended in this call, times what is left of all, over the cells
    that run at once.

    Args:
        total: cells in all.
        already: of them, those that were done before this call.
        workers: cells that run at once.
        steps: of a cell.
        run_dir: run folder of a cell by name, read for its step.
    """

    def __init__(
        self,
        *,
        total: int,
        already: int,
        workers: int,
        steps: int,
        run_dir: Callable[[str], Path],
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._done, self._workers, self._steps = total, already, workers, steps
        self._run_dir, self._clock = run_dir, clock
        self._console = console or Console(stderr=True, highlight=False)
        self._began: dict[str, tuple[str, float]] = {}
        self._durations: list[float] = []
        self._looked = -math.inf
        self._live: Live | None = None
        self._bar = Progress(TextColumn("cells"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[left]}"))
        self._task = self._bar.add_task("cells", total=total, completed=already, left="")

    def __enter__(self) -> CompareProgress:
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=2, transient=True)
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def began(self, name: str, label: str) -> None:
        """A cell has been started."""
        self._began[name] = (label, self._clock())

    def ended(self, name: str, outcome: str) -> None:
        """A cell has ended; ``outcome`` says how."""
        label, began = self._began.pop(name)
        seconds = self._clock() - began
        self._durations.append(seconds)
        self._done += 1
        left = self.seconds_left()
        rest = f"; left {duration(left)}" if left else ""
        self.message(f"{self._done}/{self._total}  {label}: {outcome}, {duration(seconds)}{rest}")

    def message(self, text: str) -> None:
        """A line of its own, without control codes."""
        clean = "".join(c for c in text if c.isprintable())
        self._console.print(escape(clean), soft_wrap=True)

    def tick(self) -> None:
        """Bring the panel up to date."""
        now = self._clock()
        if self._live is None or now - self._looked < REFRESH_S:
            return
        self._looked = now
        left = self.seconds_left()
        self._bar.update(self._task, completed=self._done, left="" if left is None else f"left {duration(left)}")
        table = Table.grid(padding=(0, 2))
        for name, (label, began) in self._began.items():
            row = last_row(self._run_dir(name) / "metrics.jsonl")
            table.add_row(escape(label), f"step {row.get('step', 0)}/{self._steps}", duration(now - began))
        self._live.update(Group(self._bar, table))

    def seconds_left(self) -> float | None:
        """None until a first cell has ended; 0 when all have."""
        if not self._durations:
            return None
        mean = sum(self._durations) / len(self._durations)
        now = self._clock()
        under_way = sum(min(1.0, (now - began) / mean) if mean else 1.0 for _, began in self._began.values())
        return max(0.0, self._total - self._done - under_way) * mean / self._workers


def last_row(path: Path) -> dict[str, Any]:
    """The last whole line of a JSON-lines file; empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - TAIL))
            lines = file.read().split(b"\n")
        row = json.loads(lines[-2])
    except (OSError, ValueError, IndexError):
        return {}
    return row if isinstance(row, dict) else {}


def duration(seconds: float) -> str:
    """``52 s``, ``3:05`` or ``1:02:09``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
