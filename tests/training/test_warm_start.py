"""The supervised start: what carries loss, that it learns, and that a seed decides all of it."""

import itertools
import math
import random

import pytest
import torch
from fakes import FakeTask, FakeTokenizer, fake_problem
from transformers import LlamaConfig, LlamaForCausalLM

from brace_rl.config import config_from_dict
from brace_rl.tasks.base import Problem, Transcript, TranscriptPiece
from brace_rl.training.warm_start import warm_start

VOCABULARY = 128
TOKENIZER = FakeTokenizer()


class TranscriptTask(FakeTask):
    """Gives the transcripts it was made with, over and over, or draws of them."""

    def __init__(self, *transcripts, shuffled=False):
        super().__init__()
        self.transcripts = transcripts
        self.shuffled = shuffled

    def demonstrations(self, seed, *, mistakes=0.0):
        if not self.shuffled:
            return itertools.cycle(self.transcripts)
        rng = random.Random(seed)
        return (rng.choice(self.transcripts) for _ in itertools.count())


def transcript(index, *pieces, prompt=None):
    problem = fake_problem(index) if prompt is None else Problem(id=f"p{index}", prompt=prompt, answer="x")
    return Transcript(problem, tuple(TranscriptPiece(text, is_policy) for text, is_policy in pieces))


def tiny_actor(seed=0, **settings):
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=64,
            **settings,
        )
    ).eval()


def tiny_config(*, steps=1, batch_size=1, lr=1e-2, seed=0):
    return config_from_dict({"warm_start": {"steps": steps, "batch_size": batch_size, "lr": lr}, "run": {"seed": seed}})


def losses(actor, task, **settings):
    reported = {}
    warm_start(actor, TOKENIZER, task, tiny_config(**settings), reported.__setitem__)
    return reported


@torch.no_grad()
def policy_token_losses(actor, transcript):
    """-log pi of each policy token of one transcript alone, without padding; the closing token is one."""
    ids = TOKENIZER.encode(transcript.problem.prompt, add_special_tokens=False)
    is_policy = [False] * len(ids)
    for piece in transcript.pieces:
        tokens = TOKENIZER.encode(piece.text, add_special_tokens=False)
        ids, is_policy = ids + tokens, is_policy + [piece.is_policy] * len(tokens)
    ids, is_policy = [*ids, TOKENIZER.eos_token_id], [*is_policy, True]
    logprobs = actor(torch.tensor([ids])).logits[0].log_softmax(-1)
    return [-logprobs[i - 1, ids[i]].item() for i in range(1, len(ids)) if is_policy[i]]


TOOL_USE = transcript(0, ("<call>", True), ("[result]", False), ("done", True))
SHORT = transcript(1, ("ok", True))


def test_the_loss_is_the_mean_over_policy_tokens_of_all_rows():
    actor = tiny_actor()
    expected = policy_token_losses(actor, TOOL_USE) + policy_token_losses(actor, SHORT)
    assert len(expected) == len("<call>done") + len("ok") + 2
    reported = losses(actor, TranscriptTask(TOOL_USE, SHORT), batch_size=2)
    assert reported[1] == pytest.approx(sum(expected) / len(expected), abs=1e-5)


def test_a_token_that_doubles_as_padding_is_read_and_learnt_where_it_is_real():
    """Id 0 pads, ends a sequence and stands in this prompt and in what the policy writes."""
    special = transcript(2, ("a<eos>b", True), prompt="<eos>q<eos>")
    actor = tiny_actor()
    expected = policy_token_losses(actor, special) + policy_token_losses(actor, TOOL_USE)
    reported = losses(actor, TranscriptTask(special, TOOL_USE), batch_size=2)
    assert reported[1] == pytest.approx(sum(expected) / len(expected), abs=1e-5)


def test_tokens_of_prompts_and_observations_are_read_but_not_learnt():
    """Output rows of tokens that only the environment writes get the softmax's push away, never a pull."""
    with_observation = transcript(0, ("a", True), ("ZZZ", False), ("b", True), prompt="Q")
    actor = tiny_actor()

    def logprob_of_z(policy):
        ids = TOKENIZER.encode("Qa", add_special_tokens=False)
        return policy(torch.tensor([ids])).logits[0, -1].log_softmax(-1)[ord("Z")].item()

    before = logprob_of_z(actor)
    warm_start(actor, TOKENIZER, TranscriptTask(with_observation), tiny_config(steps=20))
    assert logprob_of_z(actor) < before

    actor = tiny_actor()
    as_policy = transcript(0, ("aZZZb", True), prompt="Q")
    warm_start(actor, TOKENIZER, TranscriptTask(as_policy), tiny_config(steps=20))
    assert logprob_of_z(actor) > before


def test_the_loss_falls():
    reported = losses(tiny_actor(), TranscriptTask(TOOL_USE, SHORT), steps=40, batch_size=2)
    assert reported[40] < 0.5 * reported[4]
    assert reported[4] < 1.1 * math.log(VOCABULARY)


def trained_weights(*, seed=0, global_seed=0, **model_settings):
    task = TranscriptTask(*(transcript(i, (chr(97 + i) * 3, True)) for i in range(8)), shuffled=True)
    actor = tiny_actor(**model_settings)
    torch.manual_seed(global_seed)
    warm_start(actor, TOKENIZER, task, tiny_config(steps=5, batch_size=2, seed=seed))
    return torch.cat([p.detach().flatten() for p in actor.parameters()])


def test_the_same_seed_gives_the_same_weights_and_another_seed_others():
    assert torch.equal(trained_weights(seed=1), trained_weights(seed=1))
    assert not torch.equal(trained_weights(seed=1), trained_weights(seed=2))


def test_weights_do_not_depend_on_the_global_generator_even_with_dropout():
    a = trained_weights(global_seed=1, attention_dropout=0.5)
    assert torch.equal(a, trained_weights(global_seed=2, attention_dropout=0.5))


@pytest.mark.parametrize("training", [False, True])
def test_the_model_stays_in_its_mode(training):
    """A model that came out in training mode would sample and be trained with dropout, and a resumed one would not."""
    actor = tiny_actor().train(training)
    warm_start(actor, TOKENIZER, TranscriptTask(SHORT), tiny_config(steps=2))
    assert actor.training is training


def test_no_step_means_no_change():
    actor = tiny_actor()
    before = torch.cat([p.detach().clone().flatten() for p in actor.parameters()])
    assert losses(actor, TranscriptTask(SHORT), steps=0) == {}
    assert torch.equal(torch.cat([p.detach().flatten() for p in actor.parameters()]), before)


def test_a_task_that_caches_its_prompts_is_left_alone():
    class CachingTask(TranscriptTask):
        cache = TOKENIZER.encode("Q", add_special_tokens=False)

        def prompt_ids(self, problem, tokenizer):
            return self.cache

    warm_start(tiny_actor(), TOKENIZER, CachingTask(SHORT), tiny_config(steps=2))
    assert CachingTask.cache == [ord("Q")]
