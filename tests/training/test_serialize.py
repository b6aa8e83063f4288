import json
import math

import pytest
from fakes import fake_request

from brace_rl.files import json_text
from brace_rl.tasks.base import Problem
from brace_rl.training.serialize import (
    group_from_dict,
    group_to_dict,
    problem_from_dict,
    problem_to_dict,
    trajectory_from_dict,
    trajectory_to_dict,
)
from brace_rl.training.types import NOT_A_POLICY_TOKEN, RolloutGroup, SamplingParams, Trajectory


def through_json(data):
    return json.loads(json_text(data))


def a_trajectory(sample=0, **changes):
    fields = {
        "request_index": 3,
        "sample_index": sample,
        "problem_id": "p3",
        "prompt_ids": [4, 5],
        "response_ids": [6, 7, 8],
        "policy_mask": [True, False, True],
        "behavior_logprobs": [-0.1, 0.0, -1 / 3],
        "behavior_entropies": [1e-300, 0.0, 0.7],
        "versions": [0, NOT_A_POLICY_TOKEN, 2],
        "rewards": [0.0, 0.0, 1.0],
        "kept_ids": [[6, 9], [], [8]],
        "truncated": True,
        "success": True,
        "turns": 2,
        "info": {"turns": 2.0, "tool_errors": 0.1},
    }
    return Trajectory(**{**fields, **changes})


def test_a_group_comes_back_equal():
    request = fake_request(3, samples=2, issued_version=1, sampling=SamplingParams(0.7, 0.9, 5))
    group = RolloutGroup(request, [a_trajectory(0), a_trajectory(1, kept_ids=None, info={}, truncated=False)])
    assert group_from_dict(through_json(group_to_dict(group))) == group


def test_a_seed_of_63_bits_and_floats_of_every_size_survive():
    trajectory = a_trajectory(rewards=[5e-324, 0.1 + 0.2, -1e308])
    restored = trajectory_from_dict(through_json(trajectory_to_dict(trajectory)))
    assert [x.hex() for x in restored.rewards] == [x.hex() for x in trajectory.rewards]
    request = fake_request(0)
    assert request.seed > 2**53
    group = group_from_dict(through_json(group_to_dict(RolloutGroup(request, []))))
    assert group.request.seed == request.seed


def test_non_finite_floats_survive():
    trajectory = a_trajectory(behavior_logprobs=[-math.inf, 0.0, math.nan], info={"x": math.inf})
    restored = trajectory_from_dict(through_json(trajectory_to_dict(trajectory)))
    assert restored.behavior_logprobs[:2] == [-math.inf, 0.0]
    assert math.isnan(restored.behavior_logprobs[2])
    assert restored.info == {"x": math.inf}


def test_chat_prompts_and_metadata_survive():
    messages = ({"role": "system", "content": "é"}, {"role": "user", "content": "1 + 1?"})
    problem = Problem(id="a", prompt=messages, answer="2", metadata={"level": 3, "steps": ["x", None]})
    assert problem_from_dict(through_json(problem_to_dict(problem))) == problem


@pytest.mark.parametrize("change", [{"unknown": 1}, {"info": None}, {"rewards": ["x"]}])
def test_what_was_not_written_here_is_not_read(change):
    with pytest.raises((AttributeError, TypeError, ValueError)):
        trajectory_from_dict({**trajectory_to_dict(a_trajectory()), **change})
