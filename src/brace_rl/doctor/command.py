"""``brace doctor``: parsing and messages only."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import click

from brace_rl.doctor.examination import Request
from brace_rl.doctor.settings import read_settings
from brace_rl.errors import BraceError

FRAMEWORKS = {
    "areal": "brace_rl.doctor.areal",
    "openrlhf": "brace_rl.doctor.openrlhf",
    "skyrl": "brace_rl.doctor.skyrl",
    "torchrl": "brace_rl.doctor.torchrl",
    "verl": "brace_rl.doctor.verl",
}
"""Name -> module with ``examine``."""

FOUND_SOMETHING = 1
"""Exit code when there is anything to mend."""


@click.command("doctor", context_settings={"ignore_unknown_options": True})
@click.argument("name", type=click.Choice(sorted(FRAMEWORKS)))
@click.argument("settings", metavar="[CONFIG] [KEY=VALUE]...", nargs=-1)
@click.option("--workers/--no-workers", default=True, show_default=True, help="Ask the framework's workers too.")
def doctor_command(name: str, settings: tuple[str, ...], workers: bool) -> None:
    """Say whether BRACE is in place in framework NAME, and what in a configuration keeps it from working.

    CONFIG is a configuration file of the framework; KEY=VALUE are settings as its own command takes them, on top of the
    file or, without one, of the framework's defaults. The exit code is 0 when there is nothing to mend, 1 when there
    is, and 2 for input that cannot be used.
    """
    files, overrides = _sorted_out(settings)
    if len(files) > 1:
        raise BraceError(f"{files[1]}: a second configuration file; name one file, and settings as KEY=VALUE")
    # Before the framework is imported, which takes long.
    config = read_settings(Path(files[0])) if files else None
    request = Request(config=config, overrides=tuple(overrides), workers=workers)
    examination = import_module(FRAMEWORKS[name]).examine(request)
    for what, seen in examination.facts:
        click.echo(f"{what}: {seen}")
    for finding in examination.findings:
        click.echo(f"{finding.severity}: {finding.what}\n  mend: {finding.mend}")
    count = len(examination.findings)
    click.echo("nothing to mend" if not count else f"{count} thing{'s' * (count > 1)} to mend")
    if count:
        sys.exit(FOUND_SOMETHING)


def _sorted_out(given: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Files, and settings as ``key=value``: ``--key value`` is one too, and ``--key`` alone is true."""
    files: list[str] = []
    pairs: list[str] = []
    waiting = list(reversed(given))
    while waiting:
        argument = waiting.pop()
        if "=" in argument:
            if not argument.partition("=")[0].strip("-+ "):
                raise BraceError(f"{argument}: a value without a key; write KEY=VALUE")
            pairs.append(argument)
        elif argument.startswith("--"):
            has_value = waiting and not waiting[-1].startswith("--") and "=" not in waiting[-1]
            pairs.append(f"{argument}={waiting.pop() if has_value else 'true'}")
        else:
            files.append(argument)
    return files, pairs
