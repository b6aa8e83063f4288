"""What `brace_rl.core` makes of sampled responses under each method."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from brace_rl import core
from brace_rl.oracle.methods import AUTOMATIC, CRITIC_FREE, Method


class Responses(NamedTuple):
    """Sampled tokens with everything a target reads; all ``[N, H]``.

    Attributes:
        values: the critic before each token.
        rewards: received on emitting it.
        behavior_logprobs: as the engine recorded them.
        target_logprobs: of pi, before the update.
    """

    values: Tensor
    rewards: Tensor
    behavior_logprobs: Tensor
    target_logprobs: Tensor


def sampled_windows(method: Method, responses: Responses, groups: int) -> Tensor | None:
    """``[N, H]`` int64 windows of the kinds that choose them; else None.

    Args:
        groups: the rows are this many independent batches of equal size; a batch window is chosen for each.
    """
    if method.kind not in AUTOMATIC:
        return None
    behavior, target = responses.behavior_logprobs, responses.target_logprobs
    mask = torch.ones_like(behavior, dtype=torch.bool)
    if method.kind == "path":
        return core.path_windows(
            behavior_logprobs=behavior,
            target_logprobs=target,
            policy_mask=mask,
            budget=method.parameter,
            c_clip=method.c_clip,
            check_inputs=False,
        )
    chosen = [
        core.drift_window(
            behavior_logprobs=b,
            target_logprobs=t,
            policy_mask=m,
            eps=method.parameter,
            c_clip=method.c_clip,
            check_inputs=False,
        ).window
        for b, t, m in zip(behavior.chunk(groups), target.chunk(groups), mask.chunk(groups), strict=True)
    ]
    windows = torch.stack(chosen).repeat_interleave(len(behavior) // groups)
    return windows[:, None].expand(behavior.shape)


def sampled_targets(
    method: Method, responses: Responses, *, windows: Tensor | None = None, gamma: float = 1.0, groups: int = 1
) -> core.ValueTargets:
    """Targets and advantages of every token, from the library under test.

    Args:
        windows: from :func:`sampled_windows`, for the kinds that choose them.
        groups: the rows are this many groups of equal size, for the kinds without a critic.
    """
    values, rewards, behavior, target = responses
    mask = torch.ones_like(values, dtype=torch.bool)
    plain: dict[str, Any] = {"values": values, "rewards": rewards, "policy_mask": mask}
    if method.kind == "mc" or method.kind in CRITIC_FREE:
        returned = core.monte_carlo_targets(**plain, gamma=gamma, check_inputs=False)
        if method.kind == "mc":
            return returned
        return returned._replace(advantages=_group_advantages(method, responses, mask, groups))
    if method.kind == "gae":
        return core.gae_targets(**plain, gamma=gamma, lam=method.parameter, check_inputs=False)
    ratios = plain | {"behavior_logprobs": behavior, "target_logprobs": target}
    clips: dict[str, Any] = {"rho_clip": method.rho_clip, "c_clip": method.c_clip, "gamma": gamma}
    if method.kind in ("vtrace", "uncapped"):
        return core.vtrace_targets(**ratios, **clips, check_inputs=False)
    estimator = core.capped_targets if method.kind == "capped" else core.brace_targets
    window = method.window if windows is None else windows
    return estimator(**ratios, **clips, window=window, check_inputs=False)


def _group_advantages(method: Method, responses: Responses, mask: Tensor, groups: int) -> Tensor:
    returns = responses.rewards.sum(1)
    return core.critic_free_advantages(
        returns=returns,
        baselines=returns.view(groups, -1).mean(1).repeat_interleave(len(returns) // groups),
        behavior_logprobs=responses.behavior_logprobs,
        target_logprobs=responses.target_logprobs,
        policy_mask=mask,
        window=method.window,
        c_clip=method.c_clip,
        check_inputs=False,
    )
