"""The picture of one or more runs."""

from __future__ import annotations

import struct

import pytest
from run_folders import CONFIG, FINISHED, healthy_rows, make_run

from brace_rl.errors import BraceError
from brace_rl.report import training_figure
from brace_rl.report.figure import _labels
from brace_rl.report.run_data import read_run


def size_of_png(path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def test_runs_of_any_length_share_one_picture(tmp_path):
    runs = [
        make_run(tmp_path / "full", rows=healthy_rows(30), summary=FINISHED),
        make_run(tmp_path / "one", rows=healthy_rows(1)),
        make_run(tmp_path / "none"),
    ]
    path = training_figure(runs, tmp_path / "docs" / "runs.png")
    width, height = size_of_png(path)
    assert width > height > 500
    assert [entry.name for entry in path.parent.iterdir()] == ["runs.png"]


def test_runs_are_told_apart_by_what_differs(tmp_path):
    gae = {**CONFIG, "algorithm": {"value_target": "gae"}}
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", config=gae), make_run(tmp_path / "c", config=gae)]
    assert _labels([read_run(run) for run in runs]) == [
        "brace, window 100, clips 1.2 / 1.1; async, S = 4; seed 0",
        "gae; async, S = 4; seed 0 (b)",
        "gae; async, S = 4; seed 0 (c)",
    ]


def test_no_run_and_no_run_folder_are_errors(tmp_path):
    with pytest.raises(BraceError, match="no run to draw"):
        training_figure([], tmp_path / "a.png")
    with pytest.raises(BraceError, match="not a run folder"):
        training_figure([tmp_path], tmp_path / "a.png")
