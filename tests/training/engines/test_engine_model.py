"""What the engine reads off a model before it runs it."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, T5Config, T5ForConditionalGeneration

from brace_rl.errors import ModelError
from brace_rl.training.engines.model import forward_arguments, load_weights, max_positions


def test_length_limit_is_the_model_s_or_where_its_frequencies_switch():
    assert max_positions(LlamaConfig(max_position_embeddings=96)) == 96
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 24}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, max_position_embeddings=96, rope_parameters=rope)
    assert max_positions(config) == 24
    assert max_positions(object()) is None


def test_forward_arguments_name_the_cache_and_the_mask(build_model):
    names = forward_arguments(build_model("gpt2"))
    assert {"attention_mask", "position_ids", "logits_to_keep"} <= names
    assert names & {"cache", "past_key_values"}


def test_encoder_decoders_are_refused():
    config = T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    with pytest.raises(ModelError, match="t5: not a decoder"):
        forward_arguments(T5ForConditionalGeneration(config))


def test_loading_converts_to_the_model_s_dtype_and_takes_nan_in_tied_weights(build_model):
    model = build_model().to(torch.bfloat16)
    state = {name: torch.full_like(tensor, torch.nan).float() for name, tensor in model.state_dict().items()}
    load_weights(model, state)
    assert all(tensor.isnan().all() and tensor.dtype == torch.bfloat16 for tensor in model.state_dict().values())
