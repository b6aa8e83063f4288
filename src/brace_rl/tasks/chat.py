"""Chat messages to token ids, through a model's own template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from brace_rl.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def chat_ids(
    messages: Sequence[Mapping[str, str]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """The prompt up to where the assistant begins.

    Args:
        tools: descriptions of functions the model may call, in the form chat templates take.

    Raises:
        ModelError: the model has no chat template, or its template refuses the messages.
    """
    if tokenizer.chat_template is None:
        raise ModelError(
            f"{tokenizer.name_or_path}: has no chat template; use an instruct model, or put a chat_template.jinja "
            f"into the model folder"
        )
    from jinja2.exceptions import TemplateError

    def ids(chat: Sequence[Mapping[str, str]]) -> list[int]:
        rows = [dict(message) for message in chat]
        described = None if tools is None else [dict(tool) for tool in tools]
        return list(
            tokenizer.apply_chat_template(
                rows, tools=described, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        )

    try:
        return ids(messages)
    except TemplateError:
        # Some templates refuse a system message; its text then opens the user's.
        try:
            return ids(_without_system(messages))
        except TemplateError as error:
            raise ModelError(f"{tokenizer.name_or_path}: its chat template refuses the prompt: {error}") from None


def _without_system(messages: Sequence[Mapping[str, str]]) -> Sequence[Mapping[str, str]]:
    if len(messages) < 2 or messages[0]["role"] != "system":
        return messages
    system, question, *rest = messages
    merged = {"role": question["role"], "content": f"{system['content']}\n\n{question['content']}"}
    return (merged, *rest)
