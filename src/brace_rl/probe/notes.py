"""The probe in plain words: what can be told apart, and what it would take where it cannot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from brace_rl.diagnose.sums import Estimate
from brace_rl.probe.estimate import Group, Measured, Needed
from brace_rl.probe.options import Options

if TYPE_CHECKING:
    from brace_rl.probe.run import Measurement

FEW_PROMPTS = 10
"""Below this many prompts an interval rests on too little to be trusted."""

_MUCH_TRUNCATION = 0.05
"""Share of continuations cut at the length limit above which that is worth saying."""

_MANY_TIMES = 100
"""How often more prompts than measured is called out of reach."""


def notes(overall: Group, positions: Sequence[Group], measured: Measurement, options: Options) -> list[str]:
    """Sentences, most important first."""
    found = [_bias(overall), *_critic(overall)]
    peak = max(positions, key=lambda group: abs(group.figures["b"].estimate.value))
    if len(positions) > 1 and peak.figures["b"].is_resolved:
        found.append(f"b is largest at position {peak.label}: {_told(peak.figures['b'].estimate)}.")
    wide = [group.label for group in positions if group.figures["b"].needed is not None]
    if wide:
        found.append(
            f"At {'position' if len(wide) == 1 else 'positions'} {', '.join(wide)} the interval of b is wider than b "
            "is large: read the course over all positions, not such a point."
        )
    return found + _warnings(overall, measured, options)


def needed_text(measured: Measured, overall: Group, continuations: int) -> str:
    """What would make the interval as narrow as the effect, if the effect is as large as it looks."""
    needed = measured.needed
    if needed is None:
        return ""
    if needed.prompts is None or needed.prompts > _MANY_TIMES * overall.prompts:
        return "no affordable number would resolve an effect as small as this estimate"
    ways = _ways(needed, overall.prompts, continuations, measured.noise_share)
    return f"to resolve it, if it is as large as it looks: {ways}"


def _ways(needed: Needed, prompts: int, continuations: int, noise_share: float) -> str:
    first = f"about {needed.prompts} prompts instead of {prompts}"
    if needed.continuations is None:
        return f"{first} (more continuations alone would not do: they remove {noise_share:.0%} of the variance at most)"
    return f"{first}, or about {needed.continuations} continuations instead of {continuations}"


def _bias(overall: Group) -> str:
    b = overall.figures["b"]
    if b.is_resolved:
        more = "more" if b.estimate.value > 0 else "less"
        return f"Staleness: pi earns {more} than mu from the same states, b = {_told(b.estimate)}."
    largest = max(abs(b.estimate.low), abs(b.estimate.high))
    if largest == 0:
        return (
            "Staleness: V^pi and V^mu cannot be told apart, because nothing varied; how large b could be is not known."
        )
    return (
        f"Staleness: V^pi and V^mu cannot be told apart, b = {_told(b.estimate)}; a bias of up to {largest:.3g} could "
        "hide in this."
    )


def _critic(overall: Group) -> list[str]:
    g_pi, g_mu, staleness = (overall.figures[name] for name in ("g_pi", "g_mu", "staleness"))
    side = ""
    if g_pi.is_resolved:
        side = " The critic is too " + ("high" if g_pi.estimate.value > 0 else "low") + " for pi."
    found = [f"Critic: V - V^pi = {_told(g_pi.estimate)}, V - V^mu = {_told(g_mu.estimate)}.{side}"]
    if staleness.is_resolved:
        nearer, farther = ("V^mu", "V^pi") if staleness.estimate.value > 0 else ("V^pi", "V^mu")
        found.append(
            f"State by state the critic is nearer to {nearer} than to {farther} (difference of mean squared gaps "
            f"{_told(staleness.estimate)})."
        )
    elif overall.figures["b"].estimate.value != 0:
        found.append(
            "Whether the critic is nearer to V^pi or to V^mu cannot be told (difference of mean squared gaps "
            f"{_told(staleness.estimate)})."
        )
    return found


def _warnings(overall: Group, measured: Measurement, options: Options) -> list[str]:
    found = []
    b = overall.figures["b"]
    text = needed_text(b, overall, options.continuations)
    if text:
        found.append(f"The interval of b over all states is wider than b is large; {text}.")
    if np.array_equal(measured.sample.returns_pi, measured.sample.returns_mu, equal_nan=True):
        found.append(
            "No continuation earned otherwise under pi than under mu with the same random numbers: b = 0 with no width "
            "means that nothing varied here, not that nothing could."
        )
    if overall.prompts < FEW_PROMPTS:
        found.append(f"Only {overall.prompts} prompts: intervals rest on little, take at least {FEW_PROMPTS}.")
    if options.prefixes == "fresh" and overall.prompts < options.prompts:
        found.append(f"{options.prompts} prompts were asked for, {overall.prompts} are there.")
    truncated = (measured.pi.truncated.mean() + measured.mu.truncated.mean()) / 2
    if truncated > _MUCH_TRUNCATION:
        found.append(
            f"{truncated:.0%} of the continuations were cut at the length limit; they count with what they had earned."
        )
    unjudged = int((np.isnan(measured.pi.returns) | np.isnan(measured.mu.returns)).sum())
    if unjudged:
        found.append(f"{unjudged} pairs of continuations are left out, because an environment could not judge them.")
    failures = int(measured.pi.failed.sum() + measured.mu.failed.sum())
    if failures:
        found.append(f"{failures} continuations count as 0 because their environment failed.")
    return found


def _told(e: Estimate) -> str:
    return f"{e.value:+.3g} [{e.low:+.3g}, {e.high:+.3g}]"
