"""The propositions of docs/theory.md, exact, by enumerating every response of a small token MDP.

Two tokens, four steps, a random reward at each of the sixteen leaves and two random policies: every expectation is a
sum over sixteen rows, computed by the library's own estimators.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from brace_rl import core

STEPS = 4
LEAVES = 2**STEPS
STATES = LEAVES - 1
WINDOWS = [0, 1, 2, 3, 4, 10]
SEEDS = [0, 1, 2]


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=0, atol=1e-10)


@dataclass
class TokenMdp:
    """All responses as rows; state ``[leaf, t]`` is the prefix of length t, numbered breadth first."""

    seed: int

    @cached_property
    def _tables(self) -> tuple[Tensor, Tensor, Tensor]:
        g = torch.Generator().manual_seed(self.seed)
        pi, mu = (torch.randn(STATES, 2, generator=g, dtype=torch.float64).log_softmax(1) for _ in range(2))
        return pi, mu, torch.randn(LEAVES, generator=g, dtype=torch.float64)

    @cached_property
    def states(self) -> Tensor:
        leaf, t = torch.arange(LEAVES)[:, None], torch.arange(STEPS)
        return 2**t - 1 + (leaf >> (STEPS - t))

    @cached_property
    def actions(self) -> Tensor:
        return (torch.arange(LEAVES)[:, None] >> (STEPS - 1 - torch.arange(STEPS))) & 1

    @property
    def reward(self) -> Tensor:
        return self._tables[2]

    def logprobs(self, which: str) -> Tensor:
        return self._tables[0 if which == "pi" else 1][self.states, self.actions]

    def batch(self, state_values: Tensor) -> dict[str, Tensor]:
        rewards = torch.zeros(LEAVES, STEPS, dtype=torch.float64)
        rewards[:, -1] = self.reward
        return {
            "values": state_values[self.states],
            "rewards": rewards,
            "behavior_logprobs": self.logprobs("mu"),
            "target_logprobs": self.logprobs("pi"),
            "policy_mask": torch.ones(LEAVES, STEPS, dtype=torch.bool),
        }

    def mean_under_mu(self, x: Tensor) -> Tensor:
        """``[STATES]``: E_mu[x_s | s] of a figure ``[LEAVES, STEPS]`` of the path from s on."""
        log_mu = self.logprobs("mu")
        onward = log_mu.flip(1).cumsum(1).flip(1).exp()
        return torch.zeros(STATES, dtype=torch.float64).index_add_(0, self.states.flatten(), (onward * x).flatten())

    def value(self, step_logprobs: Tensor, gamma: float = 1.0) -> Tensor:
        """``[STATES]`` exact value of the policy with the given log-probs ``[LEAVES, STEPS]`` along the paths."""
        onward = step_logprobs.flip(1).cumsum(1).flip(1).exp()
        discount = gamma ** torch.arange(STEPS - 1, -1, -1, dtype=torch.float64)
        paths = onward * discount * self.reward[:, None]
        # Paths through a state are summed; each later choice has been weighed by its probability.
        return torch.zeros(STATES, dtype=torch.float64).index_add_(0, self.states.flatten(), paths.flatten())

    def truncated_policy(self, rho_clip: float) -> Tensor:
        """Log-probs along the paths of ``pi_rho ~ min(rho_clip mu, pi)``."""
        pi, mu, _ = self._tables
        weights = torch.minimum(rho_clip * mu.exp(), pi.exp())
        return (weights / weights.sum(1, keepdim=True)).log()[self.states, self.actions]

    def mean_target(self, state_values: Tensor, estimator: str, **options: float) -> Tensor:
        function = getattr(core, f"{estimator}_targets")
        return self.mean_under_mu(function(**self.batch(state_values), **options).targets)

    def mean_target_map(self, estimator: str, **options: float) -> tuple[Tensor, Tensor]:
        """The mean target is affine in V: ``M V + b``."""
        b = self.mean_target(torch.zeros(STATES, dtype=torch.float64), estimator, **options)
        columns = [self.mean_target(e, estimator, **options) - b for e in torch.eye(STATES, dtype=torch.float64)]
        return torch.stack(columns, 1), b

    def fixed_point(self, estimator: str, **options: float) -> Tensor:
        matrix, b = self.mean_target_map(estimator, **options)
        return torch.linalg.solve(torch.eye(STATES, dtype=torch.float64) - matrix, b)


@pytest.fixture(params=SEEDS)
def mdp(request: pytest.FixtureRequest) -> TokenMdp:
    return TokenMdp(request.param)


def test_enumeration_agrees_with_backward_induction(mdp):
    """The yardstick itself: V^mu by the Bellman equation."""
    _, mu, reward = mdp._tables
    values = torch.zeros(STATES, dtype=torch.float64)
    for s in range(STATES - 1, -1, -1):
        children = [reward[2 * s + 1 + a - STATES] if 2 * s + 1 >= STATES else values[2 * s + 1 + a] for a in (0, 1)]
        values[s] = sum(mu[s, a].exp() * children[a] for a in (0, 1))
    assert close(mdp.value(mdp.logprobs("mu")), values)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_monte_carlo_fixes_the_value_of_the_behaviour_policy(mdp, gamma):
    v_mu = mdp.value(mdp.logprobs("mu"), gamma)
    options = {"window": 0, "gamma": gamma}
    assert close(mdp.fixed_point("brace", **options), v_mu)
    anywhere = torch.linspace(-3, 3, STATES, dtype=torch.float64)
    assert close(mdp.mean_target(anywhere, "brace", **options), v_mu)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_capped_fixes_the_value_of_the_truncated_policy_whatever_the_window(mdp, window, gamma):
    options = {"window": window, "gamma": gamma, "rho_clip": 1.2, "c_clip": 1.1}
    wanted = mdp.value(mdp.truncated_policy(1.2), gamma)
    assert close(mdp.fixed_point("capped", **options), wanted)


def test_vtrace_fixes_the_value_of_the_truncated_policy_and_without_a_cap_that_of_pi(mdp):
    assert close(mdp.fixed_point("vtrace"), mdp.value(mdp.truncated_policy(1.2)))
    assert close(mdp.fixed_point("vtrace", rho_clip=1.0, c_clip=1.0), mdp.value(mdp.truncated_policy(1.0)))
    assert close(mdp.fixed_point("vtrace", rho_clip=math.inf, c_clip=1.0), mdp.value(mdp.logprobs("pi")))


@pytest.mark.parametrize("window", WINDOWS)
def test_the_mean_target_looks_forward_only_and_its_fixed_point_is_unique(mdp, window):
    """I - M is triangular by time, with E_mu[rho_s] > 0 (1 with no window or no token left) on its diagonal."""
    matrix, _ = mdp.mean_target_map("brace", window=window, rho_clip=1.2)
    time = torch.tensor([s.bit_length() - 1 for s in range(1, STATES + 1)])
    other = ~torch.eye(STATES, dtype=torch.bool)
    assert close(matrix[(time[:, None] >= time) & other], torch.zeros(()).double())
    rho = (mdp.logprobs("pi") - mdp.logprobs("mu")).exp().clamp(max=1.2)
    expected = mdp.mean_under_mu(rho) if window else torch.ones(STATES, dtype=torch.float64)
    expected = torch.where(time == STEPS - 1, 1.0, expected)
    assert close(1 - matrix.diagonal(), expected)
    assert bool((expected > 0).all())


@pytest.mark.parametrize("window", WINDOWS)
def test_repeated_regression_converges_to_the_fixed_point(mdp, window):
    options = {"window": window, "rho_clip": 1.2, "c_clip": 1.1}
    values = torch.zeros(STATES, dtype=torch.float64)
    for _ in range(200):
        values = mdp.mean_target(values, "brace", **options)
    assert close(values, mdp.fixed_point("brace", **options))


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("lam", [1.0, 0.8])
def test_one_application_moves_the_windows_fixed_point_by_at_most_theta_times_the_gap(mdp, gamma, lam):
    v_rho = mdp.value(mdp.truncated_policy(1.2), gamma)
    gap = mdp.value(mdp.logprobs("mu"), gamma) - v_rho
    ratios = {k: v for k, v in mdp.batch(v_rho).items() if k not in ("values", "rewards")}
    previous = None
    for window in WINDOWS:
        options = {"window": window, "c_clip": 1.1, "gamma": gamma, "lam": lam}
        weights = core.window_weights(**ratios, **options)
        moved = mdp.mean_target(v_rho, "brace", rho_clip=1.2, **options) - v_rho
        arrival = torch.clamp(torch.arange(STEPS) + window, max=STEPS - 1)
        handed_over = weights * gap[mdp.states[:, arrival]]
        assert close(moved, mdp.mean_under_mu(handed_over)), "the offset is the weighted gap at the window's end"
        theta = mdp.mean_under_mu(weights).max()
        assert moved.abs().max() <= theta * gap.abs().max() + 1e-12
        if previous is None:
            assert close(theta, torch.ones((), dtype=torch.float64))
        else:
            assert theta <= previous + 1e-12
        previous = theta


def test_theta_falls_strictly_once_the_cap_bites(mdp):
    ratios = {k: v for k, v in mdp.batch(torch.zeros(STATES).double()).items() if k not in ("values", "rewards")}
    theta = [mdp.mean_under_mu(core.window_weights(**ratios, window=k, c_clip=1.0)).max() for k in (0, 1)]
    at_root = [mdp.mean_under_mu(core.window_weights(**ratios, window=k, c_clip=1.0))[0] for k in (0, 1, 2, 3)]
    assert theta[1] <= theta[0]
    assert all(later < sooner for sooner, later in pairwise(at_root))


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from([0.5, 1.0, 1.1, 3.0, math.inf]),
    st.sampled_from([1.0, 0.9]),
    st.sampled_from([1.0, 0.8]),
)
def test_theta_starts_at_one_and_never_rises_with_the_window(seed, c_clip, gamma, lam):
    """At every state, hence also for the largest; for any two policies and any cap."""
    mdp = TokenMdp(seed)
    ratios = {k: v for k, v in mdp.batch(torch.zeros(STATES).double()).items() if k not in ("values", "rewards")}
    options = {"c_clip": c_clip, "gamma": gamma, "lam": lam}
    means = [mdp.mean_under_mu(core.window_weights(**ratios, window=k, **options)) for k in range(STEPS + 2)]
    assert close(means[0], torch.ones(STATES).double())
    assert all(bool((later <= sooner + 1e-12).all()) for sooner, later in pairwise(means))


@pytest.mark.parametrize("window", WINDOWS)
def test_with_exact_ratios_the_mean_target_follows_pi_for_the_window_and_then_mu(mdp, window):
    """Whatever V is. The last token is always mu's: its residual is not reweighted."""
    any_values = torch.linspace(-2, 5, STATES, dtype=torch.float64)
    got = mdp.mean_target(any_values, "brace", window=window, rho_clip=math.inf, c_clip=math.inf)
    for start in range(STEPS):
        follows_pi = (torch.arange(STEPS) < min(start + window, STEPS - 1)).expand(LEAVES, -1)
        mixed = mdp.value(torch.where(follows_pi, mdp.logprobs("pi"), mdp.logprobs("mu")))
        at_start = torch.arange(2**start - 1, 2 ** (start + 1) - 1)
        assert close(got[at_start], mixed[at_start])


@pytest.mark.parametrize("budget", [0.0, 0.4, 1.0])
def test_path_windows_leave_the_windows_fixed_point_in_place(mdp, budget):
    """They are stopping times: at V^{pi_rho} the mean target moves by the weighted gap at the window's end, no more."""
    v_rho = mdp.value(mdp.truncated_policy(1.2))
    gap = mdp.value(mdp.logprobs("mu")) - v_rho
    batch = mdp.batch(v_rho)
    ratios = {k: v for k, v in batch.items() if k not in ("values", "rewards")}
    windows = core.path_windows(**ratios, budget=budget, c_clip=1.1)
    targets = core.brace_targets(**batch, window=windows, rho_clip=1.2, c_clip=1.1).targets
    weights = core.window_weights(**ratios, window=windows, c_clip=1.1)
    arrival = torch.arange(STEPS) + windows
    handed_over = weights * gap[mdp.states.gather(1, arrival)]
    assert close(mdp.mean_under_mu(targets) - v_rho, mdp.mean_under_mu(handed_over))
