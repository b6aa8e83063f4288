"""Question files: formats, errors of one clear line, splits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from brace_rl.errors import DataError
from brace_rl.tasks.data import load_dataset, load_splits

SHARED = Path(__file__).parents[2] / "../shared/data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the real data files are not here")

GSM8K_ROW = {"question": "Two and two?", "answer": "2+2=<<2+2=4>>4\n#### 4"}
VERL_ROW = {"prompt": [{"role": "user", "content": "Two and two?"}], "reward_model": {"ground_truth": "4"}}
PLAIN_ROW = {"prompt": "Two and two?", "answer": "4"}


def write(path: Path, *rows: Any) -> Path:
    """Rows as JSONL; a row that is bytes or text already is written as it is."""
    lines = [
        row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode() for row in rows
    ]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def question(number: int) -> dict[str, str]:
    return {"question": f"What is {number}?", "answer": f"#### {number}"}


def error_of(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        load_dataset(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


# Formats


@pytest.mark.parametrize("row", [GSM8K_ROW, VERL_ROW, PLAIN_ROW])
def test_all_formats_give_the_same_columns(tmp_path: Path, row: dict[str, Any]) -> None:
    (loaded,) = load_dataset(write(tmp_path / "rows.jsonl", row))
    assert loaded["prompt"] == [{"role": "user", "content": "Two and two?"}]
    assert loaded["answer"] == "4"
    assert loaded["id"] == "rows.jsonl:1"
    assert loaded["solution"] == (GSM8K_ROW["answer"] if row is GSM8K_ROW else "")


@pytest.mark.parametrize(
    ("row", "suffix"),
    [
        *((row, suffix) for row in (GSM8K_ROW, VERL_ROW, PLAIN_ROW) for suffix in (".json", ".parquet")),
        (GSM8K_ROW, ".csv"),
        (PLAIN_ROW, ".csv"),
    ],
)
def test_all_kinds_of_file_give_what_jsonl_gives(tmp_path: Path, row: dict[str, Any], suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    if suffix == ".json":
        path.write_text(json.dumps([row]))
    elif suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([row]), path)
    else:
        path.write_text(",".join(row) + "\n" + ",".join(f'"{value}"' for value in row.values()) + "\n")
    expected = load_dataset(write(tmp_path / "rows.jsonl", row))[0]
    assert load_dataset(path)[0] == expected | {"id": f"rows{suffix}:1"}


def test_numbers_blank_lines_byte_order_mark_and_own_ids_are_understood(tmp_path: Path) -> None:
    first = json.dumps({"prompt": "a", "answer": 3, "id": 7})
    second = json.dumps({"prompt": "b\u2028c", "answer": 2.5, "id": "x"}, ensure_ascii=False)
    rows = load_dataset(write(tmp_path / "rows.jsonl", "\ufeff" + first, "", second + "\r"))
    assert rows["id"] == ["7", "x"]
    assert rows["answer"] == ["3", "2.5"]
    assert rows[1]["prompt"][0]["content"] == "b\u2028c"


# Errors


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ('{"question": "q", "answer": ', "not valid JSON"),
        ("[1, 2]", "must be a JSON object with named columns, not list"),
        ("[" * 100_000, "nested too deeply|not valid JSON"),
        ({"question": "q", "answer": "no mark"}, "does not end in '#### N'"),
        ({"question": "q", "answer": "x ####  "}, "does not end in '#### N'"),
        ({"question": " ", "answer": "#### 1"}, "question must be text"),
        ({"question": None, "answer": "#### 1"}, "question must be text"),
        ({"question": "q"}, "columns not understood"),
        ({}, "columns not understood"),
        (PLAIN_ROW, "a plain row in a file that began as GSM8K"),
        (VERL_ROW, "a verl row in a file that began as GSM8K"),
        (b'{"question": "caf\xe9", "answer": "#### 1"}', "not UTF-8"),
        ('{"question": "\\ud800", "answer": "#### 1"}', "half of a surrogate pair"),
        ({"question": "q", "answer": "#### 1", "id": [1]}, "id must be text or an integer"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, bad: Any, message: str) -> None:
    path = write(tmp_path / "rows.jsonl", question(1), "", bad, question(2))
    error = error_of(path)
    assert error.startswith(f"{path}:3: ")
    assert re.search(message, error)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prompt": "q", "answer": None}, "no gold answer; answer must be"),
        ({"prompt": "q", "answer": " "}, "no gold answer"),
        ({"prompt": "q", "answer": float("nan")}, "no gold answer"),
        ({"prompt": "q", "answer": True}, "no gold answer"),
        ({"prompt": "q"}, "has a prompt but no gold answer"),
        ({"prompt": "", "answer": "1"}, "prompt must be text"),
        ({"prompt": [], "answer": "1"}, "list of chat messages that is not empty"),
        ({"prompt": ["hi"], "answer": "1"}, "a chat message needs a role"),
        ({"prompt": [{"role": "boss", "content": "x"}], "answer": "1"}, "a chat message needs a role"),
        ({"prompt": [{"role": "system", "content": "x"}], "answer": "1"}, "prompt asks nothing"),
        ({"prompt": [{"role": "user", "content": "q"}], "reward_model": None}, "no gold answer; reward_model"),
        ({"prompt": [{"role": "user", "content": "q"}], "reward_model": {}}, "no gold answer; reward_model"),
    ],
)
def test_a_row_without_question_or_gold_answer_is_named(tmp_path: Path, bad: Any, message: str) -> None:
    first = VERL_ROW if "reward_model" in bad else PLAIN_ROW
    error = error_of(write(tmp_path / "rows.jsonl", first, bad))
    assert ":2: " in error
    assert message in error


def test_duplicate_ids_name_both_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", question(1) | {"id": "a"}, question(2), question(3) | {"id": "a"})
    assert error_of(path) == f"{path}:3: id 'a' was used at {path}:1; ids must be unique"


def test_unusable_files_are_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    write(tmp_path / "blank.jsonl", "", "  ")
    write(tmp_path / "list.json", "[]")
    write(tmp_path / "object.json", "{}")
    write(tmp_path / "spaces.json", "  ")
    write(tmp_path / "lines.json", question(1), question(2))
    write(tmp_path / "rows.txt", question(1))
    write(tmp_path / "broken.parquet", "not parquet")
    (tmp_path / "folder.jsonl").mkdir()
    expected = {
        "missing.jsonl": "no such file",
        "folder.jsonl": "is a folder",
        "empty.jsonl": "is empty",
        "blank.jsonl": "holds no rows",
        "list.json": "holds no rows",
        "object.json": "must hold a list of rows",
        "spaces.json": "not valid JSON",
        "lines.json": "holds one object per line; rename it to lines.jsonl",
        "rows.txt": "use .jsonl, .json, .csv, .tsv, .parquet",
        "broken.parquet": "not a readable Parquet file",
    }
    for name, message in expected.items():
        assert message in error_of(tmp_path / name)


def test_a_truncated_parquet_file_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([PLAIN_ROW] * 100), path)
    path.write_bytes(path.read_bytes()[:-20])
    assert "not a readable Parquet file" in error_of(path)


@pytest.mark.parametrize("bad", ['"q",1,2', '"q"', '"q" x",1'])
def test_a_ragged_or_badly_quoted_csv_row_is_named_by_its_line(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"prompt,answer\na,1\n{bad}\n")
    assert error_of(path).startswith(f"{path}:3: ")


def test_a_csv_file_with_a_column_twice_is_refused_and_one_with_two_unnamed_columns_is_not(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("prompt,answer,answer\na,1,2\n")
    assert error_of(path) == f"{path}:1: column 'answer' is there twice; rename or drop one"
    path.write_text(",prompt,,answer\n0,a,,1\n")
    assert load_dataset(path)["answer"][0] == "1"


# Splits


def ids(rows: Any) -> list[str]:
    return [row_id.rpartition(":")[2] for row_id in rows["id"]]


def test_the_last_rows_are_held_out_when_there_is_no_evaluation_file(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", *map(question, range(10)))
    train, evaluation = load_splits(path, None, most_train=5, held_out=3)
    assert ids(train) == ["1", "2", "3", "4", "5"]
    assert ids(evaluation) == ["8", "9", "10"]


def test_no_question_is_in_both_splits(tmp_path: Path) -> None:
    again = {"question": "  what IS\n1? ", "answer": "#### 1"}
    path = write(tmp_path / "rows.jsonl", *map(question, range(4)), again)
    train, evaluation = load_splits(path, None, most_train=100, held_out=1)
    assert ids(train) == ["1", "3", "4"]
    assert ids(evaluation) == ["5"]
    other = write(tmp_path / "eval.jsonl", question(0), question(9), question(2))
    train, evaluation = load_splits(path, other, most_train=100, held_out=2)
    assert ids(train) == ["2", "3", "4", "5"]
    assert ids(evaluation) == ["1", "2"]


def test_nothing_left_to_train_on_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", *map(question, range(3)))
    with pytest.raises(DataError, match=r"3 rows leave nothing .* lower task\.eval_problems"):
        load_splits(path, None, most_train=10, held_out=3)
    with pytest.raises(DataError, match="every question is also held out"):
        load_splits(path, path, most_train=10, held_out=3)


# Real files


@needs_shared
@pytest.mark.parametrize(("name", "rows"), [("gsm8k/test.jsonl", 1319), ("gsm8k/train_first3500.jsonl", 3500)])
def test_the_real_gsm8k_files_load(name: str, rows: int) -> None:
    loaded = load_dataset(SHARED / name)
    assert len(loaded) == rows
    assert all(loaded["answer"])


@needs_shared
@pytest.mark.parametrize(("name", "rows"), [("verl_arpo_valid", 180), ("verl_arpo_hard_search_1k", 1071)])
def test_real_verl_files_load(name: str, rows: int) -> None:
    loaded = load_dataset(SHARED / f"formats/{name}.parquet")
    assert len(loaded) == rows
    assert [message["role"] for message in loaded[0]["prompt"]] == ["system", "user"]


@needs_shared
def test_a_real_verl_file_without_reward_model_is_the_clear_error() -> None:
    path = SHARED / "formats/verl_arithmetic_sequence_train.parquet"
    assert error_of(path) == (
        f"{path}: row 1: has a prompt but no gold answer; add reward_model.ground_truth (verl) or answer"
    )
