"""What the estimators must reduce to, and one example worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from estimators import ESTIMATORS, estimate, every_estimator, random_batch

from brace_rl import core


def close(a: torch.Tensor, b: torch.Tensor, atol: float = 1e-12) -> bool:
    return torch.allclose(a, b, rtol=0, atol=atol)


def returns_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return batch["rewards"].flip(1).cumsum(1).flip(1) * batch["policy_mask"]


def test_example_worked_by_hand():
    """Three tokens, R = 1 at the end, V = (1/2, 1/4, 3/4), w = (2, 1/2, 1), rho_clip = 3/2, c_clip = 5/4, window 1.

    delta = (1/4 - 1/2, 3/4 - 1/4, 1 - 3/4) = (-1/4, 1/2, 1/4), rho = (3/2, 1/2, 1), c = (5/4, 1/2, 1), T = 2.

    s = 0: j = 1.  V_0 + rho_0 delta_0 + c_0 (R - V_1) = 1/2 - 3/8 + 5/4 * 3/4 = 17/16
    s = 1: j = 2.  V_1 + rho_1 delta_1 + c_1 (R - V_2) = 1/4 + 1/4 + 1/2 * 1/4 = 5/8
    s = 2: j = 2.  V_2 + (R - V_2) = 1
    A = (5/8 - 1/2, 1 - 1/4, 1 - 3/4) = (1/8, 3/4, 1/4); weights (c_0, c_1, 1) = (5/4, 1/2, 1).
    """
    batch = {
        "values": torch.tensor([[0.5, 0.25, 0.75]]),
        "rewards": torch.tensor([[0.0, 0.0, 1.0]]),
        "behavior_logprobs": torch.full((1, 3), -1.0),
        "target_logprobs": torch.full((1, 3), -1.0) + torch.tensor([[2.0, 0.5, 1.0]]).log(),
        "policy_mask": torch.ones(1, 3, dtype=torch.bool),
    }
    got = core.brace_targets(**batch, window=1, rho_clip=1.5, c_clip=1.25)
    assert close(got.targets, torch.tensor([[17 / 16, 5 / 8, 1.0]]), 1e-6)
    assert close(got.advantages, torch.tensor([[1 / 8, 3 / 4, 1 / 4]]), 1e-6)
    ratios = {k: batch[k] for k in ("behavior_logprobs", "target_logprobs", "policy_mask")}
    weights = core.window_weights(**ratios, window=1, c_clip=1.25)
    assert close(weights, torch.tensor([[5 / 4, 1 / 2, 1.0]]), 1e-6)


@pytest.mark.parametrize(
    ("estimator", "options", "targets", "advantages"),
    [
        # s = 1: V_1 + rho_1 delta_1 + c_1 rho_2 delta_2 = 1/4 + 1/4 + 1/2 * 1/4
        # s = 0: V_0 + rho_0 delta_0 + c_0 rho_1 delta_1 + c_0 c_1 rho_2 delta_2 = 1/2 - 3/8 + 5/4 * 1/4 + 5/8 * 1/4
        ("vtrace", {"rho_clip": 1.5, "c_clip": 1.25}, [19 / 32, 5 / 8, 1.0], [1 / 8, 3 / 4, 1 / 4]),
        # s = 0: the product stops after c_0: 1/2 - 3/8 + 5/4 (rho_1 delta_1 + rho_2 delta_2) = 1/8 + 5/4 * 1/2
        ("capped", {"window": 1, "rho_clip": 1.5, "c_clip": 1.25}, [3 / 4, 5 / 8, 1.0], [1 / 8, 3 / 4, 1 / 4]),
        # lam = 1/2: V_1 + delta_1 + 1/2 delta_2 = 1/4 + 1/2 + 1/8;  V_0 + delta_0 + 1/2 delta_1 + 1/4 delta_2
        ("gae", {"lam": 0.5}, [9 / 16, 7 / 8, 1.0], [1 / 16, 5 / 8, 1 / 4]),
        # gamma = 1/2: the reward, halved for every token before it
        ("monte_carlo", {"gamma": 0.5}, [1 / 4, 1 / 2, 1.0], [-1 / 4, 1 / 4, 1 / 4]),
    ],
)
def test_the_same_example_worked_by_hand_for_the_others(estimator, options, targets, advantages):
    """V = (1/2, 1/4, 3/4), R = 1, delta = (-1/4, 1/2, 1/4), rho = (3/2, 1/2, 1), c = (5/4, 1/2, 1) as above."""
    behavior = torch.full((1, 3), -1.0, dtype=torch.float64)
    batch = {
        "values": torch.tensor([[0.5, 0.25, 0.75]], dtype=torch.float64),
        "rewards": torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64),
        "behavior_logprobs": behavior,
        "target_logprobs": behavior + torch.tensor([[2.0, 0.5, 1.0]], dtype=torch.float64).log(),
        "policy_mask": torch.ones(1, 3, dtype=torch.bool),
    }
    got = estimate(estimator, batch, **options)
    assert close(got.targets, torch.tensor([targets], dtype=torch.float64))
    assert close(got.advantages, torch.tensor([advantages], dtype=torch.float64))


@pytest.mark.parametrize("window", [0, 1, 3, 100])
def test_on_policy_the_target_is_the_return_at_every_position(window):
    batch = random_batch(0, holes=False)
    batch["target_logprobs"] = batch["behavior_logprobs"]
    assert close(core.brace_targets(**batch, window=window).targets, returns_of(batch))


def test_on_policy_all_estimators_agree():
    batch = random_batch(1)
    batch["target_logprobs"] = batch["behavior_logprobs"]
    wanted = estimate("monte_carlo", batch).targets
    for name in ESTIMATORS:
        assert close(estimate(name, batch, window=3).targets, wanted), name


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_window_zero_is_monte_carlo(gamma):
    batch = random_batch(2)
    wanted = core.monte_carlo_targets(
        **{k: batch[k] for k in ("values", "rewards", "policy_mask")}, gamma=gamma
    ).targets
    assert close(core.brace_targets(**batch, window=0, gamma=gamma).targets, wanted)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_gae_with_lambda_one_is_monte_carlo(gamma):
    batch = random_batch(3)
    gae, monte_carlo = (estimate(name, batch, gamma=gamma, lam=1.0) for name in ("gae", "monte_carlo"))
    assert close(gae.targets, monte_carlo.targets)
    assert close(gae.advantages, monte_carlo.advantages)


def test_gae_with_lambda_zero_is_the_one_step_target():
    batch = random_batch(4, holes=False)
    following = torch.nn.functional.pad(batch["values"][:, 1:], (0, 1))
    assert close(estimate("gae", batch, lam=0.0).targets, batch["rewards"] + following)


@pytest.mark.parametrize("window", [12, 13, 10_000])
def test_capped_with_a_window_past_the_end_is_vtrace(window):
    batch = random_batch(5)
    options = {"rho_clip": 1.2, "c_clip": 1.1, "gamma": 0.97, "lam": 0.9}
    assert close(
        estimate("capped", batch, window=window, **options).targets, estimate("vtrace", batch, **options).targets
    )


def test_brace_with_a_window_past_the_end_is_vtrace_with_the_last_residual_unweighted():
    """Giving the last token ratio 1 changes nothing else: its trace coefficient is never used."""
    batch = random_batch(6, holes=False)
    options = {"rho_clip": 1.2, "c_clip": 1.1}
    brace = core.brace_targets(**batch, window=12, **options).targets
    assert not close(brace, core.vtrace_targets(**batch, **options).targets, 1e-3)
    batch["target_logprobs"] = batch["target_logprobs"].clone()
    batch["target_logprobs"][:, -1] = batch["behavior_logprobs"][:, -1]
    assert close(brace, core.vtrace_targets(**batch, **options).targets)


def test_brace_is_the_corrected_backup_applied_window_times():
    """U <- G - V; window times: U_t <- rho_t delta_t + gamma c_t U_{t+1} for t < T, U_T held."""
    batch = random_batch(7, rows=3, columns=20, holes=False)
    gamma, window = 0.95, 6
    w = (batch["target_logprobs"] - batch["behavior_logprobs"]).exp()
    values, rewards = batch["values"], batch["rewards"]
    following = torch.nn.functional.pad(values[:, 1:], (0, 1))
    delta = rewards + gamma * following - values
    returns = core.monte_carlo_targets(
        values=values, rewards=rewards, policy_mask=batch["policy_mask"], gamma=gamma
    ).targets
    u = returns - values
    for _ in range(window):
        backed_up = w.clamp(max=1.2) * delta + gamma * w.clamp(max=1.1) * torch.nn.functional.pad(u[:, 1:], (0, 1))
        u = torch.cat([backed_up[:, :-1], u[:, -1:]], 1)
    assert close(core.brace_targets(**batch, window=window, gamma=gamma).targets, values + u)


def test_last_policy_token_gets_its_reward_and_bootstrap():
    batch = random_batch(8, holes=False)
    batch["values"][:, -1] += 5.0
    assert close(core.brace_targets(**batch).targets[:, -1], batch["rewards"][:, -1])
    bootstrap = torch.tensor([0.0, 1.0, 2.0, -3.0], dtype=torch.float64)
    got = core.brace_targets(**batch, gamma=0.9, bootstrap_values=bootstrap)
    wanted = batch["rewards"][:, -1] + 0.9 * bootstrap
    assert close(got.targets[:, -1], wanted)
    assert close(got.advantages[:, -1], wanted - batch["values"][:, -1])


@every_estimator
def test_row_without_policy_tokens_gives_zeros_and_disturbs_nobody(estimator):
    batch = random_batch(9)
    before = estimate(estimator, batch, window=3)
    batch["policy_mask"][2] = False
    for x in ("values", "behavior_logprobs", "target_logprobs"):
        batch[x][2] = math.nan
    batch["rewards"][2] = 7.0
    after = estimate(estimator, batch, window=3)
    others = [0, 1, 3]
    for old, new in zip(before, after, strict=True):
        assert close(new[2], torch.zeros(12, dtype=torch.float64))
        assert close(new[others], old[others])


@every_estimator
def test_batch_without_any_policy_token_gives_zeros(estimator):
    batch = random_batch(10)
    batch["policy_mask"][:] = False
    got = estimate(estimator, batch, window=3)
    assert got.targets.abs().sum() == 0
    assert got.advantages.abs().sum() == 0


@every_estimator
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (1, 1)])
def test_tiny_shapes_are_served(estimator, shape):
    batch = {k: torch.ones(shape) for k in ("values", "rewards", "behavior_logprobs", "target_logprobs")} | {
        "policy_mask": torch.ones(shape, dtype=torch.bool)
    }
    got = estimate(estimator, batch, window=2)
    assert got.targets.shape == shape
    assert bool((got.targets == 1).all())


@every_estimator
def test_reward_on_a_tool_token_belongs_to_the_policy_token_before_it(estimator):
    batch = random_batch(11)
    mask = torch.tensor([1, 1, 0, 0, 1, 1, 1, 0, 1, 1, 0, 0], dtype=torch.bool)
    batch["policy_mask"] = mask.expand(4, -1).clone()
    batch["rewards"] = torch.zeros_like(batch["values"])
    moved = {k: v.clone() for k, v in batch.items()}
    batch["rewards"][:, [1, 6, 9]] = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    moved["rewards"][:, [2, 7, 11]] = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    for a, b in zip(estimate(estimator, batch, window=3), estimate(estimator, moved, window=3), strict=True):
        assert close(a, b)


def test_products_that_would_overflow_make_no_nan():
    """c_clip^window is far beyond float32; where the residuals are zero the target is V."""
    shape = (1, 300)
    batch = {
        "values": torch.full(shape, 0.5),
        "rewards": torch.zeros(shape),
        "behavior_logprobs": torch.zeros(shape),
        "target_logprobs": torch.full(shape, 5.0),
        "policy_mask": torch.ones(shape, dtype=torch.bool),
    }
    batch["rewards"][0, -1] = 0.5
    for clip in (100.0, math.inf):
        for name in ("brace", "capped", "vtrace"):
            got = estimate(name, batch, window=300, rho_clip=clip, c_clip=clip)
            assert torch.equal(got.targets, batch["values"]), (name, clip)
        each = torch.full(shape, 300)
        assert torch.equal(core.brace_targets(**batch, window=each, c_clip=clip).targets, batch["values"])


def test_extreme_ratio_at_the_last_token_is_never_read_by_brace():
    batch = {k: v.float() if v.is_floating_point() else v for k, v in random_batch(12, holes=False).items()}
    wanted = core.brace_targets(**batch, rho_clip=math.inf, c_clip=math.inf, window=3)
    batch["target_logprobs"][:, -1] = batch["behavior_logprobs"][:, -1] + 1000.0
    got = core.brace_targets(**batch, rho_clip=math.inf, c_clip=math.inf, window=3)
    assert torch.equal(got.targets, wanted.targets)


def test_window_weight_is_what_the_return_is_multiplied_with():
    """The derivative of the BRACE target by the terminal reward, where the reward is not inside the window."""
    batch = random_batch(13, rows=2, columns=30, holes=False)
    more = {k: v.clone() for k, v in batch.items()}
    more["rewards"][:, -1] += 1.0
    window, gamma, lam = 4, 0.97, 0.9
    options = {"window": window, "gamma": gamma, "lam": lam, "c_clip": 1.1}
    slope = core.brace_targets(**more, **options).targets - core.brace_targets(**batch, **options).targets
    ratios = {k: batch[k] for k in ("behavior_logprobs", "target_logprobs", "policy_mask")}
    weights = core.window_weights(**ratios, **options)
    left = torch.arange(29, -1, -1)
    tail = gamma ** (left - window).clamp(min=0).double()
    assert close(slope, weights * tail)


def test_without_a_critic_the_advantage_is_that_of_a_constant_critic():
    batch = random_batch(14)
    rewards = torch.zeros_like(batch["rewards"])
    last = (batch["policy_mask"] * torch.arange(12)).argmax(1)
    returns = torch.tensor([1.0, 0.0, 1.0, -0.5], dtype=torch.float64)
    rewards[torch.arange(4), last] = returns
    baselines = torch.tensor([0.25, 0.5, 0.75, 0.1], dtype=torch.float64)
    batch |= {"rewards": rewards, "values": baselines[:, None].expand(4, 12).clone()}
    ratios = {k: batch[k] for k in ("behavior_logprobs", "target_logprobs", "policy_mask")}
    for window in (0, 1, 3, 100):
        got = core.critic_free_advantages(**ratios, returns=returns, baselines=baselines, window=window)
        assert close(got, core.brace_targets(**batch, window=window).advantages), window
    plain = core.critic_free_advantages(**ratios, returns=returns, baselines=baselines, window=0)
    assert close(plain, (returns - baselines)[:, None] * batch["policy_mask"])
