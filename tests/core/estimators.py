"""Random batches, and one way to call every estimator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from brace_rl import core

RATIO_OPTIONS = ("rho_clip", "c_clip", "lam")
ESTIMATORS: dict[str, tuple[Callable[..., core.ValueTargets], tuple[str, ...]]] = {
    "brace": (core.brace_targets, ("window", *RATIO_OPTIONS, "gamma")),
    "capped": (core.capped_targets, ("window", *RATIO_OPTIONS, "gamma")),
    "vtrace": (core.vtrace_targets, (*RATIO_OPTIONS, "gamma")),
    "gae": (core.gae_targets, ("lam", "gamma")),
    "monte_carlo": (core.monte_carlo_targets, ("gamma",)),
}

every_estimator = pytest.mark.parametrize("estimator", list(ESTIMATORS))


def estimate(name: str, batch: dict[str, Tensor], **options: object) -> core.ValueTargets:
    """Call an estimator with the inputs and options it has, leaving out those it does not."""
    function, known = ESTIMATORS[name]
    inputs = dict(batch)
    if "rho_clip" not in known:
        inputs.pop("behavior_logprobs"), inputs.pop("target_logprobs")
    common = ("check_inputs", "segment_ids", "bootstrap_values")
    return function(**inputs, **{k: v for k, v in options.items() if k in known or k in common})


def random_batch(seed: int, rows: int = 4, columns: int = 12, *, holes: bool = True) -> dict[str, Tensor]:
    """Float64 inputs with dense rewards on policy tokens; every row has a policy token."""
    g = torch.Generator().manual_seed(seed)
    shape = (rows, columns)
    mask = torch.rand(shape, generator=g) < 0.7 if holes else torch.ones(shape, dtype=torch.bool)
    mask[:, columns // 2] = True
    behavior = -torch.rand(shape, generator=g, dtype=torch.float64)
    return {
        "values": torch.randn(shape, generator=g, dtype=torch.float64),
        "rewards": torch.randn(shape, generator=g, dtype=torch.float64) * mask,
        "behavior_logprobs": behavior,
        "target_logprobs": behavior + 0.3 * torch.randn(shape, generator=g, dtype=torch.float64),
        "policy_mask": mask,
    }
