"""Tiny random models and tokenizers for the engine tests."""

from __future__ import annotations

import random

import pytest
import torch
from engine_checks import POSITIONS, VOCABULARY
from engine_checks import full_logits as compute_full_logits
from tokenizers import Tokenizer, decoders, models
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

# Large enough that distributions are far from uniform and an attention error shows.
SPREAD = 0.4


def _sizes(**more):
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": POSITIONS,
        "initializer_range": SPREAD,
    }
    return {**sizes, **more}


def _build(kind: str, seed: int):
    torch.manual_seed(seed)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**_sizes(tie_word_embeddings=True)))
    if kind == "mistral-sliding":
        return MistralForCausalLM(MistralConfig(**_sizes(sliding_window=6)))
    if kind == "gemma2-mixed-sliding":
        return Gemma2ForCausalLM(Gemma2Config(**_sizes(head_dim=8, sliding_window=5)))
    if kind == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=POSITIONS, initializer_range=SPREAD
            )
        )
    raise ValueError(kind)


@pytest.fixture(scope="session")
def build_model():
    """``build_model(kind, seed=0)``: the same weights for the same arguments."""
    return lambda kind="llama", seed=0: _build(kind, seed).eval()


@pytest.fixture(scope="session")
def letters():
    """A tokenizer of one-, two- and three-letter tokens, ids 0 .. VOCABULARY - 1."""
    pieces = [*"abcdefghijklmnopqrstuvwxyz<>/ ", "ab", "bc", "abc", "a<", "</", "/x", "x>", "</x>", "> ", "<abc"]
    pieces += [f"[{i}]" for i in range(VOCABULARY - len(pieces))]
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="session")
def random_prompts():
    """``random_prompts(n, seed=0, lengths=(1, 20))``: tuples of token ids."""

    def make(count, seed=0, lengths=(1, 20)):
        rng = random.Random(seed)
        return [tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(*lengths))) for _ in range(count)]

    return make


@pytest.fixture(scope="session")
def full_logits():
    """As :func:`engine_checks.full_logits`."""
    return compute_full_logits
