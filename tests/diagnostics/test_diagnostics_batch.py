"""Batch figures: hand-worked numbers, masks, extremes."""

from __future__ import annotations

import math

import pytest
import torch

from brace_rl import core
from brace_rl.diagnostics import batch as diagnostics

MASK = torch.tensor([[True, True, False], [False, True, True]])


def masked(values: list[list[float]], junk: float = math.nan) -> torch.Tensor:
    x = torch.tensor(values, dtype=torch.float64)
    return torch.where(MASK, x, junk)


def test_ratio_figures_worked_by_hand():
    """w = (1/2, 2, 1, 1/2): mean 1, sum 4, sum of squares 5.5, ESS 16 / (4 * 5.5); log w = (-a, a, 0, -a), a = log 2.

    Capped at 1.1 the logs are (-a, c, 0, -a), c = log 1.1.
    """
    log_ratio = masked([[0.5, 2.0, 9.0], [9.0, 1.0, 0.5]]).log()
    got = diagnostics.ratio_statistics(
        behavior_logprobs=torch.zeros_like(log_ratio),
        target_logprobs=log_ratio,
        policy_mask=MASK,
        c_clip=1.1,
        gamma=0.9,
    )
    a, c = math.log(2), math.log(1.1)
    mean = (c - 2 * a) / 4
    wanted = {
        "ratio/mean": 1.0,
        "ratio/max": 2.0,
        "ratio/ess": 16 / 22,
        "ratio/log_mean": -a / 4,
        "ratio/log_abs_max": a,
        "drift/m": mean + math.log(0.9),
        "drift/sigma": math.sqrt((2 * a * a + c * c) / 4 - mean**2),
    }
    assert {k: v.item() for k, v in got.items()} == pytest.approx(wanted)


@pytest.mark.parametrize("extreme", [-1e4, 1e4])
def test_ratio_figures_stay_finite_at_extremes(extreme):
    log_ratio = torch.zeros(2, 3)
    log_ratio[0, 0] = extreme
    got = diagnostics.ratio_statistics(behavior_logprobs=torch.zeros(2, 3), target_logprobs=log_ratio, policy_mask=MASK)
    assert all(v.isfinite() for v in got.values())
    assert got["ratio/ess"].item() == pytest.approx(0.25 if extreme > 0 else 0.75)


def test_on_policy_ratio_figures_are_exact():
    x = torch.randn(2, 3)
    got = diagnostics.ratio_statistics(behavior_logprobs=x, target_logprobs=x, policy_mask=MASK)
    assert {k: v.item() for k, v in got.items()} == {
        "ratio/mean": 1.0,
        "ratio/max": 1.0,
        "ratio/ess": 1.0,
        "ratio/log_mean": 0.0,
        "ratio/log_abs_max": 0.0,
        "drift/m": 0.0,
        "drift/sigma": 0.0,
    }


def test_drift_is_the_one_that_chooses_the_window():
    g = torch.Generator().manual_seed(0)
    inputs = {
        "behavior_logprobs": -torch.rand(2, 3, generator=g),
        "target_logprobs": -torch.rand(2, 3, generator=g),
        "policy_mask": MASK,
    }
    measured = diagnostics.ratio_statistics(**inputs, c_clip=1.1, gamma=0.9, lam=0.8)["drift/m"]
    chosen = core.drift_window(**inputs, eps=0.5, c_clip=1.1, gamma=0.9, lam=0.8)
    assert measured.item() == pytest.approx(chosen.drift.item())


def test_target_figures_worked_by_hand():
    """Targets (0, 0, 1, 1), V (0, 1/2, 1/2, 1): gap (0, -1/2, 1/2, 0), variances 1/8 and 1/4."""
    got = diagnostics.target_statistics(
        values=masked([[0.0, 0.5, 0.0], [0.0, 0.5, 1.0]]),
        targets=masked([[0.0, 0.0, 0.0], [0.0, 1.0, 1.0]], math.inf),
        advantages=masked([[0.1, -3.0, 0.0], [0.0, 2.0, 0.0]], -1e9),
        policy_mask=MASK,
    )
    assert {k: v.item() for k, v in got.items()} == pytest.approx(
        {"target/abs_gap": 0.25, "value/mean": 0.5, "value/explained_variance": 0.5, "advantage/abs_max": 3.0}
    )


def test_explained_variance_is_one_for_a_perfect_critic_and_zero_where_nothing_varies():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(2, 3, generator=g)
    key = "value/explained_variance"
    kw = {"advantages": x, "policy_mask": MASK}
    assert diagnostics.target_statistics(values=x, targets=x, **kw)[key].item() == 1.0
    assert diagnostics.target_statistics(values=x - 7, targets=x, **kw)[key].item() == pytest.approx(1.0, abs=1e-5)
    assert diagnostics.target_statistics(values=x, targets=torch.ones(2, 3), **kw)[key].item() == 0.0


def test_window_weight_figures_read_policy_tokens_alone():
    got = diagnostics.window_weight_statistics(
        window_weights=masked([[0.5, 1.0, 0.0], [0.0, 2.5, 0.0]]), policy_mask=MASK
    )
    assert got["window_weight/mean"].item() == 1.0
    assert got["window_weight/max"].item() == 2.5


def test_staleness_figures_worked_by_hand():
    """At version 10, ages (3, 1) and (4, 4); spreads 2 and 0; the row without policy tokens does not count."""
    versions = torch.tensor([[7, 9, -1], [-1, 6, 6], [-1, -1, -1]])
    mask = torch.cat([MASK, torch.zeros(1, 3, dtype=torch.bool)])
    got = diagnostics.staleness_statistics(versions=versions, policy_mask=mask, current_version=10)
    assert {k: v.item() for k, v in got.items()} == {
        "staleness/mean": 3.0,
        "staleness/max": 4.0,
        "staleness/within_response": 1.0,
        "staleness/within_response_max": 2.0,
    }


def test_reward_slope_is_one_where_the_target_is_the_return_and_falls_with_the_window_weight():
    g = torch.Generator().manual_seed(2)
    shape = (64, 100)
    mask = torch.ones(shape, dtype=torch.bool)
    behavior = -torch.rand(shape, generator=g, dtype=torch.float64)
    rewards = torch.zeros(shape, dtype=torch.float64)
    rewards[:, -1] = torch.randint(0, 2, (64,), generator=g).double()
    values = torch.full(shape, 0.5, dtype=torch.float64)
    returns = core.monte_carlo_targets(values=values, rewards=rewards, policy_mask=mask).targets
    junk = {"values": values, "returns": returns, "policy_mask": mask, "edges": (20, 50)}
    exact = diagnostics.reward_slopes(targets=returns, **junk)
    assert list(exact) == ["beta/horizon_0_20", "beta/horizon_20_50", "beta/horizon_50_up"]
    assert all(v.item() == pytest.approx(1.0) for v in exact.values())
    target = behavior - 0.05
    ratios = {"behavior_logprobs": behavior, "target_logprobs": target, "policy_mask": mask}
    brace = core.brace_targets(values=values, rewards=rewards, **ratios, window=50).targets
    slope = diagnostics.reward_slopes(targets=brace, **junk)["beta/horizon_50_up"].item()
    assert slope == pytest.approx(math.exp(-0.05 * 50), abs=1e-9)


def test_reward_slope_without_variation_is_nan():
    ones = torch.ones(1, 4)
    mask = torch.ones(1, 4, dtype=torch.bool)
    got = diagnostics.reward_slopes(values=ones, targets=ones, returns=ones, policy_mask=mask, edges=(2,))
    assert all(v.isnan() for v in got.values())


def test_a_batch_without_policy_tokens_gives_the_documented_figures():
    x, mask = torch.full((2, 3), math.nan), torch.zeros(2, 3, dtype=torch.bool)
    ratio = diagnostics.ratio_statistics(behavior_logprobs=x, target_logprobs=x, policy_mask=mask)
    assert ratio["ratio/mean"].item() == ratio["ratio/ess"].item() == ratio["ratio/max"].item() == 1.0
    zeros = {
        **diagnostics.target_statistics(values=x, targets=x, advantages=x, policy_mask=mask),
        **diagnostics.window_weight_statistics(window_weights=x, policy_mask=mask),
        **diagnostics.staleness_statistics(versions=torch.full((2, 3), -1), policy_mask=mask, current_version=5),
    }
    assert all(v.item() == 0 for v in zeros.values())


def test_nothing_is_read_back_from_the_device():
    x, mask = torch.empty(2, 3, device="meta"), torch.empty(2, 3, dtype=torch.bool, device="meta")
    figures = {
        **diagnostics.ratio_statistics(behavior_logprobs=x, target_logprobs=x, policy_mask=mask),
        **diagnostics.target_statistics(values=x, targets=x, advantages=x, policy_mask=mask),
        **diagnostics.window_weight_statistics(window_weights=x, policy_mask=mask),
        **diagnostics.staleness_statistics(versions=x.long(), policy_mask=mask, current_version=3),
        **diagnostics.reward_slopes(values=x, targets=x, returns=x, policy_mask=mask),
    }
    assert all(v.device.type == "meta" and v.dim() == 0 for v in figures.values())
