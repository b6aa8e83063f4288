"""Models scored through their hidden states: the logits of every kind of head, or a clear refusal."""

import pytest
import torch
from test_learner import random_batch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from brace_rl.errors import ModelError
from brace_rl.training.logprobs import TokenScorer

SIZE = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama(**kwargs):
    return LlamaForCausalLM(LlamaConfig(**SIZE, **kwargs))


def with_bias(model):
    """``model`` with an output head that has a bias."""
    head = torch.nn.Linear(SIZE["hidden_size"], SIZE["vocab_size"])
    torch.nn.init.normal_(head.bias)
    model.set_output_embeddings(head)
    return model


MODELS = {
    "llama": llama,
    "tied": lambda: llama(tie_word_embeddings=True),
    "bias": lambda: with_bias(llama(tie_word_embeddings=False)),
    "soft cap": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZE, head_dim=8, final_logit_softcapping=0.05)),
    "scaled": lambda: CohereForCausalLM(CohereConfig(**SIZE, logit_scale=0.25)),
    "divided": lambda: GraniteForCausalLM(GraniteConfig(**SIZE, logits_scaling=8.0)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=16, n_layer=1, n_head=2, n_positions=32)),
}


@pytest.mark.parametrize("kind", MODELS)
def test_scores_are_log_softmax_of_the_models_own_logits(kind):
    torch.manual_seed(0)
    model = MODELS[kind]().eval()
    batch = random_batch()
    scored = TokenScorer(model, temperature=0.7)(batch)
    logits = model(batch.input_ids, attention_mask=batch.attention_mask).logits[:, :-1].float() / 0.7
    expected = logits.log_softmax(-1)
    mask = batch.policy_mask
    tokens = batch.input_ids[:, 1:, None]
    torch.testing.assert_close(scored.logprobs[mask], expected.gather(-1, tokens).squeeze(-1)[mask])
    torch.testing.assert_close(scored.entropies[mask], -(expected.exp() * expected).sum(-1)[mask])
    assert torch.isnan(scored.logprobs[~mask]).all()
    own = torch.autograd.grad(scored.logprobs[mask].sum(), list(model.parameters()), allow_unused=True)
    wanted = torch.autograd.grad(
        expected.gather(-1, tokens).squeeze(-1)[mask].sum(), list(model.parameters()), allow_unused=True
    )
    for a, b in zip(own, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def test_a_model_whose_logits_are_something_else_is_refused():
    class Doubled(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = 2 * output.logits
            return output

    with pytest.raises(ModelError, match="Doubled: its logits are not its output head") as caught:
        TokenScorer(Doubled(LlamaConfig(**SIZE)), temperature=1.0)
    assert "\n" not in str(caught.value)


def test_a_head_that_is_not_linear_is_refused():
    model = llama(tie_word_embeddings=False)
    model.set_output_embeddings(torch.nn.Sequential(model.get_output_embeddings()))
    with pytest.raises(ModelError, match="output head is Sequential"):
        TokenScorer(model, temperature=1.0)
