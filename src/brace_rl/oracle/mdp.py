"""Token MDPs small enough to be solved: transitions, policies and exact values.

A response is ``H`` tokens, positions ``0 .. H-1``; the last one is the ``T`` of :mod:`brace_rl.core.brace`. The prefix
written so far is summarised by one of ``X`` states, transitions are deterministic, and the policy sees an
*observation*: one of ``C`` classes of (position, state). All is float64, and exact up to rounding.

Policies are tables ``[H, X, A]`` of probabilities; leading batch axes are allowed where it says ``[..., H, X, A]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TokenMDP:
    """A finite-horizon MDP over tokens.

    Attributes:
        next_state: ``[H, X, A]`` int64, the state after token ``a`` at position ``t``; that of the last is never read.
        rewards: ``[H, X, A]`` float64, received on emitting the token.
        observations: ``[H, X]`` int64 in ``0 .. C-1``, what the policy sees before the token.
        start: state before token 0.
    """

    next_state: Tensor
    rewards: Tensor
    observations: Tensor
    start: int = 0

    @property
    def horizon(self) -> int:
        """H, tokens in a response."""
        return self.next_state.shape[0]

    @property
    def states(self) -> int:
        """X."""
        return self.next_state.shape[1]

    @property
    def actions(self) -> int:
        """A."""
        return self.next_state.shape[2]

    @cached_property
    def successor(self) -> Tensor:
        """``[H, X, A]`` flat index of the next (position, state) in ``[H + 1, X]``; position H is after the end."""
        position = torch.arange(1, self.horizon + 1)[:, None, None]
        return position * self.states + torch.where(position < self.horizon, self.next_state, 0)

    def policy(self, logits: Tensor) -> Tensor:
        """``[..., C, A]`` logits to ``[..., H, X, A]`` float64 probabilities."""
        return logits.detach().double().softmax(-1)[..., self.observations, :]


class Policies(NamedTuple):
    """Who is to be judged, who wrote the tokens, and who is said to have written them; all ``[H, X, A]``.

    Attributes:
        target: pi.
        sampler: what tokens are really drawn from; expectations are over it.
        recorded: mu as it stands in the log-probs. Equal to ``sampler`` unless the engine is at odds with itself.
    """

    target: Tensor
    sampler: Tensor
    recorded: Tensor

    @property
    def ratios(self) -> Tensor:
        """``[H, X, A]`` w = pi / recorded mu."""
        return self.target / self.recorded

    @property
    def mean_ratio(self) -> Tensor:
        """``[H, X]`` E[w] over the sampler: exactly 1 where what is recorded is what was sampled from."""
        return (self.sampler * self.ratios).sum(-1)


def after(mdp: TokenMDP, x: Tensor) -> Tensor:
    """``[H, X]`` per state to ``[H, X, A]``, its entry after each token; 0 after the last."""
    return torch.cat([x, x.new_zeros(1, mdp.states)]).flatten()[mdp.successor]


def policy_values(mdp: TokenMDP, policy: Tensor, *, gamma: float = 1.0) -> Tensor:
    """``[..., H, X]`` value of a policy ``[..., H, X, A]`` before every token, by backward induction."""
    value = policy.new_zeros(*policy.shape[:-3], mdp.states)
    values = []
    rows = zip(policy.unbind(-3), mdp.rewards.unbind(0), mdp.next_state.unbind(0), strict=True)
    for p, r, nxt in reversed(list(rows)):
        value = (p * (value[..., nxt] * gamma + r)).sum(-1)
        values.append(value)
    return torch.stack(values[::-1], -2)


def state_distribution(mdp: TokenMDP, policy: Tensor) -> Tensor:
    """``[H, X]`` probability of being in a state before token ``t`` when tokens are drawn from ``policy``."""
    here = torch.zeros(mdp.states, dtype=torch.float64)
    here[mdp.start] = 1.0
    reached = []
    for p, nxt in zip(policy.unbind(0), mdp.next_state.unbind(0), strict=True):
        reached.append(here)
        here = torch.zeros_like(here).index_add_(0, nxt.flatten(), (here[:, None] * p).flatten())
    return torch.stack(reached)


def truncated_policy(policies: Policies, rho_clip: float) -> Tensor:
    """``[H, X, A]`` pi_rho, proportional to ``sampler * min(rho_clip, w)``: what a corrected window evaluates.

    With true log-probs that is the paper's ``min(rho_clip mu, pi)``.
    """
    weights = policies.sampler * policies.ratios.clamp(max=rho_clip)
    return weights / weights.sum(-1, keepdim=True)
