"""Real AIME items through a real model: loading, prompting, generating, scoring. Not about its skill."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_model import END, SHARED, load, responses

from brace_rl.config import load_config
from brace_rl.tasks.math.settings import MathSettings
from brace_rl.tasks.math.task import INSTRUCTIONS, MathTask
from brace_rl.training.run import check

AIME = SHARED / "aime"
NEW_TOKENS = 8

pytest.importorskip("math_verify")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not AIME.is_dir(), reason="the real data files are not here"),
]


@pytest.mark.parametrize("name", ["aime2024_rllm.json", "aime2025.jsonl", "llmeval_aime2025.jsonl"])
def test_aime_items_are_prompted_answered_and_scored(smollm2: Path, name: str) -> None:
    task = MathTask(MathSettings(eval_data=str(AIME / name)), seed=0)
    model = load(smollm2)

    (alone,) = responses(task, model, lambda n: [], items=1, tokens=NEW_TOKENS)
    prompt = model[1].decode(alone.prompt_ids)
    assert prompt.endswith(f"{INSTRUCTIONS['boxed']}<|im_end|>\n<|im_start|>assistant\n")
    assert prompt.count(INSTRUCTIONS["boxed"]) == 1
    assert 0 < len(alone.response_ids) <= NEW_TOKENS
    assert all(logprob <= 0 for logprob in alone.behavior_logprobs)
    assert (alone.truncated, alone.reward) == (True, 0.0)

    gold = [int(problem.answer) for problem in task.eval_problems()[:4]]
    texts = [
        f"So it is \\boxed{{{gold[0]}}}.{END}",
        f"Answer: {gold[1]:03d}{END}",
        f"\\boxed{{{gold[2] + 1}}}{END}",
        f"It is {gold[3]}.{END}",
    ]
    scored = responses(task, model, lambda n: [texts[n]], items=4, tokens=64)
    assert [trajectory.reward for trajectory in scored] == [1.0, 1.0, 0.0, 0.0]
    assert [trajectory.info["answered"] for trajectory in scored] == [1.0, 1.0, 1.0, 0.0]
    assert not any(trajectory.truncated for trajectory in scored)


def test_the_soft_punishment_reaches_the_reward_of_right_and_cut_responses(smollm2: Path) -> None:
    settings = MathSettings(eval_data=str(AIME / "aime2025.jsonl"), overlong_cache_tokens=40)
    task = MathTask(settings, seed=0)
    right = f"\\boxed{{{int(task.eval_problems()[0].answer)}}}"
    model = load(smollm2)
    (short,) = responses(task, model, lambda n: [right + END], items=1, tokens=80)
    (long,) = responses(task, model, lambda n: [right + " so" * 50 + END], items=1, tokens=80)
    (cut,) = responses(task, model, lambda n: [], items=1, tokens=4)
    assert short.reward == 1.0
    assert long.reward == pytest.approx(1.0 - (len(long.response_ids) - 40) / 40)
    assert cut.reward == -1.0


def test_the_recipe_at_the_paper_s_scale_is_checked_as_a_run_would_begin(smollm2: Path) -> None:
    overrides = {
        "task.data": str(AIME / "aime_1983_2023_train.jsonl"),
        "task.eval_data": str(AIME / "aime2025.jsonl"),
        "model.path": str(smollm2),
        "rollout.max_prompt_tokens": "4096",  # one of the old problems draws a figure in 3479 tokens
    }
    found = check(load_config(Path(__file__).parents[3] / "recipes" / "math_dapo.toml", overrides))
    assert (found["training problems"], found["held-out problems"]) == ("975", "30")
    assert (found["schedule"], found["value target"]) == ("async, S = 5", "brace, window 100")
