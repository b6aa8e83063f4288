"""Every format reads the same; what cannot be read says which row, which column, and what was expected."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest
from rollout_rows import clean_rows, write_rows

from brace_rl.diagnose.columns import ABSENT, ColumnMap, parse_maps
from brace_rl.diagnose.reader import read_responses, rollout_files
from brace_rl.errors import DataError

GOOD = {
    "behavior_logprobs": [-1.0, -0.5],
    "target_logprobs": [-1.1, -0.4],
    "values": [0.1, 0.2],
    "policy_mask": [1, 1],
    "reward": 1.0,
}


def read(path, *maps):
    return list(read_responses(path, parse_maps(maps)))


def test_all_formats_give_the_same_responses(tmp_path):
    rows = clean_rows(prompts=6)
    paths = [write_rows(tmp_path / name, rows) for name in ("r.jsonl", "r.jsonl.gz", "r.parquet")]
    (tmp_path / "r.json").write_text(json.dumps(rows))
    first, *others = [read(path) for path in [*paths, tmp_path / "r.json"]]
    assert len(first) == 24
    for other in others:
        for a, b in zip(first, other, strict=True):
            for name in ("behavior_logprobs", "values", "rewards", "policy_mask", "versions", "token_ids"):
                np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
            assert (a.prompt_id, a.current_version, a.truncated) == (b.prompt_id, b.current_version, b.truncated)


def test_a_scalar_reward_stands_at_the_last_policy_token(tmp_path):
    path = write_rows(tmp_path / "r.jsonl", [GOOD | {"policy_mask": [True, False], "reward": 2}])
    assert read(path)[0].rewards.tolist() == [2.0, 0.0]


def test_null_and_spelled_out_nan_are_nan(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text('{"values": [null, "NaN", NaN, 1]}\n')
    values = read(path)[0].values
    assert [math.isnan(v) for v in values] == [True, True, True, False]


@pytest.mark.parametrize(
    ("row", "column", "expected"),
    [
        (GOOD | {"values": "high"}, "values", "a list of numbers"),
        (GOOD | {"values": [0.1, "x"]}, "values", "a number at position 1"),
        (GOOD | {"values": [0.1, "0.5"]}, "values", "a number at position 1"),
        (GOOD | {"values": [0.1, 10**400]}, "values", "a number at position 1"),
        (GOOD | {"reward": 10**400}, "reward", "a finite number"),
        (GOOD | {"current_version": 10**400}, "current_version", "a finite number"),
        (GOOD | {"values": [[0.1], [0.2]]}, "values", "a number at position 0"),
        (GOOD | {"values": [0.1]}, "values", "2 entries, as many as behavior_logprobs"),
        (GOOD | {"policy_mask": [0, 2]}, "policy_mask", "true or false"),
        (GOOD | {"reward": "good"}, "reward", "a finite number"),
        (GOOD | {"reward": math.nan}, "reward", "a finite number"),
        (GOOD | {"rewards": [0.0, math.inf]}, "rewards", "a finite number at position 1"),
        (GOOD | {"versions": [1, 1.5]}, "versions", "a whole number at position 1"),
        (GOOD | {"current_version": 1.5}, "current_version", "a whole number"),
        (GOOD | {"truncated": "no"}, "truncated", "true or false"),
        (GOOD | {"bootstrap": math.inf}, "bootstrap", "a finite number"),
        (GOOD | {"prompt_id": [1]}, "prompt_id", "a text or a whole number"),
        ({k: v for k, v in GOOD.items() if k != "values"}, "values", "in every row"),
        (GOOD | {"token_ids": [1, 2]}, "token_ids", "in every row or in none"),
    ],
)
def test_a_malformed_row_is_named(tmp_path, row, column, expected):
    path = write_rows(tmp_path / "r.jsonl", [GOOD, GOOD, row])
    with pytest.raises(DataError) as error:
        read(path)
    message = str(error.value)
    assert message.startswith(f"{path}: row 3: {column}")
    assert expected in message
    assert "\n" not in message


@pytest.mark.parametrize("text", ['{"values": [1,', "[1, 2]", "nonsense", "[" * 100_000, '{"values": [1]}\n\xff'])
def test_a_line_that_is_no_row_is_named(tmp_path, text):
    path = tmp_path / "r.jsonl"
    path.write_bytes(b'{"values": [0.5]}\n\n' + text.encode("latin-1"))
    with pytest.raises(DataError, match=r"r.jsonl: row [34]: expected"):
        read(path)


def test_files_that_are_not_what_they_say(tmp_path):
    (tmp_path / "bad.parquet").write_bytes(b"not parquet")
    whole = gzip.compress(b'{"values": [0.5]}\n' * 1000)
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.jsonl").write_bytes(b"\n")
    for name, reason in (("bad.parquet", "parquet"), ("cut.jsonl.gz", "cannot be read"), ("empty.jsonl", "no rows")):
        with pytest.raises(DataError, match=reason):
            read(tmp_path / name)


def test_a_dump_without_numbers_says_what_to_log(tmp_path):
    path = write_rows(tmp_path / "1.jsonl", [{"input": "q", "output": "a", "gts": "1", "score": 1.0, "step": 1}])
    with pytest.raises(DataError, match="log rollout_log_probs, old_log_probs and values"):
        read(path)


def test_the_built_in_map_reads_a_verl_batch(tmp_path):
    row = {
        "rollout_log_probs": [-1.0, -0.5, 0.0],
        "old_log_probs": [-1.1, -0.4, 0.0],
        "values": [0.1, 0.2, 0.0],
        "response_mask": [1, 1, 0],
        "rm_scores": [0.0, 1.0, 0.0],
        "uid": "u1",
    }
    path = write_rows(tmp_path / "b.parquet", [row])
    with pytest.raises(DataError, match="--map verl"):
        read(path)
    (response,) = read(path, "verl")
    assert response.behavior_logprobs.tolist() == [-1.0, -0.5, 0.0]
    assert response.target_logprobs.tolist() == [-1.1, -0.4, 0.0]
    assert response.rewards.tolist() == [0.0, 1.0, 0.0]
    assert response.policy_mask.tolist() == [True, True, False]
    assert response.prompt_id == "u1"


@pytest.mark.parametrize("column", ["old_log_probs", "response_mask"])
def test_a_verl_batch_without_the_samplers_logprobs_is_not_read_in_part(tmp_path, column):
    row = {"values": [0.1, 0.2, 0.0], column: [1, 1, 0], "rm_scores": [0.0, 1.0, 0.0]}
    path = write_rows(tmp_path / "r.jsonl", [row])
    with pytest.raises(DataError, match=f"but {column} is, as verl calls it; add --map verl"):
        read(path)
    (response,) = read(path, "verl")
    assert response.rewards.tolist() == [0.0, 1.0, 0.0]


def test_a_map_that_renames_columns_which_are_there_is_refused(tmp_path):
    path = write_rows(tmp_path / "r.jsonl", [GOOD])
    with pytest.raises(DataError, match=r"behavior_logprobs itself is; leave out the --map"):
        read(path, "verl")


def test_dotted_paths_reach_into_objects_and_lists():
    row = {"a": {"b": [{"x": [1, 2]}, {"y": 0}, {"x": [3]}]}, "c.d": 5, "e": [7, 8]}
    for path, wanted in (
        ("a.b.*.x", [1, 2, 3]),
        ("a.b.-1.x", [3]),
        ("a.b.0.x", [1, 2]),
        ("c.d", 5),
        ("e.1", 8),
        ("e.*", [7, 8]),
        ("a.b.9.x", ABSENT),
        ("a.z", ABSENT),
        ("a.b.*.z", ABSENT),
    ):
        assert ColumnMap({"values": path}).find(row, "values") == wanted


def test_maps_are_checked(tmp_path):
    mapping = tmp_path / "map.json"
    mapping.write_text('{"values": "v"}')
    assert parse_maps([str(mapping)]).paths["values"] == "v"
    assert parse_maps(["verl", "values=w"]).paths["values"] == "w"
    for word, reason in (
        ("value=v", "not a column of ours"),
        ("values=", "names no column"),
        ("veryl", "not understood"),
    ):
        with pytest.raises(DataError, match=reason):
            parse_maps([word])
    mapping.write_text("[1]")
    with pytest.raises(DataError, match="object of texts"):
        parse_maps([str(mapping)])


def test_a_column_that_was_asked_for_must_be_there(tmp_path):
    path = write_rows(tmp_path / "r.jsonl", [GOOD])
    with pytest.raises(
        DataError, match=r"row 1: values \(mapped from critic.v\): not there; columns of the row: behav"
    ):
        read(path, "values=critic.v")


def test_lines_in_a_json_file_are_told_where_they_belong(tmp_path):
    path = tmp_path / "r.json"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD) + "\n")
    with pytest.raises(DataError, match=r"r\.json: expected one list of rows \(JSON lines belong into"):
        read(path)


def test_a_map_nested_without_end_is_refused(tmp_path):
    mapping = tmp_path / "map.json"
    mapping.write_text("[" * 100_000)
    with pytest.raises(DataError, match="nested too deeply"):
        parse_maps([str(mapping)])


def test_a_folder_stands_for_its_rollouts(tmp_path):
    with pytest.raises(DataError, match=r"without rollouts.jsonl"):
        rollout_files([tmp_path])
    with pytest.raises(DataError, match="no such file"):
        rollout_files([tmp_path / "x.jsonl"])
    with pytest.raises(DataError, match="/dev/null: not an ordinary file"):
        rollout_files([Path("/dev/null")])
    path = write_rows(tmp_path / "rollouts.jsonl", [GOOD])
    assert rollout_files([tmp_path, path]) == [path, path]


def test_progress_ends_at_the_size_of_the_file(tmp_path):
    for name in ("r.jsonl", "r.jsonl.gz", "r.parquet"):
        path, seen = write_rows(tmp_path / name, clean_rows(prompts=40)), []
        list(read_responses(path, parse_maps([]), seen.append))
        assert seen == sorted(seen)
        assert seen[-1] == path.stat().st_size
