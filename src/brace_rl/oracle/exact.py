"""Exact mean, variance and fixed point of every value target, and how far one application moves a critic.

Each target is ``V`` plus a correction that obeys ``u_t = offset_t + coef_t u_{t+1}``: first to the end of the response
with one pair of maps (the *start*), then ``k`` times over the whole response with another (the *window*), as in
:mod:`brace_rl.core.backup`. Offset and coefficient are functions of (position, state, token), so given the state

    E[u_t] = E_a[offset + coef E[u_{t+1}]],
    Var[u_t] = Var_a[offset + coef E[u_{t+1}]] + E_a[coef^2 Var[u_{t+1}]],

the second by the law of total variance, which never subtracts large moments. Both are backward recursions over
``[H, X]``. Not so the windows of ``path``, which depend on the ratios of the whole path ahead: see
:mod:`brace_rl.oracle.sampling`.

States that the sampler never reaches have values too; where a maximum over states is taken they are left out.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from brace_rl.oracle.mdp import Policies, TokenMDP, after, policy_values, state_distribution, truncated_policy
from brace_rl.oracle.methods import CRITIC_FREE, Method


class Moments(NamedTuple):
    """Of a target given the state before the token; both ``[H, X]``."""

    mean: Tensor
    variance: Tensor


class Maps(NamedTuple):
    """``x -> offset + coef x`` for each (position, state, token); both ``[H, X, A]``."""

    offset: Tensor
    coef: Tensor


class OffsetCurve(NamedTuple):
    """One application of BRACE at ``V = V^{pi_rho}``, for windows ``0 .. K``; every tensor ``[K + 1]``.

    Attributes:
        theta: largest ``E[gamma^{j-s} Pi_k(s)]`` over reachable states.
        measured: largest ``|E[target] - V|`` over reachable states.
        gap: ``max |V^mu - V^{pi_rho}|`` over reachable states; ``theta * gap`` bounds ``measured``.
    """

    theta: Tensor
    measured: Tensor
    gap: float


class Drift(NamedTuple):
    """Mean and deviation of ``log min(c_clip, w)`` over a response (Eq. 13), and the largest E[w] of any state."""

    mean: float
    deviation: float
    largest_mean_ratio: float


def target_moments(mdp: TokenMDP, policies: Policies, method: Method, values: Tensor, *, gamma: float = 1.0) -> Moments:
    """Mean and variance of a target over tokens drawn by the sampler, given the state.

    Args:
        values: ``[H, X]`` the critic before each token.
        method: any kind but ``path``; ``drift`` is taken in the large-batch limit, where its window is a number.
    """
    start, window, times = _estimator(mdp, policies, method, values, gamma)
    moments = _to_the_end(mdp, policies.sampler, start)
    if window is not None:
        for _ in range(times):
            moments = _apply(mdp, policies.sampler, window, moments)
    return Moments(mean=values + moments.mean, variance=moments.variance)


def fixed_point(mdp: TokenMDP, policies: Policies, method: Method, *, gamma: float = 1.0) -> Tensor:
    """``[H, X]`` the V that is its own mean target: where regression on the target ends.

    ``V^mu`` for the targets without ratios, ``V^{pi_rho}`` for V-trace and ``capped``, and for BRACE what backward
    induction gives: the equation at a state holds its own value with coefficient ``E[rho]``.
    """
    sampled = policy_values(mdp, policies.sampler, gamma=gamma)
    window = resolved_window(mdp, policies, method, gamma=gamma)
    if method.kind in ("mc", "gae") or (method.kind in ("brace", "drift") and window == 0):
        return sampled
    if method.kind in ("vtrace", "uncapped", "capped"):
        return policy_values(mdp, truncated_policy(policies, method.rho_clip), gamma=gamma)
    return _brace_fixed_point(mdp, policies, method, window, sampled, gamma)


def resolved_window(mdp: TokenMDP, policies: Policies, method: Method, *, gamma: float = 1.0) -> int:
    """Tokens the method corrects: its window, or that of ``drift`` from the exact drift; 0 for kinds without."""
    if method.kind in ("brace", "capped"):
        return min(method.window, mdp.horizon)
    if method.kind != "drift":
        return 0
    mean = drift(mdp, policies, c_clip=method.c_clip).mean + math.log(gamma)
    return mdp.horizon if mean >= 0 else min(mdp.horizon, math.floor(-math.log(method.parameter) / -mean))


def drift(mdp: TokenMDP, policies: Policies, *, c_clip: float) -> Drift:
    """What the ratios of a response do to a product of them."""
    reached = state_distribution(mdp, policies.sampler)
    weights = reached[..., None] * policies.sampler / mdp.horizon
    logs = policies.ratios.clamp(max=c_clip).log()
    mean = float((weights * logs).sum())
    return Drift(
        mean=mean,
        deviation=float((weights * (logs - mean).square()).sum().sqrt()),
        largest_mean_ratio=float(policies.mean_ratio[reached > 0].max()),
    )


def window_weights(mdp: TokenMDP, policies: Policies, *, window: int, c_clip: float, gamma: float = 1.0) -> Tensor:
    """``[H, X]`` ``E[gamma^{j-s} Pi_k(s)]``, the mean weight of the return in the BRACE target."""
    maps = _trace(mdp, policies, c_clip, gamma)
    weights = torch.ones_like(policies.sampler[..., 0])
    for _ in range(min(window, mdp.horizon)):
        weights = _mean_after(mdp, policies.sampler, maps, weights)
    return weights


def return_weights(mdp: TokenMDP, policies: Policies, method: Method, *, gamma: float = 1.0) -> Moments:
    """Mean and variance, given the state, of the weight that the realised return has in the target.

    1 for the return itself, ``lambda^{T-s}`` for GAE, and the product of the trace over the window for the others (for
    the whole response where there is no window).
    """
    one = torch.ones_like(policies.sampler[..., 0])
    if method.kind == "mc":
        return Moments(one, torch.zeros_like(one))
    if method.kind == "gae":
        ahead = torch.arange(mdp.horizon - 1, -1, -1, dtype=torch.float64)[:, None]
        return Moments(one * method.parameter**ahead, torch.zeros_like(one))
    maps = _trace(mdp, policies, method.c_clip, gamma)
    whole = method.kind in ("vtrace", "uncapped")
    moments = Moments(one, torch.zeros_like(one))
    for _ in range(mdp.horizon if whole else resolved_window(mdp, policies, method, gamma=gamma)):
        moments = _apply(mdp, policies.sampler, maps, moments)
    return moments


def offset_curve(
    mdp: TokenMDP, policies: Policies, method: Method, *, longest: int | None = None, gamma: float = 1.0
) -> OffsetCurve:
    """The offset bound against what one application really does, for every window up to ``longest`` (default H)."""
    reachable = state_distribution(mdp, policies.sampler) > 0
    values = policy_values(mdp, truncated_policy(policies, method.rho_clip), gamma=gamma)
    gap = policy_values(mdp, policies.sampler, gamma=gamma) - values
    trace = _trace(mdp, policies, method.c_clip, gamma)
    _, window, _ = _estimator(mdp, policies, Method("brace", 1, method.rho_clip, method.c_clip), values, gamma)
    assert window is not None
    weights, moved = torch.ones_like(values), gap
    theta, measured = [], []
    for _ in range((mdp.horizon if longest is None else longest) + 1):
        theta.append(weights[reachable].max())
        measured.append(moved[reachable].abs().max())
        weights = _mean_after(mdp, policies.sampler, trace, weights)
        moved = _mean_after(mdp, policies.sampler, window, moved)
    return OffsetCurve(theta=torch.stack(theta), measured=torch.stack(measured), gap=float(gap[reachable].abs().max()))


def followed_then_sampled(mdp: TokenMDP, policies: Policies, *, window: int, gamma: float = 1.0) -> Tensor:
    """``[H, X]`` value of drawing ``window`` tokens from pi, but never the last one, and the rest from the sampler.

    It is the mean BRACE target without caps, whatever the critic.
    """
    values = policy_values(mdp, policies.sampler, gamma=gamma)
    last = values[-1]
    for _ in range(min(window, mdp.horizon)):
        values = (policies.target * (mdp.rewards + gamma * after(mdp, values))).sum(-1)
        values[-1] = last
    return values


def _estimator(
    mdp: TokenMDP, policies: Policies, method: Method, values: Tensor, gamma: float
) -> tuple[Maps, Maps | None, int]:
    """Start maps, window maps and number of applications of the latter."""
    if method.kind == "path":
        raise ValueError("path: its windows depend on the path ahead and not on the state; use sampled moments")
    if method.kind in CRITIC_FREE:
        raise ValueError(f"{method.kind}: has no value target")
    residual = mdp.rewards + gamma * after(mdp, values) - values[..., None]
    full = torch.full_like(residual, gamma)
    if method.kind == "mc":
        return Maps(residual, full), None, 0
    if method.kind == "gae":
        return Maps(residual, full * method.parameter), None, 0
    corrected = residual * policies.ratios.clamp(max=method.rho_clip)
    trace = policies.ratios.clamp(max=method.c_clip) * gamma
    if method.kind in ("vtrace", "uncapped"):
        return Maps(corrected, trace), None, 0
    trace = _stopped(trace)
    times = resolved_window(mdp, policies, method, gamma=gamma)
    if method.kind == "capped":
        return Maps(corrected, full), Maps(corrected, trace), times
    corrected = torch.cat([corrected[:-1], residual[-1:]])  # the last residual keeps weight 1
    return Maps(residual, full), Maps(corrected, trace), times


def _trace(mdp: TokenMDP, policies: Policies, c_clip: float, gamma: float) -> Maps:
    """Maps whose k applications to 1 give the window's weight: 1 at the last token, where every product stops."""
    coef = _stopped(policies.ratios.clamp(max=c_clip) * gamma)
    offset = torch.zeros_like(coef)
    offset[-1] = 1.0
    return Maps(offset, coef)


def _stopped(coef: Tensor) -> Tensor:
    return torch.cat([coef[:-1], torch.zeros_like(coef[-1:])])


def _mean_after(mdp: TokenMDP, sampler: Tensor, maps: Maps, mean: Tensor) -> Tensor:
    return (sampler * (maps.offset + maps.coef * after(mdp, mean))).sum(-1)


def _apply(mdp: TokenMDP, sampler: Tensor, maps: Maps, moments: Moments) -> Moments:
    """One application to every position at once."""
    outcome = maps.offset + maps.coef * after(mdp, moments.mean)
    mean = (sampler * outcome).sum(-1)
    spread = (outcome - mean[..., None]).square() + maps.coef.square() * after(mdp, moments.variance)
    return Moments(mean=mean, variance=(sampler * spread).sum(-1))


def _to_the_end(mdp: TokenMDP, sampler: Tensor, maps: Maps) -> Moments:
    """The recursion from the last token to the first."""
    mean = variance = torch.zeros(mdp.states, dtype=torch.float64)
    means, variances = [], []
    rows = zip(*(x.unbind(0) for x in (sampler, maps.offset, maps.coef, mdp.next_state)), strict=True)
    for p, offset, coef, nxt in reversed(list(rows)):
        outcome = offset + coef * mean[nxt]
        mean = (p * outcome).sum(-1)
        variance = (p * ((outcome - mean[:, None]).square() + coef.square() * variance[nxt])).sum(-1)
        means.append(mean)
        variances.append(variance)
    return Moments(mean=torch.stack(means[::-1]), variance=torch.stack(variances[::-1]))


def _brace_fixed_point(
    mdp: TokenMDP, policies: Policies, method: Method, window: int, sampled: Tensor, gamma: float
) -> Tensor:
    """Backward induction, holding the mean correction of every shorter window at the next position."""
    rho = policies.sampler * policies.ratios.clamp(max=method.rho_clip)
    trace = policies.sampler * policies.ratios.clamp(max=method.c_clip) * gamma
    value = sampled[-1]
    values = [value]
    corrections = torch.zeros(window, mdp.states, dtype=torch.float64)  # [n, X]: after n applications
    rows = [x.unbind(0) for x in (rho, trace, mdp.rewards, mdp.next_state, sampled)]
    for t in range(mdp.horizon - 2, -1, -1):
        rho_t, trace_t, rewards_t, nxt, sampled_t = (row[t] for row in rows)
        carried = (trace_t * corrections[:, nxt]).sum(-1)
        backed_up = (rho_t * (rewards_t + gamma * value[nxt])).sum(-1)
        total = rho_t.sum(-1)
        value = (backed_up + carried[-1]) / total
        one_step = backed_up - total * value
        corrections = torch.cat([(sampled_t - value)[None], one_step + carried[:-1]])
        values.append(value)
    return torch.stack(values[::-1])
