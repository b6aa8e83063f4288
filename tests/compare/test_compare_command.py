"""The command line of ``brace compare``: what is wrong is one line and exit code 2, and nothing has been started."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from brace_rl import cli
from brace_rl.compare.command import names, whole_numbers
from brace_rl.compare.measures import MEASURES
from brace_rl.errors import ConfigError

RECIPES = Path(__file__).parents[2] / "recipes"
TINY = """
[task]
operands = [2, 2]
max_number = 9
train_problems = 60
eval_problems = 8
[model]
hidden_size = 16
layers = 1
heads = 2
intermediate_size = 16
[warm_start]
steps = 1
batch_size = 4
[rollout]
prompts_per_step = 4
max_response_tokens = 8
[optim]
steps = 3
critic_warmup_steps = 1
actor_lr = 1e-2
critic_lr = 1e-2
[eval]
every = 1
problems = 4
final_problems = 4
[run]
checkpoint_every = 1
"""


def call(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["brace", "compare", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code, capsys.readouterr().err


def processes_of(folder):
    """Ids of running processes that were told to work in ``folder``."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if f"{folder}".encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no.toml"], "no.toml: no such recipe"),
        (["RECIPE", "--methods", "ppo,bracee"], "method 'bracee': unknown; did you mean brace?"),
        (["RECIPE", "--methods", ","], "--methods: names none"),
        (["RECIPE", "--methods", "ppo,ppo"], "--methods: ppo is named twice"),
        (["RECIPE", "--methods", "ppo,brace:windw=20"], "no setting 'windw'; did you mean window?"),
        (
            ["RECIPE", "--algorithm.value_target", "brace"],
            "method ppo sets algorithm.value_target = monte_carlo itself",
        ),
        (["RECIPE", "--methods", "ppo,grpo"], "method grpo, S = 9: "),
        (["RECIPE", "--staleness", "4,-1"], "--staleness: '4,-1' is no list of whole numbers"),
        (["RECIPE", "--seeds", "0"], "Invalid value for '--seeds'"),
        (["RECIPE", "--workers", "none"], "Invalid value for '--workers'"),
        (["RECIPE", "--optim.stepps", "5"], "optim.stepps: no such setting; did you mean optim.steps?"),
        (["RECIPE", "--optim.steps"], "--optim.steps: needs a value"),
        (["RECIPE", "--run.seed", "3"], "--run.seed: a comparison sets it itself; use --seeds"),
        (["RECIPE", "--schedule.mode", "sync"], "schedule.mode = 'sync' has staleness 0"),
        ([], "Missing argument 'RECIPE'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2_and_starts_nothing(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(TINY)
    code, err = call(monkeypatch, capsys, *("tiny.toml" if word == "RECIPE" else word for word in words))
    assert code == 2
    assert said in err
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.toml"]


def test_a_file_where_the_folder_should_be_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "file").write_text("mine")
    code, err = call(monkeypatch, capsys, tmp_path / "tiny.toml", "--out", tmp_path / "file")
    assert (code, err.count("\n")) == (2, 1)
    assert "is a file; name a folder" in err
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(("name", "said"), [("none", "no such folder"), ("file", "is a file; name a folder")])
def test_a_report_on_nothing_is_refused_and_makes_nothing(tmp_path, monkeypatch, capsys, name, said):
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "file").write_text("mine")
    code, err = call(monkeypatch, capsys, tmp_path / "tiny.toml", "--out", tmp_path / name, "--report")
    assert (code, err.count("\n")) == (2, 1)
    assert said in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "tiny.toml"]


def test_lists_are_read_as_people_write_them():
    assert names(" ppo, brace+icepop ,") == ["ppo", "brace+icepop"]
    assert whole_numbers("--staleness", "16, 0,4,4") == [0, 4, 16]
    with pytest.raises(ConfigError, match="no list of whole numbers"):
        whole_numbers("--staleness", "4,")


def test_the_small_recipe_takes_the_methods_of_the_paper(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setattr(
        sys, "argv", ["brace", "compare", str(RECIPES / "calculator_small.toml"), "--report", "--out", str(out)]
    )
    cli.main()
    results = json.loads((out / "results.json").read_text())
    assert results["methods"] == ["ppo", "areal", "kpop", "icepop", "ppo_ewma", "brace"]
    assert {cell["status"] for cell in results["cells"]} == {"not run"}
    assert "0 of 5" in capsys.readouterr().out


@pytest.mark.slow
def test_a_comparison_that_is_stopped_leaves_no_process_and_is_gone_on_with(tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY)
    out = tmp_path / "out"
    words = [sys.executable, "-m", "brace_rl", "compare", "tiny.toml", "--methods", "ppo,brace", "--seeds", "1"]
    words += ["--staleness", "1", "--workers", "1", "--out", str(out)]
    first = subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 240
    while not list(out.glob("cells/ppo-*/summary.json")) and time.monotonic() < deadline:
        assert first.poll() is None, first.stderr.read()
        time.sleep(0.1)
    first.send_signal(signal.SIGTERM)
    assert first.wait(120) == 130
    first.stderr.close()
    assert processes_of(out) == []
    (finished,) = out.glob("cells/ppo-*/summary.json")
    written = finished.stat().st_mtime_ns
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert finished.stat().st_mtime_ns == written
    assert "2/2  brace, S = 1, seed 0: success" in done.stderr
    with (out / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["method"], row["finished"], row["failed"]) for row in rows] == [("ppo", "1", "0"), ("brace", "1", "0")]
    missing = {m.key for m in MEASURES for row in rows if not row[m.key]}
    assert missing <= {"separation"}, "a run logs what is compared; untrained, it has no success to set apart"
    cells = json.loads((out / "results.json").read_text())["cells"]
    assert [[step for step, _ in cell["evaluations"]] for cell in cells] == [[0, 1, 2, 3]] * 2
    assert cells[0]["evaluations"][0] == cells[1]["evaluations"][0]
    assert [cell["steps"] for cell in cells] == [3, 3]
