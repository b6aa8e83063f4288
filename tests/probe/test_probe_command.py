"""``brace probe`` on a run: what it writes, that it writes nothing else, and what it refuses in one line."""

from __future__ import annotations

import csv
import hashlib
import json
import re
import shutil
import sys
import warnings
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

from brace_rl import cli
from brace_rl.config import config_from_dict
from brace_rl.probe.checkpoints import choose_pair
from brace_rl.probe.estimate import FIGURES
from brace_rl.training.run import run_training

TINY = {
    "task": {"operands": [2, 2], "max_number": 9, "train_problems": 60, "eval_problems": 8},
    "model": {"hidden_size": 16, "layers": 1, "heads": 2, "intermediate_size": 16},
    "warm_start": {"steps": 40, "batch_size": 16, "lr": 1e-2},
    "rollout": {"prompts_per_step": 4, "max_response_tokens": 24, "slots": 8},
    "schedule": {"mode": "lag", "max_staleness": 2},
    "optim": {"steps": 4, "actor_lr": 1e-2, "critic_lr": 1e-2, "critic_warmup_steps": 0},
    "eval": {"final_problems": 8, "slots": 16},
    "run": {"checkpoint_every": 1, "keep_checkpoints": 10, "rollouts_per_step": 4, "trackers": []},
}
QUICK = ("--prompts", "6", "--positions", "2", "--continuations", "2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "lag"
    run_training(config_from_dict(TINY), run_dir)
    return run_dir


@pytest.fixture
def run_dir(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def brace(monkeypatch, capsys):
    """``brace(words...)`` -> (exit code, standard output, lines of standard error)."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["brace", *map(str, words)])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code or 0
        out, err = capsys.readouterr()
        return code, out, err.splitlines()

    return call


def contents(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_all_files_tell_the_same_and_the_run_is_untouched(brace, run_dir):
    before = contents(run_dir)
    code, out, err = brace("probe", run_dir, *QUICK)
    assert code == 0, err
    after = contents(run_dir)
    written = {f"probe/probe.{ending}" for ending in ("json", "csv", "html", "png", "svg")}
    assert after.keys() - before.keys() == written
    assert {name: after[name] for name in before} == before
    found = json.loads((run_dir / "probe" / "probe.json").read_text())
    assert (found["step"], found["behavior_step"]) == (4, 2)  # as old as max_staleness
    assert (found["overall"]["states"], found["overall"]["prompts"], len(found["states"])) == (12, 6, 12)
    b = found["overall"]["figures"]["b"]
    assert f"{b['value']:+.3f} [{b['low']:+.3f}, {b['high']:+.3f}]" in out
    assert "2 continuations each under pi and under mu" in out
    rows = list(csv.DictReader((run_dir / "probe" / "probe.csv").read_text().splitlines()))
    assert [row["figure"] for row in rows] == list(FIGURES) * 3
    assert float(rows[-4]["value"]) == pytest.approx(b["value"])
    page = (run_dir / "probe" / "probe.html").read_text()
    assert "<script" not in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert f"{b['value']:+.3f} [{b['low']:+.3f}" in page
    HTMLParser().feed(page)
    assert (run_dir / "probe" / "probe.png").read_bytes().startswith(b"\x89PNG")
    assert ElementTree.parse(run_dir / "probe" / "probe.svg").getroot().tag.endswith("svg")
    assert "states under pi: 12 of 12" in err
    assert "states under pi: 12 to do" in err


def test_a_seed_repeats_every_file_and_another_does_not(brace, run_dir, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert brace("probe", run_dir, *QUICK, "--seed", seed, "--out", tmp_path / name)[0] == 0
    assert not (run_dir / "probe").exists()
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert contents(tmp_path / "a")["probe.csv"] != contents(tmp_path / "c")["probe.csv"]


def test_a_policy_against_itself_has_b_exactly_0(brace, run_dir, tmp_path):
    code, out, _ = brace("probe", run_dir, *QUICK, "--step", "3", "--behavior-step", "3", "--out", tmp_path)
    assert code == 0
    found = json.loads((tmp_path / "probe.json").read_text())
    for group in (found["overall"], *found["positions"]):
        b = group["figures"]["b"]
        assert (b["value"], b["low"], b["high"]) == (0, 0, 0)
    assert "not that nothing could" in out
    assert "how large b could be is not known" in out
    assert "could hide in this" not in out


def test_logged_responses_are_cut_where_they_were_sampled(brace, run_dir, tmp_path):
    words = ("--prefixes", "rollouts", "--prompts", "5", "--at", "0,2", "--continuations", "2", "--out", tmp_path)
    assert brace("probe", run_dir, *words)[0] == 0
    logged = [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]
    states = json.loads((tmp_path / "probe.json").read_text())["states"]
    prompts = {state["prompt_id"] for state in states}
    assert len(prompts) == 5
    # mu is step 2, which sampled what step 5 would have consumed: the latest logged, of version 1, are closest.
    assert prompts & {row["prompt_id"] for row in logged if row["step"] == 4}
    assert prompts <= {row["prompt_id"] for row in logged}


def test_mu_is_the_checkpoint_whose_age_is_closest_to_the_staleness(tmp_path):
    for step in (4, 8, 12, 16, 20):
        folder = tmp_path / "checkpoints" / f"step_{step:06d}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text("{}")

    def ages(staleness, **chosen):
        pair = choose_pair(tmp_path, max_staleness=staleness, **{"step": None, "behavior_step": None, **chosen})
        return pair.step, pair.behavior_step

    assert ages(8) == (20, 12)
    assert ages(0) == (20, 16)
    assert ages(10) == (20, 12)  # of two equally close the younger
    assert ages(1000) == (20, 4)
    assert ages(4, step=12) == (12, 8)
    assert ages(4, behavior_step=4) == (20, 4)


def damage(run_dir, how):
    newest = run_dir / "checkpoints" / "step_000004"
    if how == "no critic":
        (newest / "critic.safetensors").unlink()
    elif how == "bad critic":
        (newest / "critic.safetensors").write_bytes(b"x")
    elif how == "one checkpoint":
        for step in (1, 2, 3):
            shutil.rmtree(run_dir / "checkpoints" / f"step_00000{step}")
    elif how == "no checkpoint":
        shutil.rmtree(run_dir / "checkpoints")
    elif how == "no actor":
        shutil.rmtree(newest / "actor")
    elif how == "format":
        (newest / "state.json").write_text('{"format": 99}')
    elif how == "no rollouts":
        (run_dir / "rollouts.jsonl").unlink()
    elif how == "empty rollouts":
        (run_dir / "rollouts.jsonl").write_text("")
    elif how == "bad rollouts":
        (run_dir / "rollouts.jsonl").write_text('{"step": 1}\n')
    elif how == "strange prompt":
        row = {"step": 1, "prompt_id": "x", "token_ids": [1], "policy_mask": [1], "versions": [0]}
        (run_dir / "rollouts.jsonl").write_text(json.dumps(row) + "\n")
    elif how == "not a run":
        (run_dir / "config.json").unlink()


@pytest.mark.parametrize(
    ("how", "words", "message"),
    [
        ("not a run", (), "not a run folder"),
        ("no checkpoint", (), "holds no complete checkpoint; set run.checkpoint_every"),
        (
            "one checkpoint",
            (),
            "no checkpoint older than step 4.*run.checkpoint_every and a larger run.keep_checkpoints",
        ),
        ("no critic", (), r"has no critic \(critic.safetensors\)"),
        ("bad critic", (), "critic.safetensors: is damaged"),
        ("no actor", (), "actor: no such model folder"),
        ("format", (), "has checkpoint format 99"),
        ("", ("--step", "9"), "--step: .* no checkpoint of step 9; it holds 1, 2, 3, 4"),
        ("", ("--behavior-step", "0"), "--behavior-step: .* no checkpoint of step 0"),
        ("", ("--step", "1"), "no checkpoint older than step 1"),
        ("", ("--step", "2", "--behavior-step", "3"), "must not be newer than pi"),
        ("", ("--at", "0,500"), "--at: no response has a policy token 500"),
        ("", ("--at", "0,1.5"), "--at: 1.5 is out of range"),
        ("", ("--positions", "0"), "--positions: must be at least 1"),
        ("", ("--prompts", "0"), "--prompts: must be at least 1"),
        ("", ("--continuations", "1"), "--continuations: must be at least 2"),
        ("", ("--continuations", "x"), "not a valid integer"),
        ("", ("--device", "tpu9"), "tpu9"),
        ("no rollouts", ("--prefixes", "rollouts"), "rollouts.jsonl: cannot be read.*run.rollouts_per_step"),
        ("empty rollouts", ("--prefixes", "rollouts"), "rollouts.jsonl: holds no response"),
        ("bad rollouts", ("--prefixes", "rollouts"), "rollouts.jsonl, line 1: not a logged response"),
        ("strange prompt", ("--prefixes", "rollouts"), "line 1: prompt_id 'x' is no training problem"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(how, words, message, brace, run_dir):
    damage(run_dir, how)
    before = contents(run_dir)
    code, out, err = brace("probe", run_dir, *words)
    errors = [line for line in err if line.startswith("error: ")]
    assert (code, out, len(errors)) == (2, "", 1)
    assert re.search(message, errors[0]), errors
    assert [line for line in err if line not in errors and not line.startswith("prefixes under mu")] == []
    assert contents(run_dir) == before


def test_a_position_beyond_the_length_limit_is_refused_before_anything_is_sampled(brace, run_dir):
    code, _, err = brace("probe", run_dir, "--at", "0,9999")
    assert (code, len(err)) == (2, 1)
    assert "policy token 9999" in err[0]
    assert "rollout.max_response_tokens" in err[0]


def test_a_file_in_the_way_is_named(brace, run_dir, tmp_path):
    (tmp_path / "out").write_text("")
    code, _, err = brace("probe", run_dir, "--out", tmp_path / "out")
    assert (code, len(err)) == (2, 1)
    assert "--out: " in err[0]
