"""Small tokenizers for models that start from random weights, in the ``transformers`` format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers.decoders import Decoder
    from tokenizers.pre_tokenizers import PreTokenizer
    from transformers import PreTrainedTokenizerFast

PAD, EOS, BOS, UNKNOWN = "<pad>", "<eos>", "<bos>", "<unk>"
SPECIAL = (PAD, EOS, BOS, UNKNOWN)
TAGS = ("<calc>", "</calc>", "<result>", "</result>", "<answer>", "</answer>")
ERROR = "error"
CHARACTERS = "0123456789+-*/()=. "
"""All a prompt, a call or a result may hold, one token a character; anything else becomes ``<unk>``."""


def build_tokenizer(
    words: Sequence[str], pre_tokenizer: PreTokenizer, decoder: Decoder | None = None
) -> PreTrainedTokenizerFast:
    """The special tokens, then ``words``, numbered in this order; anything else becomes ``<unk>``.

    Args:
        pre_tokenizer: splits a text into words.
        decoder: joins words; None: with a space between any two.
    """
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate((*SPECIAL, *words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizer
    if decoder is not None:
        tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        bos_token=BOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )


def build_calculator_tokenizer() -> PreTrainedTokenizerFast:
    """Characters, tags and the word ``error``: 30 tokens, the same ids in every run.

    Decoding what was encoded gives the same text back, with no spaces added. Tags are ordinary tokens, so
    ``skip_special_tokens`` keeps them; nothing is added at the beginning or the end of a text.
    """
    from tokenizers import Regex, decoders, pre_tokenizers

    split = pre_tokenizers.Split(Regex("|".join([*TAGS, ERROR, r"[\s\S]"])), behavior="isolated")
    return build_tokenizer([*TAGS, ERROR, *CHARACTERS], split, decoders.Fuse())
