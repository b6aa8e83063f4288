"""Learning on an oracle: the lag is exact, seeds are apart, and a critic fitted to samples ends where theory says."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from brace_rl import core
from brace_rl.errors import BraceError
from brace_rl.oracle.engine import Engine
from brace_rl.oracle.exact import fixed_point
from brace_rl.oracle.learn import Learner, critic_cells, learn, whiten_each
from brace_rl.oracle.mdp import Policies, policy_values, state_distribution
from brace_rl.oracle.methods import AUTOMATIC, PARAMETERS, parse_method
from brace_rl.oracle.presets import PRESETS, chain, make_preset
from brace_rl.oracle.sampling import Steps, draw_paths
from brace_rl.oracle.settings import LearnConfig
from brace_rl.oracle.sweep import best_fixed, boundary_map, cap_gain, curves, interval, paired
from brace_rl.quantiles import student_quantile

QUICK = LearnConfig(steps=12, batch=8, lag=3, seeds=3, eval_every=4, critic_warmup=2)
TASK = chain(horizon=12, success=0.3)


@pytest.mark.parametrize("lag", [0, 1, 4])
def test_every_batch_is_drawn_from_the_weights_exactly_lag_steps_old(lag: int) -> None:
    learner = Learner(TASK, parse_method("mc"), replace(QUICK, lag=lag))
    weights = [learner.actor.detach().clone()]
    for step in range(10):
        assert torch.equal(learner.snapshots[0], weights[max(0, step - lag)])
        learner.step(train_actor=True)
        weights.append(learner.actor.detach().clone())
    assert not torch.equal(weights[0], weights[-1])


def test_ratios_are_one_without_lag_and_not_with_it() -> None:
    assert learn(TASK, parse_method("mc"), replace(QUICK, lag=0)).ratio_spread == 0.0
    assert learn(TASK, parse_method("mc"), QUICK).ratio_spread > 0.0


@pytest.mark.parametrize("name", ["uncapped", "vtrace", "capped:3", "brace:3", "drift:0.1", "path:1"])
def test_without_lag_every_target_learns_as_monte_carlo_does(name: str) -> None:
    config = replace(QUICK, lag=0, steps=6)
    plain, other = (learn(TASK, parse_method(m), config).success for m in ("mc", name))
    assert torch.allclose(plain, other, atol=1e-3)
    assert (plain[-1] - plain[0]).abs().max() > 0.01


def test_warmup_leaves_the_actor_alone() -> None:
    curve = learn(TASK, parse_method("brace:3"), replace(QUICK, critic_warmup=12))
    assert torch.equal(curve.success[0], curve.success[-1])


@pytest.mark.parametrize("preset", list(PRESETS))
@pytest.mark.parametrize("kind", list(PARAMETERS))
def test_every_method_learns_on_every_preset_repeatably(preset: str, kind: str) -> None:
    task = make_preset(preset, horizon=8, success=0.3)
    first, second = (learn(task, parse_method(kind), replace(QUICK, steps=5)) for _ in range(2))
    assert torch.equal(first.success, second.success)
    assert first.success.isfinite().all()
    assert first.success.shape == (3, 3)
    assert (first.mean_window is not None) == (kind in AUTOMATIC)


def test_an_easy_task_is_learnt() -> None:
    curve = learn(TASK, parse_method("brace:3"), replace(QUICK, steps=80, lag=2, batch=16))
    assert curve.success[0] == pytest.approx([0.3] * 3, abs=1e-6)
    assert float(curve.final.mean()) > 0.75
    assert float(curve.area.min()) > 0.35


@pytest.mark.parametrize("name", ["mc", "uncapped", "brace:4"])
def test_critic_fitted_to_sampled_targets_ends_at_the_exact_fixed_point(name: str) -> None:
    # The engine's temperature keeps sampler and policy apart for good; the actor stands still.
    task = chain(horizon=8, success=0.3, engine=Engine(temperature=1.5))
    config = LearnConfig(
        steps=500, batch=64, lag=0, seeds=4, critic_lr=0.01, critic_bins=8, critic_warmup=500, eval_every=500
    )
    learner = Learner(task, parse_method(name), config)
    values = []
    for step in range(config.steps):
        learner.step(train_actor=False)
        if step >= config.steps // 2:
            values.append(learner.critic.detach()[:, task.mdp.start].mean())
    policies = Policies(*(task.mdp.policy(task.logits / t) for t in (1.0, 1.5, 1.5)))
    exact = fixed_point(task.mdp, policies, parse_method(name))
    assert float(torch.stack(values).mean()) == pytest.approx(float(exact[0, task.mdp.start]), abs=0.02)
    sampled, judged = (float(policy_values(task.mdp, p)[0, 0]) for p in (policies.sampler, policies.target))
    assert judged - sampled > 0.12  # so that 0.02 tells the fixed points apart


def test_critic_gap_is_the_critic_minus_the_exact_value() -> None:
    learner = Learner(TASK, parse_method("mc"), QUICK)
    learner.step(train_actor=True)
    zero = torch.zeros(3, 12, TASK.mdp.states, dtype=torch.float64)
    gaps, critic = learner.critic_gaps(learner.policy_values()), learner.critic_gaps(zero)
    assert gaps.shape == (3, 8 * 12)
    start = critic[:, 0] - gaps[:, 0]  # the first token of the first response is at the start
    assert torch.allclose(start, learner.success())


def test_target_gap_is_the_target_minus_the_exact_value() -> None:
    learner = Learner(TASK, parse_method("mc"), QUICK)
    with pytest.raises(ValueError, match="no batch has been drawn yet"):
        learner.target_gaps(learner.policy_values())
    learner.step(train_actor=True)
    returns = learner.target_gaps(torch.zeros(3, 12, TASK.mdp.states, dtype=torch.float64)).view(3, 8, 12)
    assert set(returns.unique().tolist()) <= {0.0, 1.0}
    assert torch.equal(returns, returns[..., -1:].expand_as(returns))
    assert learner.target_gaps(learner.policy_values()).mean() != returns.mean()


@pytest.mark.parametrize("preset", list(PRESETS))
def test_tokens_drawn_are_those_of_the_policy(preset: str) -> None:
    # The chain's tokens are drawn all at once, those of a task whose observations hang on the state one by one.
    task = make_preset(preset, horizon=6, success=0.3)
    steps = Steps.of(task.mdp)
    assert (steps.seen is None) == (preset == "branch")
    logits = torch.randn(2, *task.logits.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    paths = draw_paths(steps, logits, batch=4000, generator=torch.Generator().manual_seed(4))
    for table in range(2):
        states, tokens = (x[table * 4000 : (table + 1) * 4000] for x in paths)
        policy = task.mdp.policy(logits[table])
        entry = states * task.mdp.actions + tokens % task.mdp.actions
        reached = state_distribution(task.mdp, policy)
        expected = (reached[..., None] * policy).flatten()
        found = torch.zeros_like(expected).index_add_(
            0, entry.flatten(), torch.full((entry.numel(),), 1 / 4000.0).double()
        )
        allowed = 5 * (expected * (1 - expected) / 4000).sqrt() + 1e-9
        assert ((found - expected).abs() <= allowed).all()
        flat = task.mdp.next_state.flatten()[entry[:, :-1]] + torch.arange(1, 6) * task.mdp.states
        assert torch.equal(flat, states[:, 1:])
        observed = task.mdp.observations.flatten()[states] + table * task.logits.shape[0]
        assert torch.equal(observed, tokens // task.mdp.actions)


def test_critic_cells_tell_states_apart_and_stretches_of_positions() -> None:
    cells = critic_cells(TASK.mdp, 3).view(12, TASK.mdp.states)
    assert torch.equal(cells[0], cells[3])
    assert not torch.equal(cells[3], cells[4])
    assert len(cells[0].unique()) == TASK.mdp.states
    assert int(critic_cells(TASK.mdp, 1000).max()) + 1 == 12 * TASK.mdp.states


def test_seeds_are_whitened_apart() -> None:
    advantages = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 7)[:, None]
    mask = torch.ones(2, 5, dtype=torch.bool)
    apart = torch.cat([core.whiten(group, mask) for group in advantages.split(2)])
    assert torch.allclose(whiten_each(advantages, 3), apart, atol=1e-6)


def test_noise_recorded_as_sampled_widens_ratios_and_a_noisy_record_raises_their_mean() -> None:
    generator = torch.Generator().manual_seed(1)
    weights = torch.zeros(4000, 1, 3, dtype=torch.float64)
    pi = weights.softmax(-1)
    for engine, expected in ((Engine(noise=0.5), 1.0), (Engine(recorded_noise=0.5), None)):
        sampled, recorded = (x.softmax(-1) for x in engine.logits(weights, generator))
        mean_ratio = (sampled * pi / recorded).sum(-1)
        assert float((pi / recorded).log().std()) > 0.3
        if expected is None:
            assert float(mean_ratio.mean()) > 1.1
        else:
            assert torch.allclose(mean_ratio, torch.ones_like(mean_ratio))


@pytest.mark.parametrize("preset", list(PRESETS))
@pytest.mark.parametrize("horizon", [8, 50])
def test_presets_start_from_the_same_success_at_every_horizon(preset: str, horizon: int) -> None:
    task = make_preset(preset, horizon=horizon, success=0.1)
    assert float(policy_values(task.mdp, task.mdp.policy(task.logits))[0, task.mdp.start]) == pytest.approx(0.1)


def test_a_start_that_cannot_be_had_is_an_error() -> None:
    with pytest.raises(BraceError, match="cannot be had from a response of 2 tokens"):
        make_preset("branch", horizon=2, success=0.1)


def test_branch_success_hangs_on_the_first_token() -> None:
    task = make_preset("branch", horizon=40)
    values = policy_values(task.mdp, task.mdp.policy(task.logits))
    after_first = values[1, task.mdp.next_state[0, task.mdp.start]]
    assert float(after_first[0]) > 4 * float(after_first[1:].max())


def test_curves_come_lag_by_lag_with_means_over_seeds() -> None:
    methods = [parse_method("mc"), parse_method("brace:3")]
    rows = list(curves(TASK, methods, [0, 2], QUICK))
    assert [(row["lag"], row["method"]) for row in rows] == [(0, "mc"), (0, "brace:3"), (2, "mc"), (2, "brace:3")]
    assert rows[0]["steps"] == [0, 4, 8, 12]
    again = learn(TASK, methods[1], replace(QUICK, lag=2))
    assert rows[3]["success"] == pytest.approx(again.success.mean(1).tolist())
    assert rows[3]["area"] == pytest.approx(again.area.tolist())


def test_map_has_a_cell_for_every_lag_horizon_and_noise() -> None:
    cells = list(
        boundary_map(
            lambda horizon: chain(horizon=horizon, success=0.3),
            [parse_method("uncapped"), parse_method("brace:3")],
            lags=[0, 2],
            horizons=[6, 8],
            noises=[0.0, 0.3],
            config=replace(QUICK, steps=4),
        )
    )
    assert len({(cell["lag"], cell["horizon"], cell["noise"]) for cell in cells}) == 8
    spread = {(cell["lag"], cell["noise"]): cell["ratio_spread"] for cell in cells}
    assert spread[0, 0.0] == 0.0 < spread[0, 0.3]


def test_cap_gain_is_the_paired_difference_and_the_best_fixed_method_chooses_no_window() -> None:
    cell = {"area": {"uncapped": [0.1, 0.2, 0.3], "brace:100": [0.2, 0.3, 0.4], "path:1": [0.9, 0.9, 0.9]}}
    mean, half = cap_gain(cell, method="brace:100", baseline="uncapped")
    assert mean == pytest.approx(0.1)
    assert half == pytest.approx(0.0, abs=1e-12)
    assert best_fixed(cell) == "brace:100"
    with pytest.raises(BraceError, match="has no method 'mc'"):
        cap_gain(cell, method="mc", baseline="uncapped")


@pytest.mark.parametrize(
    ("degrees", "expected"),  # the usual printed table
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (19, 2.093), (29, 2.045), (99, 1.984)],
)
def test_student_quantile_is_that_of_the_table(degrees: int, expected: float) -> None:
    assert student_quantile(degrees) == pytest.approx(expected, abs=5e-3)


def test_interval_by_hand() -> None:
    mean, half = interval(torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]], dtype=torch.float64))
    assert float(mean) == 3.0
    assert float(half) == pytest.approx(2.776 * math.sqrt(2.5 / 5), abs=1e-3)  # t(4) times sd / sqrt(n)
    assert paired([1.0, 2.0], [0.0, 1.0]) == pytest.approx((1.0, 0.0))
