"""BRACE in SkyRL, without a fork: see ``docs/skyrl.md``.

``python -m brace_rl.integrations.skyrl`` takes the place of SkyRL's entry points. This module imports neither SkyRL nor
torch before :func:`main` is called.
"""

from __future__ import annotations


def main() -> None:
    """Train as SkyRL's entry point does, with BRACE's trainers; SkyRL's ``trainer.override_entrypoint`` calls this."""
    import sys

    from brace_rl.errors import BraceError

    try:
        from brace_rl.integrations.skyrl.launch import launch

        launch(sys.argv[1:])
    except BraceError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
