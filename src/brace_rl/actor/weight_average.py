"""The weight average of PPO-EWMA: an exponentially weighted mean of the weights after every optimiser step.

Hilton, Cobbe and Schulman, arXiv 2110.00641. With total weight ``W`` and weights ``theta``::

    W' = beta W + 1
    average <- (beta W average + theta) / W'

so that the average of the first ``n`` of them is their mean weighted by ``beta^(n-1) .. 1``, whatever ``n`` is: no bias
towards the start. Its policy is the proximal one of ``ppo_ewma`` and ``ppo_ewma_revised``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from brace_rl.errors import ModelError

ACTIVE_FRACTION = 0.9
"""Share of active tokens below which the revised form restarts the average (Guan et al., arXiv 2605.12070)."""

_TOTAL_WEIGHT = "total_weight"
_AVERAGE = "average."


def beta_for_window(window: int) -> float:
    """``W / (W + 2)``: the revised form's decay for samples up to ``window`` versions old.

    The mean age of the averaged weights is then ``beta / (1 - beta) = W / 2``.

    Raises:
        ValueError: a negative window.
    """
    if window < 0:
        raise ValueError(f"window = {window}: must be at least 0 (weight versions)")
    return window / (window + 2)


class WeightAverage:
    """Average of a model's weights, in float32 or better, on the device of the weights it is given.

    Integer entries of the state dict (buffers that count) are not averaged: the latest stands.

    Attributes:
        beta: decay per update.
        total_weight: ``W``; 1 right after a reset.
    """

    def __init__(self, weights: Mapping[str, Tensor], *, beta: float) -> None:
        """Start from ``weights``, a ``state_dict``.

        Raises:
            ValueError: ``beta`` not in ``[0, 1)``.
        """
        if not 0 <= beta < 1:
            raise ValueError(f"beta = {beta}: must be at least 0 and below 1")
        self.beta = beta
        self.total_weight = 1.0
        self._average = {name: _wide(x.detach()).clone() for name, x in weights.items()}

    @torch.no_grad()
    def update(self, weights: Mapping[str, Tensor]) -> None:
        """Take in the weights after an optimiser step.

        Raises:
            ModelError: weights of another model.
        """
        self.total_weight = self.beta * self.total_weight + 1
        self._blend(weights, 1 / self.total_weight)

    @torch.no_grad()
    def reset(self, weights: Mapping[str, Tensor]) -> None:
        """Forget the past: the average is ``weights``.

        Raises:
            ModelError: weights of another model.
        """
        self.total_weight = 1.0
        self._blend(weights, 1.0)

    def reset_if_inactive(
        self, weights: Mapping[str, Tensor], *, active_fraction: float, threshold: float = ACTIVE_FRACTION
    ) -> bool:
        """:meth:`reset` when the rule's ``active_fraction`` on a minibatch is below ``threshold``; returns whether."""
        if active_fraction >= threshold:
            return False
        self.reset(weights)
        return True

    @torch.no_grad()
    def copy_to(self, module: nn.Module) -> None:
        """Write the average into ``module``, in the dtypes it has. To score with it, give a copy of the actor.

        Raises:
            ModelError: a module of another shape.
        """
        own = module.state_dict()
        self._check(own)
        for name, x in own.items():
            x.copy_(self._average[name])

    def state_dict(self) -> dict[str, Tensor]:
        """Everything but ``beta``, as tensors (not copies) for a checkpoint."""
        tensors = {f"{_AVERAGE}{name}": x for name, x in self._average.items()}
        return {_TOTAL_WEIGHT: torch.tensor(self.total_weight, dtype=torch.float64), **tensors}

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what :meth:`state_dict` gave.

        Raises:
            ModelError: the average of another model, or no average at all.
        """
        if _TOTAL_WEIGHT not in tensors:
            raise ModelError("the checkpoint holds no weight average; resume with the actor rule the run had")
        average = {name.removeprefix(_AVERAGE): x for name, x in tensors.items() if name.startswith(_AVERAGE)}
        self._check(average)
        for name, x in self._average.items():
            x.copy_(average[name])
        self.total_weight = float(tensors[_TOTAL_WEIGHT])

    def _blend(self, weights: Mapping[str, Tensor], share: float) -> None:
        # (beta W average + theta) / W' = average + (theta - average) / W', which leaves equal weights as they are.
        self._check(weights)
        for name, x in self._average.items():
            theta = weights[name].detach().to(x)
            if x.is_floating_point() and share < 1:
                x.lerp_(theta, share)
            else:
                x.copy_(theta)

    def _check(self, weights: Mapping[str, Tensor]) -> None:
        differing = sorted(set(self._average) ^ set(weights))
        if differing:
            raise ModelError(f"the weight average is of another model: only one of the two has {differing[0]}")
        for name, x in self._average.items():
            if x.shape != weights[name].shape:
                shapes = f"{list(x.shape)} in the average and {list(weights[name].shape)} in the model"
                raise ModelError(f"the weight average is of another model: {name} is {shapes}")


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32)) if x.is_floating_point() else x
