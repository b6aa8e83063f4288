"""What `brace oracle` runs, prints and writes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from brace_rl.errors import BraceError
from brace_rl.files import write_json_atomic
from brace_rl.oracle import draw, tables
from brace_rl.oracle.cells import FOLDER, CellStore
from brace_rl.oracle.methods import CRITIC_FREE, Method, parse_method
from brace_rl.oracle.pairs import pair_rows
from brace_rl.oracle.presets import LONGEST_HORIZON, Preset, make_preset
from brace_rl.oracle.readable import PAIRS_SAID, curve_table, map_table, pair_table, text_table
from brace_rl.oracle.settings import LearnConfig
from brace_rl.oracle.study import study
from brace_rl.oracle.sweep import Row, boundary_map, curves, mean_of

PARTS = ("exact", "pairs", "curves", "map")
CRITIC_NAMES = {"own": "fixed point", "mu": "V^mu", "pi": "V^pi"}
LEARN_OPTIONS = ("steps", "batch", "seeds", "seed", "actor_lr", "critic_lr", "critic_bins", "critic_sees")
PRESET_OPTIONS = ("horizon", "success", "classes", "actions")
BASELINE = "uncapped"
"""What a window is compared with on the map: the same clips over the whole response."""


@dataclass(frozen=True)
class _Request:
    """The command line, understood."""

    preset: Preset
    options: dict[str, float]
    clips: dict[str, float]
    methods: list[Method]
    map_methods: list[Method]
    lags: list[int]
    lag: int
    after: int
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
    for method in request.methods:
        if method.kind in CRITIC_FREE and {"exact", "pairs"} & set(chosen):
            raise BraceError(f"method {method.name!r}: has no value target; it can be asked for in curves and map only")
    torch.set_num_threads(1)  # the tensors are small: a second thread waits more than it works
    for part in chosen:
        {"exact": _exact, "pairs": _pairs, "curves": _curves, "map": _map}[part](request, console)
    _print(console, f"\nfiles: {out}")


def _request(preset: str, out: Path, given: dict[str, Any]) -> _Request:
    options = {name: given[name] for name in PRESET_OPTIONS if given[name] is not None}
    for name in ("rho_clip", "c_clip"):
        if not given[name] > 0:
            raise BraceError(f"--{name.replace('_', '-')} {given[name]:g}: must be above 0 (inf for no cap)")
    clips = {"rho_clip": given["rho_clip"], "c_clip": given["c_clip"]}
    lags = _numbers("--lags", given["lags"], int)
    config = LearnConfig(**{name: given[name] for name in LEARN_OPTIONS})
    for value in (given["lag"], *lags):
        if value < 0:
            raise BraceError(f"lag {value}: must be at least 0")
    horizons = _numbers("--map-horizons", given["map_horizons"], int)
    for horizon in horizons:
        if not 2 <= horizon <= LONGEST_HORIZON:
            raise BraceError(f"--map-horizons {horizon}: must be between 2 and {LONGEST_HORIZON} tokens")
    noises = _numbers("--map-noises", given["map_noises"], float)
    if not all(0 <= noise < math.inf for noise in noises):
        raise BraceError(f"--map-noises {given['map_noises']}: must be at least 0")
    if not 0 <= given["noise"] < math.inf:
        raise BraceError(f"--noise {given['noise']:g}: must be at least 0")
    if given["after"] < 1:
        raise BraceError(f"--after {given['after']}: must be at least 1 step")
    task = make_preset(preset, **options)
    if given["noise"]:
        task = replace(task, engine=replace(task.engine, noise=given["noise"]))
    return _Request(
        preset=task,
        options=options,
        clips=clips,
        methods=[parse_method(name, **clips) for name in given["methods"].split(",")],
        map_methods=[parse_method(name, **clips) for name in given["map_methods"].split(",")],
        lags=lags,
        lag=given["lag"],
        after=given["after"],
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
    result = study(request.preset, request.methods, lag=request.lag, seed=request.config.seed, **request.clips)
    write_json_atomic(request.out / "exact.json", result)
    tables.write_study_tables(result, request.out)
    draw.draw_study(result, request.out)
    for line in _study_lines(result):
        _print(console, line)


def _study_lines(result: dict[str, Any]) -> list[str]:
    """Headline, the targets' errors and the offset bound, as text."""
    ratios, values, offset, clips = (result[name] for name in ("ratios", "values", "offset", "clips"))
    headline = (
        f"{result['preset']}, {result['horizon']} tokens, lag {result['lag']}: at the start "
        f"V^pi {values['pi'][0]:.4f}, V^mu {values['mu'][0]:.4f}, V^pi_rho {values['pi_rho'][0]:.4f} "
        f"(rho_clip {clips['rho']:g}); drift m {ratios['mean']:+.2e} (c_clip {clips['c']:g}), "
        f"sigma {ratios['deviation']:.3f}, largest E[w] {ratios['largest_mean_ratio']:.4f}"
    )
    fixed = {row["method"]: row["values"][0] for row in result["fixed_points"]}
    targets = [
        [
            row["method"],
            CRITIC_NAMES[row["critic"]],
            f"{fixed[row['method']]:.4f}",
            *(f"{_rms(row[key]):.4f}" for key in ("bias", "spread", "rmse")),
            row["source"],
        ]
        for row in result["targets"]
    ]
    shown = [k for k in (0, 1, 10, 100, result["horizon"]) if k < len(offset["theta"])]
    moved = [[str(k), *(f"{offset[key][k]:.4f}" for key in ("theta", "bound", "measured"))] for k in shown]
    return [
        headline,
        "\nerror of each target against V^pi (root mean square over positions), and its fixed point at the start",
        text_table((["method", "V is", "fixed point", "bias", "spread", "rmse", "how"], targets)),
        "\nlargest offset of one application of BRACE at V^pi_rho",
        text_table((["k", "Theta_k", "bound", "measured"], moved)),
    ]


def _rms(x: Sequence[float]) -> float:
    return float((sum(v * v for v in x) / len(x)) ** 0.5)


def _pairs(request: _Request, console: Console) -> None:
    rows = pair_rows(request.preset, request.methods, request.lags, request.config, steps=request.after)
    about = {"preset": request.preset.name, "horizon": request.preset.mdp.horizon, "config": asdict(request.config)}
    write_json_atomic(request.out / "pairs.json", about | {"after": request.after, "pairs": rows})
    tables.write_pair_tables(rows, request.out)
    _print(console, f"\n{request.after} steps of PPO with {request.methods[0].name}, then exact, {PAIRS_SAID}")
    _print(console, text_table(pair_table(rows)))


def _curves(request: _Request, console: Console) -> None:
    rows: list[dict[str, Any]] = []
    about = {"preset": request.preset.name, "horizon": request.preset.mdp.horizon, "config": asdict(request.config)}
    with _sweep(request, console, len(request.methods) * len(request.lags)) as store:
        for row in curves(request.preset, request.methods, request.lags, request.config, run=store.row):
            rows.append(row)
            write_json_atomic(request.out / "curves.json", about | {"curves": rows})
    tables.write_curve_tables(rows, request.out)
    title = f"{request.preset.name}, {request.preset.mdp.horizon} tokens, batch {request.config.batch}"
    draw.draw_curves(rows, request.out, f"{title}, {request.config.seeds} seeds, 95 % interval")
    _print(console, f"\nsuccess, mean over the curve and at its end: {title}, {request.config.seeds} seeds")
    _print(console, text_table(curve_table(rows)))


def _map(request: _Request, console: Console) -> None:
    points: list[dict[str, Any]] = []
    about = {"preset": request.preset.name, "config": asdict(request.config), "baseline": BASELINE}
    options = {name: value for name, value in request.options.items() if name != "horizon"}
    cells = len(request.horizons) * len(request.noises) * len(request.lags) * len(request.map_methods)
    with _sweep(request, console, cells) as store:
        found = boundary_map(
            lambda horizon: make_preset(request.preset.name, horizon=horizon, **options),
            request.map_methods,
            lags=request.lags,
            horizons=request.horizons,
            noises=request.noises,
            config=request.config,
            run=store.row,
        )
        for point in found:
            points.append(point)
            write_json_atomic(request.out / "map.json", about | {"cells": points})
    tables.write_map_tables(points, request.out)
    names = [method.name for method in request.map_methods]
    if BASELINE in names:
        for name in names:
            if name != BASELINE:
                draw.draw_map(points, request.out, method=name, baseline=BASELINE)
    _print(
        console, "\nmean success over the curve, and each automatic window against the best fixed target of the point"
    )
    _print(console, text_table(map_table(points)))


@contextmanager
def _sweep(request: _Request, console: Console, cells: int) -> Iterator[CellStore]:
    """Cells that are kept as they finish, a bar that moves with every step and a line for every cell."""
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("learning", total=cells * request.config.steps)
        done, run, spent = 0, 0, 0.0

        def report(task: Preset, row: Row, is_old: bool) -> None:
            nonlocal done, run, spent
            done += 1
            where = f"{task.mdp.horizon} tokens, noise {task.engine.noise:g}, S = {row['lag']}, {row['method']}"
            line = f"[{done}/{cells}] {where}: area {mean_of(row['area']):.3f}"
            if is_old:
                progress.advance(bar, request.config.steps)
                _print(progress.console, f"{line}, from an earlier run")
                return
            run += 1
            spent += row["seconds"]
            left = timedelta(seconds=round((cells - done) * spent / run))
            _print(progress.console, f"{line}, {row['seconds']:.1f} s, about {left} left")

        yield CellStore(request.out / FOLDER, on_cell=report, on_step=lambda _: progress.advance(bar))


def _print(console: Console, text: str) -> None:
    """As it stands: no markup (``E[w]`` is none), no emoji (``:100:``), no colours, no line breaks of rich's own."""
    console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)
