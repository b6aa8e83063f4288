"""Environments of the package verifiers, through its own rollout. Skipped where it is not installed."""

from __future__ import annotations

import asyncio
import pickle
import signal
from pathlib import Path

import pytest

from brace_rl.errors import ConfigError
from brace_rl.tasks.adapters.verifiers import parse_tool_calls
from brace_rl.tasks.base import Environment, StepResult, Task
from brace_rl.tasks.registry import parse_settings, task_class

ENVIRONMENT = '''
"""Sums, by head, with a tool, or by guessing."""
import verifiers as vf
from datasets import Dataset

ROWS = [{"question": f"What is {n}+{n}?", "answer": str(2 * n)} for n in range(6)]


def right(completion, answer, **kwargs):
    return 1.0 if completion[-1].content.strip() == answer else 0.0


async def length(completion, **kwargs):
    return float(len(completion[-1].content))


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


class Guessing(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        guess, gold = messages[-1].content, state["answer"]
        if guess == gold:
            state["final_env_response"] = [{"role": "user", "content": "yes"}]
            state["guessed"] = True
        return [{"role": "user", "content": "higher" if guess < gold else "lower"}]


def guessed(state, **kwargs):
    return 1.0 if state.get("guessed") else 0.0


def load_environment(kind="single", **kwargs):
    data = Dataset.from_list(ROWS)
    if kind == "single":
        rubric = vf.Rubric(funcs=[right, length], weights=[1.0, 0.0])
        return vf.SingleTurnEnv(dataset=data, system_prompt="Be brief.", rubric=rubric)
    if kind == "tool":
        return vf.ToolEnv(dataset=data, tools=[add], max_turns=4, rubric=vf.Rubric(funcs=[right]))
    if kind == "guess":
        return Guessing(dataset=data, max_turns=3, rubric=vf.Rubric(funcs=[guessed]))
    raise ValueError("no such kind")
'''


def test_tool_calls_are_taken_out_of_the_text() -> None:
    text = 'Let me see. <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    content, calls = parse_tool_calls(text)
    assert content == "Let me see."
    assert calls == [{"id": "call_0", "name": "add", "arguments": '{"a": 1, "b": 2}'}]


@pytest.mark.parametrize("call", ["{", "[]", '{"name": "add"}', "[" * 100_000])
def test_a_call_that_cannot_be_read_is_a_call_that_fails(call: str) -> None:
    (found,) = parse_tool_calls(f"<tool_call>{call}</tool_call>")[1]
    assert (found["name"], found["arguments"]) == ("", call)


def test_settings_need_an_environment() -> None:
    with pytest.raises(ConfigError, match=r"task\.environment: verifiers needs the id"):
        parse_settings({"name": "verifiers"})


class TestInstalled:
    """What needs the package."""

    @pytest.fixture(autouse=True)
    def installed(self) -> None:
        verifiers = pytest.importorskip("verifiers")
        if not hasattr(verifiers, "MultiTurnEnv"):
            pytest.skip("a version of verifiers with other environments")

    @pytest.fixture
    def make(self, tmp_path: Path):  # type: ignore[no-untyped-def]
        path = tmp_path / "sums.py"
        path.write_text(ENVIRONMENT)

        def task(kind: str) -> Task:
            settings = parse_settings(
                {"name": "verifiers", "environment": str(path), "arguments": {"kind": kind}, "eval_problems": 2}
            )
            return task_class("verifiers")(settings, seed=0)

        return task

    @staticmethod
    def play(environment: Environment, *turns: str) -> list[StepResult]:
        async def steps() -> list[StepResult]:
            return [await environment.step(turn) for turn in turns]

        return asyncio.run(steps())

    def test_a_single_turn_is_scored_by_the_rubric(self, make) -> None:  # type: ignore[no-untyped-def]
        task = make("single")
        problem = task.train_problems()[2]
        assert [message["content"] for message in problem.prompt] == ["Be brief.", "What is 2+2?"]
        environment = pickle.loads(pickle.dumps(task.environment(problem)))
        (end,) = self.play(environment, "4")
        assert (end.done, end.reward, end.success, end.info["length"]) == (True, 1.0, True, 1.0)
        (end,) = self.play(task.environment(problem), "5 I think")
        assert (end.done, end.reward, end.success) == (True, 0.0, False)

    def test_held_out_problems_are_not_trained_on(self, make) -> None:  # type: ignore[no-untyped-def]
        task = make("single")
        assert [problem.answer for problem in task.eval_problems()] == ["8", "10"]
        assert [problem.answer for problem in task.train_problems()] == ["0", "2", "4", "6"]

    def test_a_tool_call_is_answered_by_the_tool(self, make) -> None:  # type: ignore[no-untyped-def]
        task = make("tool")
        call = '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 3}}</tool_call>'
        observed, failed, end = self.play(
            task.environment(task.train_problems()[3]), call, "<tool_call>nonsense</tool_call>", "6"
        )
        assert observed.observation == ({"role": "tool", "content": "6"},)
        assert failed.observation[0]["role"] == "tool"
        assert not failed.done
        assert (end.done, end.reward, end.info["add_calls"]) == (True, 1.0, 1.0)

    def test_an_environment_of_several_turns_ends_when_it_says_so(self, make) -> None:  # type: ignore[no-untyped-def]
        task = make("guess")
        problem = task.train_problems()[2]
        first, end = self.play(task.environment(problem), "3", "4")
        assert first.observation == ({"role": "user", "content": "higher"},)
        assert (end.done, end.reward) == (True, 1.0)
        results = self.play(task.environment(problem), "1", "2", "3")
        assert (results[-1].done, results[-1].reward) == (True, 0.0)

    def test_the_trainers_answers_to_signals_are_kept(self, make) -> None:  # type: ignore[no-untyped-def]
        before = signal.getsignal(signal.SIGINT)
        make("single")
        assert signal.getsignal(signal.SIGINT) is before

    def test_closing_an_episode_cancels_what_waits(self, make) -> None:  # type: ignore[no-untyped-def]
        task = make("guess")

        async def leave() -> int:
            environment = task.environment(task.train_problems()[2])
            await environment.step("3")
            environment.close()
            for _ in range(10):
                await asyncio.sleep(0)
            return len(asyncio.all_tasks()) - 1

        assert asyncio.run(leave()) == 0

    def test_an_environment_that_cannot_be_loaded_is_one_line(self, make) -> None:  # type: ignore[no-untyped-def]
        with pytest.raises(ConfigError, match=r"task\.environment: .*no such kind") as caught:
            make("nosuch")
        assert "\n" not in str(caught.value)
