"""Saving matplotlib figures."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from brace_rl.files import write_bytes_atomic, write_text_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOTS_PER_INCH = 130


def save_figure(figure: Figure, path: Path) -> list[Path]:
    """Write ``path.png`` and ``path.svg``, which hold no date, and return them.

    Raises:
        BraceError: a file cannot be written.
    """
    png, svg = io.BytesIO(), io.StringIO()
    figure.savefig(png, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})
    figure.set_layout_engine("none")  # settled by the first drawing; finding it again costs as much as drawing
    figure.savefig(svg, format="svg", metadata={"Date": None})
    paths = [path.with_suffix(".png"), path.with_suffix(".svg")]
    write_bytes_atomic(paths[0], png.getvalue())
    write_text_atomic(paths[1], svg.getvalue())
    return paths
