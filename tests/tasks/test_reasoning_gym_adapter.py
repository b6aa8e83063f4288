"""Data sets of reasoning-gym: problems, scores, and answers that are code. Skipped where the package is missing."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest

from brace_rl.errors import ConfigError
from brace_rl.tasks.adapters.plain import is_plain
from brace_rl.tasks.base import Problem, StepResult, Task
from brace_rl.tasks.registry import parse_settings, task_class


@pytest.mark.parametrize(
    "text", ["x**2 + 3*x - 1", "-4", "3.5", "[['_', 'Q'], ['Q', '_']]", "sin(x) + C", "(1, 2)", "x**(-1/2)", "'abc'"]
)
def test_literals_and_elementary_expressions_are_plain(text: str) -> None:
    assert is_plain(text)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "().__class__",
        "open('x')",
        "[n for n in (1, 2)]",
        "lambda: 1",
        "f'{x}'",
        "9**9**9",
        "9**(9**9)",
        "((10**999)**999)**999",
        "10**1000",
        "1 << 99999999",
        "'a' * 10**9",
        "sin(x, key=1)",
        "sin.real",
        "x if y else z",
        "(y := 1)",
        "1 2 3",
        "",
        "(" * 5000,
        "1" * 5000,
    ],
)
def test_code_and_huge_numbers_are_not_plain(text: str) -> None:
    assert not is_plain(text)


def test_settings_need_a_data_set_and_leave_size_and_seed_to_the_trainer() -> None:
    with pytest.raises(ConfigError, match=r"task\.dataset: reasoning_gym needs the name"):
        parse_settings({"name": "reasoning_gym"})
    with pytest.raises(ConfigError, match=r"task\.options: size is set by the trainer"):
        parse_settings({"name": "reasoning_gym", "dataset": "chain_sum", "options": {"size": 3}})


class TestInstalled:
    """What needs the package."""

    @pytest.fixture(autouse=True)
    def installed(self) -> None:
        pytest.importorskip("reasoning_gym")

    @staticmethod
    def make(dataset: str = "chain_sum", seed: int = 0, **others: Any) -> Task:
        values = {"name": "reasoning_gym", "dataset": dataset, "train_problems": 20, "eval_problems": 10, **others}
        return task_class("reasoning_gym")(parse_settings(values), seed=seed)

    @staticmethod
    def answer(task: Task, problem: Problem, turn: str) -> StepResult:
        environment = pickle.loads(pickle.dumps(task.environment(problem)))
        return asyncio.run(environment.step(turn))

    def test_the_right_answer_scores_1_and_a_wrong_one_less(self) -> None:
        task = self.make()
        problem = task.train_problems()[0]
        end = self.answer(task, problem, f"so <answer> {problem.answer} </answer>")
        assert (end.done, end.reward, end.success, end.info["answered"]) == (True, 1.0, True, 1.0)
        assert not self.answer(task, problem, "<answer>no idea</answer>").success
        assert self.answer(task, problem, problem.answer).info["answered"] == 0.0

    def test_problems_depend_on_the_seed_and_held_out_ones_do_not(self) -> None:
        first, other = self.make(seed=1), self.make(seed=2)
        assert first.train_problems() == self.make(seed=1).train_problems()
        assert [p.prompt for p in first.train_problems()] != [p.prompt for p in other.train_problems()]
        assert first.eval_problems() == other.eval_problems()

    def test_no_question_is_both_trained_on_and_held_out(self) -> None:
        narrow = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
        task = self.make(options=narrow, train_problems=300, eval_problems=100)
        train = {str(problem.prompt) for problem in task.train_problems()}
        assert train
        assert not train & {str(problem.prompt) for problem in task.eval_problems()}

    @pytest.mark.parametrize("dataset", ["n_queens", "polynomial_multiplication", "binary_matrix", "string_insertion"])
    def test_scorers_that_evaluate_answers_never_see_code(self, dataset: str, tmp_path: Any) -> None:
        task = self.make(dataset, train_problems=2, eval_problems=1)
        problem = task.train_problems()[0]
        trace = tmp_path / "ran"
        end = self.answer(task, problem, f"<answer>[open({str(trace)!r}, 'w').close()]</answer>")
        assert not end.success
        assert not trace.exists()
        assert self.answer(task, problem, f"<answer>{problem.answer}</answer>").success

    @pytest.mark.parametrize("dataset", ["knights_knaves", "maze", "countdown", "leg_counting", "word_sorting"])
    def test_data_sets_of_other_kinds_work(self, dataset: str) -> None:
        task = self.make(dataset, train_problems=2, eval_problems=1)
        problem = task.eval_problems()[0]
        assert self.answer(task, problem, f"<answer>{problem.answer}</answer>").success

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"dataset": "chain_summ"}, r"task\.dataset: .*'chain_summ'; did you mean chain_sum"),
            ({"options": {"min_term": 2}}, r"task\.options: chain_sum refuses them: .*min_term"),
            ({"options": {"min_terms": -2}}, r"task\.options: chain_sum refuses them: min_terms must be positive"),
        ],
    )
    def test_what_the_package_refuses_is_one_line(self, values: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message) as caught:
            self.make(**values)
        assert "\n" not in str(caught.value)
