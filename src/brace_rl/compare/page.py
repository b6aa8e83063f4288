"""Writes ``compare.html``: one file, no script, nothing loaded from elsewhere, all text escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from brace_rl.compare import charts
from brace_rl.compare.charts import Curve, success_chart
from brace_rl.compare.measures import MEASURES, Measure
from brace_rl.compare.outcomes import FAILED_RULE, WARMUP_RULE, Comparison, MethodRow
from brace_rl.compare.tables import (
    COST_HEADS,
    INTERVALS,
    SUCCESS_HEADS,
    Cells,
    cost_rows,
    measure_heads,
    measure_rows,
    method_heads,
    method_lines,
    notes,
    success_rows,
)
from brace_rl.report.style import STYLE
from brace_rl.report.svg import Line, line_chart

# Control characters (which HTML forbids), surrogates, and marks that reorder the text around them.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def render(comparison: Comparison) -> str:
    """The page as text."""
    body = [
        f"<h1>{len(comparison.methods)} methods on {_text(comparison.recipe)}</h1>",
        _facts(comparison),
        _notes(comparison),
        *(_at(comparison, staleness) for staleness in comparison.staleness),
        f"<h2>What makes each method</h2>{_table(method_heads(comparison), method_lines(comparison))}",
        "<h2>What the figures are</h2><dl>",
        *(f"<dt>{_text(m.title)}</dt><dd>{_text(m.meaning)}</dd>" for m in MEASURES),
        "</dl>",
    ]
    # The policy forbids scripts and outside resources even if some text slipped through unescaped.
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>brace compare</title><style>{STYLE}{charts.STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _facts(comparison: Comparison) -> str:
    given = ", ".join(f"{key} = {value}" for key, value in comparison.settings.items())
    facts = {
        "methods": ", ".join(comparison.methods),
        "staleness S": ", ".join(map(str, comparison.staleness)),
        "seeds": ", ".join(map(str, comparison.seeds)),
        "trainer steps": str(comparison.steps),
        "steps that train the actor": _actor_steps(comparison),
        "settings over the recipe": given or "none",
        "cells": f"{len(comparison.cells)}, of which {len(comparison.failures)} failed, {comparison.missing} not run",
    }
    items = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in facts.items())
    return f'<div class="card"><dl>{items}</dl></div><p class="soft">{_text(INTERVALS)} {_text(FAILED_RULE)}</p>'


def _actor_steps(comparison: Comparison) -> str:
    by_method = comparison.actor_steps
    if len(set(by_method.values())) == 1:
        return next(iter(by_method.values()))
    return f"{', '.join(f'{method} {steps}' for method, steps in by_method.items())}. {WARMUP_RULE}"


def _notes(comparison: Comparison) -> str:
    lines = notes(comparison)
    if not lines:
        return ""
    items = "".join(f"<li>{_text(line)}</li>" for line in lines)
    return f'<h2>Notes</h2><ul class="notes">{items}</ul>'


def _at(comparison: Comparison, staleness: int) -> str:
    rows = comparison.at(staleness)
    curves = [Curve(row.method, row.curve, place) for place, row in enumerate(rows)]
    title = f"Success on held-out problems, S = {staleness}"
    picture = success_chart(title, curves, steps=comparison.steps)
    learning = _figure(title, "Mean over seeds; bands are 95 % intervals.", rows, picture)
    drawn = [figure for measure in MEASURES if (figure := _measure_figure(measure, rows))]
    return (
        f"<h2>S = {staleness}</h2>{_table(SUCCESS_HEADS, success_rows(rows))}"
        f'{learning}<h3 class="step">Diagnostics, means over seeds</h3>{_table(measure_heads(), measure_rows(rows))}'
        f'<div class="charts">{"".join(drawn)}</div>'
        f'<h3 class="step">Cost, all seeds together, without evaluation</h3>{_table(COST_HEADS, cost_rows(rows))}'
    )


def _measure_figure(measure: Measure, rows: Sequence[MethodRow]) -> str:
    lines = [
        Line(row.method, row.courses[measure.key], place % charts.PALETTE + 1, smooth=True)
        for place, row in enumerate(rows)
        if row.courses[measure.key]
    ]
    picture = line_chart(measure.title, lines, allow_log=True) if lines else ""
    shown = [row for row in rows if row.courses[measure.key]]
    return _figure(measure.title, "", shown, picture, places=[rows.index(row) for row in shown])


def _figure(title: str, hint: str, rows: Sequence[MethodRow], picture: str, places: Sequence[int] | None = None) -> str:
    if not picture:
        return ""
    keys = "".join(
        f'<span class="key"><i class="c{place % charts.PALETTE + 1}"></i>{_text(row.method)}</span>'
        for place, row in zip(places if places is not None else range(len(rows)), rows, strict=True)
    )
    note = f"<p>{_text(hint)}</p>" if hint else ""
    return f"<figure><figcaption><h3>{_text(title)}</h3>{keys}{note}</figcaption>{picture}</figure>"


def _table(heads: Cells, rows: Sequence[Cells]) -> str:
    head = "".join(f"<th>{_text(name)}</th>" for name in heads)
    body = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _text(value: object) -> str:
    """Escaped for HTML; characters that cannot be seen are spelled out."""
    return html.escape(_HIDDEN.sub(lambda found: f"⟨U+{ord(found.group()):04X}⟩", str(value)), quote=True)
