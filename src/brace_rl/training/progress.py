"""What a person sees while a run goes on: a live panel on a terminal, plain lines anywhere else."""

from __future__ import annotations

import math
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

_SHOWN: Sequence[tuple[str, str, str]] = (
    ("reward", "reward/mean", ".3f"),
    ("success", "eval/success", ".1%"),
    ("length", "response/length_mean", ".1f"),
    ("staleness", "staleness/mean", ".2f"),
    ("ratio ESS", "ratio/ess", ".3f"),
    ("|target-V|", "target/abs_gap", ".4f"),
    ("tokens/s", "throughput/tokens_per_s", ",.0f"),
)
"""Label, metric, format. Success is shown from the steps that evaluate."""

_HISTORY = 40
"""Steps a sparkline covers; one column each."""


class Progress:
    """Shows steps as they finish; a context manager that stops itself.

    On a terminal: a bar with the time left, and for each figure its recent course and last value. Elsewhere (a file, a
    pipe, CI): one line for a step, without control codes, and at most one line every ``every_s`` seconds; steps
    that evaluate, the first and the last always get theirs.

    Args:
        stream: where to write; None: standard output.
        live: True or False to force either form; None: live when ``stream`` is a terminal that can move its cursor.
        every_s: seconds between plain lines.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        stream: TextIO | None = None,
        live: bool | None = None,
        every_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream if stream is not None else sys.stdout
        self._console = Console(file=self._stream, force_terminal=live)
        can_be_live = self._stream.isatty() and not self._console.is_dumb_terminal
        self._is_live = can_be_live if live is None else live
        self._every_s = every_s
        self._clock = clock
        self._total = 0
        self._first = 0
        self._started = 0.0
        self._last_line = -math.inf
        self._history: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_HISTORY))
        self._bar: Bar | None = None
        self._task = TaskID(0)
        self._display: Live | None = None

    def start(self, total: int, completed: int = 0) -> None:
        """Begin. ``total`` steps in all, of which ``completed`` were done by an earlier run that is resumed."""
        self._total, self._first, self._started = total, completed, self._clock()
        if not self._is_live:
            return
        self._bar = Bar(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task("step", total=total, completed=completed)
        self._display = Live(self._panel(), console=self._console, refresh_per_second=2)
        self._display.start()

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Show a finished step: ``metrics`` is a row of ``metrics.jsonl`` with its "step"; 0 is before training."""
        figures = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
        step = int(figures["step"])
        for _, name, _ in _SHOWN:
            if math.isfinite(figures.get(name, math.nan)):
                self._history[name].append(figures[name])
        if self._display is not None and self._bar is not None:
            self._bar.update(self._task, completed=step)
            self._display.update(self._panel())
        elif not self._is_live:
            self._plain_step(step, figures)

    def message(self, text: str) -> None:
        """Print a line above the live panel, or as it is. Control codes in it are left out."""
        clean = "".join(c for c in text if c.isprintable() or c in "\n\t")
        if self._is_live:
            self._console.print(clean, markup=False, highlight=False)
        else:
            self._write(clean)

    def stop(self) -> None:
        """Leave the last state on the screen. Idempotent."""
        if self._display is not None:
            self._display.stop()
            self._display = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _plain_step(self, step: int, figures: Mapping[str, float]) -> None:
        now = self._clock()
        is_first_or_last = step in (self._first + 1, self._total)
        if now - self._last_line < self._every_s and not is_first_or_last and "eval/success" not in figures:
            return
        self._last_line = now
        shown = [f"{label} {format(figures[name], spec)}" for label, name, spec in _SHOWN if name in figures]
        if step == 0:
            self._write("  ".join(["before training:", *shown]))
            return
        done = step - self._first
        if done > 0 and step < self._total:
            shown.append(f"left {_duration((now - self._started) / done * (self._total - step))}")
        self._write("  ".join([f"step {step}/{self._total}", *shown]))

    def _panel(self) -> Group:
        table = Table.grid(padding=(0, 2))
        for label, name, spec in _SHOWN:
            history = self._history.get(name)
            if history:
                curve = sparkline(history, ascii_only=self._console.options.ascii_only)
                table.add_row(Text(label, style="dim"), Text(format(history[-1], spec)), Text(curve, style="cyan"))
        return Group(*([self._bar] if self._bar is not None else []), table)

    def _write(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def sparkline(values: Iterable[float], *, ascii_only: bool = False) -> str:
    """One character per value, lowest to highest over the range of ``values``; a constant series is a middle line."""
    marks = "_.-=+*#" if ascii_only else "▁▂▃▄▅▆▇█"
    numbers = list(values)
    low, high = min(numbers), max(numbers)
    if low == high:
        return marks[len(marks) // 2] * len(numbers)
    return "".join(marks[round((value - low) / (high - low) * (len(marks) - 1))] for value in numbers)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
