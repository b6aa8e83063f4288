"""Gradient checkpointing: the same update, with layers run again in the backward pass."""

import copy

import pytest
import torch
from test_learner import make_learner, parameters_after_update, random_batch, tiny_config
from transformers.models.llama.modeling_llama import LlamaMLP

from brace_rl.errors import ModelError
from brace_rl.training.recompute import recompute_layers

ON = {"gradient_checkpointing": True}


@pytest.mark.parametrize("keep_graph", [False, True])
def test_an_update_with_recomputed_layers_is_the_same_update(keep_graph):
    optim = {"keep_graph": keep_graph, "micro_batch_tokens": 24}
    plain, plain_metrics = parameters_after_update(tiny_config(optim=optim), random_batch())
    again, again_metrics = parameters_after_update(tiny_config(optim=optim, model=ON), random_batch())
    for a, b in zip(plain, again, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
    assert again_metrics == pytest.approx(plain_metrics, abs=1e-5)


def test_layers_run_again_in_the_backward_pass_and_only_there(monkeypatch):
    runs, forward = [], LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: runs.append(1) or forward(self, x))
    learner = make_learner(tiny_config(model=ON))
    batch = random_batch()
    runs.clear()
    learner.evaluate(batch)
    layers_of_both = 2 * learner.actor.config.num_hidden_layers
    assert len(runs) == layers_of_both
    loss = learner.passes.score_part(batch).logprobs[batch.policy_mask].sum()
    assert len(runs) == layers_of_both + learner.actor.config.num_hidden_layers
    loss.backward()
    assert len(runs) == layers_of_both + 2 * learner.actor.config.num_hidden_layers


def test_a_copy_recomputes_its_own_layers():
    actor = make_learner(tiny_config(model=ON)).actor
    other = copy.deepcopy(actor)
    with torch.no_grad():
        for parameter in other.model.layers.parameters():
            parameter.zero_()
    tokens = torch.tensor([[1, 2, 3]])
    assert not torch.allclose(actor(tokens).logits, other(tokens).logits)


def test_a_model_without_such_layers_is_refused():
    with pytest.raises(ModelError, match=r"Linear: .*model\.gradient_checkpointing to false"):
        recompute_layers(torch.nn.Linear(2, 2))
