"""Every method through the learner: what it trains, what it reads and what it leaves alone."""

import math
from dataclasses import replace

import pytest
import torch
from test_learner import make_learner, random_batch, random_trajectories, tiny_config

from brace_rl import core
from brace_rl.actor.options import RULE_OPTIONS
from brace_rl.errors import ConfigError
from brace_rl.methods import METHODS, UNPUBLISHED, method_settings, with_method
from brace_rl.training.batch import collate
from brace_rl.training.estimates import estimates, group_rewards, length_adaptive_lam
from brace_rl.training.learner import Learner
from brace_rl.training.learning_rate import ess_scaled_lr, staleness_scaled_lr

ROLLOUT = {"samples_per_prompt": 2}


def config_of(method, **sections):
    sections.setdefault("rollout", ROLLOUT)
    return tiny_config(**with_method(sections, method))


def grouped_batch(rewards=(1.0, 0.0, 1.0, 1.0, 0.0, 0.0), size=2):
    rows = random_trajectories(count=len(rewards))
    for index, (row, reward) in enumerate(zip(rows, rewards, strict=True)):
        row.request_index = index // size
        row.rewards[-1] = reward
    return collate(rows, pad_token_id=0, device=torch.device("cpu"))


def nearly_on_policy(batch, learner):
    """The batch as if a policy a little away from the learner's had sampled it."""
    logprobs = learner.evaluate(batch).target_logprobs
    noise = 0.1 * torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(3))
    return replace(batch, behavior_logprobs=logprobs + noise)


def free_learner(config):
    actor = make_learner(tiny_config()).actor
    return Learner(actor, None, config)


def moved(before, module):
    return any(not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def weights(module):
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize("method", [*METHODS, *(f"brace+{rule}" for rule in RULE_OPTIONS)])
def test_every_method_takes_a_step_with_finite_figures(method):
    config = config_of(method, optim={"critic_warmup_steps": 1})
    learner = free_learner(config) if config.algorithm.value_target == "none" else make_learner(config)
    start = weights(learner.actor)
    figures = [learner.update(nearly_on_policy(grouped_batch(), learner)) for _ in range(2)][-1]
    assert all(math.isfinite(value) for value in figures.values())
    assert moved(start, learner.actor)
    assert figures["actor/active_fraction"] + figures["actor/rejected_fraction"] <= 1 + 1e-6


def test_a_method_replaces_the_rule_and_keeps_the_rest_of_the_recipe():
    recipe = {"actor": {"rule": "kpop", "phi": 0.1}, "algorithm": {"window": 7}, "optim": {"steps": 3}}
    merged = with_method(recipe, "brace+estr")
    assert merged["actor"] == {"rule": "estr", **UNPUBLISHED["estr"]}
    assert (merged["algorithm"]["window"], merged["optim"]) == (7, {"steps": 3})
    assert recipe["actor"]["rule"] == "kpop"


@pytest.mark.parametrize("name", ["brce", "ppo+icepop", "brace+nothing", ""])
def test_an_unknown_method_is_an_error(name):
    with pytest.raises(ConfigError, match="method"):
        method_settings(name)


def test_every_method_cites_a_source_or_says_it_is_ours():
    for method in METHODS.values():
        assert any(word in method.__doc__ for word in ("arXiv", "report", "ours"))


def test_ppo_with_the_paper_critic_is_the_core_loss():
    learner = make_learner(tiny_config(algorithm={"whiten_advantages": False}))
    batch = random_batch()
    before = learner.evaluate(batch)
    estimate = estimates(learner.config.algorithm, batch, before)
    expected = core.ppo_clip_loss(
        target_logprobs=before.target_logprobs,
        behavior_logprobs=batch.behavior_logprobs,
        advantages=estimate.advantages,
        policy_mask=batch.policy_mask,
        clip_low=0.2,
        clip_high=0.28,
    )
    figures = learner.update(batch)
    assert figures["actor/loss"] == pytest.approx(float(expected.loss), abs=1e-6)
    assert figures["actor/clip_fraction"] == pytest.approx(float(expected.clip_fraction), abs=1e-6)


@pytest.mark.parametrize("rule", RULE_OPTIONS)
@pytest.mark.parametrize("keep_graph", [False, True])
def test_micro_batches_do_not_change_what_a_rule_does(rule, keep_graph):
    results = []
    for tokens in (10_000, 12):
        optim = {"micro_batch_tokens": tokens, "keep_graph": keep_graph}
        learner = make_learner(config_of(f"brace+{rule}", optim=optim))
        learner.update(random_batch(seed=1))
        results.append((weights(learner.actor), learner.update(random_batch(seed=2))))
    for a, b in zip(results[0][0], results[1][0], strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-3)
    # Adam forgives a gradient that is off by a factor; its norm does not.
    for name in ("actor/rejected_fraction", "actor/loss", "actor/grad_norm", "value/loss", "critic/grad_norm"):
        assert results[0][1][name] == pytest.approx(results[1][1][name], abs=1e-5, rel=1e-4), name


@pytest.mark.parametrize("rule", ["m2po", "icepop"])
def test_a_rule_that_rejects_leaves_the_value_targets_alone(rule):
    batch = random_batch()
    learners = [make_learner(config_of(method)) for method in ("brace", f"brace+{rule}")]
    results = [learner.update(batch) for learner in learners]
    assert results[1]["actor/rejected_fraction"] > 0 or rule == "icepop"
    for name in ("target/abs_gap", "value/loss", "critic/grad_norm"):
        assert results[0][name] == results[1][name]


def test_m2po_decides_on_whole_minibatches_under_the_weights_they_meet():
    optim = {"minibatches": 2, "micro_batch_tokens": 12}
    learner = make_learner(config_of("brace+m2po", optim=optim))
    seen = []
    select = learner.objective.select
    learner.objective.select = lambda batch, rows, logprobs: seen.append(logprobs) or select(batch, rows, logprobs)
    learner.update(random_batch())
    assert [x.shape[0] for x in seen] == [3, 3]


def test_group_advantages_by_hand():
    batch = grouped_batch()
    learner = free_learner(config_of("grpo"))
    before = learner.evaluate(batch)

    def advantage(name):
        config = config_of("grpo", algorithm={"advantage": name}) if name == "group" else config_of(name)
        x = estimates(config.algorithm, batch, before).advantages
        last = batch.policy_mask.long().cumsum(1).argmax(1)
        return x.gather(1, last[:, None]).squeeze(1).tolist()

    root = math.sqrt(0.5)
    assert advantage("group") == pytest.approx([0.5 / root, -0.5 / root, 0, 0, 0, 0])
    assert advantage("dr_grpo") == pytest.approx([0.5, -0.5, 0, 0, 0, 0])
    assert advantage("rloo") == pytest.approx([1, -1, 0, 0, 0, 0])
    assert advantage("group_brace") == pytest.approx([0.5, -0.5, 0, 0, 0, 0])
    assert torch.equal(before.values[:, 0], torch.tensor([0.5, 0.5, 1, 1, 0, 0]))
    assert group_rewards(batch).others.tolist() == [0, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("size", [3, 7, 8])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 0.7, 0.9])
def test_a_group_of_equal_rewards_has_no_advantage_not_even_from_rounding(reward, size):
    batch = grouped_batch(rewards=(reward,) * size, size=size)
    before = free_learner(config_of("grpo")).evaluate(batch)
    for method in ("grpo", "dr_grpo", "rloo", "group_brace"):
        assert estimates(config_of(method).algorithm, batch, before).advantages.abs().max() == 0, method


def test_a_response_nobody_could_judge_is_no_member_of_its_group():
    batch = grouped_batch(rewards=(1.0, 0.0, 0.0, 1.0, 1.0, 0.0), size=3)
    batch.policy_mask[2] = False
    rewards = group_rewards(batch)
    assert rewards.means[:2].tolist() == [0.5, 0.5]
    assert rewards.deviations[:2].tolist() == pytest.approx([math.sqrt(0.5)] * 2)
    assert rewards.others[:2].tolist() == [0, 1]
    assert rewards.means[3:].tolist() == pytest.approx([2 / 3] * 3)


def test_group_brace_is_dr_grpo_at_window_0_and_weighted_beyond():
    batch = grouped_batch()
    before = free_learner(config_of("grpo")).evaluate(batch)
    plain = estimates(config_of("dr_grpo").algorithm, batch, before).advantages
    at_0 = estimates(config_of("group_brace", algorithm={"window": 0}).algorithm, batch, before).advantages
    beyond = estimates(config_of("group_brace").algorithm, batch, before).advantages
    torch.testing.assert_close(at_0, plain)
    assert not torch.allclose(beyond, plain)


def test_without_a_critic_there_are_no_critic_figures_and_no_warm_up():
    learner = free_learner(config_of("grpo", optim={"critic_warmup_steps": 3}))
    figures = learner.update(grouped_batch())
    assert not learner.warming_up
    assert set(learner.optimizers) == {"actor"}
    assert not {"value/loss", "critic/grad_norm", "critic/lr"} & set(figures)


def test_the_critic_takes_several_steps_towards_the_same_targets():
    batch = random_batch()
    one, two = (make_learner(tiny_config(optim={"critic_updates": n})) for n in (1, 2))
    calls = []
    step = two.critic_optimizer.step
    two.critic_optimizer.step = lambda *a, **k: calls.append(1) or step(*a, **k)
    first, second = one.update(batch), two.update(batch)
    assert len(calls) == 2
    assert first["value/loss"] == second["value/loss"]
    assert moved([p.detach() for p in one.critic.parameters()], two.critic)
    assert not moved([p.detach() for p in one.actor.parameters()], two.actor)


def test_frozen_attention_stays_and_the_rest_of_the_critic_learns():
    learner = make_learner(tiny_config(optim={"freeze_critic_attention": True}))
    start = {name: x.detach().clone() for name, x in learner.critic.named_parameters()}
    learner.update(random_batch())
    changed = {name for name, x in learner.critic.named_parameters() if not torch.equal(x, start[name])}
    assert not any("self_attn" in name for name in changed)
    assert any("mlp" in name for name in changed)
    assert "head.weight" in changed
    assert all(x.requires_grad for x in learner.actor.parameters())


def test_critic_warm_up_ends_early_once_the_critic_explains_enough():
    optim = {"critic_warmup_steps": 50, "critic_warmup_until": 0.5, "critic_lr": 0.02}
    learner = make_learner(tiny_config(optim=optim))
    batch, steps = random_batch(), 0
    start = weights(learner.actor)
    while learner.warming_up:
        assert not moved(start, learner.actor)
        explained = learner.update(batch)["value/explained_variance"]
        steps += 1
    assert explained >= 0.5
    assert steps == learner.warmup_ended < 50
    learner.update(batch)
    assert moved(start, learner.actor)


def test_length_adaptive_lambda_is_that_of_each_response():
    batch = random_batch()
    learner = make_learner(tiny_config())
    before = learner.evaluate(batch)
    config = config_of("vapo", algorithm={}, optim={"critic_warmup_steps": 1})
    alpha = config.algorithm.policy_lam_alpha
    actual = estimates(config.algorithm, batch, before).advantages
    for row in range(len(batch)):
        lam = length_adaptive_lam(alpha, int(batch.policy_mask[row].sum()))
        expected = core.gae_targets(
            values=before.values[row : row + 1],
            rewards=batch.rewards[row : row + 1],
            policy_mask=batch.policy_mask[row : row + 1],
            lam=lam,
        ).advantages
        torch.testing.assert_close(actual[row : row + 1], expected)
    assert length_adaptive_lam(0.05, 10) == 0.0
    assert length_adaptive_lam(1.5, 100) == pytest.approx(1 - 1 / 150)


@pytest.mark.parametrize("window", ["auto", "auto_path"])
def test_automatic_windows_are_those_of_the_core_and_are_reported(window):
    batch = random_batch()
    learner = make_learner(tiny_config(algorithm={"window": window, "auto_budget": 0.5, "auto_eps": 0.2}))
    before = learner.evaluate(batch)
    ratios = {
        "behavior_logprobs": batch.behavior_logprobs,
        "target_logprobs": before.target_logprobs,
        "policy_mask": batch.policy_mask,
    }
    if window == "auto":
        expected = core.drift_window(**ratios, eps=0.2).window.expand_as(batch.policy_mask)
    else:
        expected = core.path_windows(**ratios, budget=0.5)
    figures = learner.update(batch)
    assert figures["window/mean"] == pytest.approx(float(expected[batch.policy_mask].double().mean()))
    assert figures["window/max"] == float(expected[batch.policy_mask].max())


def test_the_weight_average_is_checkpointed_and_resumes_to_the_same_update():
    config = config_of("ppo_ewma_original")
    whole = make_learner(config)
    batches = [random_batch(seed=seed) for seed in range(3)]
    for batch in batches[:2]:
        whole.update(batch)
    resumed = make_learner(config)
    resumed.actor.load_state_dict(whole.actor.state_dict())
    resumed.critic.load_state_dict(whole.critic.state_dict())
    for name, optimizer in resumed.optimizers.items():
        optimizer.load_state_dict(whole.optimizers[name].state_dict())
    resumed.restore(whole.counters(), {name: x.clone() for name, x in whole.tensors.items()})
    assert whole.update(batches[2]) == resumed.update(batches[2])


def test_learning_rates_shrink_with_staleness_and_with_the_effective_sample():
    assert staleness_scaled_lr(1e-3, staleness=8, reference=2) == pytest.approx(2.5e-4)
    assert staleness_scaled_lr(1e-3, staleness=1, reference=2) == 1e-3
    assert staleness_scaled_lr(1e-3, staleness=0, reference=2) == 1e-3
    assert float(ess_scaled_lr(1e-3, torch.tensor(0.25))) == pytest.approx(5e-4)
    scaled = make_learner(
        tiny_config(
            optim={"lr_reference_staleness": 2.0, "lr_ess_scaling": True},
            schedule={"mode": "lag", "max_staleness": 8},
        )
    )
    figures = scaled.update(random_batch())
    assert figures["actor/lr"] == pytest.approx(1e-2 / 4 * math.sqrt(figures["ratio/ess"]), rel=1e-6)
    assert figures["actor/lr_total"] == figures["actor/lr"]
    assert figures["actor/staleness_lr"] == pytest.approx(figures["actor/lr"] * figures["staleness/mean"])


def test_the_sum_of_learning_rates_is_over_optimiser_steps():
    figures = make_learner(tiny_config(optim={"minibatches": 3})).update(random_batch())
    assert figures["actor/lr_total"] == pytest.approx(3 * figures["actor/lr"])


def test_a_minibatch_that_nobody_could_judge_changes_nothing():
    learner = make_learner(tiny_config(optim={"minibatches": 6}))
    batch = random_batch()
    batch.policy_mask[2] = False
    figures = learner.update(batch)
    assert all(math.isfinite(x) for x in figures.values())


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"algorithm": {"value_target": "none"}}, r"algorithm\.advantage: eq27 reads a critic"),
        (
            {"algorithm": {"advantage": "group_brace", "gamma": 0.9}, "rollout": ROLLOUT},
            r"algorithm\.advantage: group_brace is Eq\. 27 at gamma = lam = 1",
        ),
        ({"algorithm": {"advantage": "group"}}, r"rollout\.samples_per_prompt: .*2 or more"),
        ({"actor": {"rule": "estr"}}, r"actor\.tau: field required"),
        ({"actor": {"rule": "icepops"}}, r"actor\.rule: .*did you mean icepop"),
        ({"actor": {"rule": "icepop", "lo": 1}}, r"actor\.lo: no such setting; did you mean actor\.low"),
        ({"actor": {"rule": "ppo", "edge": "U"}, "schedule": {"mode": "lag", "max_staleness": 1}}, r"actor\.edge"),
        ({"actor": "ppo"}, r"actor"),
    ],
)
def test_combinations_that_cannot_work_are_refused_in_one_line(sections, message):
    with pytest.raises(ConfigError, match=message) as caught:
        tiny_config(**sections)
    assert "\n" not in str(caught.value)
