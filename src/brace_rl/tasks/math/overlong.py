"""What a long response costs.

By default nothing: a response that reaches the length limit is cut there, answers nothing and has reward 0. With
``task.overlong_cache_tokens`` DAPO's soft overlong punishment (Yu et al. 2025, arXiv 2503.14476, Eq. 13) is added to
the reward of every response, right or wrong, cut or not.
"""

from __future__ import annotations

from brace_rl.tasks.math.settings import OverlongSettings


def soft_overlong_punishment(tokens: int, *, limit: int, cache_tokens: int, penalty: float = 1.0) -> float:
    """0 up to ``limit - cache_tokens`` response tokens, then linear down to ``-penalty`` at ``limit``.

    Args:
        tokens: length of the response.
        limit: the length at which responses are cut, ``L_max`` in the paper.
        cache_tokens: ``L_cache``; 0 turns the punishment off.
    """
    if cache_tokens == 0:
        return 0.0
    excess = tokens - (limit - cache_tokens)
    return -penalty * min(1.0, max(0, excess) / cache_tokens)


class OverlongTask:
    """Gives a task the penalty its settings ask for."""

    settings: OverlongSettings

    def length_reward(self, tokens: int, *, limit: int) -> float:
        """Added to the last policy token of a finished response of ``tokens`` tokens, cut ones included."""
        settings = self.settings
        return soft_overlong_punishment(
            tokens, limit=limit, cache_tokens=settings.overlong_cache_tokens, penalty=settings.overlong_penalty
        )
