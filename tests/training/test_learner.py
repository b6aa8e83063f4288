"""One update: what it reads, what it leaves alone, and that splitting the batch changes nothing."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from brace_rl import core
from brace_rl.config import config_from_dict
from brace_rl.errors import DivergedError, StalenessError
from brace_rl.training.batch import collate
from brace_rl.training.estimates import estimates
from brace_rl.training.learner import Learner
from brace_rl.training.logprobs import TokenScorer
from brace_rl.training.models import Critic
from brace_rl.training.types import Trajectory

VOCABULARY = 11


def tiny_actor(seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config)


def tiny_config(**sections):
    sections.setdefault("schedule", {"mode": "sync", "max_staleness": 0})
    optim = {"steps": 100, "actor_lr": 1e-2, "critic_lr": 1e-2, "critic_warmup_steps": 0}
    sections["optim"] = optim | sections.get("optim", {})
    return config_from_dict(sections)


def make_learner(config, seed=0):
    actor = tiny_actor(seed)
    critic = Critic.from_actor(actor)
    torch.manual_seed(seed + 1)
    torch.nn.init.normal_(critic.head.weight, std=0.5)
    return Learner(actor, critic, config)


def random_trajectories(count=6, seed=0, version=0, kept=False):
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high, n):
        return torch.randint(low, high, (n,), generator=generator).tolist()

    rows = []
    for index in range(count):
        size = 3 + draw(0, 6, 1)[0]
        response = draw(1, VOCABULARY, size)
        mask = [True, *[bool(x) for x in draw(0, 3, size - 2)], True]
        logprobs = (-2.0 + torch.rand(size, generator=generator)).tolist()
        rows.append(
            Trajectory(
                request_index=index,
                sample_index=0,
                problem_id=str(index),
                prompt_ids=draw(1, VOCABULARY, 2 + index % 2),
                response_ids=response,
                policy_mask=mask,
                behavior_logprobs=[x if m else 0.0 for x, m in zip(logprobs, mask, strict=True)],
                behavior_entropies=[1.0 if m else 0.0 for m in mask],
                versions=[version if m else -1 for m in mask],
                rewards=[0.0] * (size - 1) + [float(index % 2)],
                kept_ids=[[t, (t + 1) % VOCABULARY] if m else [] for t, m in zip(response, mask, strict=True)]
                if kept
                else None,
            )
        )
    return rows


def random_batch(**kwargs):
    return collate(random_trajectories(**kwargs), pad_token_id=0, device=torch.device("cpu"))


def parameters_after_update(config, batch):
    learner = make_learner(config)
    metrics = learner.update(batch)
    return [p.detach() for p in (*learner.actor.parameters(), *learner.critic.parameters())], metrics


def test_micro_batches_change_neither_the_update_nor_the_metrics():
    batch = random_batch()
    whole, whole_metrics = parameters_after_update(tiny_config(), batch)
    split, split_metrics = parameters_after_update(tiny_config(optim={"micro_batch_tokens": 12}), batch)
    for a, b in zip(whole, split, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)
    for name in ("tokens/evaluate", "tokens/update"):  # these count padding, of which smaller groups have less
        assert split_metrics.pop(name) <= whole_metrics.pop(name)
    for name, value in whole_metrics.items():
        assert split_metrics[name] == pytest.approx(value, abs=1e-4), name


@pytest.mark.parametrize("warmup", [0, 1])
def test_keeping_the_graph_saves_the_second_forward_pass_and_changes_no_bit(warmup, monkeypatch):
    batch, forward, calls = random_batch(), TokenScorer.forward, []

    def counted(self, part):
        calls.append(1)
        return forward(self, part)

    monkeypatch.setattr(TokenScorer, "forward", counted)
    optim = {"micro_batch_tokens": 24, "critic_warmup_steps": warmup}
    twice, twice_metrics = parameters_after_update(tiny_config(optim=optim), batch)
    calls_of_two_passes = len(calls)
    once, once_metrics = parameters_after_update(tiny_config(optim=optim | {"keep_graph": True}), batch)
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))
    assert once_metrics == twice_metrics
    calls_of_one_pass = len(calls) - calls_of_two_passes
    assert calls_of_two_passes == calls_of_one_pass * (1 if warmup else 2)


def test_the_value_of_a_token_is_read_before_it():
    learner = make_learner(tiny_config())
    batch = random_batch(count=1)
    values = learner.evaluate(batch).values
    changed = batch.input_ids.clone()
    changed[0, 4] = (changed[0, 4] + 1) % VOCABULARY
    after = learner.evaluate(replace(batch, input_ids=changed))
    torch.testing.assert_close(after.values[0, :4], values[0, :4])
    assert not torch.allclose(after.values[0, 4], values[0, 4])


def test_target_logprobs_are_those_of_the_tempered_policy():
    learner = make_learner(tiny_config(rollout={"temperature": 0.7}))
    batch = random_batch(count=1)
    logits = learner.actor(batch.input_ids).logits / 0.7
    expected = logits.log_softmax(-1)[0, :-1].gather(-1, batch.input_ids[0, 1:, None]).squeeze(-1)
    actual = learner.evaluate(batch).target_logprobs[0]
    mask = batch.policy_mask[0]
    torch.testing.assert_close(actual[mask], expected[mask])
    assert torch.isnan(actual[~mask]).all()


def test_pi_is_renormalised_over_the_recorded_kept_set():
    batch = random_batch(count=2, kept=True)
    actor = make_learner(tiny_config()).actor
    logits = actor(batch.input_ids, attention_mask=batch.attention_mask).logits
    scored = TokenScorer(actor, temperature=1.0)(batch).logprobs
    for row, column in batch.policy_mask.nonzero().tolist():
        token, other = batch.kept_ids[row][column]
        kept = logits[row, column, [token, other]].log_softmax(-1)
        assert scored[row, column].item() == pytest.approx(kept[0].item(), abs=1e-6)


def test_critic_warm_up_leaves_the_actor_alone():
    learner = make_learner(tiny_config(optim={"critic_warmup_steps": 1}))
    actor_before = [p.detach().clone() for p in learner.actor.parameters()]
    critic_before = [p.detach().clone() for p in learner.critic.parameters()]
    metrics = learner.update(random_batch())
    assert all(torch.equal(a, b) for a, b in zip(actor_before, learner.actor.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(critic_before, learner.critic.parameters(), strict=True))
    assert metrics["actor/lr"] == 0
    learner.update(random_batch(version=1))
    assert not all(torch.equal(a, b) for a, b in zip(actor_before, learner.actor.parameters(), strict=True))


def test_actor_and_critic_share_no_parameter():
    learner = make_learner(tiny_config())
    assert not {id(p) for p in learner.actor.parameters()} & {id(p) for p in learner.critic.parameters()}


def test_targets_are_computed_once_whatever_the_number_of_minibatches(monkeypatch):
    calls = []
    original = core.brace_targets
    monkeypatch.setattr(core, "brace_targets", lambda **kwargs: calls.append(1) or original(**kwargs))
    make_learner(tiny_config(optim={"minibatches": 3})).update(random_batch())
    assert len(calls) == 1


def test_two_minibatches_make_two_optimiser_steps():
    learner = make_learner(tiny_config(optim={"minibatches": 2}))
    learner.update(random_batch())
    steps = {int(state["step"]) for state in learner.actor_optimizer.state.values()}
    assert steps == {2}


@pytest.mark.parametrize("target", ["brace", "capped", "vtrace", "gae", "monte_carlo"])
def test_every_value_target_reaches_its_estimator(target):
    config = tiny_config(algorithm={"value_target": target, "window": 3, "rho_clip": 1.3, "c_clip": 1.05, "lam": 0.99})
    learner = make_learner(config)
    batch = random_batch()
    before = learner.evaluate(batch)
    arguments = {"values": before.values, "rewards": batch.rewards, "policy_mask": batch.policy_mask, "gamma": 1.0}
    ratios = {"behavior_logprobs": batch.behavior_logprobs, "target_logprobs": before.target_logprobs}
    clips = {"rho_clip": 1.3, "c_clip": 1.05}
    expected = {
        "brace": lambda: core.brace_targets(**arguments, **ratios, **clips, lam=0.99, window=3),
        "capped": lambda: core.capped_targets(**arguments, **ratios, **clips, lam=0.99, window=3),
        "vtrace": lambda: core.vtrace_targets(**arguments, **ratios, **clips, lam=0.99),
        "gae": lambda: core.gae_targets(**arguments, lam=0.99),
        "monte_carlo": lambda: core.monte_carlo_targets(**arguments),
    }[target]()
    actual = estimates(config.algorithm, batch, before)
    assert torch.equal(actual.targets, expected.targets)
    assert torch.equal(actual.advantages, expected.advantages)


def test_on_policy_the_target_is_the_reward_at_every_token():
    learner = make_learner(tiny_config())
    batch = random_batch()
    before = learner.evaluate(batch)
    on_policy = _with_logprobs(batch, before.target_logprobs)
    targets = estimates(learner.config.algorithm, on_policy, before).targets
    expected = batch.rewards.sum(dim=1, keepdim=True).expand_as(targets)
    torch.testing.assert_close(targets[batch.policy_mask], expected[batch.policy_mask])


def _with_logprobs(batch, logprobs):
    return replace(batch, behavior_logprobs=logprobs)


def test_truncated_rows_bootstrap_from_the_state_after_their_last_token_only_when_asked():
    rows = random_trajectories(count=2)
    rows[1].truncated = True
    batch = collate(rows, pad_token_id=0, device=torch.device("cpu"))
    assert make_learner(tiny_config()).evaluate(batch).bootstrap_values is None
    learner = make_learner(tiny_config(algorithm={"bootstrap_truncated": True}))
    after = learner.critic(batch.input_ids, batch.attention_mask)
    bootstrap = learner.evaluate(batch).bootstrap_values
    assert bootstrap[0] == 0
    torch.testing.assert_close(bootstrap[1], after[1, batch.lengths[1] - 1])


def test_stale_tokens_scored_by_the_current_policy_stop_the_run():
    learner = make_learner(tiny_config(schedule={"mode": "lag", "max_staleness": 4}))
    learner.update(random_batch())
    batch = random_batch(version=0)
    recomputed = _with_logprobs(batch, learner.evaluate(batch).target_logprobs)
    with pytest.raises(StalenessError, match="identical to the current policy"):
        learner.update(recomputed)


def test_tokens_the_policy_was_certain_of_prove_nothing():
    learner = make_learner(tiny_config(schedule={"mode": "lag", "max_staleness": 4}))
    learner.update(random_batch())
    batch = random_batch(version=0)
    alone = tuple(tuple((token,) for token in row) for row in batch.input_ids[:, 1:].tolist())
    certain = replace(batch, kept_ids=alone, behavior_logprobs=torch.zeros_like(batch.behavior_logprobs))
    assert learner.update(certain)["ratio/mean"] == pytest.approx(1.0)


def test_identical_logprobs_are_fine_where_nothing_moved_the_actor():
    learner = make_learner(tiny_config(schedule={"mode": "lag", "max_staleness": 4}, optim={"actor_lr": 0.0}))
    learner.update(random_batch())
    batch = random_batch(version=0)
    learner.update(_with_logprobs(batch, learner.evaluate(batch).target_logprobs))
    assert (learner.version, learner.moved_version) == (2, 0)


def test_values_that_are_not_finite_stop_the_run_and_say_what_to_lower():
    learner = make_learner(tiny_config())
    torch.nn.init.constant_(learner.critic.head.bias, float("nan"))
    with pytest.raises(DivergedError, match=r"step 1: values: .*row 0.*lower optim\.critic_lr or optim\.actor_lr"):
        learner.update(random_batch())


def test_gradients_that_are_not_finite_stop_the_run_before_the_weights_change():
    learner = make_learner(tiny_config())
    before = [p.detach().clone() for p in learner.critic.parameters()]
    learner.critic.head.weight.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(DivergedError, match="the critic's gradient has norm"):
        learner.update(random_batch())
    assert all(torch.equal(a, b) for a, b in zip(before, learner.critic.parameters(), strict=True))


def test_identical_logprobs_are_fine_while_the_actor_has_not_moved():
    learner = make_learner(tiny_config(schedule={"mode": "lag", "max_staleness": 4}, optim={"critic_warmup_steps": 2}))
    for version in range(3):
        batch = random_batch(version=0)
        learner.update(_with_logprobs(batch, learner.evaluate(batch).target_logprobs))
        assert learner.version == version + 1


def test_identical_logprobs_of_fresh_tokens_are_fine():
    learner = make_learner(tiny_config())
    learner.update(random_batch())
    batch = random_batch(version=1)
    metrics = learner.update(_with_logprobs(batch, learner.evaluate(batch).target_logprobs))
    assert metrics["ratio/max"] == pytest.approx(1.0)


def test_learning_rate_warms_up_over_actor_steps():
    learner = make_learner(tiny_config(optim={"critic_warmup_steps": 1, "lr_warmup_steps": 4, "actor_lr": 0.4}))
    rates = [learner.update(random_batch(version=v))["actor/lr"] for v in range(6)]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.4])
