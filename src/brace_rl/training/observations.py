"""From what an environment says to the tokens that are inserted after a turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from brace_rl.errors import ModelError
from brace_rl.tasks.base import Messages, StepResult

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TURN = "a-turn-of-the-assistant"
"""Stands for the turn before the observation where a chat template is rendered."""


def observation_ids(
    result: StepResult, tokenizer: PreTrainedTokenizerBase, *, last_token: int, most_tokens: int = 0
) -> tuple[list[int], bool]:
    """Token ids of the observation, and whether it was cut.

    Args:
        last_token: the turn's last; the end-of-sequence token is not written again by a chat template.
        most_tokens: longer observations lose their end, but keep ``observation_end``; 0: no limit. Messages lose the
            end of the last one's content.

    Raises:
        ModelError: the observation is messages and the model has no chat template for them.
    """

    def encode(text: str) -> list[int]:
        # What a tool answers may hold halves of surrogate pairs, which no tokenizer takes; they become "?".
        writable = text.encode("utf-8", "replace").decode("utf-8")
        return list(tokenizer.encode(writable, add_special_tokens=False))

    if isinstance(result.observation, str):
        opening, body, end = "", result.observation, result.observation_end
    else:
        opening, body, end = _with_markers(result.observation, tokenizer, closed=last_token == tokenizer.eos_token_id)
    ids = encode(opening + body + end)
    if not most_tokens or len(ids) <= most_tokens:
        return ids, False
    end_ids = encode(end)
    room = max(len(encode(opening)), most_tokens - len(end_ids))
    return encode(opening + body)[:room] + end_ids, True


def _with_markers(messages: Messages, tokenizer: PreTrainedTokenizerBase, *, closed: bool) -> tuple[str, str, str]:
    """What stands before the last message's content, the content, and what stands after it."""
    from jinja2.exceptions import TemplateError

    chat: Sequence[dict[str, str]] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": _TURN},
        *map(dict, messages),
    ]
    if tokenizer.chat_template is None:
        raise ModelError(f"{tokenizer.name_or_path}: has no chat template, which this task's observations need")
    try:
        text = str(tokenizer.apply_chat_template(list(chat), tokenize=False, add_generation_prompt=True))
    except TemplateError as error:
        raise ModelError(f"{tokenizer.name_or_path}: its chat template refuses an observation: {error}") from None
    after = text.partition(_TURN)[2]
    eos = str(tokenizer.eos_token)
    if closed and after.startswith(eos):
        after = after[len(eos) :]
    body = messages[-1]["content"].strip()
    opening, _, end = after.rpartition(body) if body else (after, "", "")
    return opening, body, end
