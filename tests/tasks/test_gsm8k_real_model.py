"""Real GSM8K items through a real model: loading, prompting, tools, scoring. Not about its skill."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_model import END, SHARED, load, parts, responses

from brace_rl.config import load_config
from brace_rl.errors import ConfigError
from brace_rl.tasks.gsm8k import Gsm8kSettings, Gsm8kTask
from brace_rl.tasks.python_tool import Limits, check_isolation
from brace_rl.training.run import check

ITEMS = 3
NEW_TOKENS = 6

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SHARED.is_dir(), reason="the real data files are not here"),
]


def test_gsm8k_items_are_prompted_computed_answered_and_scored(smollm2: Path) -> None:
    model = load(smollm2)
    task = Gsm8kTask(Gsm8kSettings(eval_data=str(SHARED / "gsm8k/test.jsonl"), eval_problems=2000), seed=0)
    problems = task.eval_problems()
    assert len(problems) == 1319

    (alone,) = responses(task, model, lambda n: [], items=1, tokens=NEW_TOKENS)
    prompt = model[1].decode(alone.prompt_ids)
    assert "write an arithmetic expression between <calc> and </calc>" in prompt
    assert prompt.endswith(
        "How much in dollars does she make every day at the farmers' market?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert len(alone.response_ids) == NEW_TOKENS
    assert all(logprob < 0 for logprob in alone.behavior_logprobs)
    assert (alone.truncated, alone.reward) == (True, 0.0)

    (computed,) = responses(task, model, lambda n: ["She sells <calc>16-3-4</calc>"], items=1, tokens=48)
    (call, wrote), (told, environment), (went_on, again), *_ = parts(computed, model[1])
    assert (call, wrote) == ("She sells <calc>16-3-4</calc>", True)
    assert (told, environment) == ("<result>9</result>", False)
    assert went_on
    assert again

    golds = [problem.answer for problem in problems[:ITEMS]]
    answers = [f"So it is {golds[0]}.\n#### {golds[0]}{END}", f"#### ${golds[1]}.00{END}", f"#### 1{golds[2]}{END}"]
    scored = responses(task, model, lambda n: ["<calc>1/0</calc>", answers[n]], items=ITEMS, tokens=96)
    assert [trajectory.reward for trajectory in scored] == [1.0, 1.0, 0.0]
    assert all(t.info["tool_errors"] == t.info["answered"] == 1.0 and not t.truncated for t in scored)


def test_gsm8k_items_are_computed_in_python(smollm2: Path) -> None:
    try:
        check_isolation(Limits())
    except ConfigError as error:
        pytest.skip(str(error))
    model = load(smollm2)
    task = Gsm8kTask(Gsm8kSettings(eval_data=str(SHARED / "gsm8k/test.jsonl"), python_tool=True), seed=0)
    script = ["<python>\neggs = 16 - 3 - 4\nprint(eggs * 2)\n</python>", f"#### 18{END}"]
    (trajectory,) = responses(task, model, lambda n: script, items=1, tokens=96)
    texts = parts(trajectory, model[1])
    assert texts[1] == ("<result>18</result>", False)
    assert (trajectory.reward, trajectory.info["tool_calls"], trajectory.info["tool_errors"]) == (1.0, 1.0, 0.0)


def test_the_recipe_at_the_papers_scale_is_checked_as_a_run_would_begin(smollm2: Path) -> None:
    overrides = {
        "task.data": str(SHARED / "gsm8k/train_first3500.jsonl"),
        "task.eval_data": str(SHARED / "gsm8k/test.jsonl"),
        "model.path": str(smollm2),
    }
    found = check(load_config(Path(__file__).parents[2] / "recipes" / "gsm8k_tool.toml", overrides))
    assert (found["training problems"], found["held-out problems"]) == ("3500", "1319")
    assert (found["schedule"], found["value target"]) == ("async, S = 13", "brace, window 100")
