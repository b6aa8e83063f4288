"""Windows: what they weigh, and how the two automatic forms choose them."""

from __future__ import annotations

import math

import pytest
import torch
from estimators import random_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Options, path_window, window_weight

from brace_rl import core

RATIO_INPUTS = ("behavior_logprobs", "target_logprobs", "policy_mask")
seeds = st.integers(0, 2**31)
few = settings(max_examples=40, deadline=None)


def ratios(seed: int, **shape: int) -> dict[str, torch.Tensor]:
    batch = random_batch(seed, **shape)
    return {k: batch[k] for k in RATIO_INPUTS}


def policy_rows(batch: dict[str, torch.Tensor]) -> list[list[float]]:
    log_ratios = batch["target_logprobs"] - batch["behavior_logprobs"]
    return [row[mask].tolist() for row, mask in zip(log_ratios, batch["policy_mask"], strict=True)]


@few
@given(seeds, st.sampled_from([0, 1, 2, 5, 64, 1000]), st.sampled_from([1.0, 0.9]))
def test_window_weights_are_the_products(seed, window, gamma):
    batch = ratios(seed, columns=20)
    o = Options("brace", window, c_clip=1.1, gamma=gamma, lam=0.95)
    got = core.window_weights(**batch, window=window, c_clip=1.1, gamma=gamma, lam=0.95)
    for row, mask, log_ratios in zip(got, batch["policy_mask"], policy_rows(batch), strict=True):
        wanted = [window_weight(s, log_ratios, o) for s in range(len(log_ratios))]
        assert torch.allclose(row[mask], torch.tensor(wanted, dtype=torch.float64), atol=1e-12)
        assert bool((row[~mask] == 0).all())


@few
@given(seeds, st.sampled_from([0.0, 0.05, 0.5, 2.0, math.inf]))
def test_path_windows_are_those_found_by_walking(seed, budget):
    batch = ratios(seed, columns=20)
    got = core.path_windows(**batch, budget=budget, c_clip=1.1)
    for row, mask, log_ratios in zip(got, batch["policy_mask"], policy_rows(batch), strict=True):
        wanted = [path_window(s, log_ratios, budget, 1.1) for s in range(len(log_ratios))]
        assert row[mask].tolist() == wanted
        assert bool((row[~mask] == 0).all())


@few
@given(seeds, st.sampled_from([0.1, 1.0]))
def test_path_windows_stop_at_the_end_of_a_packed_response(seed, budget):
    batch = ratios(seed, rows=4, columns=9)
    wanted = core.path_windows(**batch, budget=budget)
    packed = {k: v.reshape(1, -1) for k, v in batch.items()}
    ids = torch.arange(4).repeat_interleave(9)[None]
    assert torch.equal(core.path_windows(**packed, budget=budget, segment_ids=ids), wanted.reshape(1, -1))


def test_path_windows_bound_the_window_weight_by_the_budget_and_one_token():
    batch = ratios(0, rows=8, columns=200)
    budget, c_clip = 0.7, 1.1
    windows = core.path_windows(**batch, budget=budget, c_clip=c_clip)
    weights = core.window_weights(**batch, window=windows, c_clip=c_clip)
    mask = batch["policy_mask"]
    log_ratios = (batch["target_logprobs"] - batch["behavior_logprobs"]).clamp(max=math.log(c_clip))
    assert weights[mask].log().abs().max() <= budget + log_ratios[mask].abs().max()
    assert windows.max() > windows[mask].min() > -1


def test_path_windows_reach_the_end_where_the_policies_agree():
    batch = ratios(1, holes=False)
    batch["target_logprobs"] = batch["behavior_logprobs"]
    assert torch.equal(core.path_windows(**batch, budget=0.0), torch.arange(11, -1, -1).expand(4, -1))


def test_drift_window_is_the_longest_that_keeps_the_predicted_weight():
    """Every log ratio is -0.02: m = -0.02, and log(1/0.1) / 0.02 = 115.1."""
    mask = torch.ones(2, 400, dtype=torch.bool)
    behavior = torch.full((2, 400), -1.0, dtype=torch.float64)
    chosen = core.drift_window(behavior_logprobs=behavior, target_logprobs=behavior - 0.02, policy_mask=mask, eps=0.1)
    assert chosen.drift.item() == pytest.approx(-0.02)
    assert chosen.window.item() == 115
    weight = core.window_weights(
        behavior_logprobs=behavior, target_logprobs=behavior - 0.02, policy_mask=mask, window=chosen.window
    )
    assert 0.1 <= weight[0, 0].item() < 0.1 * math.exp(0.02)


def test_drift_counts_the_cap_the_discount_and_lambda():
    mask = torch.tensor([[True, True, False]])
    behavior = torch.zeros(1, 3, dtype=torch.float64)
    target = torch.tensor([[1.0, -0.5, math.nan]], dtype=torch.float64)
    chosen = core.drift_window(
        behavior_logprobs=behavior, target_logprobs=target, policy_mask=mask, eps=0.5, c_clip=1.1, gamma=0.9, lam=0.8
    )
    assert chosen.drift.item() == pytest.approx(math.log(0.72) + (math.log(1.1) - 0.5) / 2)


@pytest.mark.parametrize("shift", [0.0, 0.05])
def test_without_downward_drift_the_window_is_everything(shift):
    batch = ratios(2, holes=False)
    batch["target_logprobs"] = batch["behavior_logprobs"] + shift
    assert core.drift_window(**batch, eps=0.5).window.item() == 12


def test_lambda_zero_leaves_no_window():
    assert core.drift_window(**ratios(3), eps=0.5, lam=0.0).window.item() == 0


def test_chosen_windows_can_be_used_as_they_are():
    batch = random_batch(4)
    inputs = {k: batch[k] for k in RATIO_INPUTS}
    window = core.drift_window(**inputs, eps=0.9).window
    got = core.brace_targets(**batch, window=window).targets
    assert torch.equal(got, core.brace_targets(**batch, window=int(window)).targets)
    each = core.path_windows(**inputs, budget=0.3)
    assert core.brace_targets(**batch, window=each).targets.isfinite().all()


def test_options_out_of_range_are_refused():
    batch = ratios(5)
    with pytest.raises(ValueError, match=r"eps = 1\.0: must be between 0 and 1"):
        core.drift_window(**batch, eps=1.0)
    with pytest.raises(ValueError, match=r"budget = -1\.0: must be at least 0"):
        core.path_windows(**batch, budget=-1.0)
    rows = torch.zeros(4)
    with pytest.raises(ValueError, match=r"baselines: got \[3\]"):
        core.critic_free_advantages(**batch, returns=rows, baselines=torch.zeros(3))
    with pytest.raises(ValueError, match="returns: nan at row 0"):
        core.critic_free_advantages(**batch, returns=rows * math.nan, baselines=rows)
