"""What `brace bench` measures and prints. No test looks at how long anything took."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from brace_rl import core
from brace_rl.bench import command, schedules
from brace_rl.bench import targets as target_bench
from brace_rl.bench.targets import loop_gae, measure_targets
from brace_rl.bench.timing import median_seconds, torch_threads
from brace_rl.config import load_config
from brace_rl.errors import BraceError

CPU = torch.device("cpu")
RECIPE = Path(__file__).parents[2] / "recipes" / "calculator.toml"


# The baseline of the comparison is right


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 4),
    tokens=st.integers(1, 20),
    share=st.sampled_from([0.3, 0.7, 1.0]),
    gamma=st.sampled_from([1.0, 0.9]),
    lam=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
)
def test_the_loop_computes_the_same_gae_as_the_core_gaps_included(seed, rows, tokens, share, gamma, lam):
    generator = torch.Generator().manual_seed(seed)
    policy_mask = torch.rand(rows, tokens, generator=generator) < share
    arguments = {
        "values": torch.randn(rows, tokens, generator=generator, dtype=torch.float64),
        "rewards": torch.randn(rows, tokens, generator=generator, dtype=torch.float64) * policy_mask,
        "policy_mask": policy_mask,
        "gamma": gamma,
        "lam": lam,
    }
    torch.testing.assert_close(loop_gae(**arguments), core.gae_targets(**arguments).targets, atol=1e-12, rtol=1e-12)


def test_tool_spans_take_64_tokens_after_every_512():
    mask = target_bench._with_tool_spans(torch.ones(2, 1200, dtype=torch.bool))
    assert mask[0, :512].all()
    assert not mask[0, 512:576].any()
    assert mask[0, 576:1088].all()
    assert not mask[0, 1088:1152].any()
    assert torch.equal(mask[0], mask[1])


# Rows and tables


def test_targets_are_measured_one_row_each_relative_to_the_loop():
    rows = measure_targets(device=CPU, shape=(2, 600), repeats=1)
    assert [row["target"] for row in rows] == [
        "GAE, Python loop",
        "BRACE, window 10",
        "BRACE, window 100",
        "BRACE, window 1000",
        "BRACE, window 100, tool spans",
        "BRACE, window 100, unchecked",
    ]
    assert rows[0]["times faster than the loop"] == 1.0
    for row in rows:
        assert row["milliseconds"] > 0
        assert row["times faster than the loop"] * row["milliseconds"] == pytest.approx(rows[0]["milliseconds"])


def test_the_median_leaves_out_the_warm_up_and_runs_what_it_measures():
    calls = []
    assert median_seconds(lambda: calls.append(1), repeats=3, warmups=2, device=CPU) >= 0
    assert len(calls) == 5


def test_the_thread_count_is_put_back_whatever_happens():
    before, inside = torch.get_num_threads(), []

    def measured():
        with torch_threads(before + 1):
            inside.append(torch.get_num_threads())
            raise RuntimeError

    with pytest.raises(RuntimeError):
        measured()
    assert (inside, torch.get_num_threads()) == ([before + 1], before)


def test_a_table_is_markdown():
    text = command.render("speed", [{"run": "a", "s/step": 0.12345, "tokens": 12345.6}, {"run": "b", "s/step": None}])
    assert text.splitlines() == [
        "### speed",
        "",
        "| run | s/step | tokens |",
        "| --- | --- | --- |",
        "| a | 0.123 | 12,346 |",
        "| b |  |  |",
    ]


def test_the_machine_is_described_by_what_makes_numbers_comparable():
    machine = command.describe_machine(CPU)
    assert {"processor", "cores", "python", "torch"} <= set(machine)
    assert machine["torch"] == torch.__version__
    assert all(isinstance(value, str) and value for value in machine.values())


def test_what_is_asked_for_is_measured_printed_and_returned_as_json(monkeypatch):
    monkeypatch.setattr(
        command, "measure_targets", lambda device: measure_targets(device=device, shape=(2, 8), repeats=1)
    )
    printed = []
    results = command.run_bench(["targets"], recipe=RECIPE, device_name="cpu", steps=1, echo=printed.append)
    assert list(results) == ["machine", "targets"]
    assert json.loads(json.dumps(results)) == results
    (title,) = results["targets"]
    assert printed[0].startswith("processor: ")
    assert f"### {title}" in printed[-1]
    assert "| BRACE, window 1000 |" in printed[-1]


# Schedules


@pytest.mark.parametrize(
    ("cores", "names"),
    [
        (1, ["sync, 1 thread", "async, 1 + 1 threads"]),
        (2, ["sync, 1 thread", "sync, 2 threads", "async, 1 + 1 threads", "async, 2 + 1 threads"]),
        (
            4,
            [
                "sync, 1 thread",
                "sync, 4 threads",
                "async, 1 + 1 threads",
                "async, 3 + 1 threads",
                "async, 4 + 1 threads",
            ],
        ),
    ],
)
def test_each_schedule_is_tried_at_each_sensible_number_of_threads(cores, names):
    assert [variant.name for variant in schedules.schedule_variants(4, cores)] == names


def test_every_variant_is_a_valid_configuration_of_the_default_recipe():
    variants = schedules.schedule_variants(4, 4)
    for variant in [*variants, *schedules.target_variants(variants[-1])]:
        config = load_config(RECIPE, {key: str(value) for key, value in variant.settings})
        assert config.schedule.mode == variant.name.split(",")[0] or variant.name == config.algorithm.value_target
        assert config.schedule.max_staleness == (0 if config.schedule.mode == "sync" else 4)


def test_the_targets_are_compared_on_the_same_schedule():
    base = schedules.schedule_variants(4, 2)[-1]
    gae, brace = schedules.target_variants(base)
    assert (gae.name, brace.name) == ("gae", "brace")
    assert gae.settings[:-1] == brace.settings[:-1] == base.settings


def write_metrics(folder, rows):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def step_row(step, seconds, tokens):
    return {
        "step": step,
        "time/step": seconds,
        "tokens/step": tokens,
        "time/wait_rollouts": seconds / 2,
        "time/targets": seconds / 100,
    }


def test_means_leave_out_the_first_steps_and_agree_with_each_other(monkeypatch):
    rows = [{"step": 0, "eval/success": 0.0}]
    rows += [step_row(step, 1000.0, 1.0) for step in range(1, schedules.WARMUP_STEPS + 1)]
    rows += [step_row(schedules.WARMUP_STEPS + 1, 1.0, 100.0), step_row(schedules.WARMUP_STEPS + 2, 3.0, 500.0)]
    asked = []

    def run(recipe, root, settings):
        asked.append(settings)
        return write_metrics(root / "run", rows)

    monkeypatch.setattr(schedules, "run", run)
    (variant,) = schedules.schedule_variants(4, 1)[-1:]
    (row,) = schedules.measure(RECIPE, [variant], steps=2, model=Path("model"))
    assert row["run"] == "async, 1 + 1 threads"
    assert (row["s/step"], row["tokens/step"], row["tokens/s"]) == (2.0, 300.0, 150.0)
    assert (row["waiting for rollouts"], row["value target"]) == (pytest.approx(0.5), pytest.approx(0.01))
    assert asked[0]["optim.steps"] == schedules.WARMUP_STEPS + 2
    assert asked[0]["warm_start.steps"] == 0
    assert dict(variant.settings).items() <= asked[0].items()


def recorded_command(monkeypatch, returncode=0, stderr=""):
    """Have subprocess.run answer at once; returns the list its command lines go to."""
    commands = []

    def run(words, **_):
        commands.append(words)
        return subprocess.CompletedProcess(words, returncode, stdout="", stderr=stderr)

    monkeypatch.setattr(schedules.subprocess, "run", run)
    return commands


def overrides_of(words):
    from brace_rl.cli import split_overrides

    return split_overrides(words[words.index("train") + 1 :])


@pytest.mark.parametrize("sync_every", [1, 3])
def test_the_shared_model_comes_from_one_synchronous_step_of_any_recipe(sync_every, tmp_path, monkeypatch):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f"[schedule]\nmax_staleness = 4\nsync_every = {sync_every}\n")
    commands = recorded_command(monkeypatch)
    folder = schedules.warm_started_model(recipe, tmp_path)
    assert folder == tmp_path / "run" / "checkpoints" / "step_000001" / "actor"
    overrides, others = overrides_of(commands[0])
    assert others == [str(recipe)]
    config = load_config(recipe, overrides)
    assert (config.schedule.mode, config.optim.steps, config.run.trackers) == ("sync", 1, ())
    assert (config.run.root, config.run.name) == (str(tmp_path), "run")


def test_a_measured_run_that_fails_is_told_in_one_line(tmp_path, monkeypatch):
    recorded_command(monkeypatch, returncode=2, stderr="warning: x\nerror: task.data: is wrong\n")
    with pytest.raises(BraceError, match=r"ended with exit code 2: error: task\.data: is wrong") as caught:
        schedules.run(RECIPE, tmp_path, {})
    assert "\n" not in str(caught.value)
