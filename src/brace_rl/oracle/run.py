"""What `brace oracle` runs, prints and writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from brace_rl.errors import BraceError
from brace_rl.files import write_json_atomic
from brace_rl.oracle import draw, tables
from brace_rl.oracle.methods import Method, parse_method
from brace_rl.oracle.presets import LONGEST_HORIZON, Preset, make_preset
from brace_rl.oracle.settings import LearnConfig
from brace_rl.oracle.study import CRITICS, study
from brace_rl.oracle.sweep import best_fixed, boundary_map, curves, interval_of, paired

PARTS = ("exact", "curves", "map")
BASELINE = "uncapped"
"""What a window is compared with on the map: the same clips over the whole response."""


@dataclass(frozen=True)
class _Request:
    """The command line, understood."""

    preset: Preset
    options: dict[str, float]
    methods: list[Method]
    map_methods: list[Method]
    lags: list[int]
    lag: int
    horizons: list[int]
    noises: list[float]
    config: LearnConfig
    out: Path


def run_oracle(preset: str, out: Path, parts: str, given: dict[str, Any], console: Console) -> None:
    """Run each part and leave its files as soon as it has them.

    Args:
        given: the options of `brace oracle` by their Python names.

    Raises:
        BraceError: an option that cannot be meant; nothing has been run.
    """
    chosen = _choices(parts)
    request = _request(preset, out, given)
    if out.exists() and not out.is_dir():
        raise BraceError(f"--out {out}: is a file; name a folder")
    for part in chosen:
        {"exact": _exact, "curves": _curves, "map": _map}[part](request, console)
    console.print(f"files: {out}")


def _request(preset: str, out: Path, given: dict[str, Any]) -> _Request:
    options = {name: given[name] for name in ("horizon", "success") if given[name] is not None}
    for name in ("rho_clip", "c_clip"):
        if not given[name] > 0:
            raise BraceError(f"--{name.replace('_', '-')} {given[name]:g}: must be above 0 (inf for no cap)")
    clips = {"rho_clip": given["rho_clip"], "c_clip": given["c_clip"]}
    lags = _numbers("--lags", given["lags"], int)
    config = LearnConfig(
        **{name: given[name] for name in ("steps", "batch", "seeds", "seed", "actor_lr", "critic_lr", "critic_bins")}
    )
    for value in (given["lag"], *lags):
        if value < 0:
            raise BraceError(f"lag {value}: must be at least 0")
    horizons = _numbers("--map-horizons", given["map_horizons"], int)
    for horizon in horizons:
        if not 2 <= horizon <= LONGEST_HORIZON:
            raise BraceError(f"--map-horizons {horizon}: must be between 2 and {LONGEST_HORIZON} tokens")
    noises = _numbers("--map-noises", given["map_noises"], float)
    if min(noises) < 0:
        raise BraceError(f"--map-noises {min(noises):g}: must be at least 0")
    return _Request(
        preset=make_preset(preset, **options),
        options=options,
        methods=[parse_method(name, **clips) for name in given["methods"].split(",")],
        map_methods=[parse_method(name, **clips) for name in given["map_methods"].split(",")],
        lags=lags,
        lag=given["lag"],
        horizons=horizons,
        noises=noises,
        config=config,
        out=out,
    )


def _choices(text: str) -> list[str]:
    chosen = [part.strip() for part in text.split(",")]
    for part in chosen:
        if part not in PARTS:
            raise BraceError(f"--parts {part}: unknown; choose from {', '.join(PARTS)}")
    return chosen


def _numbers(option: str, text: str, kind: type) -> list[Any]:
    try:
        return [kind(word) for word in text.split(",")]
    except ValueError:
        raise BraceError(f"{option} {text}: give numbers separated by commas, such as 0,10,30") from None


def _exact(request: _Request, console: Console) -> None:
    result = study(request.preset, request.methods, lag=request.lag, seed=request.config.seed)
    write_json_atomic(request.out / "exact.json", result)
    tables.write_study_tables(result, request.out)
    draw.draw_study(result, request.out)
    ratios, values = result["ratios"], result["values"]
    console.print(
        f"{result['preset']}, {result['horizon']} tokens, lag {result['lag']}: "
        f"V^pi {values['pi'][0]:.4f}, V^mu {values['mu'][0]:.4f}, V^pi_rho {values['pi_rho'][0]:.4f} at the start; "
        f"drift m {ratios['mean']:+.2e}, sigma {ratios['deviation']:.3f}, "
        f"largest E[w] {ratios['largest_mean_ratio']:.4f}"
    )
    table = Table(
        "method", "fixed point", *(f"{x}, V={c}" for c in CRITICS for x in ("bias", "spread", "rmse")), "how",
        title="targets against V^pi, root mean square over positions",
    )  # fmt: skip
    fixed = {row["method"]: row for row in result["fixed_points"]}
    by_critic = {(row["method"], row["critic"]): row for row in result["targets"]}
    for name, row in fixed.items():
        cells = [_rms(by_critic[name, critic][key]) for critic in CRITICS for key in ("bias", "spread", "rmse")]
        table.add_row(name, f"{row['values'][0]:.4f}", *(f"{cell:.4f}" for cell in cells), row["source"])
    console.print(table)
    offset = result["offset"]
    shown = sorted({0, 1, 10, 100, result["horizon"]} & set(range(len(offset["theta"]))))
    table = Table("k", "Theta_k", "bound", "measured", title="one application of BRACE at V^pi_rho")
    for k in shown:
        table.add_row(str(k), *(f"{offset[key][k]:.4f}" for key in ("theta", "bound", "measured")))
    console.print(table)


def _rms(x: Sequence[float]) -> float:
    return float((sum(v * v for v in x) / len(x)) ** 0.5)


def _curves(request: _Request, console: Console) -> None:
    rows: list[dict[str, Any]] = []
    about = {"preset": request.preset.name, "horizon": request.preset.mdp.horizon, "config": asdict(request.config)}
    with Progress(console=console, transient=True) as progress:
        steps = len(request.methods) * len(request.lags) * request.config.steps
        task = progress.add_task("learning", total=steps)
        found = curves(
            request.preset, request.methods, request.lags, request.config, on_step=lambda _: progress.advance(task)
        )
        for row in found:
            rows.append(row)
            write_json_atomic(request.out / "curves.json", about | {"curves": rows})
    tables.write_curve_tables(rows, request.out)
    title = f"{request.preset.name}, {request.preset.mdp.horizon} tokens, batch {request.config.batch}"
    draw.draw_curves(rows, request.out, f"{title}, {request.config.seeds} seeds, 95 % interval")
    base = request.methods[0].name
    table = Table("S", "method", "area", "end", f"area - {base}", "sd log w", "critic rmse", "window", "s", title=title)
    for row in rows:
        first = next(r for r in rows if r["lag"] == row["lag"])
        table.add_row(
            str(row["lag"]),
            row["method"],
            _plus_minus(interval_of(row["area"])),
            _plus_minus(interval_of(row["final"])),
            _plus_minus(paired(row["area"], first["area"]), sign="+"),
            f"{row['ratio_spread']:.3f}",
            f"{sum(row['critic_rmse']) / len(row['critic_rmse']):.3f}",
            "" if row["mean_window"] is None else f"{row['mean_window']:.0f}",
            f"{row['seconds']:.1f}",
        )
    console.print(table)


def _map(request: _Request, console: Console) -> None:
    cells: list[dict[str, Any]] = []
    about = {"preset": request.preset.name, "config": asdict(request.config), "baseline": BASELINE}
    options = {name: value for name, value in request.options.items() if name != "horizon"}
    total = len(request.horizons) * len(request.noises) * len(request.lags) * len(request.map_methods)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("map", total=total * request.config.steps)
        found = boundary_map(
            lambda horizon: make_preset(request.preset.name, horizon=horizon, **options),
            request.map_methods,
            lags=request.lags,
            horizons=request.horizons,
            noises=request.noises,
            config=request.config,
            on_step=lambda _: progress.advance(task),
        )
        for cell in found:
            cells.append(cell)
            write_json_atomic(request.out / "map.json", about | {"cells": cells})
    tables.write_map_table(cells, request.out)
    names = [method.name for method in request.map_methods]
    if BASELINE in names:
        for name in names:
            if name != BASELINE:
                draw.draw_map(cells, request.out, method=name, baseline=BASELINE)
    console.print(_map_table(cells, names))


def _map_table(cells: Sequence[dict[str, Any]], names: Sequence[str]) -> Table:
    """Areas, the best fixed target of each cell, and how far each automatic window is from it."""
    automatic = [name for name in names if name.partition(":")[0] in ("drift", "path")]
    table = Table("S", "tokens", "noise", "sd log w", *names, "best fixed", *(f"{a} - best" for a in automatic))
    for cell in cells:
        best = best_fixed(cell)
        table.add_row(
            str(cell["lag"]),
            str(cell["horizon"]),
            f"{cell['noise']:g}",
            f"{cell['ratio_spread']:.3f}",
            *(f"{interval_of(cell['area'][name])[0]:.3f}" for name in names),
            best,
            *(_plus_minus(paired(cell["area"][name], cell["area"][best]), sign="+") for name in automatic),
        )
    return table


def _plus_minus(figures: tuple[float, float], *, sign: str = "") -> str:
    mean, half = figures
    return f"{mean:{sign}.3f} ± {half:.3f}"
