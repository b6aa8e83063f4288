"""Tool calls in text and the environment that answers them."""

from __future__ import annotations

import asyncio
import pickle
import re
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brace_rl.tasks.base import StepResult
from brace_rl.tasks.tools import (
    Block,
    CalculatorTool,
    Tool,
    ToolEnvironment,
    ToolError,
    ToolFigures,
    Verdict,
    Verifier,
    blocks,
    first_block,
    run_calls,
)

COUNTS = {"tool_calls": 0.0, "tool_errors": 0.0, "tool_failures": 0.0, "tool_timeouts": 0.0}


@dataclass(frozen=True)
class LongEnough(Verifier):
    """Judges by length, to see which text it is given."""

    length: int

    async def judge(self, turn: str) -> Verdict:
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
    assert (calc.observation, calc.observation_end, calc.done) == ("<result>24", "</result>", False)
    assert echo.text == "<result>HI</result>"


def test_a_failing_tool_is_an_observation_and_is_counted() -> None:
    divided, silent, end = play(make(), "<calc>1/0</calc>", "<echo></echo>", "done")
    assert divided.text == "<result>error: division by zero</result>"
    assert silent.text == "<result>nothing to say</result>"
    assert not divided.done
    assert end.info == {**COUNTS, "tool_calls": 2.0, "tool_errors": 2.0, "answered": 1.0}


def test_the_verifier_judges_the_last_turn_alone() -> None:
    _, end = play(make(length=4), "<calc>1</calc>", "four")
    assert (end.done, end.success, end.reward, end.observation) == (True, True, 0.5, "")


def test_a_call_in_the_last_turn_ends_the_episode_unrewarded_and_unserved() -> None:
    first, last = play(make(max_turns=2, length=14), "<calc>1</calc>", "<calc>2</calc>")
    assert not first.done
    assert (last.done, last.reward, last.observation) == (True, 0.0, "")
    assert last.info == {**COUNTS, "tool_calls": 1.0, "answered": 0.0}


def test_an_answer_in_the_last_turn_counts() -> None:
    (end,) = play(make(max_turns=1, length=2), "ok")
    assert end.success


@pytest.mark.parametrize(("limit", "observation"), [(1, "<result>error</result>"), (2, "<result>7</result>")])
def test_operations_per_call_are_limited(limit: int, observation: str) -> None:
    tool = CalculatorTool(max_operations=limit, explain=False)
    environment = ToolEnvironment(tools={"calc": tool}, verifier=LongEnough(0), max_turns=3)
    assert play(environment, "<calc>1+2*3</calc>")[0].text == observation


@dataclass(frozen=True)
class Sleeper(Tool):
    """Answers in the order of its arguments, longest last; ``never`` never."""

    async def call(self, argument: str) -> str:
        if argument == "never":
            await asyncio.get_running_loop().create_future()
        if argument == "boom":
            raise ZeroDivisionError
        await asyncio.sleep(float(argument))
        return argument


def run(calls: list[Block], timeout_s: float | None = None) -> tuple[list[str], ToolFigures]:
    figures = ToolFigures()
    tools = {"nap": Sleeper(), "echo": Echo()}
    return asyncio.run(run_calls(calls, tools, figures=figures, timeout_s=timeout_s)), figures


def test_parallel_calls_overlap_and_are_answered_in_the_order_of_the_calls() -> None:
    meeting: list[asyncio.Future[None]] = []

    class Meeting(Tool):
        async def call(self, argument: str) -> str:
            meeting.append(asyncio.get_running_loop().create_future())
            if len(meeting) == 3:
                for future in meeting[::-1]:
                    future.set_result(None)
            await meeting[-1]
            return argument

    calls = [Block("meet", name) for name in "abc"]
    figures = ToolFigures()
    assert asyncio.run(run_calls(calls, {"meet": Meeting()}, figures=figures, timeout_s=5.0)) == ["a", "b", "c"]
    assert figures.calls == 3


def test_a_call_that_fails_or_takes_too_long_is_an_observation_and_the_others_are_served() -> None:
    calls = [Block("nap", "never"), Block("nap", "boom"), Block("echo", ""), Block("echo", "hi")]
    results, figures = run(calls, timeout_s=0.01)
    assert results == [
        "error: no answer within 0.01 s",
        "error: the tool failed (ZeroDivisionError)",
        "nothing to say",
        "HI",
    ]
    assert figures == ToolFigures(calls=4, errors=1, failures=1, timeouts=1)


def test_a_single_call_is_limited_too() -> None:
    assert run([Block("nap", "never")], timeout_s=0.01)[0] == ["error: no answer within 0.01 s"]


def test_calls_of_one_turn_past_the_limit_are_refused_in_place() -> None:
    environment = ToolEnvironment(tools={"echo": Echo()}, verifier=LongEnough(0), max_turns=3, max_calls=2)
    turn = "<echo>a</echo><echo>b</echo><echo>c</echo><answer>1</answer>"
    (result,) = play(environment, turn)
    assert result.text == "<result>A</result><result>B</result><result>error: at most 2 calls per turn</result>"
    assert result.info == {**COUNTS, "tool_calls": 3.0, "tool_errors": 1.0}


def test_an_answer_before_the_calls_ends_the_episode() -> None:
    environment = ToolEnvironment(tools={"echo": Echo()}, verifier=LongEnough(0), max_turns=3, max_calls=2)
    (result,) = play(environment, "<answer>1</answer><echo>a</echo>")
    assert result.done


@dataclass(frozen=True)
class NoJudge(Verifier):
    async def judge(self, turn: str) -> Verdict:
        return Verdict(reward=0.0, success=False, answered=True, excluded=True, info={"f1": 0.5})


def test_a_verdict_that_could_not_be_had_excludes_the_episode_and_its_figures_are_kept() -> None:
    environment = ToolEnvironment(tools={}, verifier=NoJudge(), max_turns=1)
    (result,) = play(environment, "x")
    assert (result.excluded, result.info["f1"], result.info["answered"]) == (True, 0.5, 1.0)


@given(st.lists(st.sampled_from(["<a>", "</a>", "<b>", "</b>", "x", "<", "/"]), max_size=24))
def test_blocks_are_those_a_regular_expression_finds(parts: list[str]) -> None:
    text, found, place = "".join(parts), [], 0
    while True:
        matches = [re.compile(rf"<({tag})>(.*?)</{tag}>", re.S).search(text, place) for tag in "ab"]
        best = min((match for match in matches if match), key=lambda match: match.end(), default=None)
        if best is None:
            break
        found.append((best[1], best[2]))
        place = best.end()
    assert list(blocks(text, "ab")) == found


def test_an_environment_survives_pickling_in_mid_episode() -> None:
    environment = make(max_turns=2)
    play(environment, "<calc>1</calc>")
    (end,) = play(pickle.loads(pickle.dumps(environment)), "<calc>2</calc>")
    assert end.done
