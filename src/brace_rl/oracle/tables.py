"""CSV files of an oracle report: the same figures as its JSON, one observation per row."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from brace_rl.files import write_text_atomic
from brace_rl.oracle.sweep import interval_of


def write_study_tables(study: dict[str, Any], folder: Path) -> None:
    """``targets.csv``, ``fixed_points.csv`` and ``offset.csv``."""
    _write(
        folder / "targets.csv",
        ["method", "critic", "source", "position", "bias", "spread", "rmse"],
        (
            [row["method"], row["critic"], row["source"], t, *figures]
            for row in study["targets"]
            for t, figures in enumerate(zip(row["bias"], row["spread"], row["rmse"], strict=True))
        ),
    )
    truth = [(f"V^{name}", "exact", values) for name, values in study["values"].items()]
    fitted = [(row["method"], row["source"], row["values"]) for row in study["fixed_points"]]
    _write(
        folder / "fixed_points.csv",
        ["method", "source", "position", "value"],
        ([name, source, t, v] for name, source, values in truth + fitted for t, v in enumerate(values)),
    )
    offset = study["offset"]
    _write(
        folder / "offset.csv",
        ["window", "theta", "bound", "measured"],
        ([k, *x] for k, x in enumerate(zip(offset["theta"], offset["bound"], offset["measured"], strict=True))),
    )


def write_curve_tables(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """``curves.csv`` by step, and ``seeds.csv`` with the area and end of every seed."""
    _write(
        folder / "curves.csv",
        ["method", "lag", "step", "success", "half_width"],
        (
            [row["method"], row["lag"], *point]
            for row in rows
            for point in zip(row["steps"], row["success"], row["half_width"], strict=True)
        ),
    )
    _write(
        folder / "seeds.csv",
        ["method", "lag", "seed", "area", "final"],
        (
            [row["method"], row["lag"], seed, *figures]
            for row in rows
            for seed, figures in enumerate(zip(row["area"], row["final"], strict=True))
        ),
    )


def write_map_table(cells: Sequence[dict[str, Any]], folder: Path) -> None:
    """``map.csv``: mean area of every method in every cell."""
    _write(
        folder / "map.csv",
        ["lag", "horizon", "noise", "ratio_spread", "method", "area", "half_width"],
        (
            [cell["lag"], cell["horizon"], cell["noise"], cell["ratio_spread"], method, *interval_of(areas)]
            for cell in cells
            for method, areas in cell["area"].items()
        ),
    )


def _write(path: Path, header: list[str], rows: Iterable[Sequence[Any]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    write_text_atomic(path, text.getvalue())
