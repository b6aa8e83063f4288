"""Files of mathematics problems: the public formats, and what is wrong with them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from brace_rl.errors import DataError
from brace_rl.tasks.math.data import OTHER_ABILITY, REPEATED, MathFile, load_problems

DATA = Path(__file__).parents[4] / "shared" / "data"


def write(folder: Path, *rows: Any, name: str = "data.jsonl") -> Path:
    path = folder / name
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(list(rows)), encoding="utf-8")
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def only(file: MathFile) -> tuple[str, str, str]:
    """Id, question and gold answer of the one problem."""
    (row,) = file.rows
    return row.id, row.messages[-1]["content"], row.answer


USER = {"role": "user", "content": "What?"}
VERL = {"prompt": [USER], "reward_model": {"ground_truth": "34", "style": "rule"}, "ability": "MATH"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (VERL | {"extra_info": {"index": "a1"}}, ("a1", "What?", "34")),
        (VERL | {"prompt": "What?", "solution": "35"}, ("data.jsonl:1", "What?", "34")),
        ({"problem": "What?", "answer": 34, "id": "0"}, ("0", "What?", "34")),
        ({"ID": "2024-I-1", "Problem": "What?", "Solution": "So 34.", "Answer": 34}, ("2024-I-1", "What?", "34")),
        ({"problem": "What?", "answer": "034", "unique_id": "test/1"}, ("test/1", "What?", "034")),
        ({"problem_idx": 3, "problem": "What?", "answer": 34.5}, ("3", "What?", "34.5")),
        (
            {"problem": "What?", "solution": "First \\boxed{3}, then \\boxed{\\frac{1}{2}}."},
            ("data.jsonl:1", "What?", "\\frac{1}{2}"),
        ),
        ({"question": "What?", "answer": "17 + 17 = 34\n#### 34"}, ("data.jsonl:1", "What?", "34")),
        ({"prompt": "What?", "answer": " 34 "}, ("data.jsonl:1", "What?", "34")),
        (
            {"messages": [{"role": "system", "content": "Be brief."}, USER], "answer": "34"},
            ("data.jsonl:1", "What?", "34"),
        ),
        ({"messages": json.dumps([USER]), "ground_truth": "34"}, ("data.jsonl:1", "What?", "34")),
        ({"responses_create_params": {"input": [USER]}, "expected_answer": "34"}, ("data.jsonl:1", "What?", "34")),
        ({"problem": "What?", "final_answer": ["34"]}, ("data.jsonl:1", "What?", "34")),
    ],
    ids=[
        "verl",
        "dapo-processed",
        "aime25",
        "aime24",
        "math",
        "matharena",
        "boxed",
        "gsm8k",
        "plain",
        "areal",
        "roll",
        "nemo",
        "list",
    ],
)
def test_the_public_formats_are_read(tmp_path: Path, row: dict[str, Any], expected: tuple[str, str, str]) -> None:
    assert only(load_problems(write(tmp_path, row))) == expected


@pytest.mark.parametrize("name", ["data.jsonl", "data.json", "data.parquet"])
def test_every_kind_of_file_holds_the_same_problems(tmp_path: Path, name: str) -> None:
    rows = [VERL, VERL | {"prompt": [{"role": "user", "content": "And?"}]}]
    file = load_problems(write(tmp_path, *rows, name=name))
    assert [(row.messages[0]["content"], row.answer) for row in file.rows] == [("What?", "34"), ("And?", "34")]


@pytest.mark.parametrize(
    ("row", "message", "kind"),
    [
        ({"problem": "What?", "answer": None}, "no gold answer", "without gold answer"),
        ({"problem": "What?", "answer": "  "}, "no gold answer", "without gold answer"),
        ({"problem": "What?", "answer": float("nan")}, "no gold answer", "without gold answer"),
        ({"problem": "What?", "answer": ["1", "2"]}, "no gold answer", "without gold answer"),
        ({"problem": "What?", "answer": True}, "no gold answer", "without gold answer"),
        ({"problem": "What?"}, "no gold answer among its columns", "without gold answer"),
        ({"answer": "34"}, "no question among its columns", "malformed"),
        ({"problem": "", "answer": "34"}, "user that is not blank", "malformed"),
        ({"problem": 5, "answer": "34"}, "must be text, or a list", "malformed"),
        ({"problem": [{"role": "robot", "content": "x"}], "answer": "34"}, "needs a role", "malformed"),
        ({"problem": "What?", "answer": "34", "id": 1.5}, "id must be text or an integer", "malformed"),
        ({"problem": "What?", "answer": "9" * 1001}, "1001 characters", "malformed"),
        ({"problem": "\ud800?", "answer": "34"}, "surrogate", "malformed"),
        ({"question": "What?", "answer": "34"}, "in a file that began with problem and answer", "of another format"),
        ({"problem": "First?", "answer": "35"}, "asks what .*:1 asks, but answers '35'", "with contradicting answers"),
        ({"problem": "Other?", "answer": "34", "id": "a"}, "id 'a' was used at", "with a repeated id"),
    ],
)
def test_a_bad_row_is_an_error_that_names_its_line_or_a_counted_skip(
    tmp_path: Path, row: dict[str, Any], message: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, {"problem": "First?", "answer": "34", "id": "a"}, row)
    with pytest.raises(DataError, match=message) as error:
        load_problems(path)
    assert str(error.value).startswith(f"{path}:2: ")
    assert "\n" not in str(error.value)
    with caplog.at_level(logging.WARNING):
        file = load_problems(path, bad_rows="skip")
    assert (len(file.rows), dict(file.left_out)) == (1, {kind: 1})
    assert f"1 problems; rows left out: 1 {kind}" in caplog.text


def test_a_repeated_question_with_the_same_answer_is_left_out_and_counted(tmp_path: Path) -> None:
    rows = [VERL | {"extra_info": {"index": "same-id"}}] * 100 + [VERL | {"prompt": [USER | {"content": " what? "}]}]
    file = load_problems(write(tmp_path, *rows))
    assert (len(file.rows), file.left_out) == (1, {REPEATED: 100})


def test_rows_of_another_ability_are_left_out_and_rows_without_that_column_are_not(tmp_path: Path) -> None:
    other = VERL | {"ability": "qa", "prompt": [USER | {"content": "Who?"}], "reward_model": None}
    unsaid = {name: value for name, value in VERL.items() if name != "ability"}
    file = load_problems(write(tmp_path, VERL, other, unsaid | {"prompt": [USER | {"content": "Where?"}]}))
    assert (len(file.rows), file.left_out) == (2, {OTHER_ABILITY: 1})


@pytest.mark.parametrize("ability", [None, " ", 3])
def test_a_row_whose_ability_says_nothing_is_refused_or_counted(tmp_path: Path, ability: Any) -> None:
    path = write(tmp_path, VERL, VERL | {"ability": ability, "prompt": [USER | {"content": "Who?"}]})
    with pytest.raises(DataError, match=r":2: its ability does not say whether it is mathematics; write 'math'"):
        load_problems(path)
    file = load_problems(path, bad_rows="skip")
    assert (len(file.rows), file.left_out) == (1, {"without ability": 1})


def test_a_file_without_a_problem_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, VERL | {"ability": "qa"})
    with pytest.raises(DataError, match="holds no mathematics problem"):
        load_problems(path)
    with pytest.raises(DataError, match="no such file"):
        load_problems(tmp_path / "nothing.jsonl")


@pytest.mark.skipif(not DATA.exists(), reason="the data sets are not here")
@pytest.mark.parametrize(
    ("name", "problems", "left_out", "last_answer"),
    [
        ("aime/aime2024_rllm.json", 30, {}, "315"),
        ("aime/aime2025.jsonl", 30, {}, "240"),
        ("aime/aime_1983_2023_train.jsonl", 975, {}, None),
        ("aime/llmeval_aime2024.jsonl", 30, {}, None),
        ("aime/llmeval_aime2025.jsonl", 30, {}, "240"),
        ("aime/llmeval_hmmt2025.jsonl", 30, {}, "\\sqrt{\\frac{95}{24}}"),
        ("math/math500_rllm.json", 500, {}, "106^\\circ"),
        ("math/math_train_first1000.jsonl", 998, {"without gold answer": 1, REPEATED: 1}, None),
        ("math/deepmath_first500_roll.jsonl", 500, {}, "b \\cdot b"),
        ("formats/verl_arpo_valid.parquet", 100, {OTHER_ABILITY: 80}, "1+274i"),
        ("formats/areal_tir_sample_math.jsonl", 10, {}, "1"),
        ("formats/nemogym_math_with_judge_example.jsonl", 5, {}, "-3"),
        ("gsm8k/test.jsonl", 1319, {}, "14"),
    ],
)
def test_public_files_load_whole(name: str, problems: int, left_out: dict[str, int], last_answer: str | None) -> None:
    file = load_problems(DATA / name, bad_rows="skip")
    assert (len(file.rows), dict(file.left_out)) == (problems, left_out)
    assert last_answer is None or file.rows[-1].answer == last_answer
    assert len({row.id for row in file.rows}) == problems


@pytest.mark.skipif(not DATA.exists(), reason="the data sets are not here")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("math/math_train_first1000.jsonl", "jsonl:887: no gold answer"),
        ("formats/verl_arithmetic_sequence_train.parquet", "row 1: no gold answer among its columns"),
        ("formats/nemogym_aviary_gsm8k_example.jsonl", "jsonl:1: no gold answer among its columns"),
        ("formats/tinker_conversations.jsonl", "jsonl:1: no gold answer among its columns"),
    ],
)
def test_public_files_that_lack_answers_are_refused(name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_problems(DATA / name)
