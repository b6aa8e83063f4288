"""Collation and micro-batching."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from brace_rl.training.batch import collate, micro_batches, minibatch_rows
from brace_rl.training.types import Trajectory


def trajectory(prompt, response, mask, rewards=None, truncated=False, kept=None):
    return Trajectory(
        request_index=0,
        sample_index=0,
        problem_id="p",
        prompt_ids=prompt,
        response_ids=response,
        policy_mask=mask,
        behavior_logprobs=[-1.0 if m else 0.0 for m in mask],
        behavior_entropies=[0.5 if m else 0.0 for m in mask],
        versions=[3 if m else -1 for m in mask],
        rewards=rewards or [0.0] * len(response),
        kept_ids=kept,
        truncated=truncated,
    )


def test_column_i_is_about_token_i_plus_1():
    batch = collate(
        [trajectory([7, 8], [1, 2, 3], [True, False, True], rewards=[0.0, 0.0, 1.0]), trajectory([9], [4], [True])],
        pad_token_id=0,
        device=torch.device("cpu"),
    )
    assert batch.input_ids.tolist() == [[7, 8, 1, 2, 3], [9, 4, 0, 0, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    assert batch.policy_mask.tolist() == [[False, True, False, True], [True, False, False, False]]
    assert batch.rewards.tolist() == [[0, 0, 0, 1], [0, 0, 0, 0]]
    assert batch.versions.tolist() == [[-1, 3, -1, 3], [3, -1, -1, -1]]


def test_non_policy_columns_hold_nan_logprobs():
    batch = collate([trajectory([7], [1, 2], [True, False])], pad_token_id=0, device=torch.device("cpu"))
    assert batch.behavior_logprobs[0, 0] == -1.0
    assert math.isnan(batch.behavior_logprobs[0, 1])


def test_rows_cuts_to_the_longest_of_them_and_keeps_their_content():
    rows = [trajectory([7, 8, 9], [1, 2], [True, True]), trajectory([5], [6], [True]), trajectory([4], [3], [True])]
    part = collate(rows, pad_token_id=0, device=torch.device("cpu")).rows([2, 1])
    assert part.input_ids.tolist() == [[4, 3], [5, 6]]
    assert part.policy_mask.tolist() == [[True], [True]]
    assert part.lengths == (2, 2)


def test_kept_ids_sit_at_the_column_of_their_token():
    rows = [trajectory([7, 8], [1, 2], [True, True], kept=[[1, 5], [2]])]
    batch = collate(rows, pad_token_id=0, device=torch.device("cpu"))
    assert batch.kept_ids == (((), (1, 5), (2,)),)


def test_mixing_rows_with_and_without_kept_ids_is_refused():
    rows = [trajectory([7], [1], [True], kept=[[1]]), trajectory([7], [1], [True])]
    with pytest.raises(ValueError, match="kept_ids"):
        collate(rows, pad_token_id=0, device=torch.device("cpu"))


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        collate([], pad_token_id=0, device=torch.device("cpu"))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 200))
def test_micro_batches_hold_every_row_once_and_respect_the_budget(lengths, budget):
    groups = micro_batches(lengths, budget)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        padded = len(group) * max(lengths[row] for row in group)
        assert padded <= budget or len(group) == 1


@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 2**31))
def test_minibatches_split_the_rows_evenly_and_reproducibly(size, parts, seed):
    rows = minibatch_rows(size, parts, seed)
    assert rows == minibatch_rows(size, parts, seed)
    assert sorted(row for part in rows for row in part) == list(range(size))
    assert max(map(len, rows)) - min(map(len, rows)) <= 1


def test_one_minibatch_keeps_the_order_of_the_batch():
    assert minibatch_rows(4, 1, seed=9) == [[0, 1, 2, 3]]
