"""Small oracles that the tests share: every preset, with a pair of policies far enough apart to matter."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from brace_rl.oracle.mdp import Policies, TokenMDP, policy_values, state_distribution, truncated_policy
from brace_rl.oracle.methods import Method, parse_method
from brace_rl.oracle.presets import branch, chain, mismatch, stale_policies, two_drifts
from brace_rl.oracle.sampling import Paths, Sample

RHO_CLIP = 1.2
EXACT_METHODS = [
    "mc",
    "gae:0.5",
    "gae:1",
    "vtrace",
    "uncapped",
    "capped:3",
    "brace:1",
    "brace:3",
    "brace:99",
    "drift:0.5",
]


class Case(NamedTuple):
    name: str
    mdp: TokenMDP
    policies: Policies

    @property
    def v_pi(self) -> Tensor:
        return policy_values(self.mdp, self.policies.target)

    @property
    def v_mu(self) -> Tensor:
        return policy_values(self.mdp, self.policies.sampler)

    @property
    def v_pi_rho(self) -> Tensor:
        return policy_values(self.mdp, truncated_policy(self.policies, RHO_CLIP))

    @property
    def reachable(self) -> Tensor:
        return state_distribution(self.mdp, self.policies.sampler) > 0


def cases(horizon: int, *, lag: int = 40) -> list[Case]:
    presets = [
        chain(horizon=horizon, actions=3, classes=3, success=0.2),
        branch(horizon=horizon, actions=2, spare=1, classes=2, success=0.2),
        two_drifts(horizon=horizon, classes=3, success=0.2),
        mismatch(horizon=horizon, classes=3, success=0.2),
    ]
    return [Case(p.name, p.mdp, stale_policies(p, lag, seed=1)) for p in presets]


def method(name: str, **clips: float) -> Method:
    return parse_method(name, **clips)


def every_response(case: Case) -> tuple[Sample, Tensor]:
    """All ``A^H`` responses as a sample, and the sampler's probability of each token ``[A^H, H]``."""
    mdp, (target, sampler, recorded) = case.mdp, case.policies
    tokens = torch.cartesian_prod(*[torch.arange(mdp.actions)] * mdp.horizon)
    state = torch.full((len(tokens),), mdp.start)
    states = []
    for t in range(mdp.horizon):
        states.append(state + t * mdp.states)
        state = mdp.next_state[t, state, tokens[:, t]]
    where = torch.stack(states, 1)
    entry = where * mdp.actions + tokens
    sample = Sample(
        mdp=mdp,
        paths=Paths(states=where, tokens=entry),
        rewards=mdp.rewards.flatten()[entry],
        behavior_logprobs=recorded.log().flatten()[entry],
        target_logprobs=target.log().flatten()[entry],
    )
    return sample, sampler.flatten()[entry]


def conditional_moments(case: Case, x: Tensor, token_probabilities: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance ``[H, X]`` of a figure ``[A^H, H]`` of all responses, given the state; NaN if unreachable."""
    prefix = torch.cat([torch.ones(len(x), 1, dtype=torch.float64), token_probabilities.cumprod(1)[:, :-1]], 1)
    onward = token_probabilities.flip(1).cumprod(1).flip(1)
    weights, flat = (prefix * onward).flatten(), where.flatten()
    zeros = torch.zeros(case.mdp.horizon * case.mdp.states, dtype=torch.float64)
    total = zeros.index_add(0, flat, weights)
    mean = zeros.index_add(0, flat, weights * x.flatten()) / total
    variance = zeros.index_add(0, flat, weights * (x.flatten() - mean[flat]).square()) / total
    shape = (case.mdp.horizon, case.mdp.states)
    return mean.view(shape), variance.view(shape)
