"""Weights in shared memory: exact values, every dtype, refusal of what does not fit, a spawned process sees them."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

from brace_rl.training.backends.shared_weights import SharedWeights

WEIGHTS = {
    "matrix": torch.arange(6, dtype=torch.float32).reshape(2, 3).T,
    "half": torch.tensor([1.5, -2.0, 0.25], dtype=torch.bfloat16),
    "flags": torch.tensor([True, False, True]),
    "count": torch.tensor(7),
    "none": torch.empty(0, 4),
}


def test_tensors_come_back_exactly() -> None:
    shared = SharedWeights(WEIGHTS)
    shared.write(WEIGHTS)
    views = shared.tensors()
    assert views.keys() == WEIGHTS.keys()
    for name, tensor in WEIGHTS.items():
        assert views[name].dtype == tensor.dtype
        assert torch.equal(views[name], tensor)


def test_what_was_written_does_not_follow_later_changes_of_the_source() -> None:
    source = {"w": torch.ones(3, requires_grad=True)}
    shared = SharedWeights(source)
    shared.write(source)
    with torch.no_grad():
        source["w"].zero_()
    assert shared.tensors()["w"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({}, "template's names; \\['w'\\]"),
        ({"w": torch.ones(3), "x": torch.ones(1)}, "\\['x'\\]"),
        ({"w": torch.ones(4)}, "\\(3,\\), got torch.float32 \\(4,\\)"),
        ({"w": torch.ones(3, dtype=torch.float64)}, "float32 \\(3,\\), got torch.float64"),
    ],
)
def test_weights_unlike_the_template_are_refused(weights: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SharedWeights({"w": torch.zeros(3)}).write(weights)


def double_in_place(shared: SharedWeights) -> None:
    shared.tensors()["w"].mul_(2)


def test_a_spawned_process_shares_the_memory() -> None:
    shared = SharedWeights({"w": torch.zeros(5)})
    shared.write({"w": torch.full((5,), 21.0)})
    process = multiprocessing.get_context("spawn").Process(target=double_in_place, args=(shared,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert shared.tensors()["w"].tolist() == [42.0] * 5
