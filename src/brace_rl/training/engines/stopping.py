"""When a turn ends: stop tokens, and stop texts found without tokenising anything again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_REPLACEMENT = "\ufffd"
"""What a tokenizer decodes part of a multi-byte character to."""
_SPARE_TOKENS = 4
"""Extra tokens decoded before the stop text, because decoding may treat the first token of a text specially."""


class StopRule:
    """Decides after each sampled token whether it ends the turn.

    A stop text may begin and end inside tokens. Only a token whose own text shares the last character of a stop text
    can complete it, so nearly all tokens are settled by one dictionary look-up and only the rest have the tail of the
    turn decoded.

    Args:
        tokenizer: a ``transformers`` tokenizer; only its ``decode`` is used.
        texts: the turn ends with the token that completes one of these.
        token_ids: the turn ends with one of these.
    """

    def __init__(self, tokenizer: Any, texts: Sequence[str], token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._texts = tuple(text for text in texts if text)
        # A token is at least one byte of text, so this many reach back over the longest stop text.
        self._tail = max((len(text.encode()) for text in self._texts), default=0) + _SPARE_TOKENS
        self._verdicts: dict[int, bool | None] = dict.fromkeys(token_ids, True)
        """True: ends the turn; False: cannot; None: depends on the tokens before it."""

    def ends(self, sampled: Sequence[int]) -> bool:
        """Whether the last of the turn's sampled tokens (at least one) ends the turn."""
        token = sampled[-1]
        if token not in self._verdicts:
            self._verdicts[token] = self._judge(token)
        verdict = self._verdicts[token]
        if verdict is not None:
            return verdict
        tail = self._decode(sampled[-self._tail :])
        return any(text in tail for text in self._texts)

    def _judge(self, token: int) -> bool | None:
        if not self._texts:
            return False
        piece = self._decode([token])
        if any(text in piece for text in self._texts):
            return True
        # A lone token may lose its space, so a stop text that ends in one is always looked for.
        possible = any(text[-1] in piece or text[-1].isspace() for text in self._texts)
        return None if possible or _REPLACEMENT in piece else False

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text
