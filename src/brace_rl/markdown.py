"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """One line per row, no newline at the end; a bar inside a cell is escaped."""
    lines = ([cell.replace("|", "\\|") for cell in line] for line in (heads, ["---"] * len(heads), *rows))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
