"""The diagnosis as tables on a terminal."""

from __future__ import annotations

import math

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from brace_rl.diagnose.diagnosis import Diagnosis
from brace_rl.diagnose.tables import (
    Cells,
    findings_count,
    horizon_table,
    lag_table,
    summary_rows,
)

_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan", "stale": "bold red", "no sign": "green"}


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Print verdict, findings, figures, recommendations and what is missing."""
    found = diagnosis.verdict
    state = _STYLES.get(found.state, "yellow")
    console.print(f"[{state}]critic: {found.state}[/]. {escape(found.sentence)}", highlight=False, soft_wrap=True)
    console.print()
    _findings(diagnosis, console)
    console.print(_table(("figure", "value", "95 % interval"), summary_rows(diagnosis.statistics)))
    for title, table in (
        ("By policy tokens still to come", horizon_table(diagnosis.statistics)),
        ("Ratio pi/mu by version lag", lag_table(diagnosis.statistics)),
    ):
        if table is not None:
            console.print(f"\n[bold]{title}[/]")
            console.print(_table(*table))
    console.print("\n[bold]Recommended[/]")
    for advice in diagnosis.recommendations:
        value = "-" if advice.value is None or math.isnan(advice.value) else f"{advice.value:g}"
        console.print(f"  {advice.name} = [bold]{value}[/]: {escape(advice.reason)}", highlight=False, soft_wrap=True)
    if diagnosis.missing:
        console.print("\n[bold]Not computed[/], because columns are missing")
        for missing in diagnosis.missing:
            console.print(
                f"  {escape(missing.figure)}: needs {', '.join(missing.columns)}", highlight=False, soft_wrap=True
            )


def _findings(diagnosis: Diagnosis, console: Console) -> None:
    console.print(f"[bold]{findings_count(diagnosis.findings)}[/]", highlight=False, soft_wrap=True)
    for finding in diagnosis.findings:
        style = _STYLES[finding.severity]
        console.print(
            f"[{style}]{finding.severity}[/] [bold]{finding.name}[/]: {escape(finding.title)}", highlight=False
        )
        console.print(f"    seen: {escape(finding.evidence)}", highlight=False, soft_wrap=True)
        console.print(f"    do:   {escape(finding.mend)}", highlight=False, soft_wrap=True)
    console.print()


def _table(heads: Cells, rows: list[Cells]) -> Table:
    table = Table(box=None, pad_edge=False)
    for i, head in enumerate(heads):
        table.add_column(head, justify="left" if i == 0 else "right", header_style="dim")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    return table
