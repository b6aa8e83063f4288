"""The evidence every value target has, for what is made of ratios alone: windows, weights, critic-free advantages."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from estimators import random_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Options, window_weight
from torch import Tensor

from brace_rl import core

seeds = st.integers(0, 2**31)
windows = st.sampled_from([0, 1, 2, 3, 7, 100])
JUNK = (math.nan, math.inf, -math.inf, 1e30)
RATIO_INPUTS = ("behavior_logprobs", "target_logprobs", "policy_mask")
few = settings(max_examples=40, deadline=None)

Inputs = dict[str, Tensor]


def critic_free(x: Inputs, *, window: int = 3) -> Tensor:
    return core.critic_free_advantages(**x, window=window)


def path_windows(x: Inputs) -> Tensor:
    return core.path_windows(**ratios_of(x), budget=0.5)


def window_weights(x: Inputs) -> Tensor:
    return core.window_weights(**ratios_of(x), window=3, gamma=0.9)


def drift(x: Inputs) -> Tensor:
    """``[B, T]`` like the others: the batch's one figure in every column of every row."""
    return core.drift_window(**ratios_of(x), eps=0.5).drift.expand(x["policy_mask"].shape)


def drift_window(x: Inputs) -> Tensor:
    return core.drift_window(**ratios_of(x), eps=0.5).window.expand(x["policy_mask"].shape)


PER_TOKEN = (critic_free, path_windows, window_weights)
EVERY = (*PER_TOKEN, drift, drift_window)
every_function = pytest.mark.parametrize("function", EVERY)


def ratios_of(x: Inputs) -> Inputs:
    return {k: x[k] for k in RATIO_INPUTS}


def inputs_of(seed: int, **shape: int) -> Inputs:
    batch = random_batch(seed, **shape)
    g = torch.Generator().manual_seed(seed + 1)
    rows = batch["policy_mask"].shape[0]
    more = {k: torch.randn(rows, generator=g, dtype=torch.float64) for k in ("returns", "baselines")}
    return ratios_of(batch) | more


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a.double(), b.double(), rtol=0, atol=1e-12)


def policy_rows(x: Inputs) -> list[list[float]]:
    log_ratios = x["target_logprobs"] - x["behavior_logprobs"]
    return [row[mask].tolist() for row, mask in zip(log_ratios, x["policy_mask"], strict=True)]


# Literal references


@few
@given(seeds, windows)
def test_critic_free_advantages_are_the_products_times_the_gain(seed, window):
    x = inputs_of(seed, columns=20)
    got = core.critic_free_advantages(**x, window=window, c_clip=1.1)
    o = Options("brace", window, c_clip=1.1)
    for row, log_ratios in enumerate(policy_rows(x)):
        gain = (x["returns"][row] - x["baselines"][row]).item()
        last = len(log_ratios) - 1
        wanted = [gain * (window_weight(s + 1, log_ratios, o) if s < last else 1.0) for s in range(last + 1)]
        mask = x["policy_mask"][row]
        assert close(got[row][mask], torch.tensor(wanted, dtype=torch.float64))
        assert bool((got[row][~mask] == 0).all())


@few
@given(seeds, st.sampled_from([0.05, 0.5, 0.95]), st.sampled_from([1.0, 0.97]))
def test_the_drift_window_is_the_formula(seed, eps, gamma):
    x = inputs_of(seed)
    got = core.drift_window(**ratios_of(x), eps=eps, c_clip=1.1, gamma=gamma)
    log_c = [min(math.log(1.1), y) for row in policy_rows(x) for y in row]
    m = math.log(gamma) + sum(log_c) / len(log_c)
    assert got.drift.item() == pytest.approx(m, abs=1e-12)
    assert got.window.item() == (min(12, math.floor(math.log(1 / eps) / abs(m))) if m < 0 else 12)


# Worked by hand


def test_windows_and_critic_free_advantages_worked_by_hand():
    """w = (2, 1/2, 1), c_clip = 5/4, so c = (5/4, 1/2, 1); T = 2; R = 1, b = 1/4.

    Critic free, window 1: A_0 = c_1 (R - b) = 1/2 * 3/4, A_1 = (empty product) 3/4, A_2 = R - b = 3/4.
    |log c| = (0.223, 0.693, 0). Budget 1/2: from 0 the sums are 0.223, 0.916 > 1/2, so j = 2; from 1, j = 2.
    Budget 1/5: from 0 already 0.223 > 1/5, so j = 1.
    m = (log 5/4 + log 1/2 + log 1) / 3 = log(5/8) / 3 = -0.157; log(1/0.7) / 0.157 = 2.28.
    """
    behavior = torch.full((1, 3), -1.0, dtype=torch.float64)
    ratios = {
        "behavior_logprobs": behavior,
        "target_logprobs": behavior + torch.tensor([[2.0, 0.5, 1.0]]).log(),
        "policy_mask": torch.ones(1, 3, dtype=torch.bool),
    }
    gains = {"returns": torch.tensor([1.0]), "baselines": torch.tensor([0.25])}
    got = core.critic_free_advantages(**ratios, **gains, window=1, c_clip=1.25)
    assert torch.allclose(got, torch.tensor([[3 / 8, 3 / 4, 3 / 4]], dtype=torch.float64), atol=1e-7)
    assert core.path_windows(**ratios, budget=0.5, c_clip=1.25).tolist() == [[2, 1, 0]]
    assert core.path_windows(**ratios, budget=0.2, c_clip=1.25).tolist() == [[1, 1, 0]]
    chosen = core.drift_window(**ratios, eps=0.7, c_clip=1.25)
    assert chosen.drift.item() == pytest.approx(math.log(5 / 8) / 3, abs=1e-7)
    assert chosen.window.item() == 2


# Invariances


@few
@given(st.sampled_from(EVERY), seeds, st.sampled_from(JUNK))
def test_junk_at_non_policy_tokens_changes_no_window(function, seed, junk):
    x = inputs_of(seed)
    wanted = function(x)
    for key in ("behavior_logprobs", "target_logprobs"):
        x[key] = torch.where(x["policy_mask"], x[key], junk)
    assert torch.equal(function(x), wanted)


@few
@given(st.sampled_from(EVERY), seeds)
def test_the_order_of_rows_does_not_matter(function, seed):
    x = inputs_of(seed)
    order = torch.randperm(4, generator=torch.Generator().manual_seed(seed))
    assert close(function({k: v[order] for k, v in x.items()}), function(x)[order])


@few
@given(st.sampled_from(PER_TOKEN), seeds)
def test_rows_choose_alone(function, seed):
    x = inputs_of(seed)
    assert close(function({k: v[1:2] for k, v in x.items()})[0], function(x)[1])


@few
@given(st.sampled_from(EVERY), seeds)
def test_masked_equals_compacted_for_windows(function, seed):
    x = inputs_of(seed, rows=1, columns=20)
    mask = x["policy_mask"][0]
    compact = {k: v[:, mask] if v.dim() == 2 else v for k, v in x.items()}
    # Where nothing drifts down the batch window is the number of columns, holes included; beyond T it says the same.
    got, wanted = function(x)[:, mask], function(compact)
    if function is drift_window:
        got, wanted = got.clamp(max=int(mask.sum())), wanted.clamp(max=int(mask.sum()))
    assert close(got, wanted)


@few
@given(seeds, windows)
def test_critic_free_advantages_are_linear_in_returns_and_baselines_together(seed, window):
    a, b = inputs_of(seed), inputs_of(seed + 1)
    b |= ratios_of(a)
    mixed = a | {k: 2.0 * a[k] - 0.5 * b[k] for k in ("returns", "baselines")}
    of_a, of_b, of_mixed = (critic_free(x, window=window) for x in (a, b, mixed))
    assert close(of_mixed, 2.0 * of_a - 0.5 * of_b)


@few
@given(seeds, st.sampled_from([0.0, 0.3, 1.0]))
def test_a_larger_budget_never_closes_a_path_window_sooner(seed, budget):
    x = ratios_of(inputs_of(seed))
    assert bool((core.path_windows(**x, budget=budget + 0.2) >= core.path_windows(**x, budget=budget)).all())


@every_function
def test_windows_carry_no_gradient(function: Callable[[Inputs], Tensor]):
    x = inputs_of(0)
    for key, value in x.items():
        if key != "policy_mask":
            value.requires_grad_()
    assert not function(x).requires_grad


@every_function
def test_inputs_of_windows_are_not_written_to(function: Callable[[Inputs], Tensor]):
    x = inputs_of(1)
    before = {k: v.clone() for k, v in x.items()}
    function(x)
    assert all(torch.equal(before[k], x[k]) for k in x)
