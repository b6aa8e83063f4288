"""Reading a run folder, whole or damaged."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from run_folders import CONFIG, FINISHED, healthy_rows, make_run, write_lines

from brace_rl.config import Config
from brace_rl.errors import BraceError
from brace_rl.report.run_data import read_run, wilson_interval
from brace_rl.training.run_files import RunWriter


def test_a_half_written_last_line_is_left_out_and_noted(tmp_path):
    run = make_run(tmp_path / "run", rows=healthy_rows(3))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rewa')
    found = read_run(run)
    assert [row["step"] for row in found.rows] == [0, 1, 2, 3]
    assert found.damage == ["The last line of metrics.jsonl is half-written, as after a crash; it is left out."]


@pytest.mark.parametrize("line", ["[1, 2]", '{"reward/mean": 1}', '{"step": "3"}', "\x00\x00", "[" * 100_000])
def test_a_line_that_is_no_row_is_left_out_wherever_it_stands(tmp_path, line):
    run = make_run(tmp_path / "run")
    (run / "metrics.jsonl").write_text(f'{{"step": 1, "a": 1}}\n{line}\n{{"step": 2, "a": 2}}\n')
    found = read_run(run)
    assert found.series("a") == [(1, 1.0), (2, 2.0)]
    assert "first line 2" in found.damage[0]


def test_null_and_nan_are_not_finite_and_text_is_not_a_figure(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "metrics.jsonl").write_text('{"step": 1, "a": null, "b": NaN, "c": "x", "d": true, "non_finite": ["a"]}\n')
    row = read_run(run).rows[0]
    assert set(row) == {"step", "a", "b"}
    assert math.isnan(row["a"])
    assert math.isnan(row["b"])


def test_two_rows_of_one_step_are_merged_and_the_later_one_wins(tmp_path):
    rows = [{"step": 2, "a": 1}, {"step": 1, "a": 5}, {"step": 2, "a": 3, "eval/success": 0.5}]
    found = read_run(make_run(tmp_path / "run", rows=rows))
    assert found.series("a") == [(1, 5.0), (2, 3.0)]
    assert [(e.step, e.success) for e in found.evaluations()] == [(2, 0.5)]


def test_evaluations_come_from_the_rows_and_from_the_summary(tmp_path):
    rows = healthy_rows(4)
    rows[2] |= {"eval/success": 0.5, "eval/problems": 128}
    found = read_run(make_run(tmp_path / "run", rows=rows, summary=FINISHED)).evaluations()
    assert [(e.step, e.success, e.problems) for e in found] == [(0, 0.25, 512), (2, 0.5, 128), (4, 0.75, 512)]


def test_the_ledger_is_the_newest_of_the_rows_when_there_is_no_summary(tmp_path):
    found = read_run(make_run(tmp_path / "run", rows=healthy_rows(2)))
    assert found.ledger() == {"issued": 100, "consumed": 80, "dropped": 4, "in_flight": 16}
    assert found.status == "unfinished"


def test_what_the_writer_writes_is_what_is_read(tmp_path):
    with RunWriter(tmp_path / "run", trackers=(), config=Config()) as writer:
        writer.write_metrics(1, {"a": 0.5, "b": math.inf})
        writer.write_samples([{"step": 1, "prompt": "é\n\u2028"}])
    found = read_run(tmp_path / "run")
    assert found.rows[0]["a"] == 0.5
    assert math.isnan(found.rows[0]["b"])
    assert found.samples == [{"step": 1, "prompt": "é\n\u2028"}]
    assert found.setting("algorithm.window") == 100
    assert found.damage == []


def test_a_folder_that_is_not_a_run_is_an_error_that_says_so(tmp_path):
    with pytest.raises(BraceError, match=r"not a run folder \(no config\.json in it\)"):
        read_run(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_a_configuration_that_is_not_one_is_an_error_that_names_the_file(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(BraceError, match=r"config\.json: "):
        read_run(tmp_path)


def test_settings_of_another_version_of_the_project_fall_back(tmp_path):
    found = read_run(make_run(tmp_path / "run", config={"task": "calculator", **{k: CONFIG[k] for k in ("run",)}}))
    assert found.setting("task.name", "unknown") == "unknown"
    assert found.setting("run.seed") == 0


def test_wilson_interval_has_the_textbook_values():
    # Wilson (1927) for 8 of 10: centre (0.8 + 3.8416/20) / 1.38416 = 0.71674, half width 0.22659.
    low, high = wilson_interval(0.8, 10)
    assert low == pytest.approx(0.49016, abs=1e-4)
    assert high == pytest.approx(0.94332, abs=1e-4)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_wilson_interval_stays_inside_and_keeps_a_width(share):
    low, high = wilson_interval(share, 20)
    assert 0 <= low < high <= 1
    assert high - low == pytest.approx(3.8416 / 23.8416)  # z^2 / (n + z^2)


def test_a_run_without_a_single_file_of_figures_has_no_rows(tmp_path):
    run = make_run(tmp_path / "run")
    Path(run / "metrics.jsonl").unlink()
    write_lines(run / "samples.jsonl", [])
    assert read_run(run).rows == []
