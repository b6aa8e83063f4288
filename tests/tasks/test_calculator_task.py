"""The generated task: problems, splits, episodes, demonstrations, tokenizer."""

from __future__ import annotations

import ast
import asyncio
import itertools
import pickle
import random
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brace_rl.config import WarmStartConfig
from brace_rl.errors import ConfigError
from brace_rl.tasks import build_task
from brace_rl.tasks.arithmetic import count_operations, evaluate
from brace_rl.tasks.base import Problem, StepResult, Transcript
from brace_rl.tasks.calculator import CalculatorSettings, CalculatorTask, Node, canonical_form, generate_problems
from brace_rl.tasks.tokenizer import CHARACTERS, ERROR, SPECIAL, TAGS, build_calculator_tokenizer

SMALL = CalculatorSettings(train_problems=400, eval_problems=64)


def make(seed: int = 0, config: CalculatorSettings = SMALL) -> CalculatorTask:
    return CalculatorTask(config, seed=seed)


def play(task: CalculatorTask, problem: Problem, *turns: str) -> list[StepResult]:
    async def steps() -> list[StepResult]:
        environment = pickle.loads(pickle.dumps(task.environment(problem)))
        return [await environment.step(turn) for turn in turns]

    return asyncio.run(steps())


def replay(task: CalculatorTask, transcript: Transcript) -> StepResult:
    """Step the environment through a transcript, checking every observation; the last step's result."""
    turns = [piece.text for piece in transcript.pieces if piece.is_policy]
    results = play(task, transcript.problem, *turns)
    observed = [result.text for result in results[:-1]]
    assert observed == [piece.text for piece in transcript.pieces if not piece.is_policy]
    assert [result.done for result in results] == [False] * (len(turns) - 1) + [True]
    return results[-1]


def tree_of(expression: str) -> Node:
    """The tree Python's own parser sees."""

    def convert(node: ast.expr) -> Node:
        if isinstance(node, ast.Constant):
            return Node(int(node.value))
        assert isinstance(node, ast.BinOp)
        left, right = convert(node.left), convert(node.right)
        operator, value = {
            ast.Add: ("+", left.value + right.value),
            ast.Sub: ("-", left.value - right.value),
            ast.Mult: ("*", left.value * right.value),
        }[type(node.op)]
        return Node(value, operator, (left, right))

    return convert(ast.parse(expression, mode="eval").body)


def subtrees(tree: Node) -> list[Node]:
    return [tree, *itertools.chain.from_iterable(map(subtrees, tree.operands))]


def postfix_of(tree: Node) -> tuple[str, ...]:
    return (*itertools.chain.from_iterable(map(postfix_of, tree.operands)), tree.operator or str(tree.value))


def without_pair(expression: str, opening: int) -> str:
    """The expression without the parenthesis at ``opening`` and the one that closes it."""
    depth = 0
    for place in range(opening, len(expression)):
        depth += {"(": 1, ")": -1}.get(expression[place], 0)
        if depth == 0:
            return expression[:opening] + expression[opening + 1 : place] + expression[place + 1 :]
    raise AssertionError("unbalanced")


def expression_of(problem: Problem) -> str:
    assert isinstance(problem.prompt, str)
    return problem.prompt.removesuffix("=")


# Problems


def test_answers_are_right_and_every_value_is_within_bounds() -> None:
    config = CalculatorSettings(train_problems=500, operands=(2, 5), max_number=30, eval_problems=1)
    for problem in make(config=config).train_problems():
        expression = expression_of(problem)
        assert problem.answer == str(evaluate(expression))
        assert 1 <= count_operations(expression) <= 4
        nodes = subtrees(tree_of(expression))
        assert all(0 <= node.value <= 309 for node in nodes)
        assert all(1 <= node.value <= 30 for node in nodes if not node.operator)


def test_expressions_are_rendered_without_needless_parentheses_but_keep_their_grouping() -> None:
    config = SMALL.model_copy(update={"operands": (2, 5)})
    for problem in make(config=config).train_problems():
        expression = expression_of(problem)
        tree = tree_of(expression)
        assert postfix_of(tree) == problem.metadata["postfix"]
        for opening in (place for place, character in enumerate(expression) if character == "("):
            assert tree_of(without_pair(expression, opening)) != tree


def test_problems_depend_on_the_seed_and_on_nothing_else() -> None:
    assert make(seed=3).train_problems() == make(seed=3).train_problems()
    assert make(seed=3).train_problems() != make(seed=4).train_problems()
    assert make(seed=3).eval_problems() == make(seed=4).eval_problems()
    assert generate_problems(SMALL, split="train", count=1, seed=0)[0].prompt == make().train_problems()[0].prompt


def test_more_problems_extend_the_same_sequence() -> None:
    longer = make(config=SMALL.model_copy(update={"train_problems": 600}))
    assert list(longer.train_problems()[:400]) == list(make().train_problems())


@pytest.mark.parametrize("seed", [0, 1])
def test_splits_share_no_expression_for_any_seeds_and_sizes(seed: int) -> None:
    config = CalculatorSettings(operands=(2, 3), max_number=12)
    keys = {}
    for split, count, split_seed in (("train", 1500, seed), ("dev", 150, 7), ("test", 150, 0)):
        problems = generate_problems(config, split=split, count=count, seed=split_seed)
        keys[split] = {canonical_form(tree_of(expression_of(problem))) for problem in problems}
        assert len(keys[split]) == count
    assert not keys["train"] & keys["dev"]
    assert not keys["train"] & keys["test"]
    assert not keys["dev"] & keys["test"]


def test_the_default_recipe_s_held_out_set_is_disjoint_from_its_20000_training_problems() -> None:
    task = make(config=CalculatorSettings())
    train = {canonical_form(tree_of(expression_of(problem))) for problem in task.train_problems()}
    held_out = {canonical_form(tree_of(expression_of(problem))) for problem in task.eval_problems()}
    assert (len(train), len(held_out), len(train & held_out)) == (20_000, 512, 0)
    ids = [problem.id for problem in (*task.train_problems(), *task.eval_problems())]
    assert len(set(ids)) == len(ids)


def test_tuning_draws_its_held_out_problems_from_the_dev_bucket() -> None:
    dev = make(config=SMALL.model_copy(update={"eval_split": "dev"})).eval_problems()
    assert not {problem.id for problem in dev} & {problem.id for problem in make().eval_problems()}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("3+4*5", "5*4+3"),
        ("1+(2+3)", "3+1+2"),
        ("2*(3*4)", "4*2*3"),
        ("9-(2-1)", "9+1-2"),
        ("9-2-1", "9-(1+2)"),
        ("(1+2)*3", "3*(2+1)"),
    ],
)
def test_reordered_and_regrouped_expressions_count_as_the_same(one: str, other: str) -> None:
    assert canonical_form(tree_of(one)) == canonical_form(tree_of(other))


@pytest.mark.parametrize(("one", "other"), [("5-3", "3-5"), ("1+2*3", "(1+2)*3"), ("12+3", "1+23"), ("2*3", "2+3")])
def test_different_expressions_stay_apart(one: str, other: str) -> None:
    assert canonical_form(tree_of(one)) != canonical_form(tree_of(other))


@settings(deadline=None)
@given(st.integers(0, 2**31))
def test_swapping_the_sides_of_sums_and_products_keeps_the_canonical_form(seed: int) -> None:
    rng = random.Random(seed)

    def swapped(tree: Node) -> Node:
        operands = tuple(map(swapped, tree.operands))
        if tree.operator in ("+", "*") and rng.random() < 0.5:
            operands = operands[::-1]
        return tree._replace(operands=operands)

    problem = generate_problems(CalculatorSettings(operands=(2, 5)), split="train", count=1, seed=seed)[0]
    tree = tree_of(expression_of(problem))
    assert canonical_form(swapped(tree)) == canonical_form(tree)


def test_asking_for_more_expressions_than_exist_is_one_clear_error() -> None:
    with pytest.raises(ConfigError, match=r"task.train_problems: .* admit only about \d+ distinct train expressions"):
        make(config=CalculatorSettings(operands=(2, 2), max_number=5))
    with pytest.raises(ConfigError, match=r"task\.eval_problems"):
        make(config=CalculatorSettings(operands=(2, 2), max_number=9, train_problems=20))


def test_too_few_turns_for_the_demonstrations_is_refused() -> None:
    config = SMALL.model_copy(update={"max_turns": 3})
    with pytest.raises(ConfigError, match=r"task.max_turns: 3 is too few"):
        build_task(config, WarmStartConfig(steps=1), 0)
    assert build_task(config, WarmStartConfig(steps=0), 0).train_problems()


# Episodes


PROBLEM = Problem(id="x", prompt="(12+7)*3-5=", answer="52")


def test_an_episode_solved_step_by_step_is_rewarded() -> None:
    results = play(
        make(), PROBLEM, "<calc>12+7</calc>", "<calc>19*3</calc>", "<calc>57-5</calc>", "<answer>52</answer>"
    )
    assert [result.text for result in results[:3]] == [
        "<result>19</result>",
        "<result>57</result>",
        "<result>52</result>",
    ]
    assert (results[3].reward, results[3].success, results[3].done) == (1.0, True, True)


@pytest.mark.parametrize(
    ("turn", "reward"),
    [
        ("<answer>52</answer>", 1.0),
        ("<answer>052</answer>", 1.0),
        ("<answer>53</answer>", 0.0),
        ("<answer>-52</answer>", 0.0),
        ("<answer>57-5</answer>", 0.0),
        ("<answer>52.0</answer>", 0.0),
        ("<answer>52 52</answer>", 0.0),
        ("<answer>" + "9" * 5000 + "</answer>", 0.0),
        ("<answer></answer>", 0.0),
        ("<answer>52", 0.0),
        ("52", 0.0),
        ("", 0.0),
    ],
)
def test_only_the_exact_integer_in_an_answer_is_rewarded(turn: str, reward: float) -> None:
    (result,) = play(make(), PROBLEM, turn)
    assert (result.done, result.reward, result.success) == (True, reward, reward == 1.0)


def test_a_call_with_more_operations_than_allowed_is_an_error_observation() -> None:
    (result,) = play(make(), PROBLEM, "<calc>(12+7)*3</calc>")
    assert (result.text, result.done) == ("<result>error</result>", False)
    generous = make(config=SMALL.model_copy(update={"operations_per_call": 2}))
    assert play(generous, PROBLEM, "<calc>(12+7)*3</calc>")[0].text == "<result>57</result>"


def test_every_observation_is_made_of_known_tokens() -> None:
    tokenizer = build_calculator_tokenizer()
    for call in ("1/3", "0-7", "1/(0-3)", "1/0", "2*", "9999999*9999999", "1/999999999999"):
        (result,) = play(make(), PROBLEM, f"<calc>{call}</calc>")
        ids = tokenizer.encode(result.text, add_special_tokens=False)
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == result.text


# Demonstrations


def test_demonstrations_without_mistakes_replay_to_reward_1() -> None:
    task = make()
    for transcript in itertools.islice(task.demonstrations(0), 200):
        assert replay(task, transcript).reward == 1.0


def test_the_share_of_failing_demonstrations_is_the_configured_one() -> None:
    task = make()
    count = 1000
    failed = sum(
        replay(task, demo).reward == 0.0 for demo in itertools.islice(task.demonstrations(1, mistakes=0.4), count)
    )
    # Four standard deviations of a binomial share of 0.4 over 1000 draws: 4 * sqrt(0.24 / 1000) = 0.062.
    assert abs(failed / count - 0.4) < 0.062


@pytest.mark.parametrize("max_number", [5, 99, 10**9])
def test_every_planted_mistake_ends_in_a_wrong_answer_and_true_observations(max_number: int) -> None:
    config = CalculatorSettings(train_problems=50, eval_problems=1, max_number=max_number)
    task = make(config=config)
    rewards = [replay(task, demo).reward for demo in itertools.islice(task.demonstrations(2, mistakes=0.999), 200)]
    assert rewards.count(0.0) >= 195


def test_demonstrations_are_reproducible_and_drawn_from_training_problems() -> None:
    task = make()
    first = list(itertools.islice(task.demonstrations(5, mistakes=0.5), 50))
    assert first == list(itertools.islice(make().demonstrations(5, mistakes=0.5), 50))
    assert first != list(itertools.islice(task.demonstrations(6, mistakes=0.5), 50))
    assert {demo.problem.id for demo in first} <= {problem.id for problem in task.train_problems()}


# The task as a whole


def test_build_task_gives_a_picklable_calculator() -> None:
    task = pickle.loads(pickle.dumps(build_task(SMALL, WarmStartConfig(), 1)))
    assert isinstance(task, CalculatorTask)
    assert task.stop == ("</calc>", "</answer>")
    assert list(task.train_problems()) == list(make(seed=1).train_problems())


# Tokenizer


TEXTS = st.lists(st.sampled_from([*CHARACTERS, *TAGS, ERROR]), max_size=60).map("".join)


@settings(deadline=None)
@given(TEXTS)
def test_decoding_an_encoded_text_gives_it_back(text: str) -> None:
    tokenizer = build_calculator_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert "".join(tokenizer.decode([token]) for token in ids) == text


def test_tags_are_one_token_each_and_characters_are_apart() -> None:
    tokenizer = build_calculator_tokenizer()
    assert tokenizer.tokenize("<calc>12+7</calc><result>error</result>") == [
        *("<calc>", "1", "2", "+", "7", "</calc>"),
        *("<result>", "error", "</result>"),
    ]
    assert len(tokenizer) == len(SPECIAL) + len(TAGS) + 1 + len(CHARACTERS) == 30
    assert tokenizer.encode("a", add_special_tokens=False) == [tokenizer.unk_token_id]


def test_the_tokenizer_survives_the_transformers_format_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    tokenizer = build_calculator_tokenizer()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokenizer.save_pretrained(tmp_path)
        loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "".join([*CHARACTERS, *TAGS, ERROR])
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.decode(loaded.encode(text)) == text
    assert (loaded.pad_token_id, loaded.eos_token_id, loaded.bos_token_id) == (0, 1, 2)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    captured = capsys.readouterr()
    assert (captured.out, captured.err, caplog.text) == ("", "", "")


def test_prompts_of_the_default_recipe_are_short_and_fully_known() -> None:
    task = make(config=CalculatorSettings(train_problems=500))
    tokenizer = task.build_tokenizer()
    for problem in task.train_problems():
        ids = task.prompt_ids(problem, tokenizer)
        assert tokenizer.unk_token_id not in ids
        assert len(ids) == len(problem.prompt) <= 20
