"""Which figures are drawn, in which order, and how to read them."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from brace_rl.report.run_data import RunData, Series
from brace_rl.report.svg import Line, line_chart, number, stacked_chart


@dataclass(frozen=True)
class Chart:
    """One picture.

    Attributes:
        lines: (metric, label, smooth), drawn in palette order.
        hint: one sentence: what it shows, and what is healthy.
        lowest: smaller values are drawn at this level.
        evaluations: add success on held-out problems, with its interval.
    """

    title: str
    hint: str
    lines: Sequence[tuple[str, str, bool]]
    floor: float | None = None
    ceiling: float | None = None
    reference: float | None = None
    allow_log: bool = False
    lowest: float = -math.inf
    evaluations: bool = False


@dataclass(frozen=True)
class Group:
    """Charts under one heading."""

    title: str
    charts: Sequence[Chart]


GROUPS: Sequence[Group] = (
    Group(
        "Learning",
        (
            Chart("Reward", "Mean over the responses of a step.", [("reward/mean", "mean", True)]),
            Chart(
                "Success",
                "Dots: held-out problems, with 95 % intervals. Line: the training batches, sampled by older policies.",
                [("success/train", "training batches", True)],
                floor=0,
                ceiling=1,
                evaluations=True,
            ),
            Chart(
                "Response length",
                "Tokens of a response, tool output included.",
                [("response/length_mean", "mean", True), ("response/length_max", "longest", False)],
                floor=0,
            ),
            Chart(
                "Truncated responses",
                "Share cut at the length limit; they count as failures, so it should be small.",
                [("response/truncated", "share", True)],
                floor=0,
            ),
            Chart("Turns", "Model turns per response.", [("response/turns", "mean", True)], floor=0),
        ),
    ),
    Group(
        "Staleness and ratios",
        (
            Chart(
                "Staleness",
                "Age of the consumed tokens in trainer steps; within: spread of versions inside one response.",
                [
                    ("staleness/mean", "mean", False),
                    ("staleness/max", "max", False),
                    ("staleness/within_response", "within", False),
                ],
                floor=0,
            ),
            Chart(
                "Effective sample size",
                "Of the per-token ratios, as a share of the tokens; 1 is on-policy, below 0.1 few tokens carry it all.",
                [("ratio/ess", "ESS", False)],
                floor=0,
                ceiling=1,
            ),
            Chart(
                "Ratio π/μ",
                "Per token; the mean stays near 1 when the logged log-probs are those really sampled from.",
                [("ratio/mean", "mean", False), ("ratio/max", "max", False)],
                reference=1,
                allow_log=True,
            ),
            Chart(
                "Largest |log ratio|",
                "At staleness 0 this is the mismatch between engine and trainer.",
                [("ratio/log_abs_max", "max", False)],
                floor=0,
            ),
            Chart(
                "Window weight Π",
                "Weight of the realised return behind the window; near 0 the reward no longer reaches the target.",
                [("window_weight/mean", "mean", False), ("window_weight/max", "max", False)],
                floor=0,
                allow_log=True,
            ),
            Chart(
                "Drift of the log ratio",
                "m: mean log of the capped ratio, expected below 0; sigma: its spread.",
                [("drift/m", "m", False), ("drift/sigma", "sigma", False)],
                reference=0,
            ),
        ),
    ),
    Group(
        "Critic",
        (
            Chart(
                "Critic error",
                "Mean |target − V| over policy tokens, before the update.",
                [("target/abs_gap", "|target − V|", True)],
                floor=0,
            ),
            Chart(
                "Explained variance",
                "Of the targets, over the whole batch; below 0 a constant would do better. Drawn down to −1.",
                [("value/explained_variance", "explained", True)],
                ceiling=1,
                reference=0,
                lowest=-1,
            ),
            Chart(
                "Value and reward",
                "The mean value should follow the mean reward.",
                [("value/mean", "mean V", False), ("reward/mean", "mean reward", False)],
            ),
            Chart("Value loss", "Half the clipped squared error.", [("value/loss", "loss", True)], floor=0),
            Chart(
                "Value clip fraction",
                "Share of tokens whose value moved past the clip.",
                [("value/clip_fraction", "share", False)],
                floor=0,
            ),
        ),
    ),
    Group(
        "Actor",
        (
            Chart(
                "Gradient norms",
                "Before clipping.",
                [("actor/grad_norm", "actor", False), ("critic/grad_norm", "critic", False)],
                floor=0,
                allow_log=True,
            ),
            Chart(
                "Clip fraction",
                "Share of tokens whose ratio left the PPO clip range on the side that stops the gradient.",
                [("actor/clip_fraction", "share", False)],
                floor=0,
            ),
            Chart("Entropy", "Per policy token, in nats.", [("entropy/mean", "mean", True)], floor=0),
            Chart("Largest advantage", "In absolute value.", [("advantage/abs_max", "max", False)], floor=0),
        ),
    ),
    Group(
        "Cost",
        (
            Chart(
                "Throughput",
                "Prompt and response tokens consumed per second.",
                [("throughput/tokens_per_s", "tokens/s", True)],
                floor=0,
            ),
            Chart(
                "Tokens per step",
                "All: prompt and response. Policy: sampled by the model.",
                [
                    ("tokens/step", "all", False),
                    ("tokens/response", "response", False),
                    ("tokens/policy", "policy", False),
                ],
                floor=0,
            ),
        ),
    ),
)

_DRAWN_ELSEWHERE = ("time/", "ledger/", "eval/", "backend/", "version")
_OTHER = "other"

OTHER_FIGURES = "Other figures"
"""Heading of the figures that no chart above was planned for."""


def chart_groups(run: RunData) -> list[tuple[str, list[str]]]:
    """(heading, figures as HTML) for everything the run logged; figures nobody planned for come last."""
    known = {metric for group in GROUPS for chart in group.charts for metric, _, _ in chart.lines}
    rest = [key for key in run.keys if key not in known and not key.startswith(_DRAWN_ELSEWHERE)]
    others = Group(OTHER_FIGURES, [Chart(key, "", [(key, "value", False)]) for key in rest])
    drawn = []
    for group in (*GROUPS, others):
        figures = [figure for chart in group.charts if (figure := _draw(chart, run))]
        if group.title == "Cost" and (phases := phase_chart(run)):
            figures.insert(0, phases)
        if figures:
            drawn.append((group.title, figures))
    return drawn


def phase_seconds(run: RunData) -> dict[str, Series]:
    """Phase -> seconds per training step; what ``time/step`` holds beyond the named phases is "other".

    Evaluation is not part of ``time/step``.
    """
    rows = run.training_rows
    names = [key for key in run.keys if key.startswith("time/") and key != "time/step"]
    names = [name for name in names if any(name in row for row in rows)]
    phases = {name.removeprefix("time/"): [(row["step"], row.get(name, 0.0)) for row in rows] for name in names}
    if any("time/step" in row for row in rows):
        rest = [(row["step"], _clean(row.get("time/step")) - named_seconds(row)) for row in rows]
        if any(seconds > 0 for _, seconds in rest):
            phases[_OTHER] = [(step, max(0.0, seconds)) for step, seconds in rest]
    return phases


def named_seconds(row: Mapping[str, float]) -> float:
    """Seconds of one step that its phases account for; evaluation is not part of a step."""
    outside = ("time/step", "time/eval")
    return sum(_clean(value) for key, value in row.items() if key.startswith("time/") and key not in outside)


def phase_chart(run: RunData) -> str:
    """Seconds of a step, phase on phase; empty when no phase was timed."""
    phases = phase_seconds(run)
    areas = [Line(name.replace("_", " "), points, _colour(i)) for i, (name, points) in enumerate(phases.items())]
    chart = stacked_chart("Seconds per phase", areas)
    if not chart:
        return ""
    means = [sum(_clean(value) for _, value in area.points) / len(area.points) for area in areas]
    legend = [(area.label, area.colour, f"{number(mean)} s") for area, mean in zip(areas, means, strict=True)]
    return _figure(
        "Seconds per phase", "Stacked; the legend gives means. Evaluation comes on top of a step.", chart, legend
    )


def _draw(chart: Chart, run: RunData) -> str:
    lines: list[Line] = []
    for metric, label, smooth in chart.lines:
        points = [(s, max(v, chart.lowest) if math.isfinite(v) else v) for s, v in run.series(metric)]
        if points:
            lines.append(Line(label, points, _colour(len(lines)), smooth))
    legend = [
        (line.label, line.colour, number(last))
        for line, (metric, _, _) in zip(lines, [item for item in chart.lines if run.series(item[0])], strict=True)
        if (last := run.last(metric)) is not None
    ]
    evaluations = run.evaluations() if chart.evaluations else []
    if evaluations:
        points = [(float(e.step), e.success) for e in evaluations]
        intervals = [e.interval() for e in evaluations]
        lines.append(Line("held-out", points, _colour(len(lines)), dots=True, intervals=intervals))
        legend.append(("held-out", lines[-1].colour, number(evaluations[-1].success)))
    picture = line_chart(
        chart.title,
        lines,
        floor=chart.floor,
        ceiling=chart.ceiling,
        reference=chart.reference,
        allow_log=chart.allow_log,
    )
    return _figure(chart.title, chart.hint, picture, legend) if picture else ""


def _figure(title: str, hint: str, picture: str, legend: Sequence[tuple[str, int, str]]) -> str:
    keys = "".join(
        f'<span class="key"><i class="c{colour}"></i>{html.escape(label)} <b>{html.escape(value)}</b></span>'
        for label, colour, value in legend
    )
    note = f"<p>{html.escape(hint)}</p>" if hint else ""
    return f"<figure><figcaption><h3>{html.escape(title)}</h3>{keys}{note}</figcaption>{picture}</figure>"


def _colour(index: int) -> int:
    return index % 8 + 1


def _clean(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else 0.0
