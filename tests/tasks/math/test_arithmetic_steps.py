"""The embedded form: generated sums, their solutions, demonstrations with mistakes, tokenizer."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brace_rl.config import load_config
from brace_rl.errors import ConfigError
from brace_rl.tasks.base import Problem, StepResult
from brace_rl.tasks.math.arithmetic_steps import (
    ArithmeticStepsTask,
    build_steps_tokenizer,
    canonical_form,
    generate_problems,
    solution,
)
from brace_rl.tasks.math.settings import ArithmeticStepsSettings
from brace_rl.tasks.registry import task_class

SMALL = ArithmeticStepsSettings(train_problems=300, eval_problems=50)
RECIPE = Path(__file__).parents[3] / "recipes" / "arithmetic_steps.toml"


def terms_of(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"[+-]\d+", text))


def play(task: ArithmeticStepsTask, problem: Problem, turn: str) -> StepResult:
    environment = pickle.loads(pickle.dumps(task)).environment(problem)
    return asyncio.run(environment.step(turn))


@pytest.mark.parametrize(("digits", "max_term"), [(1, 5), (2, 9), (2, 99), (3, 40)])
def test_answers_are_right_and_every_value_in_between_fits_the_digits(digits: int, max_term: int) -> None:
    update = {"digits": digits, "max_term": max_term, "terms": (6, 9), "train_problems": 100, "eval_problems": 1}
    for problem in ArithmeticStepsTask(SMALL.model_copy(update=update), seed=0).train_problems():
        terms = terms_of(str(problem.prompt))
        assert terms == problem.metadata["terms"]
        assert 6 <= len(terms) <= 9
        assert all(1 <= abs(term) <= max_term for term in terms)
        values = list(itertools.accumulate(terms))
        assert all(0 <= value < 10**digits for value in values)
        assert int(problem.answer) == values[-1]


def test_a_solution_is_written_out_as_documented() -> None:
    assert solution((7, 6, -9), SMALL) == ("+7=07;+6=13;-9=04;\\boxed{04}", 4)
    assert solution((7, 6, -9), SMALL, {1: 3}) == ("+7=07;+6=03;-9=-6;\\boxed{-6}", -6)


@settings(deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([(1, 9), (2, 9), (2, 99), (4, 123)]))
def test_every_step_of_a_solution_is_true_and_fills_a_blank_of_the_prompt(seed: int, size: tuple[int, int]) -> None:
    config = SMALL.model_copy(update={"digits": size[0], "max_term": size[1]})
    (problem,) = generate_problems(config, split="train", count=1, seed=seed)
    text, answer = solution(problem.metadata["terms"], config)
    assert str(answer) == problem.answer
    value = 0
    for term, written in re.findall(r"([+-]\d+)=(\d+);", text):
        value += int(term)
        assert int(written) == value
    filled = text.partition("\\boxed")[0]
    assert re.sub(r"=\d+", f"={'_' * size[0]}", filled) == problem.prompt


def test_responses_take_one_to_three_hundred_tokens() -> None:
    tokenizer = build_steps_tokenizer()
    task = ArithmeticStepsTask(SMALL, seed=0)
    lengths = {len(tokenizer.encode(solution(p.metadata["terms"], SMALL)[0])) + 1 for p in task.train_problems()}
    assert lengths == {113}


def test_a_full_solution_is_rewarded_and_a_wrong_answer_is_not() -> None:
    task = ArithmeticStepsTask(SMALL, seed=0)
    problem = task.train_problems()[0]
    text, answer = solution(problem.metadata["terms"], SMALL)
    right = play(task, problem, text)
    assert (right.done, right.reward, right.success) == (True, 1.0, True)
    assert play(task, problem, f"\\boxed{{{answer}}}").reward == 1.0
    assert play(task, problem, f"\\boxed{{{(answer + 1) % 100:02d}}}").reward == 0.0
    assert play(task, problem, text.replace("\\boxed{", "")).info["answered"] == 0.0


def test_problems_depend_on_the_seed_and_held_out_ones_do_not() -> None:
    one, same, other = (ArithmeticStepsTask(SMALL, seed=seed) for seed in (3, 3, 4))
    assert one.train_problems() == same.train_problems()
    assert one.train_problems() != other.train_problems()
    assert one.eval_problems() == other.eval_problems()


@pytest.mark.parametrize("seed", [0, 1])
def test_splits_share_no_sum_for_any_seeds_and_sizes(seed: int) -> None:
    # Few sums exist with one digit and few terms, so the splits would collide if they could.
    config = ArithmeticStepsSettings(terms=(2, 4), digits=1)
    keys = {}
    for split, count, split_seed in (("train", 250, seed), ("dev", 30, 7), ("test", 30, 0)):
        problems = generate_problems(config, split=split, count=count, seed=split_seed)
        keys[split] = {canonical_form(problem.metadata["terms"]) for problem in problems}
        assert len(keys[split]) == count
    assert not keys["train"] & keys["dev"]
    assert not keys["train"] & keys["test"]
    assert not keys["dev"] & keys["test"]


def test_reordered_sums_count_as_the_same_and_others_do_not() -> None:
    assert canonical_form((17, -4, 24)) == canonical_form((24, 17, -4))
    assert canonical_form((17, -4)) != canonical_form((17, 4))
    assert canonical_form((17, 4)) != canonical_form((1, 74))


def test_asking_for_more_sums_than_exist_is_one_clear_error() -> None:
    with pytest.raises(ConfigError, match=r"task\.train_problems: .* admit only about \d+ distinct train sums"):
        ArithmeticStepsTask(ArithmeticStepsSettings(terms=(2, 2), digits=1, train_problems=200), seed=0)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("terms", "[1, 3]", r"task\.terms: needs 2 <= fewest <= most"),
        ("terms", "[4, 3]", r"task\.terms: needs 2 <= fewest <= most"),
        ("max_term", "100", r"task\.max_term: 100 has more than task\.digits = 2 digits"),
    ],
)
def test_impossible_settings_are_refused(key: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(RECIPE, {f"task.{key}": value})


# Demonstrations


@pytest.mark.parametrize("mistakes", [0.0, 0.5])
def test_the_share_of_wrong_demonstrations_is_the_one_asked_for(mistakes: float) -> None:
    task = ArithmeticStepsTask(SMALL, seed=0)
    train = {problem.id for problem in task.train_problems()}
    wrong = 0
    for transcript in itertools.islice(task.demonstrations(0, mistakes=mistakes), 400):
        (piece,) = transcript.pieces
        assert piece.is_policy
        assert transcript.problem.id in train
        wrong += not play(task, transcript.problem, piece.text).success
    assert wrong / 400 == pytest.approx(mistakes, abs=0.08)


def test_demonstrations_depend_on_their_seed_and_on_nothing_else() -> None:
    first, second, other = (
        [t.pieces for t in itertools.islice(ArithmeticStepsTask(SMALL, seed=0).demonstrations(seed, mistakes=0.5), 20)]
        for seed in (1, 1, 2)
    )
    assert first == second
    assert first != other


def test_a_mistaken_demonstration_goes_wrong_in_one_step_and_all_kinds_occur() -> None:
    task = ArithmeticStepsTask(SMALL, seed=0)
    kinds = set()
    for transcript in itertools.islice(task.demonstrations(0, mistakes=0.999), 400):
        terms: tuple[int, ...] = transcript.problem.metadata["terms"]
        steps = re.findall(r"([+-]\d+)=(\d\d);", transcript.pieces[0].text)
        used, values = [int(term) for term, _ in steps], [0, *(int(value) for _, value in steps)]
        assert len(used) == len(terms)
        off = [place for place in range(len(terms)) if values[place + 1] - values[place] != terms[place]]
        assert len(off) == 1, transcript.pieces[0].text
        (place,) = off
        before, after, term = values[place], values[place + 1], terms[place]
        if used[place] != term:
            kinds.add("sign" if used[place] == -term else "miscopied")
            assert after == before + used[place]
        elif after == before:
            kinds.add("passed over")
        elif after // 10 == before // 10 and after % 10 == (before + term) % 10:
            kinds.add("carry")
        else:
            kinds.add("digit")
            assert sum(a != b for a, b in zip(f"{after:02d}", f"{before + term:02d}", strict=True)) == 1
    assert kinds == {"sign", "miscopied", "passed over", "carry", "digit"}


# Tokenizer and recipe


@settings(deadline=None)
@given(st.integers(0, 10**6))
def test_decoding_what_was_encoded_gives_the_same_text(seed: int) -> None:
    tokenizer = build_steps_tokenizer()
    (problem,) = generate_problems(SMALL, split="train", count=1, seed=seed)
    text = f"{problem.prompt}{solution(problem.metadata['terms'], SMALL)[0]}"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == text


def test_the_recipe_trains_this_task_asynchronously_with_brace() -> None:
    config = load_config(RECIPE)
    assert task_class(config.task.name) is ArithmeticStepsTask
    assert (config.schedule.mode, config.algorithm.value_target) == ("async", "brace")
    assert config.schedule.max_staleness >= 4
    assert config.task.eval_split == "test"
