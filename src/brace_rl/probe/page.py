"""Writes ``probe.html``: one file, no script, nothing loaded from elsewhere, all text escaped."""

from __future__ import annotations

import html
from collections.abc import Sequence

from brace_rl.diagnose.drawing import by_bin
from brace_rl.probe.drawing import LABELS, PANELS
from brace_rl.probe.run import Probe
from brace_rl.probe.tables import HEADS, legend, rows, title
from brace_rl.report.style import STYLE


def render(probe: Probe) -> str:
    """The page as text."""
    notes = "".join(f"<li>{_text(note)}</li>" for note in probe.notes)
    charts = "".join(_chart(probe, name, figures) for name, figures in PANELS)
    body = (
        f'<h1>Value probe</h1><p class="soft">{_text(probe.run)}</p><p>{_text(title(probe))}.</p>'
        f'<ul class="notes">{notes}</ul><div class="charts">{charts}</div>'
        f'<h2>By position</h2>{_table(rows(probe))}<p class="soft">{_text(legend(probe))}</p>'
    )
    # The policy forbids scripts and outside resources even if some text slipped through unescaped.
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Value probe</title><style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _chart(probe: Probe, name: str, figures: Sequence[str]) -> str:
    series = [[group.figures[figure].estimate for group in probe.positions] for figure in figures]
    reference = 0.0 if "b" in figures else None
    picture = by_bin(name, [group.label for group in probe.positions], series, reference=reference)
    keys = "".join(
        f'<span class="key"><i class="c{i + 1}"></i>{_text(LABELS[figure])}</span>' for i, figure in enumerate(figures)
    )
    return f"<figure><figcaption><h3>{_text(name)}</h3>{keys}</figcaption>{picture}</figure>"


def _table(cells: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{_text(name)}</th>" for name in HEADS)
    body = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in cells)
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)
