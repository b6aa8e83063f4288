"""``python -m brace_rl.integrations.skyrl KEY=VALUE...``."""

from brace_rl.integrations.skyrl import main

if __name__ == "__main__":
    main()
