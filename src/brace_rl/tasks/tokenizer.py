"""The small tokenizer of the calculator task, in the ``transformers`` format."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, EOS, BOS, UNKNOWN = "<pad>", "<eos>", "<bos>", "<unk>"
SPECIAL = (PAD, EOS, BOS, UNKNOWN)
TAGS = ("<calc>", "</calc>", "<result>", "</result>", "<answer>", "</answer>")
ERROR = "error"
CHARACTERS = "0123456789+-*/()=. "
"""All a prompt, a call or a result may hold, one token a character; anything else becomes ``<unk>``."""


def build_calculator_tokenizer() -> PreTrainedTokenizerFast:
    """Characters, tags and the word ``error``: 30 tokens, the same ids in every run.

    Decoding what was encoded gives the same text back, with no spaces added. Tags are ordinary tokens, so
    ``skip_special_tokens`` keeps them; nothing is added at the beginning or the end of a text.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *TAGS, ERROR, *CHARACTERS]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join([*TAGS, ERROR, r"[\s\S]"])), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        bos_token=BOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )
