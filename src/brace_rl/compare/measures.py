"""The figures beside success: what each is, where it is read from, and over what it is averaged."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from brace_rl.report.run_data import RunData, Series


@dataclass(frozen=True)
class Measure:
    """A figure of a run.

    Attributes:
        key: its name in the files.
        title: its name for people.
        meaning: one sentence, with the estimator where there is a choice.
        of_critic: there is none without a critic.
        series: its course over the trainer steps that have it.
        summary: what stands for the run, of the finite values.
    """

    key: str
    title: str
    meaning: str
    of_critic: bool
    series: Callable[[RunData], Series]
    summary: Literal["mean", "max"] = "mean"

    def of_run(self, run: RunData, *, has_critic: bool) -> Series:
        """The course over the trainer steps; empty where the figure does not exist."""
        if self.of_critic and not has_critic:
            return []
        return [(step, value) for step, value in self.series(run) if step > 0 and math.isfinite(value)]

    def summarise(self, series: Series) -> float | None:
        """What stands for a run; None for one that does not have it."""
        values = [value for _, value in series]
        if not values:
            return None
        return max(values) if self.summary == "max" else fmean(values)


def logged(metric: str) -> Callable[[RunData], Series]:
    """A metric as it was logged."""
    return lambda run: run.series(metric)


def distance(metric: str, other: str) -> Callable[[RunData], Series]:
    """``|metric - other|`` at the steps that logged both."""
    return lambda run: [
        (row["step"], abs(row[metric] - row[other])) for row in run.rows if metric in row and other in row
    ]


MEASURES = (
    Measure(
        "gap_fresh",
        "g_hat, fresh responses",
        "|mean V - E_pi[R]|. E_pi: mean reward of the new weights' responses to the held-out problems, at the steps "
        "that evaluate. Mean V: over the policy tokens of that step's training batch. Mean over the evaluations.",
        True,
        distance("value/mean", "eval/reward"),
    ),
    Measure(
        "gap_batch",
        "value gap, batch",
        "|mean V - mean reward| of the training batch, whose responses older weights sampled: E_mu, not E_pi. Mean V: "
        "over policy tokens. Mean over the steps.",
        True,
        distance("value/mean", "reward/mean"),
    ),
    Measure(
        "separation",
        "separation",
        "Mean V over the policy tokens of successful responses less that of failed ones, in the training batch. Mean "
        "over the steps that have both.",
        True,
        logged("value/separation"),
    ),
    Measure(
        "ess",
        "ESS",
        "Effective sample size of pi/mu per token, as a share of the batch's tokens. Mean over the steps.",
        False,
        logged("ratio/ess"),
    ),
    Measure(
        "critic_grad_norm",
        "critic gradient",
        "Norm of the critic's gradient before clipping. Mean over the steps.",
        True,
        logged("critic/grad_norm"),
    ),
    Measure(
        "advantage_max",
        "largest advantage",
        "Largest |advantage| before whitening, over the whole run; group advantages are in units of their own.",
        False,
        logged("advantage/abs_max"),
        "max",
    ),
    Measure(
        "target_gap",
        "|target - V|",
        "Mean over the policy tokens, before the update. Mean over the steps.",
        True,
        logged("target/abs_gap"),
    ),
    Measure(
        "clip_fraction",
        "clip fraction",
        "Share of tokens whose gradient the actor's clip removed. Mean over the steps.",
        False,
        logged("actor/clip_fraction"),
    ),
)
"""The diagnostics of the paper's Figures 4a, 4b and 6, and two more that its text gives figures of."""
