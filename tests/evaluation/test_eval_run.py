"""``brace eval``: records, resuming, refusals. A tiny model and fakes."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from brace_rl import cli
from brace_rl.config import ModelConfig
from brace_rl.tasks.tokenizer import build_calculator_tokenizer
from brace_rl.training.models import new_actor, save_actor
from brace_rl.training.rollout import RolloutDriver

Eval = Callable[..., tuple[int, str, str]]
SMALL = ("--samples", 4, "--max-response-tokens", 8, "--slots", 8, "--task.train_problems", 50, "--device", "cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = build_calculator_tokenizer()
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_actor(new_actor(ModelConfig(hidden_size=16, layers=1, heads=2), tokenizer, seed=0), tokenizer, folder)
    return folder


@pytest.fixture
def evaluate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Eval:
    """``evaluate(words...)`` runs ``brace eval``; its exit code, output and error output."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.chdir(tmp_path)

    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["brace", "eval", *map(str, words)])
        code: Any = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code
        out, err = capsys.readouterr()
        return code or 0, out, err

    return call


def table(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(folder / "records.parquet").to_pylist()
    return rows


def test_an_evaluation_writes_a_row_per_answer_and_a_summary(evaluate: Eval, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, printed, errors = evaluate("--model", model, "--task", "calculator", *SMALL, "--limit", 5, "--out", out)
    assert (code, errors) == (0, "")
    rows = table(out)
    assert [row["sample"] for row in rows] == [0, 1, 2, 3] * 5
    assert len({row["problem_id"] for row in rows}) == 5
    assert all(json.loads(row["info"]) is not None and row["response_tokens"] <= 8 for row in rows)
    summary = json.loads((out / "summary.json").read_text())
    assert set(summary["metrics"]) >= {"mean@4", "pass@1", "pass@2", "pass@4", "reward"}
    assert summary["counts"]["answers"] == 20
    assert summary["metrics"]["mean@4"]["mean"] == sum(row["success"] for row in rows) / 20
    assert "mean@4" in printed
    assert "95 % interval" in printed


def test_an_interrupted_evaluation_goes_on_and_draws_what_it_would_have_drawn(
    evaluate: Eval, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--model", model, "--task", "calculator", *SMALL, "--limit", 6)
    assert evaluate(*words, "--out", tmp_path / "whole")[0] == 0
    advance = RolloutDriver.advance
    asked: list[str] = []
    submit = RolloutDriver.submit

    def stops_after_two(self: RolloutDriver) -> Any:
        groups = advance(self)
        if len((tmp_path / "parts" / "records.jsonl").read_text().splitlines()) >= 2:
            raise KeyboardInterrupt
        return groups

    def remembers(self: RolloutDriver, requests: Any) -> None:
        asked.extend(request.problem.id for request in requests)
        submit(self, requests)

    monkeypatch.setattr(RolloutDriver, "advance", stops_after_two)
    assert evaluate(*words, "--out", tmp_path / "parts")[0] == cli.INTERRUPTED
    finished = [
        json.loads(line)["problem_id"] for line in (tmp_path / "parts" / "records.jsonl").read_text().splitlines()
    ]
    assert 2 <= len(finished) < 6
    with (tmp_path / "parts" / "records.jsonl").open("a") as file:
        file.write('{"problem_id": "cut sho')  # as a crash leaves it
    monkeypatch.setattr(RolloutDriver, "advance", advance)
    monkeypatch.setattr(RolloutDriver, "submit", remembers)
    code, printed, _ = evaluate(*words, "--out", tmp_path / "parts")
    assert code == 0
    assert f"{len(finished)} problems were answered before" in printed
    assert not set(asked) & set(finished)
    assert table(tmp_path / "parts") == table(tmp_path / "whole")


def test_a_finished_evaluation_is_only_counted_again(
    evaluate: Eval, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--model", model, "--task", "calculator", *SMALL, "--limit", 2, "--out", tmp_path / "out")
    assert evaluate(*words)[0] == 0
    before = table(tmp_path / "out")
    monkeypatch.setattr(RolloutDriver, "submit", lambda self, requests: pytest.fail("asked again"))
    assert evaluate(*words)[0] == 0
    assert table(tmp_path / "out") == before


def test_other_settings_do_not_mix_with_the_records_of_a_folder(evaluate: Eval, model: Path, tmp_path: Path) -> None:
    words = ("--model", model, "--task", "calculator", *SMALL, "--limit", 2, "--out", tmp_path / "out")
    assert evaluate(*words)[0] == 0
    code, _, errors = evaluate(*words, "--temperature", 1.0)
    assert code == cli.BAD_INPUT
    assert "another settings.sampling.temperature (0.6, now 1.0); choose another --out" in errors
    assert len(errors.splitlines()) == 1


def test_greedy_decoding_answers_once_and_repeats(evaluate: Eval, model: Path, tmp_path: Path) -> None:
    words = ("--model", model, "--task", "calculator", "--greedy", "--max-response-tokens", 6, "--limit", 3)
    assert evaluate(*words, "--out", tmp_path / "a")[0] == 0
    assert evaluate(*words, "--seed", 9, "--out", tmp_path / "b")[0] == 0
    responses = [[row["response"] for row in table(tmp_path / name)] for name in "ab"]
    assert responses[0] == responses[1]
    assert len(responses[0]) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--task", "nosuch"), "task.name: 'nosuch' is not a task"),
        (("--task", "gsm8k_tool"), "--data: gsm8k_tool reads its problems from a file"),
        (("--task", "calculator", "--data", "x.jsonl"), "--data: calculator makes its own problems"),
        (("--task", "gsm8k_tool", "--data", "nosuch.jsonl"), "nosuch.jsonl: .*(no such file|cannot be read)"),
        (("--task", "calculator", "--greedy", "--samples", "4"), "--samples: greedy"),
        (("--task", "calculator", "--greedy", "--top-p", "0.9"), "--top-p: greedy decoding samples nothing"),
        (("--task", "calculator", "--temperature", "0"), "--temperature: 0 is greedy decoding"),
        (("--task", "calculator", "--task.oprands", "[2, 2]"), "task.oprands: no such setting; did you mean"),
        (("--task", "calculator", "--optim.steps", "3"), "settings of the task only"),
        (("--task", "calculator", "--samples", "0"), "--samples"),
        (("--task", "calculator", "--device", "abacus"), "no device is called 'abacus'"),
        (("--task", "calculator", "--max-prompt-tokens", "1"), "more than .*max_prompt_tokens"),
        (("--task", "reasoning_gym"), "task.dataset: reasoning_gym needs the name"),
    ],
)
def test_bad_input_is_one_line(
    words: tuple[str, ...], message: str, evaluate: Eval, model: Path, tmp_path: Path
) -> None:
    import re

    code, _, errors = evaluate("--model", model, *words)
    assert code == cli.BAD_INPUT, errors
    assert len(errors.splitlines()) == 1, errors
    assert re.search(message, errors), errors


def test_a_missing_model_is_named(evaluate: Eval, tmp_path: Path) -> None:
    code, _, errors = evaluate("--model", tmp_path / "nosuch", "--task", "calculator")
    assert (code, "nosuch" in errors, len(errors.splitlines())) == (cli.BAD_INPUT, True, 1)


def test_a_folder_with_other_files_is_left_alone(evaluate: Eval, model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "diary.txt").write_text("mine")
    code, _, errors = evaluate("--model", model, "--task", "calculator", "--out", tmp_path / "out")
    assert (code, "holds other files" in errors) == (cli.BAD_INPUT, True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["diary.txt"]


def test_records_that_are_none_are_named(evaluate: Eval, model: Path, tmp_path: Path) -> None:
    words = ("--model", model, "--task", "calculator", *SMALL, "--limit", 2, "--out", tmp_path / "out")
    assert evaluate(*words)[0] == 0
    (tmp_path / "out" / "records.jsonl").write_text("nonsense\n")
    code, _, errors = evaluate(*words)
    assert (code, "records.jsonl:1: not a record" in errors) == (cli.BAD_INPUT, True)
