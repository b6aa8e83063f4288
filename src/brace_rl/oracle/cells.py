"""Finished learning curves on disk, so that a long sweep that was interrupted goes on where it stopped.

A *cell* is one method at one lag on one task: one file, written once it is finished. Its name is a digest of everything
the curve depends on, the task's own tables included, so that a cell made under other settings is not found and the one
asked for is run; both stay.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from brace_rl.errors import BraceError
from brace_rl.files import json_text, write_json_atomic
from brace_rl.oracle.learn import learn
from brace_rl.oracle.methods import Method
from brace_rl.oracle.presets import Preset
from brace_rl.oracle.settings import LearnConfig
from brace_rl.oracle.sweep import Row, curve_row

FOLDER = "cells"

REVISION = 1
"""Raised whenever a change to this package changes what a cell holds."""

DIGEST_LENGTH = 20
"""Hexadecimal digits of a SHA-256 in a file's name: 80 bits, far more than any sweep has cells."""


def cell_settings(preset: Preset, method: Method, config: LearnConfig) -> dict[str, Any]:
    """Everything a curve depends on, as plain data."""
    mdp = preset.mdp
    tables = hashlib.sha256()
    for table in (mdp.next_state, mdp.rewards, mdp.observations, preset.logits):
        tables.update(repr((tuple(table.shape), table.dtype)).encode())
        tables.update(table.contiguous().numpy().tobytes())
    return {
        "revision": REVISION,
        "preset": preset.name,
        "horizon": mdp.horizon,
        "tables": tables.hexdigest()[:DIGEST_LENGTH],
        "start": mdp.start,
        "engine": asdict(preset.engine),
        "method": asdict(method),
        "config": asdict(config),
    }


class CellStore:
    """Cells under a folder.

    Args:
        folder: made when the first cell is finished.
        on_cell: called with a cell's task, its row and whether it was already there.
        on_step: called after every trainer step of a cell that is run.
    """

    def __init__(
        self,
        folder: Path,
        *,
        on_cell: Callable[[Preset, Row, bool], None] | None = None,
        on_step: Callable[[int], None] | None = None,
    ) -> None:
        self._folder, self._on_cell, self._on_step = folder, on_cell, on_step

    def row(self, preset: Preset, method: Method, config: LearnConfig) -> Row:
        """The row of a cell (:func:`~brace_rl.oracle.sweep.curve_row`), from disk or else run and kept.

        Raises:
            BraceError: a file of that name that holds something else.
        """
        settings = json.loads(json_text(cell_settings(preset, method, config)))
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:DIGEST_LENGTH]
        path = self._folder / f"{digest}.json"
        row = _read(path, settings)
        is_old = row is not None
        if row is None:
            row = curve_row(learn(preset, method, config, on_step=self._on_step))
            write_json_atomic(path, {"settings": settings, "row": row})
        if self._on_cell is not None:
            self._on_cell(preset, row, is_old)
        return row


def _read(path: Path, settings: dict[str, Any]) -> Row | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise BraceError(f"{path}: cannot be read ({error}); delete it and the cell is run again") from error
    if not isinstance(found, dict) or found.get("settings") != settings or not isinstance(found.get("row"), dict):
        raise BraceError(f"{path}: is not the cell its name says; delete it and the cell is run again")
    # The one figure that may be no number: the interval of a single seed, which JSON has to spell.
    half_width = [math.nan if x == "NaN" else x for x in found["row"]["half_width"]]
    return {**found["row"], "half_width": half_width}
