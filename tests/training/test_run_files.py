"""What a run writes: whole lines, one row per step, nothing lost and nothing half-written."""

from __future__ import annotations

import json
import math
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from brace_rl.config import Config, config_from_dict, load_config
from brace_rl.errors import BraceError, ConfigError
from brace_rl.training.run_files import RunWriter, sample_record
from brace_rl.training.types import NOT_A_POLICY_TOKEN, Trajectory

CONFIG = Config()


class Letters:
    """A tokenizer whose ids are code points."""

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def new_run(directory: Path, steps: int = 0) -> RunWriter:
    writer = RunWriter(directory, trackers=(), config=CONFIG)
    for step in range(1, steps + 1):
        writer.write_metrics(step, {"reward/mean": step / 10})
        writer.write_samples([{"step": step, "prompt": "p"}])
    return writer


def test_both_configuration_files_read_back_to_the_configuration(tmp_path):
    settings = {"task": {"name": "gsm8k_tool", "data": 'a "b"\\c\x7f é.jsonl'}, "model": {"path": "m"}}
    config = config_from_dict({**settings, "optim": {"actor_lr": 3e-7, "betas": [0.5, 0.75]}})
    RunWriter(tmp_path / "run", trackers=(), config=config)
    assert config_from_dict(json.loads((tmp_path / "run" / "config.json").read_text())) == config
    assert load_config(tmp_path / "run" / "config.toml") == config


def test_a_step_is_one_line_and_any_number_type_is_accepted(tmp_path):
    with new_run(tmp_path / "run") as writer:
        writer.write_metrics(1, {"a": np.float32(0.5), "anything/at all": 2, "step": 1})
    assert rows(tmp_path / "run" / "metrics.jsonl") == [{"step": 1, "a": 0.5, "anything/at all": 2}]


def test_figures_that_are_not_finite_become_null_and_are_named(tmp_path):
    with new_run(tmp_path / "run") as writer:
        writer.write_metrics(1, {"b": math.inf, "a": math.nan, "c": 1.0})
    assert rows(tmp_path / "run" / "metrics.jsonl") == [
        {"step": 1, "b": None, "a": None, "c": 1.0, "non_finite": ["a", "b"]}
    ]


def test_no_step_is_written_twice(tmp_path):
    writer = new_run(tmp_path / "run", steps=3)
    with pytest.raises(ValueError, match="step 3 comes after step 3"):
        writer.write_metrics(3, {})
    assert [row["step"] for row in rows(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]


def test_a_figure_that_is_no_number_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="metric loss: 'high' is not a number"):
        new_run(tmp_path / "run").write_metrics(1, {"loss": "high"})


def test_a_folder_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(BraceError, match=r"is not empty; choose another run\.name"):
        new_run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_file_in_the_place_of_the_folder_is_a_clear_error(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(BraceError, match="is a file"):
        new_run(tmp_path / "run")


def test_resuming_cuts_what_came_after_the_checkpoint(tmp_path):
    new_run(tmp_path / "run", steps=5).close()
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "reward/me')
    with RunWriter(tmp_path / "run", trackers=(), config=CONFIG, resume_step=3) as writer:
        writer.write_metrics(4, {"reward/mean": 0.9})
    found = rows(tmp_path / "run" / "metrics.jsonl")
    assert [(row["step"], row["reward/mean"]) for row in found] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.9)]
    assert [row["step"] for row in rows(tmp_path / "run" / "samples.jsonl")] == [1, 2, 3]


def test_resuming_where_no_run_is_says_so_and_writes_nothing(tmp_path):
    with pytest.raises(BraceError, match="no run to resume"):
        RunWriter(tmp_path / "run", trackers=(), config=CONFIG, resume_step=3)
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_a_clear_error(tmp_path):
    writer = new_run(tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(BraceError, match=r"metrics\.jsonl: no space left on the disk"):
        writer.write_metrics(1, {"a": 1.0})


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files")
def test_a_line_that_fits_only_in_part_is_taken_back(tmp_path):
    import resource

    writer = new_run(tmp_path / "run", steps=2)
    path = tmp_path / "run" / "metrics.jsonl"
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, hard))
    try:
        with pytest.raises(BraceError, match="cannot be written"):
            writer.write_metrics(3, {"a": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    writer.write_metrics(3, {"a": 1.0})
    assert rows(path)[-1] == {"step": 3, "a": 1.0}


def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"run\.trackers: wandb is not installed; pip install wandb"):
        RunWriter(tmp_path / "run", trackers=("wandb",), config=CONFIG)
    assert not (tmp_path / "run").exists()


FAKE_WANDB = """
from pathlib import Path
def init(*, dir, config, **named):
    assert config["run"]["seed"] == 0
    return Run(Path(dir) / "sent.txt")
class Run:
    def __init__(self, path):
        self.path = path
    def log(self, metrics, step):
        if step == 2:
            raise RuntimeError("no network")
        self.path.write_text(f"{step} {metrics}")
    def finish(self):
        pass
"""


def fake_package(tmp_path, monkeypatch, source: str) -> None:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "wandb.py").write_text(source)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.syspath_prepend(tmp_path / "packages")


def test_a_tracker_that_fails_is_left_out_and_the_run_goes_on(tmp_path, monkeypatch):
    fake_package(tmp_path, monkeypatch, FAKE_WANDB)
    with RunWriter(tmp_path / "run", trackers=("wandb",), config=CONFIG) as writer:
        writer.write_metrics(1, {"a": 1.0})
        with pytest.warns(UserWarning, match="wandb failed at step 2"):
            writer.write_metrics(2, {"a": 2.0})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            writer.write_metrics(3, {"a": 3.0})
    assert (tmp_path / "run" / "sent.txt").read_text() == "1 {'a': 1.0}"
    assert [row["step"] for row in rows(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]


def test_a_tracker_that_cannot_start_leaves_no_folder_behind(tmp_path, monkeypatch):
    fake_package(tmp_path, monkeypatch, "def init(**named):\n    raise RuntimeError('not logged in')\n")
    with pytest.raises(ConfigError, match=r"run\.trackers: wandb cannot start: not logged in"):
        RunWriter(tmp_path / "run", trackers=("wandb",), config=CONFIG)
    assert not (tmp_path / "run").exists()


def test_tensorboard_receives_every_figure(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with RunWriter(tmp_path / "run", trackers=("tensorboard",), config=CONFIG) as writer:
        writer.write_metrics(1, {"reward/mean": 0.25})
        writer.write_metrics(2, {"reward/mean": 0.5})
    events = EventAccumulator(str(tmp_path / "run" / "events"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]


def test_a_sample_marks_tool_output_and_encodes_versions_by_runs():
    trajectory = Trajectory(
        request_index=7,
        sample_index=1,
        problem_id="p7",
        prompt_ids=[ord("?")],
        response_ids=[ord(letter) for letter in "ab84cd"],
        policy_mask=[True, True, False, False, True, True],
        versions=[3, 3, NOT_A_POLICY_TOKEN, NOT_A_POLICY_TOKEN, 3, 4],
        rewards=[0.0, 0.0, 0.0, 0.0, 0.0, 1.0],
        success=True,
        turns=2,
    )
    record = sample_record(trajectory, Letters(), step=5)
    assert record["response"] == [
        {"text": "ab", "policy": True},
        {"text": "84", "policy": False},
        {"text": "cd", "policy": True},
    ]
    assert record["versions"] == [[3, 3], [4, 1]]
    assert (record["prompt"], record["reward"], record["success"], record["step"]) == ("?", 1.0, True, 5)
