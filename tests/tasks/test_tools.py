"""Tool calls in text and the environment that answers them."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import dataclass

import pytest

from brace_rl.tasks.base import StepResult
from brace_rl.tasks.tools import (
    CalculatorTool,
    Tool,
    ToolEnvironment,
    ToolError,
    Verdict,
    Verifier,
    first_block,
)


@dataclass(frozen=True)
class LongEnough(Verifier):
    """Judges by length, to see which text it is given."""

    length: int

    def judge(self, turn: str) -> Verdict:
        success = len(turn) == self.length
        return Verdict(reward=0.5 * success, success=success, answered=bool(turn))


@dataclass(frozen=True)
class Echo(Tool):
    async def call(self, argument: str) -> str:
        if not argument:
            raise ToolError("nothing to say")
        return argument.upper()


def play(environment: ToolEnvironment, *turns: str) -> list[StepResult]:
    async def steps() -> list[StepResult]:
        return [await environment.step(turn) for turn in turns]

    return asyncio.run(steps())


def make(max_turns: int = 4, length: int = 0) -> ToolEnvironment:
    tools = {"calc": CalculatorTool(), "echo": Echo()}
    return ToolEnvironment(tools=tools, verifier=LongEnough(length), max_turns=max_turns)


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("a<calc>1+1</calc>b", ("calc", "1+1")),
        ("<answer>2</answer><calc>1</calc>", ("answer", "2")),
        ("<calc>1</calc><answer>2</answer>", ("calc", "1")),
        ("</calc><calc>1</calc>", ("calc", "1")),
        ("<calc>1+<calc>2</calc>", ("calc", "1+<calc>2")),
        ("<calc></calc>", ("calc", "")),
        ("<calc>1", None),
        ("1</calc>", None),
        ("<calc>1</answer>", None),
    ],
)
def test_the_block_that_closes_first_decides(text: str, block: tuple[str, str] | None) -> None:
    assert first_block(text, ("calc", "answer")) == block


def test_each_tool_answers_its_own_tag() -> None:
    calc, echo = play(make(), "I think <calc>48/2</calc>", "<echo>hi</echo>")
    assert calc == StepResult(observation="<result>24</result>")
    assert echo.observation == "<result>HI</result>"


def test_a_failing_tool_is_an_observation_and_is_counted() -> None:
    divided, silent, end = play(make(), "<calc>1/0</calc>", "<echo></echo>", "done")
    assert divided.observation == "<result>error: division by zero</result>"
    assert silent.observation == "<result>nothing to say</result>"
    assert not divided.done
    assert end.info == {"tool_calls": 2.0, "tool_errors": 2.0, "answered": 1.0}


def test_the_verifier_judges_the_last_turn_alone() -> None:
    _, end = play(make(length=4), "<calc>1</calc>", "four")
    assert (end.done, end.success, end.reward, end.observation) == (True, True, 0.5, "")


def test_a_call_in_the_last_turn_ends_the_episode_unrewarded_and_unserved() -> None:
    first, last = play(make(max_turns=2, length=14), "<calc>1</calc>", "<calc>2</calc>")
    assert not first.done
    assert (last.done, last.reward, last.observation) == (True, 0.0, "")
    assert last.info == {"tool_calls": 1.0, "tool_errors": 0.0, "answered": 0.0}


def test_an_answer_in_the_last_turn_counts() -> None:
    (end,) = play(make(max_turns=1, length=2), "ok")
    assert end.success


@pytest.mark.parametrize(("limit", "observation"), [(1, "<result>error</result>"), (2, "<result>7</result>")])
def test_operations_per_call_are_limited(limit: int, observation: str) -> None:
    tool = CalculatorTool(max_operations=limit, explain=False)
    environment = ToolEnvironment(tools={"calc": tool}, verifier=LongEnough(0), max_turns=3)
    assert play(environment, "<calc>1+2*3</calc>")[0].observation == observation


def test_an_environment_survives_pickling_in_mid_episode() -> None:
    environment = make(max_turns=2)
    play(environment, "<calc>1</calc>")
    (end,) = play(pickle.loads(pickle.dumps(environment)), "<calc>2</calc>")
    assert end.done
