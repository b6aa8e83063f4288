"""The exact figures of the oracle, against full enumeration, against the theory, and against sampled targets."""

from __future__ import annotations

import math

import pytest
import torch
from oracle_cases import EXACT_METHODS, Case, cases, conditional_moments, every_response, method
from torch import Tensor

from brace_rl.oracle.exact import (
    drift,
    fixed_point,
    followed_then_sampled,
    offset_curve,
    resolved_window,
    target_moments,
    window_weights,
)
from brace_rl.oracle.mdp import policy_values, state_distribution
from brace_rl.oracle.presets import chain, stale_policies
from brace_rl.oracle.sampling import draw_sample
from brace_rl.oracle.targets import Responses, sampled_windows

SMALL = cases(6)
LONGER = cases(12)
BY_NAME = [pytest.param(case, id=case.name) for case in SMALL]
LONG_BY_NAME = [pytest.param(case, id=case.name) for case in LONGER]
LONG_SAFE = [pytest.param(case, id=case.name) for case in LONGER if case.name != "mismatch"]
WINDOWS = [0, 1, 5, 11, 12, 100]


def close(a: Tensor, b: Tensor, tolerance: float = 1e-9) -> bool:
    return torch.allclose(a, b, rtol=0, atol=tolerance)


def critic(case: Case, seed: int) -> Tensor:
    shape = (case.mdp.horizon, case.mdp.states)
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def regressed(case: Case, name: str, start: Tensor) -> Tensor:
    """Replace V by its own mean target until it stays."""
    values = start
    for _ in range(400):
        mean = target_moments(case.mdp, case.policies, method(name), values).mean
        settled, values = bool((mean - values).abs().max() < 1e-11), mean
        if settled:
            break
    return values


@pytest.mark.parametrize("case", BY_NAME)
@pytest.mark.parametrize("name", EXACT_METHODS)
def test_mean_and_variance_of_a_target_are_those_over_all_responses(case: Case, name: str) -> None:
    values = critic(case, 0)
    sample, probabilities = every_response(case)
    m = method(name)
    if m.kind == "drift":  # one window for the batch: that of the exact drift, not that of the enumerated rows
        m = method(f"brace:{resolved_window(case.mdp, case.policies, m)}")
    targets = sample.targets(m, values)
    mean, variance = conditional_moments(case, targets, probabilities, sample.paths.states)
    exact = target_moments(case.mdp, case.policies, method(name), values)
    seen = ~mean.isnan()
    assert seen.sum() >= case.mdp.horizon
    assert close(exact.mean[seen], mean[seen])
    assert close(exact.variance[seen], variance[seen])


@pytest.mark.parametrize("case", BY_NAME)
def test_values_and_state_distribution_are_those_over_all_responses(case: Case) -> None:
    sample, probabilities = every_response(case)
    weight = probabilities.prod(1)
    assert close(weight.sum(), torch.tensor(1.0, dtype=torch.float64))
    assert close((weight * sample.rewards.sum(1)).sum(), case.v_mu[0, case.mdp.start])
    reached = torch.zeros(case.mdp.horizon * case.mdp.states, dtype=torch.float64)
    reached.index_add_(0, sample.paths.states.flatten(), weight[:, None].expand_as(probabilities).flatten())
    assert close(reached.view(case.mdp.horizon, -1), state_distribution(case.mdp, case.policies.sampler))


@pytest.mark.parametrize("case", LONG_BY_NAME)
@pytest.mark.parametrize("name", EXACT_METHODS)
def test_mean_of_many_sampled_targets_is_the_exact_mean_within_four_standard_errors(case: Case, name: str) -> None:
    values = critic(case, 1)
    sample = draw_sample(case.mdp, case.policies, paths=4000, seed=2)
    mean, variance, visits = sample.moments(method(name), values)
    if method(name).kind == "drift":
        values_exact = target_moments(case.mdp, case.policies, method(f"brace:{batch_window(sample)}"), values)
    else:
        values_exact = target_moments(case.mdp, case.policies, method(name), values)
    often = visits >= 400
    assert often.sum() >= case.mdp.horizon
    allowed = 4 * (variance / visits).sqrt() + 1e-12
    assert ((mean - values_exact.mean).abs() <= allowed)[often].all()


def batch_window(sample: object) -> int:
    responses = Responses(sample.rewards, sample.rewards, sample.behavior_logprobs, sample.target_logprobs)  # type: ignore[attr-defined]
    windows = sampled_windows(method("drift:0.5"), responses, groups=1)
    assert windows is not None
    return int(windows[0, 0])


@pytest.mark.parametrize("case", LONG_BY_NAME)
@pytest.mark.parametrize("name", EXACT_METHODS)
def test_regression_reaches_the_same_fixed_point_from_anywhere(case: Case, name: str) -> None:
    stays = fixed_point(case.mdp, case.policies, method(name))
    for seed in (3, 4):
        assert close(regressed(case, name, critic(case, seed)), stays, 1e-8)


@pytest.mark.parametrize("case", LONG_BY_NAME)
@pytest.mark.parametrize("name", ["mc", "gae:1", "gae:0.5", "brace:0"])
def test_critic_regressed_on_returns_ends_at_the_value_of_the_sampler(case: Case, name: str) -> None:
    assert close(regressed(case, name, critic(case, 5)), case.v_mu)
    assert not close(case.v_mu, case.v_pi, 0.01)


@pytest.mark.parametrize("case", LONG_BY_NAME)
@pytest.mark.parametrize("name", ["capped:1", "capped:5", "capped:99", "uncapped"])
def test_critic_regressed_on_a_window_ends_at_the_value_of_the_truncated_policy(case: Case, name: str) -> None:
    assert close(regressed(case, name, critic(case, 6)), case.v_pi_rho, 1e-8)


@pytest.mark.parametrize("case", LONG_BY_NAME)
def test_brace_ends_between_sampler_and_truncated_policy_and_moves_over_as_its_window_grows(case: Case) -> None:
    reached = state_distribution(case.mdp, case.policies.sampler)
    fixed = [fixed_point(case.mdp, case.policies, method(f"brace:{k}")) for k in (0, 1, 3, 6, 12)]
    means = torch.stack([(reached * v).sum() for v in fixed])
    low, high = sorted([(reached * case.v_mu).sum(), (reached * case.v_pi_rho).sum()])
    assert close(means[0], (reached * case.v_mu).sum())
    assert ((means >= low - 1e-12) & (means <= high + 1e-12)).all()
    towards = (means - (reached * case.v_pi_rho).sum()).abs()
    assert (towards.diff() < 0).all()


@pytest.mark.parametrize("case", LONG_SAFE)
def test_theta_is_one_without_a_window_and_never_grows_where_log_probs_are_true(case: Case) -> None:
    theta = offset_curve(case.mdp, case.policies, method("brace")).theta
    assert float(theta[0]) == 1.0
    assert (theta.diff() <= 1e-12).all()


def test_theta_grows_where_recorded_log_probs_make_the_mean_ratio_exceed_one() -> None:
    case = next(case for case in LONGER if case.name == "mismatch")
    assert float(offset_curve(case.mdp, case.policies, method("brace")).theta.max()) > 1.005


@pytest.mark.parametrize("case", LONG_BY_NAME)
@pytest.mark.parametrize("clips", [{}, {"rho_clip": math.inf, "c_clip": math.inf}, {"rho_clip": 0.9, "c_clip": 0.8}])
def test_offset_bound_holds_for_every_window(case: Case, clips: dict[str, float]) -> None:
    curve = offset_curve(case.mdp, case.policies, method("brace", **clips))
    assert len(curve.measured) == case.mdp.horizon + 1
    assert curve.gap > 0.01
    assert (curve.measured <= curve.theta * curve.gap + 1e-12).all()
    assert abs(float(curve.measured[0]) - curve.gap) < 1e-12


@pytest.mark.parametrize("case", LONG_BY_NAME)
@pytest.mark.parametrize("window", WINDOWS)
def test_measured_offset_and_theta_are_those_of_the_target_itself(case: Case, window: int) -> None:
    curve = offset_curve(case.mdp, case.policies, method("brace"))
    mean = target_moments(case.mdp, case.policies, method(f"brace:{window}"), case.v_pi_rho).mean
    moved = (mean - case.v_pi_rho)[case.reachable].abs().max()
    k = min(window, case.mdp.horizon)
    assert close(curve.measured[k], moved)
    weights = window_weights(case.mdp, case.policies, window=window, c_clip=1.1)
    assert close(curve.theta[k], weights[case.reachable].max())


@pytest.mark.parametrize("case", LONG_SAFE)
@pytest.mark.parametrize("window", WINDOWS)
def test_without_caps_the_mean_target_follows_pi_for_the_window_and_then_mu(case: Case, window: int) -> None:
    m = method(f"brace:{window}", rho_clip=math.inf, c_clip=math.inf)
    followed = followed_then_sampled(case.mdp, case.policies, window=window)
    for seed in (7, 8):  # whatever the critic
        assert close(target_moments(case.mdp, case.policies, m, critic(case, seed)).mean, followed)


@pytest.mark.parametrize("name", EXACT_METHODS)
def test_on_policy_every_target_ends_at_the_value_of_pi(name: str) -> None:
    preset = chain(horizon=20, success=0.2)
    policies = stale_policies(preset, 0)
    assert close(fixed_point(preset.mdp, policies, method(name)), policy_values(preset.mdp, policies.target))


def test_mean_ratio_is_one_under_true_log_probs_and_above_one_under_mismatch() -> None:
    for case in LONGER:
        largest = drift(case.mdp, case.policies, c_clip=1.1).largest_mean_ratio
        if case.name == "mismatch":
            assert largest > 1.001
        else:
            assert close(case.policies.mean_ratio, torch.ones_like(case.policies.mean_ratio), 1e-12)


def test_drift_is_that_of_many_samples() -> None:
    case = LONGER[0]
    sample = draw_sample(case.mdp, case.policies, paths=4000, seed=9)
    logs = (sample.target_logprobs - sample.behavior_logprobs).clamp(max=math.log(1.1))
    exact = drift(case.mdp, case.policies, c_clip=1.1)
    assert abs(float(logs.mean()) - exact.mean) < 4 * exact.deviation / math.sqrt(logs.numel())
    assert abs(float(logs.std()) / exact.deviation - 1) < 0.05


def test_path_windows_have_no_recursion_and_say_so() -> None:
    case = SMALL[0]
    with pytest.raises(ValueError, match="depend on the path ahead"):
        target_moments(case.mdp, case.policies, method("path:1"), case.v_mu)


def test_path_windows_without_a_limit_are_brace_over_the_whole_response() -> None:
    case = LONGER[0]
    sample, values = draw_sample(case.mdp, case.policies, paths=200, seed=10), critic(case, 11)
    unlimited = sample.moments(method("path:1e9"), values)
    full = sample.moments(method("brace:99"), values)
    seen = full.visits > 0
    assert close(unlimited.mean[seen], full.mean[seen])
    assert close(unlimited.variance[seen], full.variance[seen])


def test_sampled_fixed_point_is_the_exact_one_within_its_noise() -> None:
    case = LONGER[0]
    sample = draw_sample(case.mdp, case.policies, paths=8000, seed=12)
    found = sample.fixed_point(method("brace:6"), case.v_mu)
    exact = fixed_point(case.mdp, case.policies, method("brace:6"))
    variance = target_moments(case.mdp, case.policies, method("brace:6"), exact).variance
    assert abs(float(found[0, 0] - exact[0, 0])) < 4 * math.sqrt(float(variance[0, 0]) / 8000)


def test_variance_stays_a_variance_over_two_thousand_tokens() -> None:
    preset = chain(horizon=2048)
    policies = stale_policies(preset, 30)
    values = policy_values(preset.mdp, policies.sampler)
    moments = target_moments(preset.mdp, policies, method("brace:100"), values)
    assert moments.variance.isfinite().all()
    assert (moments.variance >= 0).all()
    returns = target_moments(preset.mdp, policies, method("mc"), values).variance
    assert close(returns, values * (1 - values), 1e-9)  # the return is 0 or 1
