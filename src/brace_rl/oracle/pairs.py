"""Exact figures of targets on pairs that learning has made: a policy, the one that wrote its samples, and its critic.

PPO runs for a number of steps; then every seed gives one pair and one critic, on which all targets are held against the
truth. Besides bias and spread of the target, what an actor lives on is measured: how well a sampled advantage of Eq. 27
agrees with the true one. Averages are over tokens as the sampler draws them, and over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from brace_rl.oracle.exact import return_weights, target_moments
from brace_rl.oracle.learn import Learner
from brace_rl.oracle.mdp import Policies, TokenMDP, after, policy_values, state_distribution
from brace_rl.oracle.methods import Method
from brace_rl.oracle.presets import Preset
from brace_rl.oracle.sampling import draw_sample
from brace_rl.oracle.settings import LearnConfig

SAMPLED_RESPONSES = 2000
"""Drawn per pair for the targets whose windows hang on the path."""


def pair_rows(
    preset: Preset, methods: Sequence[Method], lags: Sequence[int], config: LearnConfig, *, steps: int
) -> list[dict[str, Any]]:
    """One row per lag and method.

    Args:
        methods: the first of them trains.
        config: of the training; its seeds are the pairs.
        steps: trainer steps before a pair is taken.

    Returns:
        Rows with "lag", "method", "success" (of the judged policies), "mean_ratio" (E[w]), "ratio_spread"; by seed:
        "bias" and "spread" of the target against V^pi (root mean squares), "correlation" of the sampled advantage with
        the true one; and "return_weight", "return_weight_spread": mean and deviation of the weight that the realised
        return has in the target, None where the window hangs on the path.
    """
    rows = []
    for lag in lags:
        learner = Learner(preset, methods[0], replace(config, lag=lag))
        for step in range(1, steps + 1):
            learner.step(train_actor=step > config.critic_warmup)
        pairs = learner.pairs()
        ratios = [_ratio_moments(preset.mdp, policies) for policies, _ in pairs]
        about = {
            "lag": lag,
            "success": learner.success().tolist(),
            "mean_ratio": sum(mean for mean, _ in ratios) / len(pairs),
            "ratio_spread": sum(spread for _, spread in ratios) / len(pairs),
        }
        for method in methods:
            figures = [pair_figures(preset.mdp, *pair, method, seed=i) for i, pair in enumerate(pairs)]
            rows.append(about | {"method": method.name} | {name: [f[name] for f in figures] for name in figures[0]})
    return rows


def pair_figures(
    mdp: TokenMDP, policies: Policies, values: Tensor, method: Method, *, seed: int
) -> dict[str, float | None]:
    """Bias, spread, correlation and weight of the return of one target on one pair, see :func:`pair_rows`.

    Args:
        seed: of the responses drawn for ``path``.
    """
    reached = state_distribution(mdp, policies.sampler)
    truth = policy_values(mdp, policies.target)
    if method.kind == "path":
        sample = draw_sample(mdp, policies, paths=SAMPLED_RESPONSES, seed=seed)
        mean, variance, visits = sample.moments(method, values)
        mean, variance = (torch.where(visits > 0, x, y) for x, y in ((mean, values), (variance, torch.zeros(()))))
        weight, weight_spread = None, None
    else:
        mean, variance = target_moments(mdp, policies, method, values)
        weight, weight_spread = _weight_figures(mdp, policies, method, reached)
    share = reached / mdp.horizon
    tokens = share[..., None] * policies.sampler
    carried = method.parameter if method.kind == "gae" else 1.0
    advantage = mdp.rewards + after(mdp, values) - values[..., None] + carried * after(mdp, mean - values)
    true = mdp.rewards + after(mdp, truth) - truth[..., None]
    advantage, true = (x - (tokens * x).sum() for x in (advantage, true))
    noise = carried**2 * (tokens * after(mdp, variance)).sum()
    scale = ((tokens * advantage.square()).sum() + noise).sqrt() * (tokens * true.square()).sum().sqrt()
    return {
        "bias": float((share * (mean - truth).square()).sum().sqrt()),
        "spread": float((share * variance).sum().sqrt()),
        "correlation": float((tokens * advantage * true).sum() / scale) if scale > 0 else math.nan,
        "return_weight": weight,
        "return_weight_spread": weight_spread,
    }


def _weight_figures(mdp: TokenMDP, policies: Policies, method: Method, reached: Tensor) -> tuple[float, float]:
    mean, variance = return_weights(mdp, policies, method)
    share = reached / mdp.horizon
    return float((share * mean).sum()), float((share * variance).sum().sqrt())


def _ratio_moments(mdp: TokenMDP, policies: Policies) -> tuple[float, float]:
    tokens = state_distribution(mdp, policies.sampler)[..., None] * policies.sampler / mdp.horizon
    logs = policies.ratios.log()
    mean = (tokens * logs).sum()
    return float((tokens * policies.ratios).sum()), float((tokens * (logs - mean).square()).sum().sqrt())
