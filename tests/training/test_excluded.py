"""Responses nobody could judge: trained on by no token, counted in no mean, and counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from brace_rl.training.batch import collate
from brace_rl.training.loop import response_metrics, value_separation
from brace_rl.training.serialize import trajectory_from_dict, trajectory_to_dict
from brace_rl.training.types import NOT_A_POLICY_TOKEN, Trajectory


def trajectory(*, excluded: bool, reward: float = 1.0) -> Trajectory:
    mask = not excluded
    return Trajectory(
        request_index=0,
        sample_index=0,
        problem_id="p",
        prompt_ids=[5, 6],
        response_ids=[7, 8],
        policy_mask=[mask, mask],
        behavior_logprobs=[-1.0, -1.0],
        behavior_entropies=[0.5, 0.5],
        versions=[0 if mask else NOT_A_POLICY_TOKEN] * 2,
        rewards=[0.0, reward if mask else 0.0],
        success=mask,
        info={"tool_calls": 4.0 if excluded else 2.0},
        excluded=excluded,
    )


def test_means_are_over_the_judged_responses() -> None:
    metrics = response_metrics([trajectory(excluded=False), trajectory(excluded=True)])
    assert (metrics["reward/mean"], metrics["success/train"], metrics["task/tool_calls"]) == (1.0, 1.0, 2.0)
    assert (metrics["response/excluded"], metrics["tokens/policy"]) == (0.5, 2.0)


def test_an_excluded_row_of_a_batch_has_no_policy_token() -> None:
    batch = collate([trajectory(excluded=True), trajectory(excluded=False)], pad_token_id=0, device=torch.device("cpu"))
    assert batch.policy_mask.sum(dim=1).tolist() == [0, 2]
    assert batch.behavior_logprobs[0].isnan().all()


def test_separation_is_over_policy_tokens_of_judged_responses() -> None:
    won, unjudged = trajectory(excluded=False), trajectory(excluded=True)
    lost = replace(won, success=False, policy_mask=[True, False])
    rows = [won, lost, unjudged, won]
    values = torch.tensor([[9.0, 0.5, 0.7], [9.0, 0.25, 9.0], [9.0, 9.0, 9.0], [9.0, 0.5, 0.3]])
    mask = torch.tensor([[False, True, True], [False, True, False], [False, False, False], [False, True, True]])
    assert value_separation(rows, values, mask) == {"value/separation": pytest.approx(0.5 - 0.25)}
    assert value_separation([won, unjudged], values[[0, 2]], mask[[0, 2]]) == {}


@pytest.mark.parametrize("excluded", [True, False])
def test_a_checkpoint_keeps_what_was_excluded(excluded: bool) -> None:
    row = trajectory(excluded=excluded)
    assert trajectory_from_dict(trajectory_to_dict(row)) == row
