"""The command line: what is wrong is one line on stderr and exit code 2, and leaves nothing half-written."""

import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from brace_rl import __main__ as command
from brace_rl import __version__, cli
from brace_rl.config import Config
from brace_rl.errors import BraceError, ConfigError
from brace_rl.training import checkpoint, run

RECIPES = Path(__file__).parents[1] / "recipes"
RECIPE = """
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
max_response_tokens = 12
[schedule]
mode = "sync"
max_staleness = 0
timeout_s = 60
[optim]
steps = 2
critic_warmup_steps = 1
actor_lr = 1e-2
critic_lr = 1e-2
[eval]
every = 1
problems = 4
final_problems = 8
[run]
name = "it"
trackers = []
"""
GSM8K_RECIPE = """
[task]
name = "gsm8k_tool"
eval_problems = 1
[rollout]
prompts_per_step = 1
max_response_tokens = 4
[schedule]
mode = "sync"
max_staleness = 0
[optim]
steps = 1
critic_warmup_steps = 0
[run]
name = "it"
trackers = []
"""
GOOD_ROW = '{"question": "What is 2+2?", "answer": "2+2=<<2+2=4>>4\\n#### 4"}'
OTHER_ROW = '{"question": "What is 2+3?", "answer": "2+3=<<2+3=5>>5\\n#### 5"}'
SECTION_5 = (
    "reward/mean",
    "eval/success",
    "response/length_mean",
    "staleness/mean",
    "staleness/max",
    "staleness/within_response",
    "staleness/within_response_max",
    "ratio/mean",
    "ratio/max",
    "ratio/ess",
    "target/abs_gap",
    "window_weight/mean",
    "window_weight/max",
    "value/explained_variance",
    "critic/grad_norm",
    "actor/grad_norm",
    "advantage/abs_max",
    "actor/clip_fraction",
    "value/clip_fraction",
    "entropy/mean",
    "time/step",
    "time/wait_rollouts",
    "time/evaluate",
    "time/targets",
    "time/update",
    "time/publish",
    "time/eval",
    "tokens/step",
    "tokens/response",
    "tokens/policy",
    "throughput/tokens_per_s",
)
"""What every step of a run must log (eval/success at intervals)."""


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def error_lines(self):
        return [line for line in self.err.splitlines() if line]


@pytest.fixture
def brace(monkeypatch, capsys):
    """``brace(words...)`` runs the command in this process, by the entry point people run."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # which the entry point replaces

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["brace", *map(str, words)])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code
        out, err = capsys.readouterr()
        return Result(code or 0, out, err)

    return call


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE + f'root = "{tmp_path / "runs"}"\n')
    return path


@pytest.fixture
def gsm8k(tmp_path):
    path = tmp_path / "gsm8k.toml"
    path.write_text(GSM8K_RECIPE + f'root = "{tmp_path / "runs"}"\n')
    (tmp_path / "rows.jsonl").write_text(f"{GOOD_ROW}\n{OTHER_ROW}\n")
    return path


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A whole model without a chat template."""
    from brace_rl.config import ModelConfig
    from brace_rl.tasks.tokenizer import build_calculator_tokenizer
    from brace_rl.training.models import new_actor, save_actor

    tokenizer = build_calculator_tokenizer()
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_actor(new_actor(ModelConfig(hidden_size=16, layers=1, heads=2), tokenizer, seed=0), tokenizer, folder)
    return folder


def assert_bad_input(result, message):
    assert result.code == 2, result
    assert len(result.error_lines) == 1, result.err
    assert result.error_lines[0].startswith("error: "), result.err
    assert re.search(message, result.err), result.err


def runs_of(tmp_path):
    root = tmp_path / "runs"
    return sorted(path.name for path in root.iterdir()) if root.exists() else []


# Help and the shape of a command line


def test_the_version_is_that_of_the_package():
    done = subprocess.run(
        [sys.executable, "-m", "brace_rl", "--version"], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == f"brace, version {__version__}\n"


def test_without_a_command_the_help_is_printed(brace):
    result = brace()
    assert (result.code, result.err) == (0, "")
    assert all(f"\n  {name}" in result.out for name in ("train", "report", "bench", "import-gguf"))


def test_train_help_names_every_setting_with_its_meaning_and_default(brace):
    result = brace("train", "--help")
    flat = " ".join(re.sub(r"-\n +", "-", result.out).split())
    for section, field in Config.model_fields.items():
        assert f"[{section}]" in flat
        for name, setting in type(field.default).model_fields.items():
            assert f"--{section}.{name} " in flat
            opening = " ".join(setting.description.split()[:2])
            assert flat.partition(f"--{section}.{name} ")[2].startswith(opening), name
    assert "gsm8k_tool Word problems" in flat
    assert "from the ratios ahead of each token [default: 100]" in flat
    assert "icepop Weight inside a band" in flat
    assert "[default: brace; or capped, vtrace, gae, monte_carlo, none]" in flat
    assert (result.code, result.err) == (0, "")


def test_train_help_shows_the_settings_of_the_family_that_is_named(brace):
    result = brace("train", "--task.name", "gsm8k_tool", "--help")
    assert result.code == 0
    assert "--task.python_tool" in result.out
    assert "--task.operands" not in result.out


@pytest.mark.parametrize("command", [(), ("train",), ("eval",), ("report",), ("bench",), ("import-gguf",)])
def test_help_fits_eighty_columns(command, brace, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = brace(*command, "--help").out.splitlines()
    assert lines
    assert [line for line in lines if len(line) > 80] == []


def test_settings_are_split_from_the_other_words():
    overrides, others = cli.split_overrides(
        ["--optim.steps", "3", "a.toml", "--run.name=x=y", "--algorithm.window", "-1", "--data", "b.jsonl"]
    )
    assert overrides == {"optim.steps": "3", "run.name": "x=y", "algorithm.window": "-1"}
    assert others == ["a.toml", "--data", "b.jsonl"]


def test_of_a_setting_given_twice_the_last_wins():
    assert cli.split_overrides(["--optim.steps", "3", "--optim.steps=4"])[0] == {"optim.steps": "4"}


@pytest.mark.parametrize("words", [["--optim.steps"], ["--optim.steps", "--run.name", "x"]])
def test_a_setting_without_a_value_is_named(words):
    with pytest.raises(ConfigError, match=r"--optim\.steps: needs a value"):
        cli.split_overrides(words)


@pytest.mark.parametrize("position", ["before", "after"])
def test_settings_may_stand_before_or_after_the_recipe(position, brace, recipe):
    setting = ("--algorithm.window", 7)
    words = (*setting, recipe) if position == "before" else (recipe, *setting)
    result = brace("train", *words, "--check")
    assert result.code == 0, result.err
    assert "value target: brace, window 7\n" in result.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nosuch",), "No such command 'nosuch'; see brace --help"),
        (("train", "--nosuch"), "No such option.*--nosuch.*; see brace train --help"),
        (("train", "a.toml", "b.toml"), "unexpected extra argument"),
        (("train",), "name a recipe, .* or a run to --resume, and not both"),
        (("train", "a.toml", "--resume", "runs/x"), "name a recipe, .* or a run to --resume, and not both"),
        (("train", "a.toml", "--optim.steps"), r"--optim\.steps: needs a value"),
        (("train", "nosuch.toml"), r"nosuch\.toml: no such recipe"),
        (("train", "--resume", "nosuch"), "nosuch: not a run folder"),
        (("train", "--resume", "nosuch", "--optim.steps", "9"), "nosuch: not a run folder"),
        (("report",), "Missing argument 'RUN_DIR'"),
        (("report", "nosuch"), "nosuch: not a run folder"),
        (("bench", "nosuch"), "'nosuch' is not one of"),
        (("bench", "--steps", "0"), "--steps.*0 is not in the range"),
        (("bench", "--recipe", "nosuch.toml"), r"nosuch\.toml: no such recipe"),
        (("import-gguf", "nosuch.gguf", "out"), "no such GGUF file|pip install"),
        (("import-gguf", "nosuch.gguf", "out", "--dtype", "int3"), "'int3' is not one of"),
    ],
)
def test_a_command_line_that_cannot_be_understood_is_one_line(words, message, brace, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert_bad_input(brace(*words), message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("algorithm.windw", "3", r"algorithm\.windw: no such setting; did you mean algorithm\.window\?"),
        ("algoritm.window", "3", r"--algoritm\.window: no such setting"),
        ("algorithm.window", "-1", r"algorithm\.window: .*whole number from 0"),
        ("algorithm.value_target", "best", r"algorithm\.value_target: .*'brace'"),
        ("schedule.max_staleness", "1", r"schedule\.max_staleness: .*staleness 0"),
        ("run.name", "a/b", r"run\.name: 'a/b' must be a plain folder name"),
        ("run.trackers", '["nosuch"]', r"run\.trackers"),
        ("model.device", "abacus", r"model\.device: no device is called 'abacus'"),
        ("task.max_turns", "1", r"task\.max_turns: 1 is too few"),
        ("task.train_problems", "100000", r"task\.train_problems: .*not 100000"),
        ("rollout.max_prompt_tokens", "1", r"rollout\.max_prompt_tokens = 1"),
    ],
)
def test_a_setting_that_cannot_work_is_one_line_and_leaves_no_folder(key, value, message, brace, recipe, tmp_path):
    assert_bad_input(brace("train", recipe, f"--{key}", value), message)
    assert runs_of(tmp_path) == []


def test_a_doubtful_setting_is_a_warning_of_one_line(brace, recipe):
    result = brace("train", recipe, "--check", "--algorithm.lam", "0.9")
    assert result.code == 0
    assert len(result.error_lines) == 1
    assert result.err.startswith("warning: algorithm.lam = 0.9 leaves the tail")


# Data and models


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("none.jsonl", None, r"none\.jsonl: no such file"),
        ("empty.jsonl", "", r"empty\.jsonl: is empty"),
        ("blank.jsonl", "\n\n", r"blank\.jsonl: holds no rows"),
        ("broken.jsonl", f'{GOOD_ROW}\n{{"question": \n', r"broken\.jsonl:2: not valid JSON"),
        ("gold.jsonl", f'{GOOD_ROW}\n{{"question": "q", "answer": "4"}}\n', r"gold\.jsonl:2: answer does not end in"),
        ("odd.jsonl", '{"text": "q"}\n', r"odd\.jsonl:1: columns not understood"),
        ("one.jsonl", f"{GOOD_ROW}\n", r"one\.jsonl: 1 rows leave nothing to train on"),
        ("data.txt", "x", r"data\.txt: cannot tell the kind of file"),
    ],
)
def test_a_data_file_that_cannot_be_used_is_one_line_with_its_place(
    name, text, message, brace, gsm8k, model_dir, tmp_path
):
    if text is not None:
        (tmp_path / name).write_text(text)
    assert_bad_input(brace("train", gsm8k, "--data", tmp_path / name, "--model", model_dir), message)
    assert runs_of(tmp_path) == []


def test_data_is_checked_before_the_model_is_looked_at(brace, gsm8k, tmp_path):
    result = brace("train", gsm8k, "--data", tmp_path / "none.jsonl", "--model", tmp_path / "no-model")
    assert_bad_input(result, r"none\.jsonl")


def train_gsm8k(brace, gsm8k, model, *words):
    return brace("train", gsm8k, "--data", gsm8k.parent / "rows.jsonl", "--model", model, *words)


def test_a_missing_model_folder_is_one_line(brace, gsm8k, tmp_path):
    assert_bad_input(train_gsm8k(brace, gsm8k, tmp_path / "no-model"), "no-model: no such model folder")
    assert runs_of(tmp_path) == []


def test_a_model_without_chat_template_is_refused_where_one_is_needed(brace, gsm8k, model_dir, tmp_path):
    assert_bad_input(train_gsm8k(brace, gsm8k, model_dir), "has no chat template; use an instruct model")
    assert runs_of(tmp_path) == []


def test_a_model_with_pickled_weights_only_is_refused(brace, gsm8k, model_dir, tmp_path):
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    for path in model_dir.iterdir():
        name = "pytorch_model.bin" if path.suffix == ".safetensors" else path.name
        (pickled / name).write_bytes(path.read_bytes())
    assert_bad_input(train_gsm8k(brace, gsm8k, pickled), "has only pickled weights, which are never loaded")
    assert runs_of(tmp_path) == []


def test_rows_without_solutions_cannot_be_warm_started_on(brace, gsm8k, model_dir, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a?", "answer": 1}\n{"prompt": "b?", "answer": 2}\n')
    chat = shutil.copytree(model_dir, tmp_path / "chat")
    (chat / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    result = train_gsm8k(brace, gsm8k, chat, "--warm_start.steps", 1)
    assert_bad_input(result, r"no worked solutions to learn from; set warm_start\.steps = 0")
    assert runs_of(tmp_path) == []


# What a run prints and leaves


def test_check_says_what_it_found_and_trains_nothing(brace, recipe, tmp_path):
    result = brace("train", recipe, "--check")
    assert (result.code, result.err) == (0, "")
    found = dict(line.split(": ", 1) for line in result.out.splitlines())
    assert (found["task"], found["training problems"], found["held-out problems"]) == ("calculator", "60", "8")
    assert found["schedule"] == "sync, S = 0"
    assert found["first problem"].endswith("=")
    assert runs_of(tmp_path) == []


@pytest.mark.parametrize("name", ["calculator.toml"])
def test_the_recipes_that_need_no_data_pass_their_check(name, brace):
    assert brace("train", RECIPES / name, "--check").code == 0


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run, by the command: (its folder, what was printed)."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "tiny.toml").write_text(RECIPE + f'root = "{folder / "runs"}"\n')
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(warnings, "showwarning", warnings.showwarning)
        patch.setattr(sys, "argv", ["brace", "train", str(folder / "tiny.toml")])
        cli.main()
    return folder / "runs" / "it", Result(0, out.getvalue(), err.getvalue())


def test_a_run_prints_its_ledger_its_success_and_where_the_report_is(finished):
    run_dir, done = finished
    ledger = json.loads((run_dir / "summary.json").read_text())["ledger"]
    assert "prompts: issued 8, consumed 8, dropped 0, in_flight 0, buffered 0" in done.out
    assert (ledger["issued"], ledger["consumed"]) == (8, 8)
    assert re.search(r"success before training: \d\.\d{3} on 8 held-out problems", done.out)
    assert re.search(r"success after training: \d\.\d{3} on 8 held-out problems", done.out)
    assert done.out.splitlines()[-1] == f"report: {run_dir / 'report.html'}"
    assert done.err == ""


def test_every_step_logs_all_that_is_promised(finished):
    run_dir, _ = finished
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert [name for name in SECTION_5 if name not in row] == []


def test_no_tracker_is_asked_for_by_an_empty_list(finished):
    run_dir, _ = finished
    assert not (run_dir / "events").exists()
    assert json.loads((run_dir / "config.json").read_text())["run"]["trackers"] == []


def test_trackers_can_be_set_on_the_command_line(brace, recipe, tmp_path):
    assert brace("train", recipe, "--run.trackers", '["tensorboard"]', "--optim.steps", 2).code == 0
    assert list((tmp_path / "runs" / "it" / "events").iterdir()) != []
    assert brace("train", recipe, "--run.trackers", "[]", "--run.name", "without").code == 0
    assert not (tmp_path / "runs" / "without" / "events").exists()


def test_the_report_can_be_written_again(finished, brace):
    run_dir, _ = finished
    (run_dir / "report.html").unlink()
    assert brace("report", run_dir).out == f"report: {run_dir / 'report.html'}\n"
    assert "</html>" in (run_dir / "report.html").read_text()


def test_a_run_is_never_overwritten(finished, brace):
    run_dir, _ = finished
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    result = brace("train", run_dir.parents[1] / "tiny.toml")
    assert_bad_input(result, "it: is not empty; choose another run.name, or resume the run it holds")
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


def test_a_finished_run_goes_on_with_more_steps(brace, recipe, tmp_path):
    brace("train", recipe)
    run_dir = tmp_path / "runs" / "it"
    assert_bad_input(brace("train", "--resume", run_dir), "already finished its 2 steps; pass --optim.steps with more")
    result = brace("train", "--resume", run_dir, "--optim.steps", 3)
    assert result.code == 0, result.err
    assert "issued 12, consumed 12, dropped 0, in_flight 0" in result.out


def test_a_setting_that_a_resumed_run_cannot_change_is_refused_and_nothing_is_touched(finished, brace):
    run_dir, _ = finished
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    for key, value in (
        ("schedule.mode", "lag"),
        ("rollout.prompts_per_step", 2),
        ("rollout.temperature", 0.5),
        ("model.hidden_size", 32),
        ("run.seed", 1),
    ):
        result = brace("train", "--resume", run_dir, "--optim.steps", 3, f"--{key}", value)
        assert_bad_input(result, rf"{re.escape(key)}: .* was started with .*, which a resumed run cannot change")
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


# Interruptions, disks and everything unforeseen


def interrupt(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize("moment", ["warm_start", "Evaluator"])
def test_ctrl_c_before_the_first_step_ends_cleanly_and_leaves_no_folder(moment, brace, recipe, monkeypatch, tmp_path):
    monkeypatch.setattr(run, moment, interrupt)
    result = brace("train", recipe)
    assert (result.code, result.error_lines) == (130, ["stopped"])
    assert runs_of(tmp_path) == []


@pytest.mark.slow
def test_ctrl_c_while_the_policy_is_first_evaluated_leaves_no_folder(brace, recipe, monkeypatch, tmp_path):
    monkeypatch.setattr(run.Evaluator, "run", interrupt)
    result = brace("train", recipe, "--schedule.mode", "async", "--schedule.max_staleness", 1)
    assert (result.code, result.error_lines) == (130, ["stopped"])
    assert runs_of(tmp_path) == []


@pytest.mark.slow
def test_a_real_ctrl_c_during_the_warm_start_ends_cleanly(recipe, tmp_path):
    words = [str(recipe), "--warm_start.steps", "1000000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "brace_rl", "train", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "runs" / "it" / "config.toml").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)  # config.toml is written right before
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, [line for line in err.splitlines() if line]) == (130, ["stopped"])
    assert runs_of(tmp_path) == []


def no_space(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (os, "fsync"),  # config.json, the first file of a run
        (run, "save_actor"),  # the model after its warm start, by whatever library
        (run, "RunWriter"),
        (run, "new_actor"),
        (run, "build_task"),
    ],
)
def test_a_disk_that_is_full_before_the_first_step_is_one_line(owner, name, brace, recipe, monkeypatch, tmp_path):
    monkeypatch.setattr(owner, name, no_space)
    assert_bad_input(brace("train", recipe), "no space left on the disk")
    assert runs_of(tmp_path) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_a_disk_that_is_full_when_a_line_is_added_is_one_line(name, brace, recipe, monkeypatch, tmp_path):
    original = run.warm_start

    def warm_start(*arguments):
        (tmp_path / "runs" / "it" / name).symlink_to("/dev/full")
        original(*arguments)

    monkeypatch.setattr(run, "warm_start", warm_start)
    result = brace("train", recipe)
    assert_bad_input(result, rf"{re.escape(name)}: no space left on the disk; free some space, then resume the run")


def test_a_disk_that_is_full_at_the_checkpoint_is_one_line_and_keeps_what_was_logged(
    brace, recipe, monkeypatch, tmp_path
):
    monkeypatch.setattr(checkpoint, "save_file", no_space)
    assert_bad_input(brace("train", recipe), "step_000002: no space left on the disk")
    run_dir = tmp_path / "runs" / "it"
    assert list((run_dir / "checkpoints").iterdir()) == []
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "failed"
    assert [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()] == [0, 1]


def test_a_disk_that_is_full_for_the_figures_of_a_benchmark_is_one_line(brace, recipe, monkeypatch, tmp_path):
    from brace_rl.bench import command

    monkeypatch.setattr(command, "run_bench", lambda *_, **__: {})
    monkeypatch.setattr(os, "fsync", no_space)
    result = brace("bench", "targets", "--recipe", recipe, "--out", tmp_path / "out.json")
    assert_bad_input(result, r"out\.json: no space left on the disk")
    assert not (tmp_path / "out.json").exists()


def test_an_error_of_the_program_itself_is_not_disguised_as_bad_input(brace, recipe, monkeypatch, tmp_path):
    def bug(*_, **__):
        raise RuntimeError("a bug")

    monkeypatch.setattr(run.Evaluator, "run", bug)
    with pytest.raises(RuntimeError, match="a bug"):
        brace("train", recipe)
    assert runs_of(tmp_path) == []


def test_an_error_after_the_first_step_keeps_the_folder_with_summary_and_report(brace, recipe, monkeypatch, tmp_path):
    def fail(self, step, problems):
        if step == 2:
            raise BraceError("the service is gone; start it")
        return {"eval/success": 0.0, "eval/problems": 1.0}

    monkeypatch.setattr(run.Evaluator, "run", fail)
    assert_bad_input(brace("train", recipe), "the service is gone; start it")
    run_dir = tmp_path / "runs" / "it"
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["ledger"]["consumed"]) == ("failed", 8)
    assert "The run ended early (failed)" in (run_dir / "report.html").read_text()
    assert (run_dir / "samples.jsonl").read_text().count("\n") == 2


def test_a_package_that_the_command_needs_and_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "brace_rl.cli")
    monkeypatch.setitem(sys.modules, "click", None)
    with pytest.raises(SystemExit) as ended:
        command.main()
    message = "error: the command needs click, which is not installed; run: pip install click\n"
    assert (ended.value.code, capsys.readouterr().err) == (2, message)
