"""``python -m brace_rl`` is the ``brace`` command."""

from brace_rl.cli import main

main()
