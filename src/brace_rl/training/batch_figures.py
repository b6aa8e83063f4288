"""What a step's metrics say about its batch, and the one thing about it that stops a run."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from brace_rl import core
from brace_rl.config import AlgorithmConfig
from brace_rl.diagnostics import batch as diagnostics
from brace_rl.errors import StalenessError
from brace_rl.training.batch import Batch
from brace_rl.training.estimates import Estimates, Evaluation


def batch_figures(
    algorithm: AlgorithmConfig, batch: Batch, before: Evaluation, estimate: Estimates, *, version: int
) -> dict[str, Tensor]:
    """Scalar tensors by metric name, over all policy tokens of the batch.

    Args:
        version: of the weights about to be updated.
    """
    mask = batch.policy_mask
    ratios: dict[str, Any] = {
        "behavior_logprobs": batch.behavior_logprobs,
        "target_logprobs": before.target_logprobs,
        "policy_mask": mask,
        "c_clip": algorithm.c_clip,
        "gamma": algorithm.gamma,
        "lam": algorithm.lam,
    }
    windows = estimate.windows
    if not isinstance(windows, int):
        chosen = windows.expand_as(mask) if windows.dim() == 0 else windows
        window_metrics = {"window/mean": chosen[mask].double().mean(), "window/max": chosen[mask].max()}
    else:
        window_metrics = {}
    return {
        **diagnostics.ratio_statistics(**ratios),
        **diagnostics.target_statistics(
            values=before.values, targets=estimate.targets, advantages=estimate.advantages, policy_mask=mask
        ),
        **diagnostics.window_weight_statistics(
            window_weights=core.window_weights(**ratios, window=windows), policy_mask=mask
        ),
        **window_metrics,
        **diagnostics.staleness_statistics(versions=batch.versions, policy_mask=mask, current_version=version),
        "entropy/mean": before.entropies[mask].mean(),
    }


def refuse_fake_behavior(batch: Batch, target_logprobs: Tensor, *, version: int, moved_version: int) -> None:
    """Stop when tokens sampled before the actor last moved have the current policy's log-probs to the last bit.

    Those were scored by the current policy, not when they were sampled. A token the policy was certain of (log-prob
    0, as where top-k leaves one) proves nothing.

    Args:
        version: of the weights about to be updated.
        moved_version: newest version whose actor differs from the one before it.

    Raises:
        StalenessError: that is so.
    """
    stale = batch.policy_mask & (batch.versions < moved_version) & (target_logprobs != 0)
    identical = (batch.behavior_logprobs == target_logprobs) | ~stale
    if bool(stale.any() & identical.all()):
        raise StalenessError(
            f"step {version + 1}: {int(stale.sum())} stale tokens have behaviour log-probs identical to the "
            "current policy's, so every ratio is 1 and nothing is corrected; log the log-probs when tokens are "
            "sampled, do not recompute them"
        )
