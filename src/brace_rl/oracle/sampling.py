"""Drawing responses, and the moments of a target from many of them where no recursion over states gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from brace_rl.oracle.mdp import Policies, TokenMDP
from brace_rl.oracle.methods import Method
from brace_rl.oracle.targets import Responses, sampled_targets, sampled_windows

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.floating]


class Paths(NamedTuple):
    """``N`` responses; both ``[N, H]`` int64.

    Attributes:
        states: flat index of (position, state) in ``[H, X]``.
        tokens: flat index of (row of the policy's table, token) in ``[tables * C, A]``.
    """

    states: Tensor
    tokens: Tensor


class SampledMoments(NamedTuple):
    """Sample mean and variance by state, NaN where no response went, and how many went; all ``[H, X]``."""

    mean: Tensor
    variance: Tensor
    visits: Tensor


@dataclass(frozen=True, eq=False)
class Steps:
    """The tables of an MDP in the form that the sampling loop reads; made once.

    NumPy, because the loop makes a handful of calls per token on a few hundred numbers, and there a call costs less.

    Attributes:
        next_state, observations: of :class:`~brace_rl.oracle.mdp.TokenMDP`, one flat row per position.
        seen: ``[H]`` the observation at every position, if it is the same in all states; else None.
    """

    mdp: TokenMDP
    next_state: list[IntArray]
    observations: list[IntArray]
    seen: IntArray | None

    @classmethod
    def of(cls, mdp: TokenMDP) -> Steps:
        """Lay the tables out."""
        observations = mdp.observations.numpy()
        seen = observations[:, 0] if (observations == observations[:, :1]).all() else None
        return cls(mdp, list(mdp.next_state.flatten(1).numpy()), list(observations), seen)


def draw_paths(steps: Steps, logits: Tensor, *, batch: int, generator: torch.Generator) -> Paths:
    """Draw ``batch`` responses from each of several policies, by inversion of one uniform number per token.

    Args:
        logits: ``[tables, C, A]``; the responses of table ``i`` are rows ``i * batch`` to ``(i + 1) * batch - 1``.
    """
    mdp, tables = steps.mdp, logits.shape[0]
    rows = tables * batch
    # The cumulative probability of the last token is 1 up to rounding and not needed: what exceeds all others is it.
    bounds = logits.detach().softmax(-1).cumsum(-1)[..., :-1].reshape(-1, mdp.actions - 1).T.contiguous().numpy()
    uniform = torch.rand(mdp.horizon, rows, generator=generator, dtype=logits.dtype).numpy()
    table = np.arange(tables).repeat(batch) * logits.shape[1]  # a short response leaves classes unseen
    states, tokens = np.empty((2, mdp.horizon, rows), dtype=np.int64)
    known: tuple[IntArray, IntArray] | None = None
    if steps.seen is not None:  # no token hangs on the state: all of them at once
        row = steps.seen[:, None] + table
        known = row, _invert(uniform, row, bounds)
    state = np.full(rows, mdp.start)
    for t, (nxt, observe) in enumerate(zip(steps.next_state, steps.observations, strict=True)):
        if known is None:
            row = observe.take(state) + table
            token = _invert(uniform[t], row, bounds)
            tokens[t] = row * mdp.actions + token
        else:
            token = known[1][t]
        states[t] = state
        state = nxt.take(state * mdp.actions + token)
    if known is not None:
        tokens = known[0] * mdp.actions + known[1]
    states += np.arange(mdp.horizon)[:, None] * mdp.states
    return Paths(*(torch.from_numpy(x).T.contiguous() for x in (states, tokens)))


def _invert(uniform: FloatArray, row: IntArray, bounds: FloatArray) -> IntArray:
    """Token of every uniform number: how many of the cumulative probabilities ``bounds [A - 1, rows]`` it exceeds."""
    token: IntArray = (uniform > bounds[0].take(row)).astype(np.int64)
    for bound in bounds[1:]:
        token += uniform > bound.take(row)
    return token


def path_rewards(mdp: TokenMDP, paths: Paths, dtype: torch.dtype) -> Tensor:
    """``[N, H]`` reward received on each token."""
    return mdp.rewards.to(dtype).flatten()[paths.states * mdp.actions + paths.tokens % mdp.actions]


def read_tokens(table: Tensor, paths: Paths) -> Tensor:
    """``[N, H]`` entries of ``[tables, C, A]`` at the tokens drawn; differentiable."""
    return table.flatten().index_select(0, paths.tokens.flatten()).view_as(paths.tokens)


@dataclass(frozen=True, eq=False)
class Sample:
    """Responses of one pair of policies, to try critics on."""

    mdp: TokenMDP
    paths: Paths
    rewards: Tensor
    behavior_logprobs: Tensor
    target_logprobs: Tensor

    def targets(self, method: Method, values: Tensor) -> Tensor:
        """``[N, H]`` targets for a critic ``[H, X]``, by `brace_rl.core`."""
        responses = Responses(
            values=values.flatten()[self.paths.states],
            rewards=self.rewards,
            behavior_logprobs=self.behavior_logprobs,
            target_logprobs=self.target_logprobs,
        )
        windows = sampled_windows(method, responses, groups=1)
        return sampled_targets(method, responses, windows=windows).targets

    def moments(self, method: Method, values: Tensor) -> SampledMoments:
        """Mean and variance of the target by state."""
        return self._by_state(self.targets(method, values))

    def fixed_point(self, method: Method, start: Tensor, *, sweeps: int = 100, tolerance: float = 1e-9) -> Tensor:
        """``[H, X]`` critic that fits its own targets on these responses, NaN where no response went.

        Each sweep replaces V by the mean target of every state; later positions settle first. Ends after ``sweeps`` or
        when no value moves by more than ``tolerance``.
        """
        values = start
        for _ in range(sweeps):
            mean = self.moments(method, values).mean
            unseen = mean.isnan()
            moved = torch.where(unseen, 0.0, mean - values).abs().max()
            values = torch.where(unseen, values, mean)
            if moved <= tolerance:
                break
        return torch.where(unseen, torch.nan, values)

    def _by_state(self, x: Tensor) -> SampledMoments:
        where, shape = self.paths.states.flatten(), (self.mdp.horizon, self.mdp.states)
        zeros = torch.zeros(shape[0] * shape[1], dtype=torch.float64)
        visits = zeros.index_add(0, where, torch.ones_like(where, dtype=torch.float64))
        mean = zeros.index_add(0, where, x.double().flatten()) / visits
        variance = zeros.index_add(0, where, (x.double().flatten() - mean[where]).square()) / visits
        return SampledMoments(*(y.view(shape) for y in (mean, variance, visits)))


def draw_sample(mdp: TokenMDP, policies: Policies, *, paths: int, seed: int) -> Sample:
    """Draw responses from the sampler; float64, so that they can be held against exact figures."""
    table = TokenMDP(
        next_state=mdp.next_state,
        rewards=mdp.rewards,
        observations=torch.arange(mdp.horizon * mdp.states).view(mdp.horizon, mdp.states),
        start=mdp.start,
    )
    generator = torch.Generator().manual_seed(seed)
    drawn = draw_paths(Steps.of(table), policies.sampler.log().flatten(0, 1)[None], batch=paths, generator=generator)
    return Sample(
        mdp=mdp,
        paths=drawn,
        rewards=path_rewards(mdp, drawn, torch.float64),
        behavior_logprobs=read_tokens(policies.recorded.log(), drawn),
        target_logprobs=read_tokens(policies.target.log(), drawn),
    )
