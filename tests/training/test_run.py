"""Whole runs of a tiny model: the schedules agree, the bound holds, a run can be broken and resumed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from brace_rl.config import config_from_dict
from brace_rl.errors import BraceError
from brace_rl.training.run import run_training

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 4
TINY = {
    "task": {"operands": [2, 2], "max_number": 9, "train_problems": 60, "eval_problems": 8},
    "model": {"hidden_size": 16, "layers": 1, "heads": 2, "intermediate_size": 16},
    "warm_start": {"steps": 2, "batch_size": 4},
    "rollout": {"prompts_per_step": 4, "samples_per_prompt": 2, "max_response_tokens": 12, "slots": 6},
    "optim": {"steps": STEPS, "actor_lr": 1e-2, "critic_lr": 1e-2, "critic_warmup_steps": 1},
    "eval": {"final_problems": 8, "slots": 8},
    "run": {"checkpoint_every": 2, "keep_checkpoints": 10, "rollouts_per_step": 3},
}
LOSSES = ("value/loss", "actor/loss", "critic/grad_norm", "actor/grad_norm", "ratio/mean", "target/abs_gap")


def tiny_config(mode, max_staleness, **changes):
    sections = {name: dict(section) for name, section in TINY.items()}
    sections["schedule"] = {"mode": mode, "max_staleness": max_staleness, "timeout_s": 60}
    for section, values in changes.items():
        sections.setdefault(section, {}).update(values)
    return config_from_dict(sections)


def metrics_of(run_dir):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in rows}


def figures_of(run_dir):
    """Every metric but times, of every step."""
    rows = metrics_of(run_dir).values()
    return [{n: x for n, x in row.items() if not n.startswith(("time/", "throughput/"))} for row in rows]


def losses_of(run_dir):
    return [{name: row.get(name) for name in LOSSES} for step, row in metrics_of(run_dir).items() if step > 0]


def weights_of(run_dir, step=STEPS):
    folder = run_dir / "checkpoints" / f"step_{step:06d}"
    return {**load_file(folder / "actor" / "model.safetensors"), **load_file(folder / "critic.safetensors")}


def assert_same_weights(a, b):
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.fixture(scope="module")
def sync_run(tmp_path_factory):
    torch.set_num_threads(1)
    run_dir = tmp_path_factory.mktemp("runs") / "sync"
    run_training(tiny_config("sync", 0), run_dir)
    return run_dir


@pytest.fixture(scope="module")
def lag_run(tmp_path_factory):
    torch.set_num_threads(1)
    run_dir = tmp_path_factory.mktemp("runs") / "lag"
    run_training(tiny_config("lag", 2), run_dir)
    return run_dir


@pytest.mark.parametrize("mode", ["lag", "async"])
def test_without_staleness_every_schedule_reproduces_sync_step_by_step(mode, sync_run, tmp_path):
    run_training(tiny_config(mode, 0), tmp_path / mode)
    assert losses_of(tmp_path / mode) == losses_of(sync_run)
    assert_same_weights(weights_of(tmp_path / mode), weights_of(sync_run))


def test_sync_ratios_are_one_up_to_rounding(sync_run):
    for step in range(1, STEPS + 1):
        assert metrics_of(sync_run)[step]["ratio/mean"] == pytest.approx(1.0, abs=1e-4)


def test_lag_makes_every_batch_exactly_s_versions_old(lag_run):
    rows = metrics_of(lag_run)
    for step in range(1, STEPS + 1):
        age = min(step - 1, 2)
        assert (rows[step]["staleness/mean"], rows[step]["staleness/max"]) == (age, age)


def test_async_respects_the_bound_and_balances_its_ledger(tmp_path):
    outcome = run_training(tiny_config("async", 2, optim={"steps": 6}), tmp_path / "async")
    rows = metrics_of(tmp_path / "async")
    assert max(rows[step]["staleness/max"] for step in range(1, 7)) <= 2
    ledger = outcome.summary["ledger"]
    assert ledger["issued"] == sum(ledger[name] for name in ("consumed", "dropped", "in_flight", "buffered"))
    assert ledger["consumed"] == 6 * 4


@pytest.mark.parametrize("mode", ["sync", "lag"])
def test_a_resumed_run_ends_bit_identical(mode, request, tmp_path):
    whole = request.getfixturevalue(f"{mode}_run")
    broken = tmp_path / "broken"
    shutil.copytree(whole, broken)
    for step in (3, 4):
        shutil.rmtree(broken / "checkpoints" / f"step_{step:06d}", ignore_errors=True)
    config = tiny_config(mode, 0 if mode == "sync" else 2)
    assert run_training(config, broken, resume=True).status == "finished"
    assert_same_weights(weights_of(broken), weights_of(whole))
    assert losses_of(broken) == losses_of(whole)


def test_a_resumed_run_takes_the_learning_rates_it_is_given(sync_run, tmp_path):
    run_dir = shutil.copytree(sync_run, tmp_path / "longer")
    run_training(tiny_config("sync", 0, optim={"steps": STEPS + 1, "critic_lr": 1e-5}), run_dir, resume=True)
    optimizer = json.loads((run_dir / "checkpoints" / f"step_{STEPS + 1:06d}" / "optimizer.json").read_text())
    assert [group["lr"] for group in optimizer["critic"]["param_groups"]] == [1e-5]


def test_a_checkpoint_that_cannot_be_read_leaves_the_run_as_it_was(sync_run, tmp_path):
    run_dir = shutil.copytree(sync_run, tmp_path / "damaged")
    damaged = run_dir / "checkpoints" / f"step_{STEPS:06d}" / "critic.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    kept = {name: (run_dir / name).read_bytes() for name in ("metrics.jsonl", "config.json", "summary.json")}
    with pytest.raises(BraceError, match="damaged"):
        run_training(tiny_config("sync", 0, optim={"steps": STEPS + 1}), run_dir, resume=True)
    assert {name: (run_dir / name).read_bytes() for name in kept} == kept


def test_an_error_between_steps_keeps_the_steps_before_it(tmp_path, monkeypatch):
    from brace_rl.training.backends.inline import InlineBackend

    collect, calls = InlineBackend.collect, []

    def fail_the_third_time(self):
        calls.append(1)
        if len(calls) == 3:
            raise BraceError("the engine fell over")
        return collect(self)

    monkeypatch.setattr(InlineBackend, "collect", fail_the_third_time)
    config = tiny_config("sync", 0, run={"checkpoint_every": 0})
    with pytest.raises(BraceError, match="fell over"):
        run_training(config, tmp_path / "run")
    monkeypatch.undo()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
    assert run_training(config, tmp_path / "run", resume=True).summary["steps"] == STEPS


def test_a_finished_run_refuses_to_resume_and_says_how(sync_run):
    with pytest.raises(BraceError, match=r"already finished .* --optim\.steps"):
        run_training(tiny_config("sync", 0), sync_run, resume=True)


def test_a_folder_without_checkpoint_refuses_to_resume(tmp_path):
    with pytest.raises(BraceError, match="no complete checkpoint"):
        run_training(tiny_config("sync", 0), tmp_path, resume=True)


def test_a_run_never_overwrites_another(sync_run):
    with pytest.raises(BraceError, match=r"sync.*"):
        run_training(tiny_config("sync", 0), sync_run)


def test_a_run_leaves_its_files(sync_run):
    names = {path.name for path in sync_run.iterdir()}
    assert {"config.json", "metrics.jsonl", "samples.jsonl", "report.html", "summary.json", "events"} <= names
    summary = json.loads((sync_run / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["eval_after"]["eval/problems"] == 8


def test_logged_rollouts_hold_what_the_learner_saw(lag_run):
    rows = [json.loads(line) for line in (lag_run / "rollouts.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [step for step in range(1, STEPS + 1) for _ in range(3)]
    for row in rows:
        assert row["current_version"] == row["step"] - 1
        mask = row["policy_mask"]
        for name in ("behavior_logprobs", "target_logprobs", "values"):
            assert [value is not None for value in row[name]] == [bool(is_policy) for is_policy in mask], name
        assert {v for v, on in zip(row["versions"], mask, strict=True) if on} == {max(0, row["current_version"] - 2)}
        if row["step"] <= 2:  # the critic warms up first, so that pi is still mu
            for pi, mu in zip(row["target_logprobs"], row["behavior_logprobs"], strict=True):
                assert pi == (None if mu is None else pytest.approx(mu, abs=1e-4))


def test_the_saved_actor_is_an_ordinary_model_folder(sync_run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = sync_run / "checkpoints" / f"step_{STEPS:06d}" / "actor"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.vocab_size == len(tokenizer)


def test_steps_report_time_and_tokens_that_agree(sync_run):
    for step in range(1, STEPS + 1):
        row = metrics_of(sync_run)[step]
        assert row["throughput/tokens_per_s"] * row["time/step"] == pytest.approx(row["tokens/step"])


RECIPE = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_run import tiny_config
from brace_rl.training.run import run_training
run_training(tiny_config({mode!r}, {lag}, optim={{"steps": {steps}}}), Path({run_dir!r}))
"""


def start_run(run_dir, *, mode, lag, steps):
    code = RECIPE.format(tests=str(Path(__file__).parent), mode=mode, lag=lag, steps=steps, run_dir=str(run_dir))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.DEVNULL)


def wait_for_step(run_dir, step, process, timeout=90.0):
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        file = run_dir / "metrics.jsonl"
        if file.exists() and any(f'"step": {step},' in line for line in file.read_text().splitlines()):
            return
        assert process.poll() is None, "the run ended early"
        time.sleep(0.05)
    raise AssertionError(f"no step {step} within {timeout} s")


@pytest.mark.slow
def test_a_run_killed_at_any_moment_resumes_bit_identical(lag_run, tmp_path):
    run_dir = tmp_path / "killed"
    process = start_run(run_dir, mode="lag", lag=2, steps=STEPS)
    wait_for_step(run_dir, 3, process)
    process.kill()
    process.wait()
    for step in (3, 4):  # had it come further before the signal, this is where it stops
        shutil.rmtree(run_dir / "checkpoints" / f"step_{step:06d}", ignore_errors=True)
    run_training(tiny_config("lag", 2), run_dir, resume=True)
    assert_same_weights(weights_of(run_dir), weights_of(lag_run))


@pytest.mark.slow
def test_ctrl_c_saves_and_the_run_goes_on_from_there(tmp_path):
    run_dir = tmp_path / "interrupted"
    process = start_run(run_dir, mode="async", lag=2, steps=500)
    wait_for_step(run_dir, 2, process)
    process.send_signal(signal.SIGINT)
    process.wait(timeout=60)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    done = summary["steps"]
    assert (run_dir / "checkpoints" / f"step_{done:06d}" / "state.json").is_file()
    outcome = run_training(tiny_config("async", 2, optim={"steps": done + 3}), run_dir, resume=True)
    assert outcome.status == "finished"
    assert outcome.summary["ledger"]["consumed"] == 4 * (done + 3)
    assert list(metrics_of(run_dir)) == list(range(done + 4))
