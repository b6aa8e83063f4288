"""The small tokenizer of the generated families, in the ``transformers`` format: a word is a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from brace_rl.tasks.search.environment import INFORMATION_CLOSING, INFORMATION_OPENING
from brace_rl.tasks.tokenizer import build_tokenizer
from brace_rl.tasks.tools import ANSWER_TAG, closing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MESSAGES = ("No", "results.", "error:")
"""What the tools say that a policy can act on; the words after ``error:`` are unknown to it."""


def build_word_tokenizer(tags: Sequence[str], words: Sequence[str]) -> PreTrainedTokenizerFast:
    """Tags and words, one token each, the same ids in every run; anything else becomes ``<unk>``.

    Words are split at spaces and around tags, and decoded with one space between any two. Tags are ordinary tokens, so
    ``skip_special_tokens`` keeps them.
    """
    from tokenizers import Regex, pre_tokenizers

    names = (*tags, ANSWER_TAG)
    markers = [INFORMATION_OPENING, INFORMATION_CLOSING, *(f"<{tag}>" for tag in names), *map(closing, names)]
    split = pre_tokenizers.Split(Regex("|".join(markers)), behavior="isolated")
    spaces = pre_tokenizers.WhitespaceSplit()
    return build_tokenizer([*markers, *MESSAGES, *words], pre_tokenizers.Sequence([split, spaces]))
