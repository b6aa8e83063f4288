"""The task shown in docs/tasks.md, exactly as shown; and files that are no task."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import re
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from brace_rl import cli
from brace_rl.config import load_config, load_resolved_config
from brace_rl.errors import ConfigError
from brace_rl.tasks import build_task
from brace_rl.tasks.registry import parse_settings, task_class
from brace_rl.training.run import run_training

DOCS = (Path(__file__).parents[2] / "docs/tasks.md").read_text(encoding="utf-8")
SMALL = {
    "model.hidden_size": "16",
    "model.layers": "1",
    "model.heads": "2",
    "warm_start.steps": "2",
    "rollout.prompts_per_step": "4",
    "rollout.max_response_tokens": "12",
    "optim.steps": "2",
    "optim.critic_warmup_steps": "1",
    "eval.final_problems": "4",
    "run.trackers": "[]",
    "run.name": "it",
}


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recipe, beside the file, in the current folder."""
    section = DOCS.partition("## A task of your own")[2].partition("\n## ")[0]
    code, recipe = (re.findall(rf"```{kind}\n(.*?)```", section, re.DOTALL)[0] for kind in ("python", "toml"))
    (tmp_path / "guess.py").write_text(code)
    (tmp_path / "guess.toml").write_text(recipe)
    monkeypatch.chdir(tmp_path)
    return Path("guess.toml")


def test_the_shown_file_is_a_few_dozen_lines(shown: Path) -> None:
    assert len(Path("guess.py").read_text().splitlines()) < 80


def test_the_shown_recipe_passes_the_check(
    shown: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["brace", "train", str(shown), "--check"])
    cli.main()
    out = capsys.readouterr().out
    assert "task: guess.py:GuessTask\n" in out
    assert "first problem: 0-63=\n" in out


def test_demonstrations_of_the_shown_task_replay_to_reward_1(shown: Path) -> None:
    config = load_config(shown, {"task.max_turns": "64"})
    task = build_task(config.task, config.warm_start, 0)

    async def reward() -> list[float]:
        rewards = []
        for transcript in islice(task.demonstrations(0), 20):
            environment = pickle.loads(pickle.dumps(task.environment(transcript.problem)))
            turns = [piece.text for piece in transcript.pieces if piece.is_policy]
            results = [await environment.step(turn) for turn in turns]
            said = [piece.text for piece in transcript.pieces if not piece.is_policy]
            assert [result.text for result in results[:-1]] == said
            rewards.append(results[-1].reward)
        return rewards

    assert asyncio.run(reward()) == [1.0] * 20


@pytest.mark.slow
def test_the_shown_task_trains_with_rollouts_in_another_process(shown: Path, tmp_path: Path) -> None:
    config = load_config(shown, {**SMALL, "schedule.mode": "async", "schedule.max_staleness": "1"})
    outcome = run_training(config, tmp_path / "runs" / "it")
    assert outcome.status == "finished"
    rows = [json.loads(line) for line in (outcome.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert any("task/guesses" in row for row in rows)
    assert load_resolved_config(outcome.run_dir).task == config.task


def test_its_settings_are_checked_like_any_others(shown: Path) -> None:
    with pytest.raises(ConfigError, match=r"task\.largst: no such setting; did you mean task\.largest\?"):
        load_config(shown, {"task.largst": "9"})
    with pytest.raises(ConfigError, match=r"task\.largest: .*less than or equal to 999"):
        load_config(shown, {"task.largest": "1000"})


def test_settings_of_an_own_task_survive_pickling(shown: Path) -> None:
    settings = load_config(shown).task
    assert pickle.loads(pickle.dumps(settings)) == settings


@pytest.mark.parametrize(
    ("make", "name", "message"),
    [
        (lambda path: None, "own.py:X", "own.py: no such file; write path/to/file.py:ClassName"),
        (lambda path: path.write_text("x = 1"), "own.py:X", "own.py has no class 'X'"),
        (lambda path: path.write_text("X = 1"), "own.py:X", "own.py has no class 'X'"),
        (lambda path: path.write_text("x = 1\n1/0"), "own.py:X", "own.py:2: ZeroDivisionError: division by zero"),
        (lambda path: path.write_text("import nosuch_package"), "own.py:X", "own.py:1: ModuleNotFoundError"),
        (lambda path: path.write_text("x = = 1"), "own.py:X", "own.py: SyntaxError"),
        (lambda path: path.write_text("x"), "own.py:", "own.py.*NameError"),
        (
            lambda path: path.write_text("from brace_rl.tasks.base import Task\nclass X(Task):\n    Settings = dict"),
            "own.py:X",
            "no attribute Settings that is a class derived from TaskSettings",
        ),
    ],
)
def test_a_file_that_is_no_task_is_one_line(
    make: Callable[[Path], object], name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "own.py")
    with pytest.raises(ConfigError, match=message) as caught:
        parse_settings({"name": name})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("statement", "said"), [("return {}['missing']", "KeyError: 'missing'"), ("raise SystemExit(7)", "SystemExit: 7")]
)
def test_what_the_code_of_an_own_task_raises_is_one_line_that_names_its_place(
    statement: str, said: str, shown: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = Path("guess.py").read_text()
    monkeypatch.setattr(sys, "argv", ["brace", "train", str(shown), "--check"])
    Path("guess.py").write_text(f"{code}\n    def eval_problems(self):\n        {statement}\n")
    with pytest.raises(SystemExit) as ended:
        cli.main()
    line = len(code.splitlines()) + 3
    assert (ended.value.code, capsys.readouterr().err) == (
        2,
        f"error: guess.py:{line}: {said}; mend that line\n",
    )


def test_every_family_names_itself_and_can_be_found() -> None:
    from brace_rl.tasks.base import Task
    from brace_rl.tasks.registry import FAMILIES, settings_class

    for name in FAMILIES:
        assert settings_class(name).model_fields["name"].default == name
        assert issubclass(task_class(name), Task)
        assert all(field.description for field in settings_class(name).model_fields.values()), name


def test_no_family_s_settings_load_torch() -> None:
    import subprocess

    code = (
        "import sys\nfrom brace_rl.tasks.registry import FAMILIES, settings_class\n"
        "for name in FAMILIES: settings_class(name)\n"
        "print([m for m in ('torch', 'transformers', 'datasets', 'bm25s', 'reasoning_gym') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert done.stdout.strip() == "[]"
