"""Writes ``report.html``: one file, nothing loaded from elsewhere, no script, all text of the run escaped."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from brace_rl.files import write_text_atomic
from brace_rl.report.charts import OTHER_FIGURES, chart_groups, named_seconds
from brace_rl.report.notes import balance, notes
from brace_rl.report.run_data import Evaluation, RunData, read_run
from brace_rl.report.style import STYLE
from brace_rl.report.svg import number

SAMPLES_SHOWN = 3
"""Responses shown from the first and from the last step that wrote samples."""
TEXT_SHOWN = 4000
"""Characters shown of a prompt, and of a response."""
IDENTITY_ROWS = 5
"""Steps shown in the table that checks time against throughput."""

# Control characters (which HTML forbids), and marks that reorder the text around them.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def write_report(run_dir: Path | str) -> Path:
    """Render the run in ``run_dir``, finished or not, to ``run_dir/report.html`` and return that path.

    Raises:
        BraceError: not a run folder, or the report cannot be written.
    """
    run = read_run(run_dir)
    path = run.directory / "report.html"
    write_text_atomic(path, render(run))
    return path


def render(run: RunData) -> str:
    """The page as text."""
    body = [
        f"<h1>{_text(run.name)}</h1>",
        _headline(run),
        _notes(run),
        *(_chart_group(title, figures) for title, figures in chart_groups(run)),
        _identity_table(run),
        _ledger_table(run),
        _samples(run),
        _configuration(run),
    ]
    # The policy forbids scripts and outside resources even if some text slipped through unescaped.
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(run.name)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def describe_method(run: RunData) -> str:
    """The value target with the settings that define it."""
    target = str(run.setting("algorithm.value_target", "unknown"))
    if target not in ("brace", "capped", "vtrace"):
        return target
    window = "" if target == "vtrace" else f"window {run.setting('algorithm.window')}, "
    return f"{target}, {window}clips {run.setting('algorithm.rho_clip')} / {run.setting('algorithm.c_clip')}"


def describe_schedule(run: RunData) -> str:
    """Mode and staleness bound."""
    mode = str(run.setting("schedule.mode", "unknown"))
    return mode if mode == "sync" else f"{mode}, S = {run.setting('schedule.max_staleness')}"


def _headline(run: RunData) -> str:
    found = run.evaluations()
    before = next((e for e in found if e.step == 0), None)
    after = next((e for e in reversed(found) if e.step > 0), None)
    if before is None and after is None:
        success = '<p class="big">–</p><p class="soft">not evaluated</p>'
    else:
        success = f'<p class="big">{_success(before)} → {_success(after)}</p>'
        counts = " / ".join(str(e.problems) if e and e.problems else "?" for e in (before, after))
        where = f"after step {after.step}" if after else "not evaluated after training"
        success += f'<p class="soft">held-out problems: {counts}; {where}; 95 % intervals (Wilson)</p>'
    seconds = run.summary.get("seconds")
    facts = {
        "status": run.status,
        "task": str(run.setting("task.name", "unknown")),
        "model": _model(run),
        "method": describe_method(run),
        "schedule": describe_schedule(run),
        "seed": str(run.setting("run.seed", "unknown")),
        "steps": f"{int(run.rows[-1]['step']) if run.rows else 0} of {run.setting('optim.steps', '?')}",
        "time": _duration(seconds) if isinstance(seconds, int | float) else "",
    }
    items = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in facts.items() if value)
    return (
        f'<div class="head"><div class="card"><h3>Success before → after training</h3>{success}</div>'
        f'<div class="card"><dl>{items}</dl></div></div>'
    )


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.1f} min"


def _success(evaluation: Evaluation | None) -> str:
    if evaluation is None:
        return "?"
    interval = evaluation.interval()
    bounds = f" <small>[{interval[0]:.1%}, {interval[1]:.1%}]</small>" if interval else ""
    return f'<span class="whole">{evaluation.success:.1%}{bounds}</span>'


def _model(run: RunData) -> str:
    parameters = run.summary.get("parameters")
    path = run.setting("model.path")
    shape = f"Llama {run.setting('model.layers', '?')} x {run.setting('model.hidden_size', '?')}, random start"
    size = f"{parameters / 1e6:,.2f} M parameters, " if isinstance(parameters, int | float) else ""
    return size + str(path or shape)


def _notes(run: RunData) -> str:
    found = notes(run)
    return f'<ul class="notes">{"".join(f"<li>{_text(note)}</li>" for note in found)}</ul>' if found else ""


def _chart_group(title: str, figures: Sequence[str]) -> str:
    heading, grid = _text(title), f'<div class="charts">{"".join(figures)}</div>'
    if title == OTHER_FIGURES:
        return f"<h2>{heading}</h2><details><summary>{len(figures)} more</summary>{grid}</details>"
    return f"<h2>{heading}</h2>{grid}"


def _identity_table(run: RunData) -> str:
    keys = ("time/step", "throughput/tokens_per_s", "tokens/step")
    rows = [row for row in run.training_rows if all(math.isfinite(row.get(key, math.nan)) for key in keys)]
    if not rows:
        return ""
    last = len(rows) - 1
    picked = sorted({round(i * last / (IDENTITY_ROWS - 1)) for i in range(IDENTITY_ROWS)})
    lines = [_identity_row(str(int(rows[i]["step"])), [rows[i]]) for i in picked]
    lines.append(_identity_row(f"all {len(rows)}", rows))
    heads = ("step", "seconds", "× tokens/s", "= product", "tokens counted", "difference", "seconds in phases")
    return (
        "<h2>Step time × throughput = tokens per step</h2>"
        '<p class="soft">From three columns of metrics.jsonl. "All" adds up seconds and tokens, and weighs throughput '
        f"by time. Phases are timed one by one; what they lack of the step belongs to none.</p>{_table(heads, lines)}"
    )


def _identity_row(label: str, rows: Sequence[Mapping[str, float]]) -> list[str]:
    seconds, tokens = (sum(row[key] for row in rows) for key in ("time/step", "tokens/step"))
    product = sum(row["time/step"] * row["throughput/tokens_per_s"] for row in rows)
    rate = product / seconds if seconds else 0.0
    difference = f"{product / tokens - 1:+.2%}" if tokens else "–"
    phases = sum(named_seconds(row) for row in rows)
    figures = [f"{seconds:,.3f}", f"{rate:,.1f}", f"{product:,.0f}", f"{tokens:,.0f}", difference, f"{phases:,.3f}"]
    return [label, *figures]


def _ledger_table(run: RunData) -> str:
    ledger = run.ledger()
    if not ledger:
        return ""
    difference = balance(ledger)
    verdict = ""
    if difference is not None:
        verdict = '<p class="good">balances</p>' if difference == 0 else f'<p class="bad">off by {difference:g}</p>'
    names = [name.replace("_", " ") for name in ledger]
    return (
        "<h2>Ledger</h2>"
        '<p class="soft">Prompts: issued = consumed + dropped + in flight + buffered (answered, not consumed).</p>'
        f"{_table(names, [[number(value) for value in ledger.values()]], verdict)}"
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], after: str = "") -> str:
    head = "".join(f"<th>{_text(name)}</th>" for name in heads)
    body = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{after}</div>'


def _samples(run: RunData) -> str:
    if not run.samples:
        return ""
    steps = sorted({sample["step"] for sample in run.samples})
    parts = []
    for step in dict.fromkeys((steps[0], steps[-1])):
        shown = [sample for sample in run.samples if sample["step"] == step][:SAMPLES_SHOWN]
        parts.append(f'<h3 class="step">Step {step}</h3>' + "".join(_sample(sample) for sample in shown))
    hint = '<p class="soft"><span class="tool">Shaded</span>: inserted by the environment. Grey: the prompt.</p>'
    return f"<h2>Samples, early and late</h2>{hint}{''.join(parts)}"


def _sample(sample: Mapping[str, Any]) -> str:
    solved = '<span class="good">solved</span>' if sample.get("success") else '<span class="bad">not solved</span>'
    facts = [solved, f"reward {_text(sample.get('reward', '?'))}", f"problem {_text(sample.get('problem_id', '?'))}"]
    if sample.get("truncated"):
        facts.append('<span class="bad">cut at the length limit</span>')
    versions = sample.get("versions")
    if isinstance(versions, list) and versions:
        runs = ", ".join(f"{pair[0]} × {pair[1]}" for pair in versions if isinstance(pair, list) and len(pair) == 2)
        facts.append(f"version × tokens: {_text(runs)}")
    pieces, left = [], TEXT_SHOWN
    response = sample.get("response")
    for piece in response if isinstance(response, list) else []:
        text = str(piece.get("text", "")) if isinstance(piece, dict) else str(piece)
        inserted = isinstance(piece, dict) and not piece.get("policy", True)
        shown = _text(text[:left])
        pieces.append(f'<span class="tool">{shown}</span>' if inserted else shown)
        left -= len(text)
        if left < 0:
            pieces.append(' <span class="soft">… (the rest is in samples.jsonl)</span>')
            break
    header = "".join(f"<span>{fact}</span>" for fact in facts)
    prompt = _text(str(sample.get("prompt", ""))[-TEXT_SHOWN:])
    return (
        f'<div class="card sample"><header>{header}</header>'
        f'<pre><span class="prompt">{prompt}</span>{"".join(pieces)}</pre></div>'
    )


def _configuration(run: RunData) -> str:
    tables = []
    for section, table in run.config.items():
        entries = table.items() if isinstance(table, dict) else [("value", table)]
        lines = "\n".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in entries)
        tables.append(f"[{section}]\n{lines}")
    text = _text("\n\n".join(tables))
    return f'<h2>Configuration</h2><details class="card"><summary>all settings</summary><pre>{text}</pre></details>'


def _text(value: object) -> str:
    """Escaped for HTML; characters that cannot be seen are spelled out."""
    return html.escape(_HIDDEN.sub(lambda found: f"⟨U+{ord(found.group()):04X}⟩", str(value)), quote=True)
