"""Oracle results as tables to be read: on the terminal and as Markdown, from the same figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from brace_rl.markdown import markdown_table
from brace_rl.oracle.sweep import (
    Row,
    Summary,
    baseline_of,
    best_fixed,
    by_lag,
    interval_of,
    is_automatic,
    mean_of,
    paired,
    summarise,
)

Table = tuple[list[str], list[list[str]]]
"""Header and rows."""

Pair = tuple[float, float]


def text_table(table: Table) -> str:
    """Right-aligned columns, never cut off, however narrow the terminal."""
    header, rows = table
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)
    )


def plus_minus(figures: Pair, *, sign: str = "") -> str:
    """Mean and half-width of its interval."""
    mean, half = figures
    return f"{mean:{sign}.3f} ± {half:.3f}"


def gain(figures: Pair) -> str:
    """A paired difference, bold where its interval leaves out 0."""
    text = plus_minus(figures, sign="+")
    return f"**{text}**" if abs(figures[0]) > figures[1] else text


def curve_table(rows: Sequence[Row]) -> Table:
    """Everything about every method at every lag, one per row."""
    found = {(lag, s.method): s for lag, summaries in by_lag(rows).items() for s in summaries}
    base = baseline_of([row["method"] for row in rows])
    header = ["S", "method", "area", f"area - {base}", "end", f"end - {base}", "stuck", "sd log w", "E[w]"]
    cells = []
    for row in rows:
        summary = found[row["lag"], row["method"]]
        cells.append(
            [
                str(row["lag"]),
                row["method"],
                plus_minus(summary.area),
                plus_minus(summary.area_gain, sign="+"),
                plus_minus(summary.final),
                plus_minus(summary.final_gain, sign="+"),
                f"{summary.stuck}/{summary.seeds}",
                f"{row['ratio_spread']:.3f}",
                f"{row['mean_ratio']:.3f}",
                f"{mean_of(row['critic_rmse']):.3f}",
                "" if row["mean_window"] is None else f"{row['mean_window']:.0f}",
                f"{row['seconds']:.1f}",
            ]
        )
    return [*header, "critic rmse", "window", "seconds"], cells


def curves_markdown(rows: Sequence[Row]) -> str:
    """Methods against lags: mean over the curve, end, seeds that went nowhere, and automatic windows against fixed."""
    found = by_lag(rows)
    base = baseline_of([row["method"] for row in rows])

    def cells(mean: Callable[[Summary], Pair], difference: Callable[[Summary], Pair]) -> str:
        return _by_lag_table(
            found, lambda s: plus_minus(mean(s)) if s.method == base else f"{mean(s)[0]:.3f} ({gain(difference(s))})"
        )

    said = f"mean; in brackets the paired difference to `{base}` with its 95 % interval, bold where that leaves out 0"
    return "\n".join(
        [
            f"Success over the whole curve ({said}):\n",
            cells(lambda s: s.area, lambda s: s.area_gain),
            f"\nSuccess at the end ({said}):\n",
            cells(lambda s: s.final, lambda s: s.final_gain),
            f"\nSeeds of {next(iter(found.values()))[0].seeds} that end below twice the success they started from:\n",
            _by_lag_table(found, lambda s: str(s.stuck)),
            *_automatic_against_fixed(rows),
            *_combinations(rows, base),
            "",
        ]
    )


def _combinations(rows: Sequence[Row], base: str) -> list[str]:
    """Each target joined with an actor rule, minus the target alone and minus the rule alone; nothing if there is none.

    The rule alone is the base target with it, so that a combination is looked for among the methods ``T+RULE`` whose
    parts ``T`` and ``BASE+RULE`` are there too.
    """
    areas = {(row["lag"], row["method"]): row["area"] for row in rows}
    lags = list(dict.fromkeys(row["lag"] for row in rows))
    names = list(dict.fromkeys(row["method"] for row in rows))
    table = []
    for name in names:
        target, joined, rule = name.partition("+")
        alone = f"{base}+{rule}"
        if not joined or target == base or target not in names or alone not in names:
            continue
        for part in (target, alone):
            differences = (paired(areas[lag, name], areas[lag, part]) for lag in lags)
            table.append([f"`{name}` - `{part}`", *map(gain, differences)])
    if not table:
        return []
    said = "\nSuccess over the whole curve, a target with an actor rule minus either of its parts:\n"
    return [said, markdown_table(["", *(f"S = {lag}" for lag in lags)], table)]


def _automatic_against_fixed(rows: Sequence[Row]) -> list[str]:
    """Each automatic window, and V-trace, minus the best fixed target of the lag; nothing if there are none."""
    points = [
        {"lag": lag, "area": {row["method"]: row["area"] for row in rows if row["lag"] == lag}}
        for lag in dict.fromkeys(row["lag"] for row in rows)
    ]
    names = list(points[0]["area"])
    automatic = [name for name in names if is_automatic(name)]
    if not automatic or all(map(is_automatic, names)):
        return []
    best = [best_fixed(point) for point in points]
    table = [
        ["best fixed", *(f"`{name}`" for name in best)],
        *(
            [
                f"`{name}` - best",
                *(gain(paired(p["area"][name], p["area"][b])) for p, b in zip(points, best, strict=True)),
            ]
            for name in automatic
        ),
    ]
    said = "\nSuccess over the whole curve, automatic windows minus the best fixed target of the lag (GAE aside):\n"
    return [said, markdown_table(["", *(f"S = {p['lag']}" for p in points)], table)]


def _by_lag_table(found: dict[int, list[Summary]], cell: Callable[[Summary], str]) -> str:
    lags = list(found)
    names = [summary.method for summary in found[lags[0]]]
    rows = [[f"`{name}`", *(cell(found[lag][i]) for lag in lags)] for i, name in enumerate(names)]
    return markdown_table(["target", *(f"S = {lag}" for lag in lags)], rows)


def map_table(points: Sequence[dict[str, Any]]) -> Table:
    """Mean success over the curve, and each automatic window against the best fixed target of the point."""
    names = list(points[0]["area"])
    automatic = [name for name in names if is_automatic(name)]
    has_fixed = len(automatic) < len(names)
    header = ["S", "tokens", "noise", "sd log w", *names]
    if has_fixed:
        header += ["best fixed", *(f"{name} - best" for name in automatic)]
    rows = []
    for point in points:
        row = [str(point["lag"]), str(point["horizon"]), f"{point['noise']:g}", f"{point['ratio_spread']:.3f}"]
        row += [f"{interval_of(point['area'][name])[0]:.3f}" for name in names]
        if has_fixed:
            best = best_fixed(point)
            row += [best, *(gain(paired(point["area"][a], point["area"][best])) for a in automatic)]
        rows.append(row)
    return header, rows


def map_gain_table(points: Sequence[dict[str, Any]]) -> Table:
    """Every method's paired difference to the baseline, and the seeds of the baseline that went nowhere."""
    names = list(points[0]["area"])
    base = baseline_of(names)
    header = ["S", "tokens", "noise", base, f"{base} stuck", *(name for name in names if name != base)]
    rows = []
    for point in points:
        summaries = {s.method: s for s in summarise(point["area"], point["final"], start=point["start"])}
        row = [str(point["lag"]), str(point["horizon"]), f"{point['noise']:g}", plus_minus(summaries[base].area)]
        row += [f"{summaries[base].stuck}/{summaries[base].seeds}"]
        rows.append([*row, *(gain(summaries[name].area_gain) for name in names if name != base)])
    return header, rows


def map_markdown(points: Sequence[dict[str, Any]]) -> str:
    """Both tables of a map."""
    base = baseline_of(list(points[0]["area"]))
    return "\n".join(
        [
            "Mean success over the curve; last columns: paired difference to the best fixed target of the point:\n",
            markdown_table(*map_table(points)),
            f"\nPaired difference of that figure to `{base}`; bold where the 95 % interval leaves out 0:\n",
            markdown_table(*map_gain_table(points)),
            "",
        ]
    )


PAIRS_SAID = (
    "mean over pairs: E[w] and deviation of log w; bias and spread of the target against V^pi; correlation of the "
    "sampled advantage with the true one; mean and deviation of the weight of the return in the target"
)
"""What the columns of :func:`pair_table` are."""


def pair_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Targets on pairs that learning made, one per lag and method."""
    header = ["S", "method", "V^pi", "E[w]", "sd log w", "bias", "spread", "correlation", "weight", "sd weight"]
    cells = []
    for row in rows:
        weights = (row["return_weight"], row["return_weight_spread"])
        cells.append(
            [
                str(row["lag"]),
                row["method"],
                f"{mean_of(row['success']):.3f}",
                f"{row['mean_ratio']:.3f}",
                f"{row['ratio_spread']:.3f}",
                *(f"{mean_of(row[name]):.4f}" for name in ("bias", "spread")),
                plus_minus(interval_of(row["correlation"])),
                *("" if None in x else f"{mean_of(x):.3f}" for x in weights),
            ]
        )
    return header, cells
