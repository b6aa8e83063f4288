"""Word problems with a calculator, on made-up rows and on real ones."""

from __future__ import annotations

import asyncio
import itertools
import json
import pickle
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from brace_rl.config import WarmStartConfig
from brace_rl.errors import DataError, ModelError
from brace_rl.tasks import build_task
from brace_rl.tasks.base import Problem, StepResult, Transcript, TranscriptPiece
from brace_rl.tasks.gsm8k import Gsm8kSettings, Gsm8kTask, only_number, parse_number, same_answer, solution_pieces

SHARED = Path(__file__).parents[2] / "../shared/data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the real data files are not here")

ROWS = [
    {"question": "Half of 48?", "answer": "Half is 48/2 = <<48/2=24>>24.\nTwice is <<24*2=48>>48.\n#### 24"},
    {"question": "One thousand?", "answer": "#### 1,000"},
    {"question": "Three?", "answer": "#### 3"},
]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
NO_SYSTEM_TEMPLATE = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + CHAT_TEMPLATE
)


def make(tmp_path: Path, rows: list[dict[str, Any]] = ROWS, max_turns: int = 6) -> Gsm8kTask:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    config = Gsm8kSettings(data=str(path), eval_problems=1, max_turns=max_turns)
    task = build_task(config, WarmStartConfig(), 0)
    assert isinstance(task, Gsm8kTask)
    return task


async def steps(task: Gsm8kTask, problem: Problem, *turns: str) -> list[StepResult]:
    environment = pickle.loads(pickle.dumps(task.environment(problem)))
    return [await environment.step(turn) for turn in turns]


def play(task: Gsm8kTask, problem: Problem, *turns: str) -> list[StepResult]:
    return asyncio.run(steps(task, problem, *turns))


async def replay(task: Gsm8kTask, transcript: Transcript) -> float:
    """Step through a transcript; every observation must be the one it holds. The reward."""
    results = await steps(task, transcript.problem, *(piece.text for piece in transcript.pieces if piece.is_policy))
    observations = [piece.text for piece in transcript.pieces if not piece.is_policy]
    assert [result.text for result in results] == [*observations, ""]
    assert results[-1].done
    return results[-1].reward


def character_tokenizer(chat_template: str | None) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {chr(code): code for code in range(128)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="\x00"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = chat_template
    return fast


# Answers


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("24", 24),
        ("24.0", 24),
        ("24.", 24),
        ("1,234", 1234),
        ("$1,234.50", Fraction(2469, 2)),
        ("-$5", -5),
        ("$-5", -5),
        ("20%", 20),
        (" 3/4 ", Fraction(3, 4)),
        (".5", Fraction(1, 2)),
        ("1,23", None),
        ("1/0", None),
        ("", None),
        ("abc", None),
        ("1e3", None),
        ("9" * 10_000, None),
    ],
)
def test_numbers_are_read_as_people_write_them(text: str, value: Fraction | int | None) -> None:
    assert parse_number(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("24 clips", 24), ("x = $1,000.", 1000), ("18 or 19", None), ("none", None), ("3/4 of it", None)],
)
def test_several_numbers_are_no_answer(text: str, value: int | None) -> None:
    assert only_number(text) == value


@pytest.mark.parametrize(
    ("given", "gold", "same"),
    [
        ("24.00", "24", True),
        ("1000", "1,000", True),
        ("24.5", "24", False),
        ("\\boxed{24}", "24", True),
        ("$24$ dollars", "24", True),
        ("24 000", "24,000", True),
        ("1 1/2 cups", "1.5", True),
        ("\\frac{1}{2}", "0.5", True),
        ("−5", "-5", True),
        ("−5", "5", False),
        ("it is −5", "5", False),
        ("23 24", "24", False),
        ("24 or 25", "24", False),
        ("1" * 10_000, "1", False),
        ("Eleanor  of lancaster.", "Eleanor Of Lancaster", True),
        ("4", "PlayStation 4", False),
        ("playstation 4", "PlayStation 4", True),
    ],
)
def test_answers_are_equal_as_numbers_or_else_as_text(given: str, gold: str, same: bool) -> None:
    assert same_answer(given, gold) is same


# Episodes


def test_an_episode_with_a_call_and_an_answer_is_rewarded(tmp_path: Path) -> None:
    task = make(tmp_path)
    problem = task.train_problems()[0]
    call, end = play(task, problem, "Half is <calc>48/2</calc>", "24.\n#### 24")
    assert (call.text, call.done) == ("<result>24</result>", False)
    assert (end.done, end.success, end.reward, end.info["answered"]) == (True, True, 1.0, 1.0)


@pytest.mark.parametrize(
    ("turn", "reward", "answered"),
    [
        ("#### 24", 1.0, 1.0),
        ("so\n#### $24.00.\n", 1.0, 1.0),
        ("#### 24 clips", 1.0, 1.0),
        ("<answer>24</answer>", 1.0, 1.0),
        ("#### 3 #### 24", 1.0, 1.0),
        ("#### 23", 0.0, 1.0),
        ("#### 23 24", 0.0, 1.0),
        ("####", 0.0, 1.0),
        ("#### 24\n#### 5", 0.0, 1.0),
        ("it is 24", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_the_last_answer_alone_decides(tmp_path: Path, turn: str, reward: float, answered: float) -> None:
    task = make(tmp_path)
    (end,) = play(task, task.train_problems()[0], turn)
    assert (end.done, end.reward, end.info["answered"]) == (True, reward, answered)


def test_a_call_the_calculator_cannot_serve_is_explained(tmp_path: Path) -> None:
    task = make(tmp_path)
    (step,) = play(task, task.train_problems()[0], "<calc>two plus two</calc>")
    assert (step.text, step.done) == ("<result>error: unexpected 't'</result>", False)


# Demonstrations


def test_annotations_become_calls_and_results() -> None:
    assert solution_pieces(ROWS[0]["answer"], most_calls=5) == (
        TranscriptPiece("Half is 48/2 = <calc>48/2</calc>", is_policy=True),
        TranscriptPiece("<result>24</result>", is_policy=False),
        TranscriptPiece("24.\nTwice is <calc>24*2</calc>", is_policy=True),
        TranscriptPiece("<result>48</result>", is_policy=False),
        TranscriptPiece("48.\n#### 24", is_policy=True),
    )


def test_annotations_past_the_turn_limit_and_unreadable_ones_keep_their_text() -> None:
    assert solution_pieces(ROWS[0]["answer"], most_calls=1)[2:] == (
        TranscriptPiece("24.\nTwice is 48.\n#### 24", is_policy=True),
    )
    assert solution_pieces("a <<x=1>>1 #### 1", most_calls=1) == (TranscriptPiece("a 1 #### 1", is_policy=True),)


def test_demonstrations_need_worked_solutions(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
    with pytest.raises(DataError, match="no worked solutions"):
        next(make(tmp_path, rows).demonstrations(0))


@needs_shared
def test_every_real_gold_solution_replays_to_reward_1() -> None:
    config = Gsm8kSettings(
        data=str(SHARED / "gsm8k/train_first3500.jsonl"),
        eval_data=str(SHARED / "gsm8k/test.jsonl"),
        eval_problems=1319,
        max_turns=6,
    )
    task = build_task(config, WarmStartConfig(), 0)
    assert isinstance(task, Gsm8kTask)
    problems = [*task.train_problems(), *task.eval_problems()]
    assert len(problems) == 4819
    transcripts = [
        Transcript(problem, solution_pieces(problem.metadata["solution"], most_calls=5)) for problem in problems
    ]

    async def failures() -> list[str]:
        return [transcript.problem.id for transcript in transcripts if await replay(task, transcript) != 1.0]

    assert asyncio.run(failures()) == []


@needs_shared
def test_real_demonstrations_use_the_tool_and_come_from_training_rows() -> None:
    config = Gsm8kSettings(data=str(SHARED / "gsm8k/test.jsonl"), eval_problems=300)
    task = build_task(config, WarmStartConfig(), 0)
    train = {problem.id for problem in task.train_problems()}
    demonstrations = list(itertools.islice(task.demonstrations(0), 200))
    assert {demonstration.problem.id for demonstration in demonstrations} <= train
    assert sum(len(demonstration.pieces) for demonstration in demonstrations) > 2 * 200
    assert not train & {problem.id for problem in task.eval_problems()}


# Prompts


def test_the_prompt_explains_the_tool_and_goes_through_the_chat_template(tmp_path: Path) -> None:
    task = make(tmp_path)
    tokenizer = character_tokenizer(CHAT_TEMPLATE)
    text = tokenizer.decode(task.prompt_ids(task.train_problems()[0], tokenizer))
    assert text.startswith("system:Solve the problem step by step.")
    assert "<calc>48/2</calc>" in text
    assert "at most 5 times" in text
    assert text.endswith("user:Half of 48?\nassistant:")


def test_a_system_message_of_the_data_is_kept(tmp_path: Path) -> None:
    prompt = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Q?"}]
    rows = [{"prompt": prompt, "answer": "1"}, {"prompt": "other", "answer": "2"}]
    problem = make(tmp_path, rows).train_problems()[0]
    assert [message["role"] for message in problem.prompt] == ["system", "user"]
    assert problem.prompt[0]["content"].startswith("Be kind.\n\nSolve")


def test_a_template_that_refuses_system_messages_gets_the_text_in_the_user_s(tmp_path: Path) -> None:
    task = make(tmp_path)
    tokenizer = character_tokenizer(NO_SYSTEM_TEMPLATE)
    text = tokenizer.decode(task.prompt_ids(task.train_problems()[0], tokenizer))
    assert text.startswith("user:Solve the problem step by step.")
    assert text.endswith("#### 24\n\nHalf of 48?\nassistant:")


def test_a_model_without_chat_template_is_the_clear_error(tmp_path: Path) -> None:
    task = make(tmp_path)
    with pytest.raises(ModelError, match="has no chat template; use an instruct model, or put a chat_template"):
        task.prompt_ids(task.train_problems()[0], character_tokenizer(None))


def test_python_is_offered_only_when_asked_for(tmp_path: Path) -> None:
    assert "</python>" not in make(tmp_path).stop
    settings = Gsm8kSettings(
        data=str(tmp_path / "rows.jsonl"), eval_problems=1, python_tool=True, python_isolation=False
    )
    task = pickle.loads(pickle.dumps(Gsm8kTask(settings, seed=0)))
    assert task.stop == ("</calc>", "</python>", "</answer>")
    problem = task.train_problems()[0]
    assert "<python>print(48 / 2)</python>" in problem.prompt[0]["content"]
    ran, failed, end = play(task, problem, "<python>print(48 // 2)</python>", "<python>1/0</python>", "#### 24")
    assert (ran.text, ran.done) == ("<result>24</result>", False)
    assert "ZeroDivisionError" in failed.text
    assert (end.reward, end.info["tool_calls"], end.info["tool_errors"]) == (1.0, 2.0, 1.0)


def test_an_evaluation_alone_needs_no_training_file(tmp_path: Path) -> None:
    make(tmp_path)
    task = Gsm8kTask(Gsm8kSettings(eval_data=str(tmp_path / "rows.jsonl")), seed=0)
    assert [problem.answer for problem in task.eval_problems()] == ["24", "1,000", "3"]
    assert list(task.train_problems()) == []
    with pytest.raises(DataError, match=r"task\.data: no file"):
        Gsm8kTask(Gsm8kSettings(), seed=0)


def test_the_task_is_picklable(tmp_path: Path) -> None:
    task = make(tmp_path)
    assert pickle.loads(pickle.dumps(task)).train_problems() == task.train_problems()
    assert task.stop == ("</calc>", "</answer>")
