"""Mathematics with real data: problems, prompts, episodes."""

from __future__ import annotations

import asyncio
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from brace_rl.config import load_config
from brace_rl.errors import ConfigError, DataError
from brace_rl.tasks.base import StepResult
from brace_rl.tasks.math.settings import MathSettings
from brace_rl.tasks.math.task import INSTRUCTIONS, MathTask
from brace_rl.tasks.registry import parse_settings

pytest.importorskip("math_verify")

RECIPES = Path(__file__).parents[3] / "recipes"
AIME = Path(__file__).parents[4] / "shared" / "data" / "aime" / "aime2025.jsonl"


def make(folder: Path, *rows: dict[str, Any], **settings: Any) -> MathTask:
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return MathTask(MathSettings(data=str(path), **settings), seed=0)


def rows(count: int) -> list[dict[str, Any]]:
    return [{"problem": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(count)]


def play(task: MathTask, turn: str, index: int = 0) -> StepResult:
    environment = pickle.loads(pickle.dumps(task)).environment(task.train_problems()[index])
    return asyncio.run(environment.step(turn))


def test_the_last_rows_are_held_out_and_the_rest_keeps_its_order(tmp_path: Path) -> None:
    task = make(tmp_path, *rows(10), eval_problems=3, train_problems=5)
    assert [problem.answer for problem in task.train_problems()] == ["1", "2", "3", "4", "5"]
    assert [problem.answer for problem in task.eval_problems()] == ["8", "9", "10"]


def test_a_question_of_the_evaluation_file_is_never_trained_on(tmp_path: Path) -> None:
    held = tmp_path / "held.jsonl"
    held.write_text(json.dumps({"question": "what is 3 + 1?", "answer": "4"}) + "\n", encoding="utf-8")
    task = make(tmp_path, *rows(5), eval_data=str(held))
    assert [problem.answer for problem in task.train_problems()] == ["1", "2", "3", "5"]
    assert [problem.answer for problem in task.eval_problems()] == ["4"]


def test_evaluation_alone_needs_no_training_file(tmp_path: Path) -> None:
    held = tmp_path / "held.jsonl"
    held.write_text("".join(json.dumps(row) + "\n" for row in rows(4)), encoding="utf-8")
    task = MathTask(MathSettings(eval_data=str(held), eval_problems=2), seed=0)
    assert (len(task.train_problems()), len(task.eval_problems())) == (0, 2)
    with pytest.raises(DataError, match=r"task\.data"):
        MathTask(MathSettings(), seed=0)


@pytest.mark.parametrize(
    ("instructions", "question", "added"),
    [
        ("auto", "What is 1 + 1?", INSTRUCTIONS["boxed"]),
        ("auto", "What is 1 + 1? Put the answer into \\boxed{}.", ""),
        ("auto", "What is 1 + 1? The last line should be of the form Answer: $Answer.", ""),
        ("boxed", "What? \\boxed{}", INSTRUCTIONS["boxed"]),
        ("answer_line", "What?", INSTRUCTIONS["answer_line"]),
        ("none", "What?", ""),
    ],
)
def test_a_prompt_says_once_how_the_answer_is_to_be_given(
    tmp_path: Path, instructions: str, question: str, added: str
) -> None:
    data = [{"problem": question, "answer": "2"}, *rows(1)]
    task = make(tmp_path, *data, eval_problems=1, instructions=instructions)
    (problem,) = task.train_problems()
    assert problem.prompt == ({"role": "user", "content": f"{question}\n\n{added}" if added else question},)


@pytest.mark.parametrize(
    ("turn", "reward"),
    [
        ("1 + 0 is 1. \\boxed{1}", 1.0),
        ("Answer: 1", 1.0),
        ("\\boxed{2-1}", 1.0),
        ("\\boxed{2}", 0.0),
        ("It is 1", 0.0),
        ("", 0.0),
    ],
)
def test_an_episode_is_one_turn_and_its_answer_decides(tmp_path: Path, turn: str, reward: float) -> None:
    result = play(make(tmp_path, *rows(4), eval_problems=1), turn)
    assert (result.done, result.reward, result.success, result.excluded) == (True, reward, reward == 1.0, False)


def test_the_answer_format_of_the_recipe_is_the_one_scored(tmp_path: Path) -> None:
    task = make(tmp_path, *rows(4), eval_problems=1, answer_format="boxed")
    assert play(task, "Answer: 1").info["answered"] == 0.0


def test_the_penalty_for_length_is_off_by_default_and_as_the_settings_ask(tmp_path: Path) -> None:
    assert make(tmp_path, *rows(4), eval_problems=1).length_reward(100, limit=100) == 0.0
    task = make(tmp_path, *rows(4), eval_problems=1, overlong_cache_tokens=10, overlong_penalty=0.5)
    assert task.length_reward(95, limit=100) == pytest.approx(-0.25)


def test_bad_settings_are_one_clear_error() -> None:
    with pytest.raises(ConfigError, match=r"task\.bad_rows"):
        parse_settings({"name": "math", "bad_rows": "ignore"})
    with pytest.raises(ConfigError, match=r"task\.scoring_worker: no such setting; did you mean task\.scoring_workers"):
        parse_settings({"name": "math", "scoring_worker": 1})
    with pytest.raises(ConfigError, match=r"task\.data: math needs a file"):
        load_config(None, {"task.name": "math"})


def test_without_math_verify_the_task_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs math-verify; install it with"):
        make(tmp_path, *rows(4), eval_problems=1)


class FakeTokenizer:
    """Ids are code points; a chat template is text around each message, and may refuse the system's."""

    def __init__(self, *, has_template: bool, refuses_system: bool = False) -> None:
        self.chat_template = "template" if has_template else None
        self._refuses_system = refuses_system

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(character) for character in text]

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> list[int]:
        from jinja2.exceptions import TemplateError

        if self._refuses_system and messages[0]["role"] == "system":
            raise TemplateError("no system messages")
        return self.encode("".join(f"[{m['role']}]{m['content']}" for m in messages) + "[assistant]")


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [
        (FakeTokenizer(has_template=True), "[system]Be brief.[user]What?[assistant]"),
        (FakeTokenizer(has_template=True, refuses_system=True), "[user]Be brief.\n\nWhat?[assistant]"),
        (FakeTokenizer(has_template=False), "Be brief.\n\nWhat?\n\n"),
    ],
    ids=["template", "no system message", "base model"],
)
def test_any_model_gets_a_prompt_it_can_read(tmp_path: Path, tokenizer: Any, text: str) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What?"}]
    task = make(
        tmp_path,
        {"prompt": messages, "answer": "1"},
        {"prompt": "x", "answer": "1"},
        eval_problems=1,
        instructions="none",
    )
    ids = task.prompt_ids(task.train_problems()[0], tokenizer)
    assert "".join(map(chr, ids)) == text


@pytest.mark.skipif(not AIME.exists(), reason="the data sets are not here")
def test_aime_items_are_prompted_and_scored() -> None:
    task = MathTask(MathSettings(eval_data=str(AIME)), seed=0)
    problems = task.eval_problems()
    assert len(problems) == 30
    right = [asyncio.run(task.environment(p).step(f"So \\boxed{{{int(p.answer):03d}}}")).reward for p in problems]
    wrong = [asyncio.run(task.environment(p).step(f"So \\boxed{{{int(p.answer) + 1}}}")).reward for p in problems]
    assert (sum(right), sum(wrong)) == (30.0, 0.0)
