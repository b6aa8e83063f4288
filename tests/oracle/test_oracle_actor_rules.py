"""Any actor rule on any value target, and the targets without a critic."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from brace_rl import core
from brace_rl.actor.options import RULE_OPTIONS
from brace_rl.oracle.learn import Learner, learn
from brace_rl.oracle.methods import WHOLE_BATCH_RULES, parse_method
from brace_rl.oracle.presets import chain
from brace_rl.oracle.settings import LearnConfig
from brace_rl.oracle.targets import Responses, sampled_targets

TASK = chain(horizon=12, success=0.3)
CONFIG = LearnConfig(steps=12, batch=8, lag=3, seeds=3, eval_every=4, critic_warmup=2)
RULES = [f"{name}:tau=1" if name == "estr" else name for name in RULE_OPTIONS if name not in WHOLE_BATCH_RULES]


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_learns_repeatably_on_a_critic_target_and_without_a_critic(rule: str) -> None:
    for target in ("brace:3", "group_brace:3"):
        first, second = (learn(TASK, parse_method(f"{target}+{rule}"), CONFIG).success for _ in range(2))
        assert first.isfinite().all()
        assert torch.equal(first, second)
        assert not torch.equal(first[0], first[-1])


def test_ppo_is_the_rule_of_a_method_that_names_none() -> None:
    plain, named = (learn(TASK, parse_method(name), CONFIG).success for name in ("brace:3", "brace:3+ppo"))
    assert torch.equal(plain, named)
    assert parse_method("brace:3+ppo").name == "brace:3"


def test_options_reach_the_rule() -> None:
    wide, nothing = (learn(TASK, parse_method(f"mc+icepop:low={low}:high=60"), CONFIG).success for low in (0, 50))
    assert torch.equal(nothing[0], nothing[-1])
    assert not torch.equal(wide, nothing)


def test_without_lag_and_noise_weighting_rules_are_ppo() -> None:
    config = replace(CONFIG, lag=0)
    plain = learn(TASK, parse_method("brace:3"), config).success
    for rule in ("decoupled", "icepop", "kpop", "dis", "tis"):
        assert torch.allclose(learn(TASK, parse_method(f"brace:3+{rule}"), config).success, plain, atol=1e-3)


def test_rejection_leaves_value_targets_alone() -> None:
    # A rule that drops everything stops the actor; the critic goes on as if the actor stood still.
    stopped = Learner(TASK, parse_method("mc+icepop:low=50:high=60"), CONFIG)
    warm = Learner(TASK, parse_method("mc"), CONFIG)
    for _ in range(6):
        stopped.step(train_actor=True)
        warm.step(train_actor=False)
    assert torch.equal(stopped.actor, warm.actor)
    assert torch.equal(stopped.critic, warm.critic)


def test_the_average_of_ppo_ewma_is_that_of_the_tables_after_every_step() -> None:
    learner = Learner(TASK, parse_method("mc+ppo_ewma:beta=0.5"), CONFIG)
    tables = [learner.actor.detach().clone()]
    for _ in range(3):
        learner.step(train_actor=True)
        tables.append(learner.actor.detach().clone())
    expected = sum(0.5 ** (3 - i) * x for i, x in enumerate(tables)) / sum(0.5 ** (3 - i) for i in range(4))
    average = learner._actor_side._average
    assert average is not None
    assert torch.allclose(average.state_dict()["average.logits"], expected, atol=1e-6)


def test_group_advantages_are_the_reward_minus_the_mean_of_its_own_batch_times_the_windows_weight() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.zeros(6, 4)
    rewards[:, -1] = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0])
    behavior, target = torch.randn(2, 6, 4, generator=generator)
    responses = Responses(torch.randn(6, 4, generator=generator), rewards, behavior, target)
    plain = sampled_targets(parse_method("group"), responses, groups=2)
    gain = torch.tensor([2, -1, -1, 0, 0, 0.0]) / 3
    assert torch.allclose(plain.advantages, gain[:, None].expand(6, 4), atol=1e-6)
    assert torch.allclose(plain.targets, rewards[:, -1:].expand(6, 4), atol=1e-6)
    weighted = sampled_targets(parse_method("group_brace:2"), responses, groups=2).advantages
    mask = torch.ones(6, 4, dtype=torch.bool)
    weights = core.window_weights(behavior_logprobs=behavior, target_logprobs=target, policy_mask=mask, window=2)
    assert torch.allclose(weighted[:, :-1], weights[:, 1:] * gain[:, None], atol=1e-6)
    assert torch.allclose(weighted[:, -1], gain, atol=1e-6)
