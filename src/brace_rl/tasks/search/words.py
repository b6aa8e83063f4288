"""The small tokenizer of the generated families, in the ``transformers`` format: a word is a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from brace_rl.tasks.search.environment import INFORMATION_CLOSING, INFORMATION_OPENING
from brace_rl.tasks.tokenizer import BOS, EOS, PAD, SPECIAL, UNKNOWN
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
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = (*tags, ANSWER_TAG)
    markers = [INFORMATION_OPENING, INFORMATION_CLOSING, *(f"<{tag}>" for tag in names), *map(closing, names)]
    vocabulary = [*SPECIAL, *markers, *MESSAGES, *words]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("|".join(markers)), behavior="isolated"), pre_tokenizers.WhitespaceSplit()]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        bos_token=BOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )
