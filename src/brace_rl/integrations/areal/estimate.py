"""From AReaL's tensors to what its critic and actor are trained on.

AReaL's ``[B, L]`` tensors are over whole sequences, prompt first, padded on the right with zeros. A rollout's own
tensors (``loss_mask``, ``logprobs``, ``versions``) say at column ``t`` what token ``t`` is. All that AReaL computes
(``values``, ``prox_logp``) says at column ``t`` what holds *before* token ``t + 1``. AReaL rolls the first kind one
column to the left to meet the second, and so does this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from brace_rl.errors import DataError
from brace_rl.integrations.token_level import TokenLevelEstimates, TokenLevelOptions, token_level_estimates


class Rollout(NamedTuple):
    """What AReaL overwrites while it computes its own advantages, ``[B, L]``, rolled.

    Attributes:
        action_mask: bool, where the policy wrote token ``t + 1``.
        behavior_logprobs: mu, as the engine recorded it.
        target_logprobs: pi, from the policy's forward pass before the update; None where AReaL made none.
    """

    action_mask: Tensor
    behavior_logprobs: Tensor
    target_logprobs: Tensor | None


def rolled(tensor: Tensor) -> Tensor:
    """Column ``t`` is what column ``t + 1`` was; the last is filled with zeros, not with the first."""
    tensor = torch.roll(tensor, -1, dims=-1)
    tensor[..., -1] = 0
    return tensor


def read_rollout(data: Mapping[str, Any]) -> Rollout:
    """Read a batch as the workflow left it, copying what will be overwritten.

    Args:
        data: AReaL's batch before ``compute_advantages``.
    """
    target = data.get("prox_logp")
    return Rollout(
        action_mask=rolled(written_by_policy(data)),
        behavior_logprobs=rolled(data["logprobs"]),
        target_logprobs=None if target is None else target.clone(),
    )


def written_by_policy(data: Mapping[str, Any]) -> Tensor:
    """``[B, L]`` bool, tokens that the policy sampled, not rolled.

    AReaL's workflows stamp sampled tokens with the version of the weights, all others with -1. Where a workflow took a
    sampled token out of its ``loss_mask``, the stamp still tells. A row that stamps its first token, before which
    there is nothing to sample from, or leaves one out that it trains on, uses stamps otherwise: there the loss mask is
    all there is.
    """
    trained: Tensor = data["loss_mask"] > 0
    versions = data.get("versions")
    if versions is None:
        return trained
    stamped = (versions >= 0) & (data["attention_mask"] > 0)
    tells = ~stamped[:, :1] & (stamped | ~trained).all(1, keepdim=True)
    return torch.where(tells, stamped, trained)


def without_junk(data: dict[str, Any]) -> None:
    """Zero what is not finite and not the policy's: AReaL masks by multiplication, which lets NaN through."""
    trained = data["loss_mask"] > 0
    kept = {"logprobs": trained, "prox_logp": rolled(trained), "ref_logp": rolled(trained)}
    for name, mask in kept.items():
        if data.get(name) is not None:
            data[name] = torch.where(mask | data[name].isfinite(), data[name], 0.0)


def areal_estimates(
    *, rollout: Rollout, rewards: Tensor, values: Tensor | None, loss_mask: Tensor, options: TokenLevelOptions
) -> TokenLevelEstimates:
    """Estimates of one batch; advantages are not whitened, AReaL's ``adv_norm`` follows.

    Args:
        rollout: from before AReaL's own advantages.
        rewards: ``[B, L]`` AReaL's ``tot_rewards``, KL penalty included.
        values: ``[B, L]`` of AReaL's critic, before token ``t + 1``.
        loss_mask: ``[B, L]`` AReaL's, rolled.

    Raises:
        DataError: a tensor is missing; the message says which setting brings it.
    """
    if values is None:
        raise DataError("values: missing, there is no critic; add a critic section to the configuration")
    if options.needs_ratios and rollout.target_logprobs is None:
        raise DataError(
            "prox_logp: missing, the policy's own log-probs were not computed; set actor.use_decoupled_loss=true with "
            "actor.prox_logp_method=recompute, or actor.recompute_logprob=true"
        )
    return token_level_estimates(
        values=values,
        rewards=rewards,
        action_mask=rollout.action_mask,
        loss_mask=loss_mask > 0,
        behavior_logprobs=rollout.behavior_logprobs,
        target_logprobs=rollout.target_logprobs,
        options=options,
    )
