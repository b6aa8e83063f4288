"""Configuration: one door, clear errors, nothing heavy imported."""

import json
import pickle
import subprocess
import sys

import pytest

from brace_rl.config import Config, config_from_dict, load_config, load_resolved_config
from brace_rl.errors import ConfigError


def write_recipe(tmp_path, text):
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return path


def test_defaults_are_the_papers():
    config = Config()
    algorithm, optim = config.algorithm, config.optim
    assert (algorithm.value_target, algorithm.window, algorithm.rho_clip, algorithm.c_clip) == ("brace", 100, 1.2, 1.1)
    assert (algorithm.gamma, algorithm.lam, algorithm.value_clip) == (1.0, 1.0, 0.5)
    assert (config.actor.rule, config.actor.clip_low, config.actor.clip_high) == ("ppo", 0.2, 0.28)
    assert (algorithm.advantage, algorithm.whiten_advantages) == ("eq27", True)
    assert (optim.actor_lr, optim.critic_lr, optim.critic_warmup_steps, optim.minibatches) == (1e-6, 1e-5, 5, 1)
    assert algorithm.bootstrap_truncated is False


def test_the_settings_people_can_name_are_these():
    """Recipes in the wild rely on these names: removing or renaming one is a breaking change."""
    surface = {s: " ".join(sorted(type(field.default).model_fields)) for s, field in Config.model_fields.items()}
    assert surface == {
        "task": "eval_problems eval_split max_number max_turns name operands operations_per_call train_problems",
        "model": "device dtype gradient_checkpointing heads hidden_size intermediate_size layers path sharding",
        "warm_start": "batch_size lr mistakes steps",
        "rollout": "max_prompt_tokens max_response_tokens prompts_per_step samples_per_prompt slots temperature top_k "
        "top_p",
        "schedule": "learner_threads max_staleness mode rollout_threads sync_every timeout_s too_old",
        "backend": "address engine gpus_per_worker kind workers",
        "algorithm": "advantage auto_budget auto_eps bootstrap_truncated c_clip gamma lam policy_lam policy_lam_alpha "
        "rho_clip value_clip value_target whiten_advantages window",
        "actor": "clip_high clip_low dual_clip edge rule",
        "optim": "actor_lr betas critic_lr critic_updates critic_warmup_steps critic_warmup_until "
        "freeze_critic_attention keep_graph learner_ranks lr_ess_scaling lr_reference_staleness lr_warmup_steps "
        "max_grad_norm micro_batch_tokens minibatches steps weight_decay",
        "eval": "every final_problems problems slots",
        "run": "checkpoint_every keep_checkpoints name rollouts_per_step root samples_per_step seed trackers",
    }


def test_a_family_has_its_own_settings_and_no_others():
    overrides = {"task.name": "gsm8k_tool", "task.data": "x.jsonl", "model.path": "m", "task.tool_timeout_s": "2"}
    config = load_config(None, overrides)
    assert (type(config.task).__name__, config.task.data, config.task.tool_timeout_s) == ("Gsm8kSettings", "x.jsonl", 2)
    assert config.model_dump()["task"]["data"] == "x.jsonl"
    with pytest.raises(ConfigError, match=r"task\.operands: no such setting"):
        load_config(None, {**overrides, "task.operands": "[2, 3]"})


def test_the_family_decides_how_text_is_read_whatever_the_order():
    overrides = {"task.data": "12", "model.path": "m", "task.name": "gsm8k_tool"}
    assert load_config(None, overrides).task.data == "12"


@pytest.mark.parametrize("name", ["calculator", "gsm8k_tool"])
def test_the_configuration_of_an_older_run_is_still_read(name, tmp_path):
    """Runs made when all families shared one table hold every key of it."""
    task = {
        "name": name,
        "data": "x.jsonl" if name == "gsm8k_tool" else "",
        "eval_data": "",
        "train_problems": 7,
        "eval_problems": 5,
        "eval_split": "test",
        "operands": [2, 3],
        "max_number": 20,
        "max_turns": 4,
        "operations_per_call": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps({"task": task, "model": {"path": "m"}}))
    config = load_resolved_config(tmp_path)
    assert (config.task.name, config.task.train_problems, config.task.max_turns) == (name, 7, 4)
    assert load_resolved_config(tmp_path, {"task.eval_problems": "6"}).task.eval_problems == 6


def test_a_configuration_survives_pickling():
    config = load_config(None, {"task.max_turns": "9"})
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_recipe_is_read_and_overrides_win(tmp_path):
    recipe = write_recipe(tmp_path, "[algorithm]\nwindow = 7\n[optim]\nsteps = 50\n")
    config = load_config(recipe, {"algorithm.window": "9", "run.name": "abc", "task.operands": "[2, 5]"})
    assert (config.algorithm.window, config.optim.steps, config.run.name) == (9, 50, "abc")
    assert config.task.operands == (2, 5)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"algorithm.window": "-1"}, r"algorithm\.window: .*whole number from 0.*-1"),
        ({"algorithm.rho_clip": "0"}, r"algorithm\.rho_clip: .*greater than 0"),
        ({"algorithm.c_clip": "-0.5"}, r"algorithm\.c_clip: .*greater than 0"),
        ({"algorithm.window": "many"}, r"algorithm\.window: .*whole number.*'many'"),
        ({"optim.steps": "true"}, r"optim\.steps: .*integer.*True"),
        ({"optim.actor_lr": "true"}, r"optim\.actor_lr: .*number.*True"),
        ({"optim.steps": "1e3"}, r"optim\.steps: .*integer.*1000\.0"),
        ({"optim.betas": "[2, 2]"}, r"optim\.betas: both must be at least 0 and below 1"),
        ({"optim.critic_lr": "1e20"}, r"optim\.critic_lr: .*less than or equal to 1"),
        ({"task.data": "x.jsonl"}, r"task\.data: the calculator generates its problems"),
        ({"algorithm.gamma": "nan"}, r"algorithm\.gamma"),
        ({"schedule.max_staleness": "-1"}, r"schedule\.max_staleness: .*greater than or equal to 0"),
        ({"schedule.mode": "sync"}, r"schedule\.max_staleness: .*staleness 0.*'lag' or 'async'"),
        ({"schedule.sync_every": "9"}, r"schedule\.sync_every: .*at most max_staleness \+ 1"),
        ({"schedule.mode": "lag", "schedule.sync_every": "2"}, r"schedule\.sync_every: only .*'async'"),
        ({"algorithm.windw": "3"}, r"algorithm\.windw: no such setting; did you mean algorithm\.window\?"),
        ({"algoritm.window": "3"}, r"--algoritm\.window: no such setting; sections are"),
        ({"rollout.temperature": "0"}, r"rollout\.temperature: .*greater than 0"),
        ({"optim.critic_warmup_steps": "100"}, r"optim\.critic_warmup_steps: must be below optim\.steps"),
        ({"optim.keep_graph": "true", "optim.minibatches": "2"}, r"optim\.keep_graph: .*minibatches"),
        ({"optim.minibatches": "99"}, r"optim\.minibatches: 99 is more than the 16 responses"),
        ({"task.name": "gsm8k_tool"}, r"task\.data: .*--data FILE"),
        ({"task.name": "gsm8k_tool", "task.data": "x"}, r"model\.path: .*--model"),
        ({"model.hidden_size": "30"}, r"model\.hidden_size: .*multiple of model\.heads"),
        ({"task.operands": "[4, 2]"}, r"task\.operands"),
        ({"backend.workers": "2"}, r"backend\.workers: only a Ray cluster .*backend\.kind = 'ray'"),
        ({"backend.address": "auto"}, r"backend\.address: only a Ray cluster"),
        (
            {"backend.kind": "ray", "backend.address": "ray://host:10001", "optim.learner_ranks": "2"},
            r"backend\.address: the trainer is a rank of the learner, .*'auto'",
        ),
        ({"backend.kind": "ray", "backend.workers": "0"}, r"backend\.workers: .*greater than or equal to 1"),
        ({"backend.engine": "vllm", "rollout.top_p": "0.9"}, r"backend\.engine: vllm .*rollout\.top_p = 1"),
        (
            {"backend.engine": "vllm", "actor.rule": "estr", "actor.tau": "1"},
            r"backend\.engine: vllm reports no entropies, .*estr",
        ),
    ],
)
def test_impossible_settings_are_one_line_that_names_the_key(overrides, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(None, overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[algorithm\nwindow = 1", "not valid TOML"),
        ("window = 1", "window: no such setting"),
        ("algorithm = 3", "algorithm: .*"),
        ("[algorithm]\nwindow = 1.5", "algorithm.window: .*whole number"),
    ],
)
def test_a_broken_recipe_is_named(tmp_path, text, message):
    recipe = write_recipe(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(recipe)
    assert str(recipe) in str(caught.value)


@pytest.mark.parametrize("text", ["7", "nan", "true", "2026-01-01"])
def test_settings_that_are_text_are_taken_as_they_are(text):
    assert load_config(None, {"run.name": text}).run.name == text


def test_a_missing_recipe_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no such recipe"):
        load_config(tmp_path / "none.toml")


def test_a_folder_that_is_no_run_cannot_be_resumed(tmp_path):
    with pytest.raises(ConfigError, match="not a run folder"):
        load_resolved_config(tmp_path)


def test_lambda_below_one_with_a_long_window_is_a_warning():
    with pytest.warns(UserWarning, match=r"algorithm\.lam = 0\.95 leaves the tail a weight of 5\.9e-03"):
        config_from_dict({"algorithm": {"lam": 0.95, "window": 100}})


def test_lambda_below_one_with_a_short_window_is_not(recwarn):
    config_from_dict({"algorithm": {"lam": 0.95, "window": 5}})
    assert not recwarn.list


def test_a_configuration_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        Config().algorithm.window = 3


def test_reading_a_configuration_loads_neither_torch_nor_transformers():
    code = (
        "import sys, brace_rl.config, brace_rl.cli; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
