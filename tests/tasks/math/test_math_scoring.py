"""Verdicts: the hand-checked answers, hostile ones, and workers that hang or die."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from brace_rl.tasks.math import workers as workers_module
from brace_rl.tasks.math.data import load_problems
from brace_rl.tasks.math.equivalence import decide
from brace_rl.tasks.math.overlong import soft_overlong_punishment
from brace_rl.tasks.math.scoring import LONGEST_ANSWER, MathVerifier
from brace_rl.tasks.math.workers import Limits, Outcome, Workers, shared_workers
from brace_rl.tasks.tools import Verdict

CHECKED: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "data" / "math_answers.json").read_text("utf-8")
)
DATA = Path(__file__).parents[4] / "shared" / "data"
LIMITS = Limits(cpu_s=2.0, memory_mb=1024, workers=1)

pytest.importorskip("math_verify")


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    running = Workers(LIMITS)
    yield running
    running.close()


@pytest.fixture(scope="module", autouse=True)
def _close_shared() -> Iterator[None]:
    yield
    shared_workers(LIMITS).close()


def judge(gold: str, *turns: str, limits: Limits = LIMITS) -> list[Verdict]:
    verifier = pickle.loads(pickle.dumps(MathVerifier(gold, limits=limits)))

    async def all_turns() -> list[Verdict]:
        return list(await asyncio.gather(*map(verifier.judge, turns)))

    return asyncio.run(all_turns())


def test_the_hand_checked_answers_are_of_at_least_200_items_and_of_both_verdicts() -> None:
    assert len({(entry["data"], entry["row"]) for entry in CHECKED}) >= 200
    assert sum(not entry["same"] for entry in CHECKED) >= 100
    assert len({entry["data"] for entry in CHECKED}) >= 10
    assert sum(entry.get("missed", False) for entry in CHECKED) <= 4


@pytest.mark.slow
def test_scoring_agrees_with_every_hand_checked_answer() -> None:
    async def run() -> list[Verdict]:
        verifiers = [MathVerifier(entry["gold"], limits=LIMITS) for entry in CHECKED]
        return list(await asyncio.gather(*(v.judge(e["text"]) for v, e in zip(verifiers, CHECKED, strict=True))))

    verdicts = asyncio.run(run())
    # Entries marked "missed" are right answers that are known not to be recognised.
    wrong = [
        entry
        for entry, verdict in zip(CHECKED, verdicts, strict=True)
        if verdict.success != (entry["same"] and not entry.get("missed", False))
    ]
    assert wrong == []
    assert not any(verdict.excluded for verdict in verdicts)


@pytest.mark.skipif(not DATA.exists(), reason="the data sets are not here")
@pytest.mark.parametrize("name", sorted({entry["data"] for entry in CHECKED}))
def test_the_hand_checked_gold_answers_are_those_of_the_data_sets(name: str) -> None:
    path = DATA / name
    if path.suffix == ".json":
        rows = json.loads(path.read_text("utf-8"))
    else:
        rows = [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]
    for entry in (entry for entry in CHECKED if entry["data"] == name):
        row = rows[entry["row"] - 1]
        gold = next(str(row[key]) for key in ("answer", "expected_answer", "ground_truth") if key in row)
        assert gold.rpartition("####")[2].strip() == entry["gold"]


@pytest.mark.skipif(not DATA.exists(), reason="the data sets are not here")
@pytest.mark.parametrize(
    "name",
    [
        "math/math500_rllm.json",
        "math/math_train_first1000.jsonl",
        "math/deepmath_first500_roll.jsonl",
        "gsm8k/test.jsonl",
    ],
)
def test_every_gold_answer_of_a_data_set_answers_itself(name: str) -> None:
    for row in load_problems(DATA / name, bad_rows="skip").rows:
        assert decide(row.answer, row.answer) is True


@pytest.mark.parametrize(
    ("gold", "given"),
    [
        ("204", "203"),
        ("x", "y"),
        ("p - q", "q - p"),
        ("(0,1)", "[0,1]"),
        ("1,-2", "1"),
        ("\\text{Yes}", "No"),
        ("3h", "3"),
        ("5", "7$, $5"),
        ("5", "\\(4\\) or \\(5\\)"),
        ("\\text{是}", "x"),
    ],
)
def test_another_answer_is_wrong(gold: str, given: str) -> None:
    assert judge(gold, f"\\boxed{{{given}}}")[0] == Verdict(0.0, False, True, False, {"answer_limit_hit": 0.0})


def test_no_answer_is_wrong_and_says_so() -> None:
    (verdict,) = judge("204", "It is 204.")
    assert (verdict.reward, verdict.success, verdict.answered) == (0.0, False, False)


HOSTILE = {
    "tower": "9^{9^{9^9}}",
    "python tower": "9**9**9**9",
    "factorial": "(10^{10})!",
    "expansion": "(a+b+c+d+e+f+g)^{300}",
    "nested fractions": "\\frac{1}{" * 80 + "2" + "}" * 80,
    "nested parentheses": "(" * 450 + "x" + ")" * 450,
    "nested roots": "\\sqrt{" * 120 + "x" + "}" * 120,
    "sum": "\\sum_{n=1}^{10^{12}} \\frac{1}{n^x}",
    "integral": "\\int_0^1 x^{x^x} \\sin(\\sin(x^{x})) dx",
    "dollars": "$" * 900,
    "matrix": "\\begin{pmatrix}" + "1 & " * 150 + "\\end{pmatrix}",
    "words": "a " * 450,
    "brackets": "[" * 900,
    "backslashes": "\\" * 901,
    "commas": "1," * 450,
    "code": "__import__('os').system('true')",
}


@pytest.mark.slow
def test_hostile_answers_are_wrong_and_stop_nobody() -> None:
    limits = Limits(cpu_s=0.5, workers=1)
    turns = [f"\\boxed{{{answer}}}" for answer in HOSTILE.values()]
    verdicts = judge("x^2 - 1", *turns, "\\boxed{(x-1)(x+1)}", limits=limits)
    shared_workers(limits).close()
    assert [verdict.success for verdict in verdicts] == [False] * len(HOSTILE) + [True]
    assert sum(verdict.info.get("answer_limit_hit", 0) for verdict in verdicts) >= 2
    assert not any(verdict.excluded for verdict in verdicts)


def test_an_answer_of_a_million_characters_is_wrong_without_being_read() -> None:
    (verdict,) = judge("5", "\\boxed{" + "(" * 1_000_000 + "}")
    assert (verdict.success, verdict.answered) == (False, True)
    assert not judge("5", "\\boxed{5" + "." * LONGEST_ANSWER + "}")[0].success


def test_a_check_that_exceeds_its_limit_kills_its_worker_by_id_and_the_next_one_is_fresh(workers: Workers) -> None:
    assert workers.submit("(x-1)(x+1)", "x^2-1").result() is Outcome.SAME
    (before,) = workers.pids
    assert workers.submit("9^{9^{9^9}}", "x^2-1").result() is Outcome.LIMIT
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)
    assert workers.submit("(x-1)(x+2)", "x^2-1").result() is Outcome.DIFFERENT
    assert workers.pids != [before]


def test_a_worker_that_is_killed_while_idle_costs_no_verdict(workers: Workers) -> None:
    assert workers.submit("(x-1)(x+1)", "x^2-1").result() is Outcome.SAME
    (before,) = workers.pids
    os.kill(before, signal.SIGKILL)
    while workers.pids:
        pass
    assert workers.submit("(x-1)(x+1)", "x^2-1").result() is Outcome.SAME
    assert workers.pids != [before]


def test_a_worker_is_replaced_after_its_number_of_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "CHECKS_PER_WORKER", 1)
    running = Workers(LIMITS)
    running.submit("x", "y").result()
    first = running._started[0].pid
    running.submit("x", "y").result()
    assert running._started[0].pid != first
    running.close()


def test_memory_beyond_the_limit_counts_as_wrong() -> None:
    running = Workers(Limits(cpu_s=20.0, memory_mb=256, workers=1))
    assert running.submit("(a+b+c+d+e+f+g+h)^{40}", "x").result() in (Outcome.LIMIT, Outcome.DIFFERENT)
    assert running.submit("(x-1)(x+1)", "x^2-1").result() is Outcome.SAME
    running.close()


def test_an_answer_no_worker_can_judge_excludes_its_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    limits = Limits(cpu_s=1.5, workers=1)
    verifier = MathVerifier("x^2-1", limits=limits)
    verdict = asyncio.run(verifier.judge("\\boxed{(x-1)(x+1)}"))
    assert (verdict.excluded, verdict.success) == (True, False)
    shared_workers(limits).close()


def test_several_answers_are_checked_while_the_event_loop_goes_on() -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    async def run() -> Verdict:
        ticking = asyncio.create_task(tick())
        verdict = await MathVerifier("x^2-1", limits=LIMITS).judge("\\boxed{(x-1)(x+1)}")
        ticking.cancel()
        return verdict

    assert asyncio.run(run()).success
    assert ticks > 1


# Overlong responses


@pytest.mark.parametrize(
    ("tokens", "expected"), [(0, 0.0), (700, 0.0), (701, -0.01), (750, -0.5), (800, -1.0), (900, -1.0)]
)
def test_the_soft_punishment_falls_linearly_over_the_last_tokens(tokens: int, expected: float) -> None:
    assert soft_overlong_punishment(tokens, limit=800, cache_tokens=100) == pytest.approx(expected)
    assert soft_overlong_punishment(tokens, limit=800, cache_tokens=100, penalty=0.5) == pytest.approx(expected / 2)


def test_without_cache_tokens_nothing_is_punished() -> None:
    assert soft_overlong_punishment(800, limit=800, cache_tokens=0) == 0.0
