"""Tables of an oracle report: the figures of its JSON as CSV, one observation per row, and as Markdown to be read."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from brace_rl.files import write_text_atomic
from brace_rl.markdown import markdown_table
from brace_rl.oracle.readable import curves_markdown, map_markdown, pair_table
from brace_rl.oracle.sweep import Summary, by_lag, summarise


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


SUMMARY_COLUMNS = [
    "method",
    "area",
    "area_half_width",
    "final",
    "final_half_width",
    "area_gain",
    "area_gain_half_width",
    "final_gain",
    "final_gain_half_width",
    "seeds_stuck",
    "seeds",
]


def write_pair_tables(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """``pairs.csv``, one pair per row, and ``pairs.md``, their means."""
    figures = ["success", "bias", "spread", "correlation", "return_weight", "return_weight_spread"]
    about = ["lag", "method", "mean_ratio", "ratio_spread"]
    _write(
        folder / "pairs.csv",
        [*about, "pair", *figures],
        (
            [*(row[name] for name in about), pair, *found]
            for row in rows
            for pair, found in enumerate(zip(*(row[name] for name in figures), strict=True))
        ),
    )
    write_text_atomic(folder / "pairs.md", markdown_table(*pair_table(rows)) + "\n")


def write_curve_tables(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """``curves.csv`` by step, ``seeds.csv`` with the area and end of every seed, ``summary.csv`` with their intervals.

    And ``summary.md``, the summary to be read: one table per lag.
    """
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
    found = by_lag(rows)
    _write(
        folder / "summary.csv",
        ["lag", *SUMMARY_COLUMNS],
        ([lag, *_flat(summary)] for lag, summaries in found.items() for summary in summaries),
    )
    write_text_atomic(folder / "summary.md", curves_markdown(rows))


def write_map_tables(cells: Sequence[dict[str, Any]], folder: Path) -> None:
    """``map.csv``: every method at every point; ``map.md``, the same to be read."""
    about = ["lag", "horizon", "noise", "ratio_spread"]
    _write(
        folder / "map.csv",
        [*about, *SUMMARY_COLUMNS],
        (
            [*(cell[name] for name in about), *_flat(summary)]
            for cell in cells
            for summary in summarise(cell["area"], cell["final"], start=cell["start"])
        ),
    )
    write_text_atomic(folder / "map.md", map_markdown(cells))


def _flat(summary: Summary) -> list[Any]:
    pairs = (summary.area, summary.final, summary.area_gain, summary.final_gain)
    return [summary.method, *(x for pair in pairs for x in pair), summary.stuck, summary.seeds]


def _write(path: Path, header: list[str], rows: Iterable[Sequence[Any]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    write_text_atomic(path, text.getvalue())
