"""Evaluation: the figures are right, the problems the same, and training does not notice."""

import json
import random

import pytest
import torch
from fakes import FakeTask, FakeTokenizer
from test_run import tiny_config, weights_of
from transformers import LlamaConfig, LlamaForCausalLM

from brace_rl.config import config_from_dict
from brace_rl.tasks.base import Environment, StepResult
from brace_rl.training.evaluate import Evaluator
from brace_rl.training.run import run_training

ONE_TOKEN_TURNS = tuple(chr(code) for code in range(2, 128))
"""Stop texts that end every turn after one token."""


class ScoreEnvironment(Environment):
    def __init__(self, reward, success):
        self.answer = StepResult(reward=reward, done=True, success=success)

    async def step(self, action):
        return self.answer


class ScoreTask(FakeTask):
    """Solves every problem but the first, with reward 0, 0.5, 1.0, 1.5; remembers what was asked."""

    def __init__(self, stop=ONE_TOKEN_TURNS):
        super().__init__(stop=stop)
        self.asked = []

    def environment(self, problem):
        self.asked.append(problem.id)
        index = [p.id for p in self.eval_problems()].index(problem.id)
        return ScoreEnvironment(reward=0.5 * index, success=index > 0)


class NeverEnding(FakeTokenizer):
    eos_token_id = None


def tiny_actor(seed=0):
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    )


def evaluator(task, *, actor=None, tokenizer=None, seed=0, **rollout):
    config = config_from_dict(
        {"rollout": {"max_response_tokens": 5, **rollout}, "eval": {"slots": 3}, "run": {"seed": seed}}
    )
    return Evaluator(actor or tiny_actor(), task, tokenizer or FakeTokenizer(), config)


def test_figures_are_means_over_the_problems():
    assert evaluator(ScoreTask()).run(0, 4) == {
        "eval/success": 0.75,
        "eval/reward": 0.75,
        "eval/excluded": 0.0,
        "eval/length_mean": 1.0,
        "eval/truncated": 0.0,
        "eval/problems": 4.0,
        "tokens/eval": 18.0,
    }


def test_responses_cut_at_the_limit_count_as_truncated_and_unsolved():
    figures = evaluator(ScoreTask(stop=()), tokenizer=NeverEnding()).run(0, 4)
    assert (figures["eval/truncated"], figures["eval/length_mean"], figures["eval/success"]) == (1.0, 5.0, 0.0)


@pytest.mark.parametrize(("asked", "used"), [(1, 1), (2, 2), (4, 4), (99, 4)])
def test_the_first_problems_are_used_and_never_more_than_there_are(asked, used):
    task = ScoreTask()
    assert evaluator(task).run(0, asked)["eval/problems"] == used
    assert set(task.asked) == {f"p{i}" for i in range(8, 8 + used)}
    assert len(task.asked) == used


def test_every_evaluation_draws_the_same_so_that_differences_come_from_the_policy():
    stop = ("a", "b", "c", "d", "e", "f")  # lengths are random, but repeatable
    first, again = evaluator(ScoreTask(stop)), evaluator(ScoreTask(stop))
    figures = first.run(0, 4)
    assert first.run(7, 4) == figures
    assert again.run(3, 4) == figures


def test_another_policy_and_another_seed_draw_other_responses():
    def lengths(**settings):
        stop = tuple(chr(code) for code in range(2, 30))
        return evaluator(ScoreTask(stop), max_response_tokens=40, **settings).run(0, 4)["eval/length_mean"]

    assert len({lengths(), lengths(seed=1), lengths(seed=2), lengths(actor=tiny_actor(seed=5))}) > 1


@pytest.mark.parametrize("training", [False, True])
def test_the_actor_comes_back_as_it_was(training):
    actor = tiny_actor().train(training)
    frozen = actor.model.embed_tokens.weight.requires_grad_(False)
    before = {name: (p.detach().clone(), p.requires_grad) for name, p in actor.named_parameters()}
    evaluator(ScoreTask(), actor=actor).run(0, 4)
    assert actor.training is training
    assert not frozen.requires_grad
    for name, parameter in actor.named_parameters():
        assert torch.equal(parameter, before[name][0])
        assert parameter.requires_grad is before[name][1]
        assert parameter.grad is None
        assert not parameter.is_inference()


def test_no_random_state_moves():
    torch.manual_seed(3)
    random.seed(3)
    before, python_before = torch.get_rng_state(), random.getstate()
    it = evaluator(ScoreTask(), actor=tiny_actor())
    torch.set_rng_state(before)
    it.run(0, 4)
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == python_before


def test_training_ends_bit_identical_however_often_it_is_evaluated(tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name, every in (("never", 0), ("always", 1)):
        run_training(tiny_config("lag", 1, eval={"every": every, "problems": 5}), tmp_path / name)
    torch.set_num_threads(threads)
    never, always = weights_of(tmp_path / "never"), weights_of(tmp_path / "always")
    assert [name for name in never if not torch.equal(never[name], always[name])] == []
    rows = [json.loads(line) for line in (tmp_path / "always" / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("eval/problems") for row in rows] == [8, 5, 5, 5, 8]
