"""BRACE in OpenRLHF, without a fork: see ``docs/openrlhf.md``.

``python -m brace_rl.integrations.openrlhf`` takes the place of ``python -m openrlhf.cli.train_ppo_ray``. This module
imports neither OpenRLHF nor torch before :func:`main` is called.
"""

from __future__ import annotations


def main() -> None:
    """Train as OpenRLHF's command does, with BRACE's targets."""
    import sys

    from brace_rl.errors import BraceError

    try:
        from brace_rl.integrations.openrlhf.launch import launch

        launch(sys.argv[1:])
    except BraceError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
