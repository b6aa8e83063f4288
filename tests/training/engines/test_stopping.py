"""Stop rules work on tokens as they come and never tokenise text."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from brace_rl.training.engines.stopping import StopRule


def ids(tokenizer, *pieces):
    return tokenizer.convert_tokens_to_ids(list(pieces))


def first_end(rule, tokens):
    """Number of tokens after which the rule ends the turn, or None."""
    return next((n for n in range(1, len(tokens) + 1) if rule.ends(tokens[:n])), None)


@pytest.mark.parametrize(
    ("pieces", "end"),
    [
        (("a", "</x>", "b"), 2),  # one token
        (("<", "/", "x", ">", "b"), 4),  # spelled out
        (("a<", "/x", "> ", "b"), 3),  # begins and ends inside tokens
        (("</", "x", "a", "x>", "</", "x>"), 6),  # nearly, then really
        (("</", "x", "a"), None),
    ],
)
def test_a_stop_text_is_found_however_it_is_split_into_tokens(letters, pieces, end):
    rule = StopRule(letters, ["</x>"], [])
    assert first_end(rule, ids(letters, *pieces)) == end


def test_the_first_of_several_texts_or_tokens_ends_the_turn(letters):
    rule = StopRule(letters, ["abc", "x"], ids(letters, "z"))
    assert first_end(rule, ids(letters, "a", "z", "x")) == 2
    assert first_end(rule, ids(letters, "b", "x", "z")) == 2
    assert first_end(rule, ids(letters, "ab", "c")) == 2


def test_a_text_ending_in_a_space_is_found(letters):
    rule = StopRule(letters, ["> "], [])
    assert first_end(rule, ids(letters, "x>", "a", "x>", " ")) == 4


def test_without_texts_no_token_is_decoded():
    rule = StopRule(None, [], [7])
    assert first_end(rule, [1, 2, 7]) == 3


def test_most_tokens_are_settled_without_decoding_the_turn(letters):
    decoded = []

    class Counting:
        def decode(self, tokens, **options):
            decoded.append(len(tokens))
            return letters.decode(tokens, **options)

    rule = StopRule(Counting(), ["</x>"], [])
    tokens = ids(letters, *"abcabcabcabc")
    assert first_end(rule, tokens) is None
    assert decoded == [1, 1, 1]


def test_a_character_split_over_byte_tokens_completes_a_stop_text():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    bytewise = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    tokens = bytewise.encode("na\u00efve \u20ac5")
    # The euro sign is three bytes; the turn ends at the last of them.
    assert first_end(StopRule(bytewise, ["\u20ac"], []), tokens) == len("na\u00efve \u20ac".encode())
