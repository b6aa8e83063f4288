"""BRACE: corrected critic targets for asynchronous PPO on language models (arXiv 2609.09783).

``brace_rl.core`` holds the method and needs torch alone. Everything else (tasks, engines, the trainer, reports) builds
on it; nothing in ``core`` imports it back.
"""

__version__ = "0.1.0"
