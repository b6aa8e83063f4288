"""Exact figures on pairs that learning made: against enumeration of all responses, and where they are known."""

from __future__ import annotations

import pytest
import torch
from oracle_cases import Case, cases, conditional_moments, every_response, method

from brace_rl.oracle.exact import return_weights
from brace_rl.oracle.learn import Learner
from brace_rl.oracle.mdp import policy_values
from brace_rl.oracle.pairs import pair_figures, pair_rows
from brace_rl.oracle.presets import chain
from brace_rl.oracle.settings import LearnConfig

CASE = cases(6)[0]
TASK = chain(horizon=12, success=0.3)
CONFIG = LearnConfig(batch=8, seeds=3, critic_warmup=2)


def sampled_advantages(case: Case, name: str, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Advantage of every token of every response, the true one, and the probability of drawing it, up to a factor."""
    sample, token_probabilities = every_response(case)
    here = sample.paths.states
    baseline = values.flatten()[here]
    targets = sample.targets(method(name), values)
    following = torch.cat([targets[:, 1:], torch.zeros(len(targets), 1, dtype=torch.float64)], 1)
    advantages = sample.rewards + following - baseline  # Eq. 27
    if name.startswith("gae"):
        advantages = targets - baseline
    truth = policy_values(case.mdp, case.policies.target)
    onward = torch.cat([truth, torch.zeros(1, case.mdp.states, dtype=torch.float64)]).flatten()
    true = (
        sample.rewards
        + onward[case.mdp.successor.flatten()[here * case.mdp.actions + sample.paths.tokens % case.mdp.actions]]
    )
    weight = token_probabilities.prod(1, keepdim=True).expand_as(advantages)
    return advantages, true - truth.flatten()[here], weight


@pytest.mark.parametrize("name", ["mc", "gae:0.5", "vtrace", "capped:3", "brace:2"])
def test_bias_spread_and_correlation_are_those_over_all_responses(name: str) -> None:
    values = torch.rand(CASE.mdp.horizon, CASE.mdp.states, generator=torch.Generator().manual_seed(1)).double()
    found = pair_figures(CASE.mdp, CASE.policies, values, method(name), seed=0)
    advantages, true, weight = sampled_advantages(CASE, name, values)
    weight = weight / weight.sum()
    a, b = (x - (weight * x).sum() for x in (advantages, true))
    expected = (weight * a * b).sum() / ((weight * a * a).sum() * (weight * b * b).sum()).sqrt()
    assert found["correlation"] == pytest.approx(float(expected), abs=1e-9)
    sample, probabilities = every_response(CASE)
    error = sample.targets(method(name), values) - CASE.v_pi.flatten()[sample.paths.states]
    mean, variance = conditional_moments(CASE, error, probabilities, sample.paths.states)
    at = (weight * mean.flatten()[sample.paths.states].square()).sum().sqrt()
    assert found["bias"] == pytest.approx(float(at), abs=1e-9)
    assert found["spread"] == pytest.approx(
        float((weight * variance.flatten()[sample.paths.states]).sum().sqrt()), abs=1e-9
    )


@pytest.mark.parametrize("name", ["brace:2", "capped:4", "uncapped", "vtrace"])
def test_weight_of_the_return_is_what_the_target_moves_by_when_every_return_does(name: str) -> None:
    """With V = 0, rewards are all a target is made of; adding 1 to the last reward adds the weight of the return."""
    m = method(name)
    sample, probabilities = every_response(CASE)
    trace = (sample.target_logprobs - sample.behavior_logprobs).exp().clamp(max=m.c_clip)
    window = m.window if m.kind in ("brace", "capped") else CASE.mdp.horizon
    last = CASE.mdp.horizon - 1
    products = torch.stack([trace[:, s : min(s + window, last)].prod(1) for s in range(last + 1)], 1)
    mean, variance = conditional_moments(CASE, products, probabilities, sample.paths.states)
    exact = return_weights(CASE.mdp, CASE.policies, m)
    seen = ~mean.isnan()
    assert torch.allclose(exact.mean[seen], mean[seen])
    assert torch.allclose(exact.variance[seen], variance[seen], atol=1e-12)


def test_weight_of_the_return_is_one_for_the_return_and_decays_for_gae() -> None:
    assert (return_weights(CASE.mdp, CASE.policies, method("mc")).mean == 1).all()
    weights = return_weights(CASE.mdp, CASE.policies, method("gae:0.5")).mean[:, 0]
    assert weights.tolist() == [0.5**n for n in (5, 4, 3, 2, 1, 0)]


def test_a_perfect_critic_on_policy_gives_one_step_targets_their_best_advantage() -> None:
    learner = Learner(TASK, method("mc"), CONFIG)
    (policies, _), *_ = learner.pairs()
    truth = policy_values(TASK.mdp, policies.target)
    one_step = pair_figures(TASK.mdp, policies, truth, method("gae:0"), seed=0)
    assert one_step["correlation"] == pytest.approx(1.0)
    assert one_step["bias"] == pytest.approx(0.0, abs=1e-12)
    returned = pair_figures(TASK.mdp, policies, truth, method("mc"), seed=0)
    assert returned["correlation"] is not None
    assert 0.0 < returned["correlation"] < 0.9


def test_pairs_are_the_policies_and_critics_of_every_seed() -> None:
    learner = Learner(TASK, method("mc"), LearnConfig(batch=8, seeds=3, lag=2, critic_warmup=0))
    for _ in range(4):
        learner.step(train_actor=True)
    pairs = learner.pairs()
    assert len(pairs) == 3
    for seed, (policies, values) in enumerate(pairs):
        assert torch.equal(policies.target, TASK.mdp.policy(learner.actor[seed]))
        assert torch.equal(policies.sampler, TASK.mdp.policy(learner.snapshots[0][seed]))
        assert torch.equal(policies.sampler, policies.recorded)
        assert values.shape == (12, TASK.mdp.states)
    assert not torch.equal(pairs[0][1], pairs[1][1])


def test_rows_have_every_lag_and_method_and_know_the_ratios() -> None:
    rows = pair_rows(TASK, [method("mc"), method("brace:3"), method("path:1")], [0, 3], CONFIG, steps=6)
    assert [(row["lag"], row["method"]) for row in rows] == [
        (lag, name) for lag in (0, 3) for name in ("mc", "brace:3", "path:1")
    ]
    assert rows[0]["ratio_spread"] == 0.0 < rows[3]["ratio_spread"]
    assert rows[3]["mean_ratio"] == pytest.approx(1.0)
    assert len(rows[4]["correlation"]) == 3
    assert rows[5]["return_weight"] == [None] * 3
