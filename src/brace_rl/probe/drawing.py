"""The counterpart of the paper's Figure 2a. Loads matplotlib, and only when something is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from brace_rl.pictures import save_figure
from brace_rl.probe.run import Probe

SIZE_INCHES = (10.0, 4.2)
LABELS = {
    "v_pi": "V^pi",
    "v_mu": "V^mu",
    "value": "V, the critic",
    "b": "b = V^pi − V^mu",
    "g_pi": "g_pi = V − V^pi",
    "g_mu": "g_mu = V − V^mu",
}
"""How each figure is called in pictures."""
PANELS = (
    ("Value by position", ("v_pi", "v_mu", "value")),
    ("Gaps by position", ("b", "g_pi", "g_mu")),
)


def draw(probe: Probe, folder: Path) -> list[Path]:
    """Write ``probe.png`` and ``probe.svg``: values on the left, gaps on the right, with 95 % intervals."""
    import matplotlib
    from matplotlib.figure import Figure

    # Without the salt, the names inside an SVG would differ from call to call.
    with matplotlib.rc_context({"svg.hashsalt": "brace probe"}):
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        are_shares = probe.options.positions.are_shares
        for axis, (title, names) in zip(figure.subplots(1, 2), PANELS, strict=True):
            for index, name in enumerate(names):
                _course(axis, probe, name, f"C{index}")
            axis.set(title=title, xlabel=f"position ({'share of the response' if are_shares else 'policy tokens'})")
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
            axis.legend(fontsize=8, frameon=False)
        axis.axhline(0, color="0.5", linewidth=0.8)
        age = probe.step - probe.behavior_step
        figure.suptitle(
            f"pi: step {probe.step}, mu: {age} steps older; {probe.overall.prompts} prompts, "
            f"{probe.options.continuations} continuations a state and policy; 95 % intervals",
            fontsize=10,
        )
        return save_figure(figure, folder / "probe")


def _course(axis: Any, probe: Probe, name: str, colour: str) -> None:
    estimates = [group.figures[name].estimate for group in probe.positions]
    places = probe.options.positions.places
    values, low, high = (np.array([getattr(e, side) for e in estimates]) for side in ("value", "low", "high"))
    axis.plot(places, values, color=colour, marker="o", markersize=3.5, label=LABELS[name])
    if len(places) == 1:  # a band would have no width
        axis.errorbar(places, values, yerr=[values - low, high - values], color=colour, capsize=3)
    axis.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
