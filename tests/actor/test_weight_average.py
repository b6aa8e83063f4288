"""The weight average of PPO-EWMA: the published recursion, resets, checkpoints, use in a model."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from brace_rl.actor.weight_average import ACTIVE_FRACTION, WeightAverage, beta_for_window
from brace_rl.errors import ModelError


def series(length: int, dtype=torch.float64) -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [
        {"a": torch.randn(3, 2, generator=g, dtype=dtype), "b": torch.randn((), generator=g, dtype=dtype)}
        for _ in range(length)
    ]


def averaged(average: WeightAverage) -> dict[str, torch.Tensor]:
    return {name.removeprefix("average."): x for name, x in average.state_dict().items() if name != "total_weight"}


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.999])
def test_average_is_that_of_the_literal_loop(beta):
    weights = series(20)
    average = WeightAverage(weights[0], beta=beta)
    total, wanted = 1.0, weights[0]["a"].clone()
    for theta in weights[1:]:
        average.update(theta)
        new_total = beta * total + 1
        wanted = (beta * total * wanted + theta["a"]) / new_total
        total = new_total
        assert torch.allclose(averaged(average)["a"], wanted, rtol=0, atol=1e-12)
        assert average.total_weight == pytest.approx(total)


def test_every_weight_so_far_counts_by_its_age_alone():
    """No bias towards the start: the average of n weights is sum beta^age theta / sum beta^age."""
    weights, beta = series(12), 0.8
    average = WeightAverage(weights[0], beta=beta)
    for theta in weights[1:]:
        average.update(theta)
    factors = [beta ** (11 - i) for i in range(12)]
    wanted = sum(f * theta["b"] for f, theta in zip(factors, weights, strict=True)) / math.fsum(factors)
    assert averaged(average)["b"].item() == pytest.approx(wanted.item(), abs=1e-12)


def test_equal_weights_stay_what_they_are_to_the_last_bit():
    theta = {"a": torch.tensor([0.1, 1e-8, -3.3])}
    average = WeightAverage(theta, beta=0.9)
    for _ in range(100):
        average.update(theta)
    assert torch.equal(averaged(average)["a"], theta["a"])


def test_half_precision_weights_are_averaged_in_float32():
    """Steps of bfloat16 near 1 are 2^-7; the mean of 1 and the next value lies between them."""
    one, more = torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1 + 2**-7], dtype=torch.bfloat16)
    average = WeightAverage({"a": one}, beta=0.99)
    average.update({"a": more})
    got = averaged(average)["a"]
    assert got.dtype == torch.float32
    assert got.item() == pytest.approx(1 + 2**-7 / 1.99, abs=1e-7)


def test_average_does_not_hold_on_to_the_weights_it_was_given():
    theta = {"a": torch.zeros(2)}
    average = WeightAverage(theta, beta=0.5)
    theta["a"].fill_(9.0)
    assert averaged(average)["a"].tolist() == [0, 0]


def test_reset_forgets_the_past():
    weights = series(6)
    average = WeightAverage(weights[0], beta=0.9)
    for theta in weights[1:5]:
        average.update(theta)
    average.reset(weights[4])
    average.update(weights[5])
    fresh = WeightAverage(weights[4], beta=0.9)
    fresh.update(weights[5])
    assert torch.equal(averaged(average)["a"], averaged(fresh)["a"])
    assert average.total_weight == fresh.total_weight


def test_reset_happens_below_the_threshold_and_only_there():
    weights = series(2)
    average = WeightAverage(weights[0], beta=0.9)
    assert not average.reset_if_inactive(weights[1], active_fraction=ACTIVE_FRACTION)
    assert torch.equal(averaged(average)["a"], weights[0]["a"])
    assert average.reset_if_inactive(weights[1], active_fraction=ACTIVE_FRACTION - 1e-6)
    assert torch.equal(averaged(average)["a"], weights[1]["a"])
    assert not average.reset_if_inactive(weights[0], active_fraction=0.6, threshold=0.5)


@pytest.mark.parametrize(("window", "beta"), [(0, 0.0), (1, 1 / 3), (2, 0.5), (9, 9 / 11)])
def test_decay_for_a_staleness_window(window, beta):
    assert beta_for_window(window) == pytest.approx(beta)
    # mean age of what is averaged, after many updates: half the window
    assert beta_for_window(window) / (1 - beta_for_window(window)) == pytest.approx(window / 2)


def test_window_zero_follows_the_weights():
    weights = series(3)
    average = WeightAverage(weights[0], beta=beta_for_window(0))
    for theta in weights:
        average.update(theta)
    assert torch.equal(averaged(average)["a"], weights[-1]["a"])


def test_checkpoint_restores_the_average_and_training_goes_on_the_same():
    weights = series(8)
    average = WeightAverage(weights[0], beta=0.9)
    for theta in weights[1:4]:
        average.update(theta)
    saved = {name: x.clone() for name, x in average.state_dict().items()}
    assert all(isinstance(x, torch.Tensor) for x in saved.values())
    resumed = WeightAverage(weights[7], beta=0.9)
    resumed.load_state_dict(saved)
    for theta in weights[4:]:
        average.update(theta)
        resumed.update(theta)
    assert torch.equal(averaged(average)["a"], averaged(resumed)["a"])
    assert average.total_weight == resumed.total_weight


def test_copied_into_a_model_it_scores_with_the_averaged_weights():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    before = copy.deepcopy(model.state_dict())
    average = WeightAverage(model.state_dict(), beta=0.5)
    with torch.no_grad():
        model[0].weight += 3
        model[1].num_batches_tracked += 7
    average.update(model.state_dict())
    proximal = copy.deepcopy(model)
    average.copy_to(proximal)
    assert torch.allclose(proximal[0].weight, before["0.weight"] + 2)  # (0.5 * 0 + 3) / 1.5
    assert proximal[1].num_batches_tracked.item() == 7  # counters are not averaged
    assert torch.equal(model[0].weight, before["0.weight"] + 3)
    x = torch.ones(1, 4)
    assert torch.allclose(proximal[0](x), x @ (before["0.weight"] + 2).T + before["0.bias"], atol=1e-6)
    half = copy.deepcopy(model).bfloat16()
    average.copy_to(half)
    assert half[0].weight.dtype == torch.bfloat16


def test_weights_of_another_model_are_refused():
    average = WeightAverage({"a": torch.zeros(2)}, beta=0.5)
    with pytest.raises(ModelError, match="only one of the two has b"):
        average.update({"a": torch.zeros(2), "b": torch.zeros(2)})
    with pytest.raises(ModelError, match=r"a is \[2\] in the average and \[3\] in the model"):
        average.update({"a": torch.zeros(3)})
    with pytest.raises(ModelError, match="only one of the two has a"):
        average.load_state_dict({"total_weight": torch.tensor(1.0)})
    with pytest.raises(ModelError, match="holds no weight average"):
        average.load_state_dict({})
    with pytest.raises(ModelError, match="only one of the two has a"):
        average.copy_to(nn.Linear(1, 1))


@pytest.mark.parametrize("beta", [-0.1, 1.0])
def test_decay_out_of_range_is_refused(beta):
    with pytest.raises(ValueError, match=f"beta = {beta}"):
        WeightAverage({}, beta=beta)
    with pytest.raises(ValueError, match="window = -1"):
        beta_for_window(-1)
