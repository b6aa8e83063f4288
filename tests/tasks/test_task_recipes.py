"""Recipes: those at the paper's scale are the paper's or say what is ours; the small ones are small forms of theirs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from brace_rl.config import Config, load_config

RECIPES = Path(__file__).parents[2] / "recipes"
PAPERS = {
    "gsm8k_tool": {
        "task.max_turns": 5,
        "model.path": "Qwen/Qwen2.5-7B-Instruct",
        "rollout.samples_per_prompt": 8,
        "rollout.prompts_per_step": 256 // 8,
        "rollout.max_response_tokens": 8192,
        "schedule.max_staleness": 13,
    },
    "math_dapo": {
        "model.path": "Qwen/Qwen2.5-7B-Instruct",
        "rollout.samples_per_prompt": 8,
        "rollout.prompts_per_step": 512 // 8,
        "rollout.max_response_tokens": 16384,
        "schedule.max_staleness": 5,
    },
    "search_r1": {
        "task.max_turns": 8,
        "model.path": "Qwen/Qwen3-8B",
        "rollout.samples_per_prompt": 4,
        "rollout.prompts_per_step": 512 // 4,
        "rollout.max_response_tokens": 8192,
        "schedule.max_staleness": 9,
    },
    "browsecomp_plus": {
        "task.judge": "llm",
        "model.path": "Qwen/Qwen3-30B-A3B",
        "rollout.samples_per_prompt": 1,
        "rollout.prompts_per_step": 15,
        "rollout.max_response_tokens": 32768,
        "schedule.max_staleness": 6,
    },
}
"""What the paper says of each task (arXiv 2609.09783, experimental setup)."""
ALL_TASKS = {
    "schedule.mode": "async",
    "optim.actor_lr": 1e-6,
    "optim.critic_lr": 1e-5,
    "optim.critic_warmup_steps": 5,
    "optim.minibatches": 1,
    "algorithm.value_target": "brace",
    "algorithm.window": 100,
    "algorithm.rho_clip": 1.2,
    "algorithm.c_clip": 1.1,
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.value_clip": 0.5,
    "algorithm.whiten_advantages": True,
    "actor.rule": "ppo",
    "actor.clip_low": 0.2,
    "actor.clip_high": 0.28,
}
JUDGE_AND_CORPUS = {"task.corpus": "c.jsonl", "task.judge_url": "http://127.0.0.1:1/v1", "task.judge_model": "m"}


def load(name: str) -> Config:
    needed = JUDGE_AND_CORPUS if name == "browsecomp_plus" else {}
    return load_config(RECIPES / f"{name}.toml", {"task.data": "x.jsonl", **needed})


@pytest.mark.parametrize("name", PAPERS)
def test_what_the_paper_says_is_what_the_recipe_sets(name: str) -> None:
    config = load(name)
    for key, value in {**ALL_TASKS, **PAPERS[name]}.items():
        section, _, field = key.partition(".")
        assert getattr(getattr(config, section), field) == value, key


@pytest.mark.parametrize("name", PAPERS)
def test_every_setting_that_is_not_the_papers_is_marked_as_ours(name: str) -> None:
    papers, section = {"task.name", *ALL_TASKS, *PAPERS[name]}, ""
    for line in (RECIPES / f"{name}.toml").read_text(encoding="utf-8").splitlines():
        if header := re.fullmatch(r"\[(\w+)\]", line):
            section = header[1]
        elif setting := re.match(r"(\w+) = ", line):
            assert ("# ours" in line) != (f"{section}.{setting[1]}" in papers), line


def test_a_judge_has_less_time_than_the_trainers_patience() -> None:
    config = load("browsecomp_plus")
    assert config.schedule.timeout_s / 2 > config.task.judge_timeout_s


@pytest.mark.parametrize("name", ["calculator", "arithmetic_steps", "search_facts", "web_facts"])
def test_the_form_for_comparisons_is_the_recipe_in_small(name: str) -> None:
    whole, small = load_config(RECIPES / f"{name}.toml"), load_config(RECIPES / f"{name}_small.toml")
    assert small.model == whole.model
    assert small.task.model_copy(update={"eval_problems": whole.task.eval_problems}) == whole.task
    assert (small.schedule.mode, whole.schedule.mode) == ("lag", "async")
    assert small.rollout.prompts_per_step * small.optim.steps < whole.rollout.prompts_per_step * whole.optim.steps
