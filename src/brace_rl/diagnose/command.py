"""``brace diagnose``: parsing and messages only; nothing heavy is imported before the files have been found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from brace_rl.diagnose.columns import BUILT_IN_MAPS, parse_maps
from brace_rl.diagnose.settings import Settings, settings_for
from brace_rl.files import write_json_atomic, write_text_atomic

_DEFAULTS = Settings()

_PIPED_WIDTH = 160
"""Columns of text that goes to a file or a pipe, where none are known."""


def _option(name: str, kind: Any, what: str, *, of_run: bool = True) -> Callable[[Any], Any]:
    default = f"{getattr(_DEFAULTS, name.replace('-', '_')):g}"
    shown = f"that of the run, or {default}" if of_run else default
    return click.option(f"--{name}", type=kind, help=f"{what}  [default: {shown}]")


@click.command("diagnose")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--map",
    "maps",
    multiple=True,
    metavar="OURS=THEIRS",
    help=f"What a column is called in the files (dotted paths allowed); or a JSON file of such pairs; or one of: "
    f"{', '.join(BUILT_IN_MAPS)}. Repeatable.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Folder for diagnosis.json and diagnosis.html.")
@_option("window", int, "Policy tokens that BRACE corrects.")
@_option("rho-clip", float, "Cap of the residual's ratio.")
@_option("c-clip", float, "Cap of the trace's ratio.")
@_option("gamma", float, "Discount per policy token.")
@_option("lam", float, "lambda, of every estimator.")
@_option("eps", float, "Weight of the return that the recommended window must leave.", of_run=False)
@_option("seed", int, "Of the bootstrap.", of_run=False)
def diagnose_command(files: tuple[Path, ...], maps: tuple[str, ...], out: Path | None, **options: Any) -> None:
    """Say from logged rollouts whether the critic is stale, how badly, where, and what to set.

    FILES are JSON lines (.jsonl, also .gz), .json or .parquet, one response per row, or run folders that hold
    rollouts.jsonl. Prints tables, and writes diagnosis.json and diagnosis.html to --out (default: the run folder, if
    FILES is one, else the current folder).
    """
    from brace_rl.diagnose.reader import rollout_files

    names = parse_maps(maps)
    paths = rollout_files(files)
    run = files[0] if len(files) == 1 and files[0].is_dir() else None
    settings = settings_for(run, options)
    folder = out or run or Path()

    from rich.console import Console

    from brace_rl.diagnose.diagnosis import diagnose
    from brace_rl.diagnose.page import render
    from brace_rl.diagnose.terminal import show

    with _progress(paths) as progress:
        diagnosis = diagnose(paths, names=names, settings=settings, progress=progress)
    write_json_atomic(folder / "diagnosis.json", diagnosis.to_dict())
    write_text_atomic(folder / "diagnosis.html", render(diagnosis))
    console = Console()
    show(diagnosis, console if console.is_terminal else Console(width=_PIPED_WIDTH))
    click.echo(f"\nwritten: {folder / 'diagnosis.json'}, {folder / 'diagnosis.html'}")


@contextmanager
def _progress(paths: Sequence[Path]) -> Iterator[Callable[[Path, int], None]]:
    """A bar over the bytes of all files, on standard error, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    sizes = {path: path.stat().st_size for path in paths}
    read = dict.fromkeys(paths, 0)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading", total=sum(sizes.values()))

        def progress(path: Path, position: int) -> None:
            bar.advance(task, position - read[path])
            read[path] = position

        yield progress
