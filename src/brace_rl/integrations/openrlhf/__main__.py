"""``python -m brace_rl.integrations.openrlhf --brace.window 100 ...``."""

from brace_rl.integrations.openrlhf import main

if __name__ == "__main__":
    main()
