"""`brace oracle`: what it writes and prints, and what it says to input it cannot use."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from brace_rl.errors import BraceError
from brace_rl.oracle import command, presets
from brace_rl.oracle.methods import parse_method
from brace_rl.oracle.study import study

QUICK = ["--horizon", "16", "--steps", "4", "--seeds", "2", "--batch", "4", "--lags", "0,2", "--lag", "20"]
METHODS = ["--methods", "mc,brace:4,drift,path", "--map-methods", "uncapped,brace:4,path"]
MAP = ["--map-horizons", "8,16", "--map-noises", "0,0.2"]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(command.oracle_command, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("oracle") / "report"
    parts = "exact,pairs,curves,map"
    return out, run("chain", "--out", str(out), "--parts", parts, "--after", "3", *QUICK, *METHODS, *MAP)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_part_leaves_data_tables_and_figures_and_nothing_half_written(report: tuple[Path, str]) -> None:
    names = {path.name for path in report[0].iterdir()}
    figures = ["moments", "fixed_points", "offset", "curves", "map_brace4_uncapped", "map_path1_uncapped"]
    data = {f"{name}.json" for name in ("exact", "pairs", "curves", "map")}
    names_of_tables = ("targets", "fixed_points", "offset", "pairs", "curves", "seeds", "summary", "map")
    tables = {f"{name}.csv" for name in names_of_tables}
    read = {"summary.md", "pairs.md", "map.md", "cells"}
    assert names == data | tables | read | {f"{name}.{kind}" for name in figures for kind in ("png", "svg")}
    assert (report[0] / "moments.png").read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (report[0] / "curves.svg").read_text(encoding="utf-8")


def test_tables_and_json_hold_the_same_figures(report: tuple[Path, str]) -> None:
    out, _ = report
    exact = json.loads((out / "exact.json").read_text(encoding="utf-8"))
    targets = rows(out / "targets.csv")
    assert len(targets) == len(exact["targets"]) * 16 == 4 * 3 * 16
    first = exact["targets"][0]
    assert [float(row["rmse"]) for row in targets[:16]] == first["rmse"]
    assert [float(row["bound"]) for row in rows(out / "offset.csv")] == exact["offset"]["bound"]
    learnt = json.loads((out / "curves.json").read_text(encoding="utf-8"))
    assert len(learnt["curves"]) == 8
    assert len(rows(out / "seeds.csv")) == 8 * 2
    assert len(rows(out / "map.csv")) == 2 * 2 * 2 * 3


def test_summary_holds_means_intervals_gains_over_monte_carlo_and_stuck_seeds(report: tuple[Path, str]) -> None:
    seeds = rows(report[0] / "seeds.csv")

    def of(method: str, figure: str) -> list[float]:
        return [float(row[figure]) for row in seeds if row["method"] == method and row["lag"] == "2"]

    found = {row["method"]: row for row in rows(report[0] / "summary.csv") if row["lag"] == "2"}
    brace, mc = of("brace:4", "final"), of("mc", "final")
    assert float(found["brace:4"]["final_gain"]) == pytest.approx(sum(brace) / 2 - sum(mc) / 2)
    half = 12.706 * abs((brace[0] - mc[0]) - (brace[1] - mc[1])) / 2  # t(1) sd / sqrt(2)
    assert float(found["brace:4"]["final_gain_half_width"]) == pytest.approx(half, rel=1e-3)
    assert float(found["mc"]["area_gain"]) == 0.0
    assert found["mc"]["seeds_stuck"] == str(sum(end < 0.06 for end in mc))
    text = (report[0] / "summary.md").read_text(encoding="utf-8")
    assert f" | {float(found['mc']['area']):.3f} ±" in text
    area, gain = (float(found["brace:4"][name]) for name in ("area", "area_gain"))
    assert f"{area:.3f} (" in text
    assert f"{gain:+.3f} ±" in text


def test_an_interrupted_sweep_goes_on_where_it_stopped_and_ends_as_if_it_had_not(tmp_path: Path) -> None:
    arguments = ["chain", "--parts", "curves", *QUICK, "--methods", "mc,brace:4"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(*arguments, "--out", str(whole))
    run(*arguments[:-1], "mc", "--out", str(broken))  # as far as it got
    assert run(*arguments, "--out", str(broken)).count("from an earlier run") == 2
    for name in ("curves.csv", "seeds.csv", "summary.md"):
        assert (whole / name).read_text(encoding="utf-8") == (broken / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("change", [["--seed", "1"], ["--actor-lr", "0.2"], ["--success", "0.1"], ["--c-clip", "1"]])
def test_a_curve_made_under_other_settings_is_run_again_and_the_old_one_kept(change: list[str], tmp_path: Path) -> None:
    arguments = ["chain", "--parts", "curves", *QUICK, "--lags", "2", "--methods", "brace:4", "--out", str(tmp_path)]
    run(*arguments)
    assert "from an earlier run" not in run(*arguments, *change)
    assert len(list((tmp_path / "cells").iterdir())) == 2
    assert "from an earlier run" in run(*arguments)


@pytest.mark.parametrize("content", ["{", "[]", '{"settings": {}, "row": {}}'])
def test_a_damaged_cell_is_named(content: str, tmp_path: Path) -> None:
    arguments = ["chain", "--parts", "curves", *QUICK, "--lags", "2", "--methods", "mc", "--out", str(tmp_path)]
    run(*arguments)
    (cell,) = (tmp_path / "cells").iterdir()
    cell.write_text(content, encoding="utf-8")
    with pytest.raises(BraceError, match=f"{cell.name}.*delete it and the cell is run again"):
        run(*arguments)


def test_mean_square_error_is_bias_squared_plus_variance(report: tuple[Path, str]) -> None:
    exact = json.loads((report[0] / "exact.json").read_text(encoding="utf-8"))
    for row in exact["targets"]:  # before token 0 there is one state, so that averages are the figures themselves
        assert row["rmse"][0] ** 2 == pytest.approx(row["bias"][0] ** 2 + row["spread"][0] ** 2)
    sources = {row["method"]: row["source"] for row in exact["targets"]}
    assert sources["brace:4"] == "exact"
    assert sources["path:1"].endswith("sampled responses")


def test_clips_that_are_given_hold_for_every_exact_figure(tmp_path: Path) -> None:
    """A capped product over the whole response ends at the V^{pi_rho} of its own clip."""
    clips = ["--rho-clip", "1.05", "--c-clip", "1.02"]
    small = ["--horizon", "5", "--success", "0.2", "--methods", "capped:5,vtrace"]
    text = run("chain", "--out", str(tmp_path), "--parts", "exact", *small, *clips)
    exact = json.loads((tmp_path / "exact.json").read_text(encoding="utf-8"))
    fixed = {row["method"]: row["values"] for row in exact["fixed_points"]}
    assert exact["values"]["pi_rho"] == pytest.approx(fixed["capped:5@1.05/1.02"], abs=1e-12)
    assert exact["values"]["pi_rho"] != pytest.approx(fixed["vtrace"], abs=1e-3)
    assert exact["clips"] == {"rho": 1.05, "c": 1.02}
    assert "(rho_clip 1.05)" in text
    assert "(c_clip 1.02)" in text
    other = study(presets.chain(horizon=5, success=0.2), [], lag=10, rho_clip=1.05)
    assert other["ratios"] != exact["ratios"]


def test_every_cell_of_a_map_has_a_line_of_its_own(report: tuple[Path, str]) -> None:
    lines = [line.split(": area")[0].split("] ")[1] for line in report[1].splitlines() if ": area" in line]
    assert len(lines) == 8 + 24
    assert len(set(lines[8:])) == 24
    assert "8 tokens, noise 0.2, S = 2, path:1" in lines


def test_what_is_printed_names_the_ratios_and_every_method(report: tuple[Path, str]) -> None:
    for text in ("largest E[w] 1.0000", "brace:4", "drift:0.1", "Theta_k", "path:1 - best", "area - mc", "files:"):
        assert text in report[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "preset 'nowhere': unknown; choose from chain"),
        (["chain", "--parts", "all"], "--parts all: unknown; choose from exact"),
        (["chain", "--lags", "1,two"], "--lags 1,two: give numbers"),
        (["chain", "--lags", "-1"], "lag -1: must be at least 0"),
        (["chain", "--horizon", "4096"], "horizon = 4096: must be between 2 and 2048"),
        (["chain", "--map-horizons", "1"], "--map-horizons 1: must be between 2 and 2048"),
        (["chain", "--map-noises", "-1"], "--map-noises -1: must be at least 0"),
        (["chain", "--classes", "0"], "classes = 0: must be at least 1"),
        (["branch", "--actions", "1"], "actions = 1: must be at least 2"),
        (["chain", "--success", "1"], "success = 1: must be between 0 and 1"),
        (["chain", "--seeds", "0"], "seeds = 0: must be at least 1"),
        (["chain", "--actor-lr", "nan"], "actor_lr = nan: must be a number, 0 or more"),
        (["chain", "--c-clip", "0"], "--c-clip 0: must be above 0"),
        (["chain", "--methods", "grpo"], "method 'grpo': unknown; choose from mc"),
        (["chain", "--methods", "group"], "method 'group': has no value target"),
        (["chain", "--noise", "-1"], "--noise -1: must be at least 0"),
        (["chain", "--after", "0"], "--after 0: must be at least 1"),
        (["chain", "--methods", "brace:1.5"], "method 'brace:1.5': the window must be a whole number"),
    ],
)
def test_bad_options_are_one_line_before_anything_runs(arguments: list[str], message: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(BraceError) as raised:
        run(*arguments, "--out", str(out))
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)
    assert not out.exists()


def test_a_file_in_the_way_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine", encoding="utf-8")
    with pytest.raises(BraceError, match="is a file; name a folder"):
        run("chain", "--out", str(tmp_path / "taken"))
    assert (tmp_path / "taken").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(
    "name",
    [
        "mc",
        "gae:0.95",
        "vtrace",
        "uncapped",
        "capped:7",
        "brace:100",
        "drift:0.1",
        "path:1",
        "brace:9@1",
        "brace:9@2/1.1",
        "brace:9@1.2/inf",
        "group",
        "group_brace:5",
        "mc+decoupled",
        "brace:9@1+icepop:low=0.5:edge=E",
        "vtrace+ppo_ewma",
    ],
)
def test_a_method_reads_back_from_its_name(name: str) -> None:
    assert parse_method(name).name == name
    assert parse_method(parse_method(name).name) == parse_method(name)


@pytest.mark.parametrize(
    "name",
    [
        "mc:1",
        "gae:2",
        "gae:x",
        "brace:-1",
        "drift:1",
        "drift:0",
        "path:-1",
        "path:nan",
        "mc@1",
        "brace@0",
        "brace@x",
        "brace@1/0",
        "group@1",
        "mc+grpo",
        "mc+icepop:low",
        "mc+icepop:lower=1",
        "mc+icepop:low=9",
        "mc+estr",
        "mc+m2po",
        "",
    ],
)
def test_a_method_out_of_range_is_refused(name: str) -> None:
    with pytest.raises(BraceError, match="method"):
        parse_method(name)


def test_defaults_can_be_used_and_the_help_names_every_preset() -> None:
    for name in [*command.METHODS.split(","), *command.MAP_METHODS.split(",")]:
        parse_method(name)
    assert command.PRESETS.split(", ") == list(presets.PRESETS)
    assert command.PRESETS.split(", ")[0] in run("--help")


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("brace_rl.oracle.command", ["torch", "rich", "matplotlib"]),
        ("brace_rl.oracle.methods", ["torch"]),
        ("brace_rl.oracle.sweep, brace_rl.oracle.study", ["brace_rl.training", "transformers", "matplotlib", "rich"]),
        ("brace_rl.oracle.run", ["brace_rl.training", "transformers", "matplotlib"]),
    ],
)
def test_imports_load_no_more_than_they_need(module: str, absent: list[str]) -> None:
    code = f"import sys, {module}; print([m for m in {absent!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


def test_a_clip_after_a_method_sets_both_and_shows_in_its_name() -> None:
    method = parse_method("path:2@1")
    assert (method.rho_clip, method.c_clip, method.parameter) == (1.0, 1.0, 2.0)
    assert (parse_method("path:2").rho_clip, parse_method("path:2").c_clip) == (1.2, 1.1)
