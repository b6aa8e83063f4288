"""The ``brace`` command, and ``python -m brace_rl``."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command; where a package it needs is missing, say which."""
    try:
        from brace_rl.cli import main as run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "brace_rl":
            raise
        sys.stderr.write(
            f"error: the command needs {error.name}, which is not installed; run: pip install {error.name}\n"
        )
        sys.exit(2)
    run()


if __name__ == "__main__":
    main()
