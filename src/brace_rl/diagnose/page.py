"""Writes ``diagnosis.html``: one file, no script, nothing loaded from elsewhere, all text escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from brace_rl.diagnose.diagnosis import Diagnosis
from brace_rl.diagnose.drawing import by_bin, histograms
from brace_rl.diagnose.finding import Finding
from brace_rl.diagnose.measures import ESTIMATORS
from brace_rl.diagnose.statistics import EXPECTATION, Statistics
from brace_rl.diagnose.sums import Estimate
from brace_rl.diagnose.tables import Cells, TextTable, findings_count, horizon_table, lag_table, summary_rows
from brace_rl.report.style import STYLE

# Control characters (which HTML forbids), surrogates, and marks that reorder the text around them.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

_BADGES = {"error": "bad", "warning": "bad", "note": "soft", "stale": "bad", "no sign": "good", "cannot tell": "soft"}


def render(diagnosis: Diagnosis) -> str:
    """The page as text."""
    stats = diagnosis.statistics
    body = [
        "<h1>Rollout diagnosis</h1>",
        f'<p class="soft">{_text(", ".join(diagnosis.files))}</p>',
        _headline(diagnosis),
        f"<h2>{_text(findings_count(diagnosis.findings))}</h2>",
        *(_finding(finding) for finding in diagnosis.findings),
        "<h2>Figures</h2>",
        _table(("figure", "value", "95 % interval"), summary_rows(stats)),
        f'<p class="soft">SNIS: {_text(EXPECTATION)}. Intervals: 95 %, bootstrap over '
        f"{'prompts' if stats.prompts else 'responses'}.</p>",
        _section("By policy tokens still to come", horizon_table(stats), _horizon_charts(stats)),
        _section("Ratio pi/mu by version lag", lag_table(stats), _lag_charts(stats)),
        _missing(diagnosis),
        _settings(stats),
    ]
    # The policy forbids scripts and outside resources even if some text slipped through unescaped.
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Rollout diagnosis</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _headline(diagnosis: Diagnosis) -> str:
    found = diagnosis.verdict
    items = "".join(
        f"<dt>{_text(r.name)} = {'–' if r.value is None else f'{r.value:g}'}</dt><dd>{_text(r.reason)}</dd>"
        for r in diagnosis.recommendations
    )
    return (
        f'<div class="head"><div class="card"><h3>Critic fitted to these returns</h3>'
        f'<p class="big {_BADGES[found.state]}">{_text(found.state)}</p><p>{_text(found.sentence)}</p></div>'
        f'<div class="card"><h3>Recommended</h3><dl>{items}</dl></div></div>'
    )


def _finding(finding: Finding) -> str:
    return (
        f'<div class="card sample"><header><span class="{_BADGES[finding.severity]}">{finding.severity}</span>'
        f"<span>{_text(finding.name)}</span></header><h3>{_text(finding.title)}</h3>"
        f"<dl><dt>seen</dt><dd>{_text(finding.evidence)}</dd><dt>do</dt><dd>{_text(finding.mend)}</dd></dl></div>"
    )


def _horizon_charts(stats: Statistics) -> list[str]:
    labels = [f"{b.low}+" for b in stats.bins]
    charts = []
    if stats.bins and stats.bins[0].beta:
        betas = [[b.beta[name] for b in stats.bins] for name in ESTIMATORS]
        predicted = [Estimate(b.predicted) for b in stats.bins]
        charts.append(
            _figure(
                "Reward-dependence slope",
                "How much of the realised return is left in the target; 1 is all. Bins of policy tokens still to come.",
                [*ESTIMATORS, "exp((T-s)m)"],
                by_bin("Reward-dependence slope", labels, [*betas, predicted], reference=1.0),
            )
        )
        shifts = [b.shift for b in stats.bins if b.shift is not None]
        errors = [b.value_error for b in stats.bins if b.value_error is not None]
        charts.append(
            _figure(
                "Where the critic errs",
                "BRACE target less return: what following pi for the window would change. G - V: the critic's error.",
                ["BRACE target - return", "G - V"],
                by_bin("Where the critic errs", labels, [shifts, errors], reference=0.0),
            )
        )
    if stats.bins:
        weights = [[b.weight_mean for b in stats.bins], [Estimate(b.predicted_window) for b in stats.bins]]
        charts.append(
            _figure(
                "Window weight",
                "What the window leaves to the return; predicted: exp(m) to the power of the tokens corrected.",
                ["mean Pi", "predicted"],
                by_bin("Window weight", labels, weights),
            )
        )
    return charts


def _lag_charts(stats: Statistics) -> list[str]:
    if not stats.lags:
        return []
    shown = stats.lags[:8]
    return [
        _figure(
            "Ratio pi/mu",
            "Share of tokens by ratio, logarithmic both ways, finest around 1. The outermost bins hold all beyond.",
            [f"lag {lag.label}" for lag in shown],
            histograms("Ratio pi/mu by lag", [lag.histogram for lag in shown]),
        ),
        _figure(
            "Spread of log pi/mu",
            "At lag 0 it is what engine and trainer disagree on; what comes on top with the lag is staleness.",
            ["deviation"],
            by_bin("Spread of log pi/mu", [lag.label for lag in shown], [[lag.log_sigma for lag in shown]]),
        ),
    ]


def _figure(title: str, hint: str, labels: Sequence[str], picture: str) -> str:
    keys = "".join(f'<span class="key"><i class="c{i + 1}"></i>{_text(label)}</span>' for i, label in enumerate(labels))
    caption = f"<figcaption><h3>{_text(title)}</h3>{keys}<p>{_text(hint)}</p></figcaption>"
    return f"<figure>{caption}{picture}</figure>" if picture else ""


def _section(title: str, table: TextTable | None, charts: Sequence[str]) -> str:
    if table is None:
        return ""
    return f'<h2>{_text(title)}</h2>{_table(*table)}<div class="charts">{"".join(charts)}</div>'


def _table(heads: Cells, rows: Sequence[Cells]) -> str:
    head = "".join(f"<th>{_text(name)}</th>" for name in heads)
    body = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _missing(diagnosis: Diagnosis) -> str:
    if not diagnosis.missing:
        return ""
    items = "".join(f"<li>{_text(m.figure)}: needs {_text(', '.join(m.columns))}</li>" for m in diagnosis.missing)
    return f"<h2>Not computed, because columns are missing</h2><ul>{items}</ul>"


def _settings(stats: Statistics) -> str:
    s = stats.settings
    text = ", ".join(
        f"{name} = {getattr(s, name):g}" for name in ("window", "rho_clip", "c_clip", "gamma", "lam", "eps")
    )
    return f'<h2>Computed with</h2><p>{_text(text)}. <span class="soft">GAE uses the same lam.</span></p>'


def _text(value: object) -> str:
    """Escaped for HTML; characters that cannot be seen are spelled out."""
    return html.escape(_HIDDEN.sub(lambda found: f"⟨U+{ord(found.group()):04X}⟩", str(value)), quote=True)
