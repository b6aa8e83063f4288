"""The exact part of a report: one stale pair of policies, every target held against the values it should have.

Results are plain data (lists, numbers, text), ready for JSON; `brace_rl.oracle.draw` draws them. "By position" means
averaged over the states in which the sampler is before that token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from brace_rl.oracle.exact import drift, fixed_point, offset_curve, resolved_window, target_moments
from brace_rl.oracle.mdp import Policies, TokenMDP, policy_values, state_distribution, truncated_policy
from brace_rl.oracle.methods import Method
from brace_rl.oracle.presets import Preset, stale_policies
from brace_rl.oracle.sampling import Sample, draw_sample

SAMPLED_TOKENS, SAMPLED_RESPONSES = 2**20, 2**12
"""At most so many tokens and responses are drawn for what no recursion gives: 512 responses at horizon 2048."""

CRITICS = ("own", "mu", "pi")
"""Critics that targets are tried with: the target's own fixed point, V^mu (left behind) and V^pi (perfect)."""


@dataclass(frozen=True, eq=False)
class _Truth:
    mdp: TokenMDP
    policies: Policies
    reached: Tensor
    v_pi: Tensor
    v_mu: Tensor
    sample: Sample


def study(
    preset: Preset,
    methods: Sequence[Method],
    *,
    lag: int,
    seed: int = 0,
    rho_clip: float = Method.rho_clip,
    c_clip: float = Method.c_clip,
) -> dict[str, Any]:
    """Everything `brace oracle` says without learning.

    Args:
        lag: trainer steps between the policy that wrote the tokens and the one that is judged.
        seed: of the pair, and of the responses drawn for the targets that have to be sampled.
        rho_clip, c_clip: of ``V^{pi_rho}``, the drift and the offset; every method has its own.

    Returns:
        "preset", "horizon", "lag"; "clips" (rho and c); "ratios" (drift per c_clip, largest E[w]); "values" by
        position; "targets", a list with method, critic, source, and bias, spread and rmse by position against V^pi;
        "fixed_points", a list with method, source and values by position; "offset", theta, bound and measured for k
        from 0 to H.
    """
    mdp, policies = preset.mdp, stale_policies(preset, lag, seed=seed)
    paths = min(SAMPLED_RESPONSES, SAMPLED_TOKENS // mdp.horizon)
    truth = _Truth(
        mdp=mdp,
        policies=policies,
        reached=state_distribution(mdp, policies.sampler),
        v_pi=policy_values(mdp, policies.target),
        v_mu=policy_values(mdp, policies.sampler),
        sample=draw_sample(mdp, policies, paths=paths, seed=seed),
    )
    brace = Method("brace", 100, rho_clip=rho_clip, c_clip=c_clip)
    found = {method: _fixed_point(truth, method) for method in methods}
    return {
        "preset": preset.name,
        "horizon": mdp.horizon,
        "states": mdp.states,
        "lag": lag,
        "seed": seed,
        "clips": {"rho": rho_clip, "c": c_clip},
        "ratios": drift(mdp, policies, c_clip=brace.c_clip)._asdict(),
        "values": {
            "pi": _by_position(truth, truth.v_pi),
            "mu": _by_position(truth, truth.v_mu),
            "pi_rho": _by_position(truth, policy_values(mdp, truncated_policy(policies, brace.rho_clip))),
        },
        "targets": [_row(truth, method, critic, found[method]) for method in methods for critic in CRITICS],
        "fixed_points": [
            {
                "method": method.name,
                "source": _source(truth, method),
                "window": None if method.kind == "path" else resolved_window(mdp, policies, method),
                "values": _by_position(truth, found[method], sampled=method.kind == "path"),
            }
            for method in methods
        ],
        "offset": _offset(truth, brace),
    }


def _fixed_point(truth: _Truth, method: Method) -> Tensor:
    if method.kind == "path":
        return truth.sample.fixed_point(method, truth.v_mu)
    return fixed_point(truth.mdp, truth.policies, method)


def _source(truth: _Truth, method: Method) -> str:
    return f"{len(truth.sample.rewards)} sampled responses" if method.kind == "path" else "exact"


def _row(truth: _Truth, method: Method, critic: str, own: Tensor) -> dict[str, Any]:
    """Bias, spread and root mean square error of one target with one critic."""
    values = {"own": own, "mu": truth.v_mu, "pi": truth.v_pi}[critic]
    weights = truth.reached
    if method.kind == "path":
        mean, variance, visits = truth.sample.moments(method, torch.where(values.isnan(), truth.v_mu, values))
        weights = visits / len(truth.sample.rewards)
    else:
        mean, variance = target_moments(truth.mdp, truth.policies, method, values)
    seen = weights > 0
    bias, variance = (torch.where(seen, x, 0.0) for x in (mean - truth.v_pi, variance))
    return {
        "method": method.name,
        "critic": critic,
        "source": _source(truth, method),
        "bias": (weights * bias).sum(1).tolist(),
        "spread": (weights * variance).sum(1).sqrt().tolist(),
        "rmse": (weights * (bias.square() + variance)).sum(1).sqrt().tolist(),
    }


def _by_position(truth: _Truth, values: Tensor, *, sampled: bool = False) -> list[float]:
    weights = truth.reached
    if sampled:
        weights = torch.where(values.isnan(), 0.0, weights)
        weights = weights / weights.sum(1, keepdim=True)
    return (weights * torch.where(weights > 0, values, 0.0)).sum(1).tolist()  # type: ignore[no-any-return]


def _offset(truth: _Truth, method: Method) -> dict[str, Any]:
    curve = offset_curve(truth.mdp, truth.policies, method)
    return {
        "gap": curve.gap,
        "theta": curve.theta.tolist(),
        "bound": (curve.theta * curve.gap).tolist(),
        "measured": curve.measured.tolist(),
    }
