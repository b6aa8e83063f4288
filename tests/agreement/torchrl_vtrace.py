"""Our V-trace beside TorchRL's, which shares no code with it: ``make agree-torchrl``, in an environment of its own.

TorchRL wants one row per environment, with flags where an episode ends; our responses become such rows. What must be
the same are the targets. The advantages differ by definition: TorchRL's carries IMPALA's factor ``min(rho_clip, w_s)``,
Eq. 27 does not, so ours is multiplied by it before the two are compared.

Prints a Markdown table, and ends with code 1 if anything differs by more than ``TOLERANCE`` of the largest target.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from importlib.metadata import version
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torchrl.objectives.value.functional import vtrace_advantage_estimate

from brace_rl import core

ROWS, COLUMNS = 6, 160
SEEDS = range(5)
RHO_CLIPS = (0.7, 1.0, 1.2, 4.0, math.inf)
C_CLIPS = (1.0, 1.1)
GAMMAS = (1.0, 0.97)
LOG_RATIO_SPREAD = 0.3
TOLERANCE = 1e-11


class Batch(NamedTuple):
    """``[B, T]`` float64 rows of whole responses; behind the last response of a row is junk.

    Attributes:
        ends: last token of a response.
        cut_off: those of them after which the response would have gone on.
        after: value of the state behind the token at an end.
    """

    values: Tensor
    rewards: Tensor
    behavior_logprobs: Tensor
    target_logprobs: Tensor
    policy_mask: Tensor
    ends: Tensor
    cut_off: Tensor
    after: Tensor


def random_batch(seed: int, *, same_length: bool, packed: bool, truncated: bool) -> Batch:
    """A batch with dense rewards."""
    generator = torch.Generator().manual_seed(seed)
    shape = (ROWS, COLUMNS)
    column = torch.arange(COLUMNS).expand(shape)
    last = torch.full((ROWS, 1), COLUMNS - 1)
    if not same_length:
        last = torch.randint(1, COLUMNS, (ROWS, 1), generator=generator)
    ends = column == last
    if packed:
        ends |= (torch.rand(shape, generator=generator) < 0.05) & (column < last)
    cut_off = ends & (torch.rand(shape, generator=generator) < 0.5) if truncated else torch.zeros_like(ends)
    values, rewards, after, drift = torch.randn(4, *shape, generator=generator, dtype=torch.float64)
    behavior_logprobs = -torch.rand(shape, generator=generator, dtype=torch.float64)
    return Batch(
        values=values,
        rewards=rewards,
        behavior_logprobs=behavior_logprobs,
        target_logprobs=behavior_logprobs + LOG_RATIO_SPREAD * drift,
        policy_mask=column <= last,
        ends=ends,
        cut_off=cut_off,
        after=after,
    )


def theirs(batch: Batch, *, rho_clip: float, c_clip: float, gamma: float) -> tuple[Tensor, Tensor]:
    """TorchRL's targets and advantages ``[B, T]``."""
    following = torch.nn.functional.pad(batch.values[:, 1:], (0, 1))
    # Tensors, because numbers would be made float32 there, and 0.97 and 1.2 are not float32 numbers.
    gamma, rho_clip, c_clip = torch.tensor([gamma, rho_clip, c_clip], dtype=torch.float64)
    advantages, targets = vtrace_advantage_estimate(
        gamma,
        log_pi=batch.target_logprobs[..., None],
        log_mu=batch.behavior_logprobs[..., None],
        state_value=batch.values[..., None],
        next_state_value=torch.where(batch.ends, batch.after, following)[..., None],
        reward=batch.rewards[..., None],
        done=batch.ends[..., None],
        terminated=(batch.ends & ~batch.cut_off)[..., None],
        rho_thresh=rho_clip,
        c_thresh=c_clip,
    )
    return targets[..., 0], advantages[..., 0]


def ours(batch: Batch, estimator: Callable[..., core.ValueTargets], **options: float) -> tuple[Tensor, Tensor]:
    """Our targets and advantages ``[B, T]``; a row that holds one response is not told it might hold several."""
    bootstrap = torch.where(batch.cut_off, batch.after, 0.0)
    packed = bool((batch.ends.sum(1) > 1).any())
    got = estimator(
        values=batch.values,
        rewards=torch.where(batch.policy_mask, batch.rewards, 0.0),
        behavior_logprobs=batch.behavior_logprobs,
        target_logprobs=batch.target_logprobs,
        policy_mask=batch.policy_mask,
        bootstrap_values=bootstrap if packed else bootstrap.sum(1),
        segment_ids=batch.ends.cumsum(1) - batch.ends.long() if packed else None,
        **options,
    )
    return got.targets, got.advantages


LAYOUTS = {
    "rows of one length": {"same_length": True, "packed": False, "truncated": False},
    "rows of different lengths": {"same_length": False, "packed": False, "truncated": False},
    "some cut off, with a bootstrap value": {"same_length": False, "packed": False, "truncated": True},
    "several responses in a row, some cut off": {"same_length": False, "packed": True, "truncated": True},
}


def vtrace(batch: Batch) -> tuple[Callable[..., core.ValueTargets], dict[str, float], Batch]:
    """V-trace itself."""
    return core.vtrace_targets, {}, batch


def capped(batch: Batch) -> tuple[Callable[..., core.ValueTargets], dict[str, float], Batch]:
    """The capped target is V-trace where its window is as long as the row."""
    return core.capped_targets, {"window": COLUMNS}, batch


def brace(batch: Batch) -> tuple[Callable[..., core.ValueTargets], dict[str, float], Batch]:
    """So is BRACE where the last token's ratio, which it never reads, is 1; TorchRL is told that it is."""
    told = torch.where(batch.ends, batch.behavior_logprobs, batch.target_logprobs)
    return core.brace_targets, {"window": COLUMNS}, batch._replace(target_logprobs=told)


def largest_differences(layout: dict[str, bool], case: Callable[[Batch], tuple]) -> tuple[float, float, int]:
    """Of the targets and of the advantages, as a share of the largest target; and how many targets were compared."""
    worst_target = worst_advantage = 0.0
    compared = 0
    for seed, rho_clip, c_clip, gamma in product(SEEDS, RHO_CLIPS, C_CLIPS, GAMMAS):
        batch = random_batch(seed, **layout)
        estimator, more, batch = case(batch)
        if estimator is core.brace_targets and rho_clip < 1.0:
            continue  # a cap below 1 weighs the last residual in V-trace, never in BRACE
        options = {"rho_clip": rho_clip, "c_clip": c_clip, "gamma": gamma}
        targets, advantages = ours(batch, estimator, **options, **more)
        wanted_targets, wanted_advantages = theirs(batch, **options)
        weights = (batch.target_logprobs - batch.behavior_logprobs).exp().clamp(max=rho_clip)
        here = batch.policy_mask
        scale = wanted_targets[here].abs().max().item()
        worst_target = max(worst_target, (targets - wanted_targets)[here].abs().max().item() / scale)
        difference = (weights * advantages - wanted_advantages)[here].abs().max().item()
        worst_advantage = max(worst_advantage, difference / scale)
        compared += int(here.sum())
    return worst_target, worst_advantage, compared


def main() -> int:
    """Print the table; 1 if something differs."""
    print(f"torchrl {version('torchrl')} | tensordict {version('tensordict')} | torch {torch.__version__} | float64")
    print(
        f"rho_clip in {RHO_CLIPS}, c_clip in {C_CLIPS}, gamma in {GAMMAS}, {len(SEEDS)} batches of {ROWS} rows each\n"
    )
    print("| layout | ours | targets compared | largest difference, targets | largest difference, advantages |")
    print("| --- | --- | --- | --- | --- |")
    agrees = True
    for (name, layout), case in product(LAYOUTS.items(), (vtrace, capped, brace)):
        of_targets, of_advantages, compared = largest_differences(layout, case)
        agrees &= compared > 0 and max(of_targets, of_advantages) <= TOLERANCE
        print(f"| {name} | {case.__name__} | {compared:,} | {of_targets:.1e} | {of_advantages:.1e} |")
    print(f"\n{'agrees' if agrees else 'DIFFERS'} (tolerance {TOLERANCE:.0e} of the largest target)")
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
