"""Ask a fresh Python process about a framework: this one must not import it, and its imports may print or fail."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from brace_rl.errors import BraceError

SECONDS = 600
"""Importing a framework takes seconds, on a cold or busy machine minutes."""

MARK = "brace-probe:"
"""Begins the line of standard output that answers; frameworks and their libraries print others."""


def answer(found: dict[str, Any]) -> None:
    """Called by the module that was asked, as its last act: writes what it found."""
    sys.stdout.write(f"\n{MARK}{json.dumps(found)}\n")


def ask(module: str, *arguments: str, about: str) -> dict[str, Any]:
    """Run a module that ends with :func:`answer`, and return what it found.

    Args:
        module: dotted name, run as ``python -m``.
        arguments: of its command line.
        about: the framework, for messages.

    Raises:
        BraceError: the process ended without an answer, or gave none in time.
    """
    try:
        command = [sys.executable, "-m", module, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise BraceError(f"the doctor waited {SECONDS} s for a process to import {about}") from None
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            found: dict[str, Any] = json.loads(line.removeprefix(MARK))
            return found
    last = (done.stderr.strip() or "nothing on standard error").splitlines()[-1]
    raise BraceError(f"a process that imports {about} ended without an answer (exit code {done.returncode}): {last}")
