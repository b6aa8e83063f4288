"""Tables of a probe: for the terminal and the page, and as CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence

from brace_rl.diagnose.sums import Estimate
from brace_rl.probe.estimate import FIGURES, Group
from brace_rl.probe.run import Probe

HEADS = (
    "position",
    "tokens",
    "states",
    "V^pi",
    "V^mu",
    "V",
    "b = V^pi - V^mu",
    "g_pi = V - V^pi",
    "g_mu = V - V^mu",
    "noise in b",
)

LEGEND = (
    "position: {kind}. tokens: policy tokens written, in mean. Brackets: 95 % intervals, bootstrap over prompts. "
    "noise in b: share of its variance that more continuations would remove."
)

_COLUMNS = (
    "position",
    "figure",
    "value",
    "low",
    "high",
    "noise_share",
    "needed_prompts",
    "needed_continuations",
    "states",
    "prompts",
    "token_mean",
)


def rows(probe: Probe) -> list[Sequence[str]]:
    """One row per position, and one for all."""
    return [_row(group) for group in (*probe.positions, probe.overall)]


def legend(probe: Probe) -> str:
    """What the columns mean."""
    are_shares = probe.options.positions.are_shares
    return LEGEND.format(kind="share of the response's policy tokens" if are_shares else "policy tokens written")


def title(probe: Probe) -> str:
    """Which policies, from which states, how often."""
    source = "held-out problems, fresh under mu" if probe.options.prefixes == "fresh" else "rollouts.jsonl"
    return (
        f"pi: step {probe.step}, mu: step {probe.behavior_step} ({probe.step - probe.behavior_step} steps older; "
        f"max_staleness {probe.max_staleness}). {probe.overall.states} states of {probe.overall.prompts} prompts "
        f"({source}), {probe.options.continuations} continuations each under pi and under mu"
    )


def csv_text(probe: Probe) -> str:
    """One row per position and figure."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for group in (*probe.positions, probe.overall):
        for name in FIGURES:
            measured = group.figures[name]
            e, needed = measured.estimate, measured.needed
            figures = [e.value, *(x if math.isfinite(x) else "" for x in (e.low, e.high, measured.noise_share))]
            more = ["", ""] if needed is None else [needed.prompts, needed.continuations]
            writer.writerow([group.label, name, *figures, *more, group.states, group.prompts, group.token_mean])
    return text.getvalue()


def _row(group: Group) -> list[str]:
    share = group.figures["b"].noise_share
    return [
        group.label,
        f"{group.token_mean:.1f}",
        str(group.states),
        *(f"{group.figures[name].estimate.value:.3f}" for name in ("v_pi", "v_mu", "value")),
        *(_interval(group.figures[name].estimate) for name in ("b", "g_pi", "g_mu")),
        "-" if math.isnan(share) else f"{share:.0%}",
    ]


def _interval(e: Estimate) -> str:
    if math.isnan(e.low):
        return f"{e.value:+.3f}"
    return f"{e.value:+.3f} [{e.low:+.3f}, {e.high:+.3f}]"
