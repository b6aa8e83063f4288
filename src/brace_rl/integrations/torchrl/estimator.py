"""BRACE as one of TorchRL's value estimators, on its own or for one of its losses::

    estimator = BraceEstimator(gamma=0.99, window=16, value_network=critic, actor_network=actor)
    estimator(batch_from_a_collector)  # writes "advantage" and "value_target"

How a loss is given one is said in ``docs/torchrl.md``.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from tensordict import is_tensor_collection  # type: ignore[import-not-found]
from tensordict.nn import (  # type: ignore[import-not-found]
    dispatch,
    set_composite_lp_aggregate,
    set_skip_existing,
)
from tensordict.nn.distributions import CompositeDistribution  # type: ignore[import-not-found]
from torch import Tensor
from torchrl.objectives.utils import hold_out_net, register_value_estimator  # type: ignore[import-not-found]
from torchrl.objectives.value import ValueEstimatorBase  # type: ignore[import-not-found]

from brace_rl.errors import ConfigError, DataError
from brace_rl.integrations.torchrl.estimate import torchrl_estimates
from brace_rl.integrations.torchrl.options import DEFAULTS, NODE, check_not_differentiable, options_from
from brace_rl.integrations.torchrl.versions import check_torchrl
from brace_rl.integrations.versions import installed_version

check_torchrl(installed_version("torchrl") or "not installed")

MASK = ("collector", "mask")
"""Where TorchRL says which steps of split trajectories are none."""

SHIFTED_MASK = "shifted_valid"
"""Where an estimator with ``shifted=True`` says which steps it left out; TorchRL's losses read it."""

STEPS = "set_keys names the entry, and a collector's batch has it"


@register_value_estimator(NODE, default_kwargs={"gamma": DEFAULTS["gamma"]})
class BraceEstimator(ValueEstimatorBase):  # type: ignore[misc]
    """Value target and advantage of BRACE, of V-trace, or of what they are compared with.

    Reads what TorchRL's ``VTrace`` reads, and the action: ``log pi`` is that of the action that was taken.

    Args:
        gamma: discount per step.
        value_network: the critic; None reads values from the data, under the keys ``value`` and ``("next", value)``.
        actor_network: a probabilistic actor, the policy to be judged by; may be left out where no ratios are needed.
        shifted, skip_existing, device, time_dim, deactivate_vmap, value_chunk_size, num_chunks, value_chunk_dim,
            shifted_budget: as for TorchRL's estimators.
        differentiable: must be False.
        options: ``value_target``, ``window``, ``rho_clip``, ``c_clip``, ``lam``, ``advantage``, ``policy_lam``,
            ``auto_eps``, ``auto_budget``, ``whiten`` of
            :class:`~brace_rl.integrations.token_level.TokenLevelOptions`, steps in the place of tokens. ``whiten`` is
            off unless asked for.

    Attributes:
        metrics: figures of the last batch by name, scalar tensors; see
            :class:`~brace_rl.integrations.token_level.TokenLevelEstimates`.

    Raises:
        ConfigError: names the option.
    """

    def __init__(
        self,
        *,
        gamma: float | Tensor,
        value_network: Any,
        actor_network: Any = None,
        shifted: bool = False,
        differentiable: bool = False,
        skip_existing: bool | None = None,
        device: torch.device | None = None,
        time_dim: int | None = None,
        deactivate_vmap: bool = False,
        value_chunk_size: int | None = None,
        num_chunks: int | None = None,
        value_chunk_dim: int = 0,
        shifted_budget: int = 1,
        **options: Any,
    ) -> None:
        check_not_differentiable(differentiable)
        super().__init__(
            value_network=value_network,
            shifted=shifted,
            skip_existing=skip_existing,
            device=device,
            deactivate_vmap=deactivate_vmap,
            value_chunk_size=value_chunk_size,
            num_chunks=num_chunks,
            value_chunk_dim=value_chunk_dim,
            shifted_budget=shifted_budget,
        )
        self.options = options_from({**options, "gamma": float(gamma)})
        if self.options.needs_ratios and actor_network is None:
            raise ConfigError(
                f"actor_network: missing, and value_target = {self.options.value_target} needs it to score actions"
            )
        self.time_dim = time_dim
        self.metrics: dict[str, Tensor] = {}
        # Beside the module, as the base class keeps the critic: their parameters belong to the loss.
        self.__dict__["actor_network"] = actor_network
        self.__dict__["actor_params"] = None

    @classmethod
    def for_loss(cls, loss_module: Any, **hyperparams: Any) -> BraceEstimator:
        """An estimator with the critic, the actor and the keys of one of TorchRL's losses.

        It judges by the actor as the loss trains it, not by a copy.
        """
        critic = "critic_network" if getattr(loss_module, "critic_network", None) is not None else "value_network"
        networks = {
            "value_network": getattr(loss_module, critic, None),
            "actor_network": getattr(loss_module, "actor_network", None),
        }
        estimator = cls(**{**networks, **hyperparams})
        if "actor_network" not in hyperparams and getattr(loss_module, "functional", False):
            estimator.__dict__["actor_params"] = loss_module.actor_network_params
        known = vars(estimator.tensor_keys)
        estimator.set_keys(**{name: key for name, key in vars(loss_module.tensor_keys).items() if name in known})
        return estimator

    @property
    def in_keys(self) -> list[Any]:
        """Entries that are read."""
        keys = [*super().in_keys]
        if self.actor_network is not None:
            sampled = self.tensor_keys.sample_log_prob
            keys += [*self.actor_network.in_keys, *self.actor_network.dist_sample_keys]
            keys += sampled if isinstance(sampled, list) else [sampled]
        return list(dict.fromkeys(keys))

    @dispatch  # type: ignore[untyped-decorator,misc]
    @torch.no_grad()
    def forward(
        self,
        tensordict: Any,
        *,
        params: Any = None,
        target_params: Any = None,
        time_dim: int | None = None,
    ) -> Any:
        """Write ``advantage`` and ``value_target`` into a batch ``[*B, T]``, with the values that they come from.

        Args:
            tensordict: as a collector returns it: steps in the order of time, each with its action, the log-prob that
                it was sampled with, and reward, done, terminated and observation under ``"next"``. Steps whose
                ``("collector", "mask")`` is false are none.
            params, target_params: of a functional critic, for the states and for the next states.
            time_dim: the dimension of time; None: the one given before, else the one named "time", else the last.

        Raises:
            DataError: an entry is missing or cannot be meant; the message says what brings it.
        """
        if tensordict.batch_dims < 1:
            raise DataError("batch: has no dimension of time; give it a batch size [..., T]")
        self._check_single_steps(tensordict)
        with nullcontext() if self.skip_existing is None else set_skip_existing(self.skip_existing):
            values, next_values, valid = self._values(tensordict, params, target_params)
            sampled, judged = self._log_probs(tensordict, values)
        if valid is not None:
            tensordict.set(SHIFTED_MASK, valid)
        found = torchrl_estimates(
            values=values,
            next_values=next_values,
            rewards=_entry(tensordict, ("next", self.tensor_keys.reward), STEPS),
            done=_entry(tensordict, ("next", self.tensor_keys.done), STEPS),
            terminated=_entry(tensordict, ("next", self.tensor_keys.terminated), STEPS),
            sample_log_prob=sampled,
            actor_log_prob=judged,
            valid=_both(values, valid, tensordict.get(MASK, None)),
            options=self.options,
            time_dim=self._get_time_dim(time_dim, tensordict),
        )
        self.metrics = found.metrics
        tensordict.set(self.tensor_keys.advantage, found.advantage)
        tensordict.set(self.tensor_keys.value_target, found.value_target)
        return tensordict

    def _check_single_steps(self, tensordict: Any) -> None:
        steps = tensordict.get(self.tensor_keys.steps_to_next_obs, None)
        if steps is not None and bool((steps != 1).any()):
            raise DataError(
                f"{self.tensor_keys.steps_to_next_obs}: steps were merged, and a return needs them one by one; leave "
                "MultiStep out"
            )

    def _values(self, tensordict: Any, params: Any, target_params: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        key = self.tensor_keys.value
        if self.value_network is None:
            mend = "give the estimator a value_network, or write it before"
            return _entry(tensordict, key, mend), _entry(tensordict, ("next", key), mend), None
        if params is not None:
            params = params.detach()
            target_params = params.clone(False) if target_params is None else target_params
        with hold_out_net(self.value_network):
            values, next_values, valid = self._call_value_nets(
                data=tensordict,
                params=params,
                next_params=target_params,
                single_call=self.shifted,
                value_key=key,
                detach_next=True,
                vmap_randomness=self.vmap_randomness,
            )
        return values, next_values, valid

    def _log_probs(self, tensordict: Any, values: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """``log mu`` and ``log pi`` of the actions taken, in the shape of the values."""
        if not self.options.needs_ratios:
            return None, None
        # One log-prob for a step, of however many parts its action is.
        with set_composite_lp_aggregate(True):
            distribution = self._distribution(tensordict)
            keys = self.actor_network.dist_sample_keys
            actions = {key: _entry(tensordict, key, "it is what the actor calls its action") for key in keys}
            is_composite = isinstance(distribution, CompositeDistribution)
            judged = distribution.log_prob(tensordict.select(*keys) if is_composite else actions[keys[0]])
        key = self.tensor_keys.sample_log_prob
        mend = "build the actor with return_log_prob=True, or name the entry: set_keys(sample_log_prob=...)"
        sampled = tensordict.select(*key) if isinstance(key, list) else _entry(tensordict, key, mend)
        return _per_step(key, sampled, values), _per_step("the actor's log-prob", judged, values)

    def _distribution(self, tensordict: Any) -> Any:
        observed = tensordict.select(*self.actor_network.in_keys, strict=False)
        if self.actor_params is None:
            return self.actor_network.get_dist(observed)
        with self.actor_params.to_module(self.actor_network, preserve_module_state=False):
            return self.actor_network.get_dist(observed)


def enable(*losses: Any) -> None:
    """Let ``loss.make_value_estimator("brace", window=16, ...)`` be said to these losses.

    Args:
        losses: classes of TorchRL's losses, or single losses; each has a list of estimators that it knows.
    """
    for loss in losses:
        if NODE not in loss.SUPPORTED_VALUE_ESTIMATORS:
            loss.SUPPORTED_VALUE_ESTIMATORS = (*loss.SUPPORTED_VALUE_ESTIMATORS, NODE)


def _entry(tensordict: Any, key: Any, mend: str) -> Any:
    found = tensordict.get(key, None)
    if found is None:
        raise DataError(f"{key}: not in the batch; {mend}")
    return found


def _per_step(name: Any, log_prob: Any, values: Tensor) -> Tensor:
    if is_tensor_collection(log_prob):
        log_prob = log_prob.sum(dim="feature", reduce=True)
    if log_prob.numel() != values.numel():
        raise DataError(
            f"{name}: got {list(log_prob.shape)}, and values are {list(values.shape)}; the distribution must give one "
            "log-prob per step: wrap it in Independent"
        )
    one: Tensor = log_prob.reshape(values.shape)
    return one


def _both(values: Tensor, *masks: Tensor | None) -> Tensor | None:
    """Where all masks that are there hold, in the shape of the values; None where there is none."""
    given = [mask for mask in masks if mask is not None]
    if not given:
        return None
    valid = torch.ones_like(values, dtype=torch.bool)
    for mask in given:
        while mask.ndim < values.ndim:
            mask = mask.unsqueeze(-1)
        valid &= mask
    return valid
