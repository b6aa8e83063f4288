"""BRACE's AReaL actor and trainer on fakes of what AReaL has: two numbers per token change, and nothing else."""

import importlib
import math
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from brace_rl import core
from brace_rl.errors import ConfigError, DataError
from brace_rl.integrations.areal.checks import config_findings
from brace_rl.integrations.areal.estimate import rolled, written_by_policy
from brace_rl.integrations.versions import UnsupportedVersionError

JUNK = math.nan
LENGTHS = (8, 6, 7)
OURS = "brace_rl.integrations.areal"


def rollout(seed=0):
    """Three sequences as AReaL's workflows leave them: prompts of two, a tool span in one, another that ends in one."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(3, 8, dtype=torch.int32)
    mask[0, [2, 3, 6, 7]] = 1
    mask[1, 2:6] = 1
    mask[2, 2:5] = 1
    attention = torch.arange(8) < torch.tensor(LENGTHS)[:, None]
    draw = [torch.randn(3, 8, generator=generator) for _ in range(3)]
    return {
        "input_ids": torch.ones(3, 8, dtype=torch.int32),
        "attention_mask": attention,
        "loss_mask": mask,
        "logprobs": torch.where(mask > 0, -draw[0].abs(), 0.0),
        "versions": torch.where(mask > 0, 3, -1) * attention,
        "rewards": torch.tensor([1.0, 0.5, -1.0]),
        "values": draw[1],
        "prox_logp": -draw[2].abs(),
    }


def expected(data, window, **options):
    """What the core says, in the columns of AReaL's results; the reward is the last action's."""
    mask = torch.roll(data["loss_mask"], -1, -1).bool()
    rewards = torch.zeros(3, 8)
    rewards[torch.arange(3), mask.long().cumsum(1).argmax(1)] = data["rewards"]
    return core.brace_targets(
        values=data["values"],
        rewards=rewards,
        behavior_logprobs=torch.roll(data["logprobs"], -1, -1),
        target_logprobs=data["prox_logp"],
        policy_mask=mask,
        window=window,
        **options,
    )


@dataclass
class PPOActorConfig:
    brace: dict[str, Any] = field(default_factory=dict)
    discount: float = 1.0
    gae_lambda: float = 1.0
    use_decoupled_loss: bool = True
    recompute_logprob: bool = False
    kl_ctl: float = 0.0
    normalise: bool = False
    backend: str = "fsdp:d1"


@dataclass
class PPOConfig:
    actor: PPOActorConfig = field(default_factory=PPOActorConfig)
    critic: dict[str, Any] | None = field(default_factory=dict)
    seed: int = 7


class FakeActor:
    """AReaL's actor, as far as BRACE's goes through it."""

    def __init__(self, config, engine):
        self.config, self.engine = config, engine
        self.adv_norm = (lambda advantages, mask, **groups: advantages * mask * 2.0) if config.normalise else None

    def _compute_advantages(self, data, meta=None):
        mask = torch.roll(data["loss_mask"].float(), -1, -1)
        old = torch.roll(data["logprobs"], -1, -1)
        if not self.config.use_decoupled_loss and self.config.recompute_logprob:
            old = data["logprobs"] = data["prox_logp"]
        old *= mask
        lengths = data["attention_mask"].sum(-1)
        rewards = -0.0 * old
        rewards[torch.arange(3), lengths - 2] += data["rewards"]
        junk = torch.full_like(old, -9.0)
        if self.adv_norm is not None:
            junk = self.adv_norm(junk, mask, group_sizes=meta)
        return data | {"returns": junk, "advantages": junk, "tot_rewards": rewards, "loss_mask": mask, "logprobs": old}


class FakeEngine:
    version = 5

    def __init__(self, config):
        self.config, self.actor, self.groups = config, FakeActor(config, self), []

    def get_version(self):
        return self.version

    def create_process_group(self, parallel_strategy):
        self.groups.append(parallel_strategy)

    @classmethod
    def as_controller(cls, config, scheduler):
        controller = SimpleNamespace(train_engine=cls, scheduler=scheduler)
        controller.create_process_group = lambda parallel_strategy: None
        return controller


class FakeTrainer:
    def __init__(self, config, train_dataset=None):
        self.config, self.scheduler = config, "scheduler"
        self.actor = self._create_train_engine(config.actor, SimpleNamespace(backend="fsdp", parallel="d1"))

    def _create_train_engine(self, actor_config, alloc):
        return "AReaL's own"


@pytest.fixture
def areal(monkeypatch):
    """Fakes of the modules that the adapter imports; yields what it made of them, and what it logged."""
    logged, warned, single = {}, [], []

    @contextmanager
    def scope(name):
        yield logged.setdefault("scopes", set()).add(name)

    logger = SimpleNamespace(warning=warned.append)
    fakes = {
        "areal.trainer.ppo.actor": {"PPOActor": FakeActor},
        "areal.utils": {
            "logging": SimpleNamespace(getLogger=lambda name: logger),
            "stats_tracker": SimpleNamespace(scope=scope, scalar=lambda **figures: logged.update(figures)),
        },
        "areal.engine.fsdp_engine": {"FSDPPPOActor": FakeEngine},
        "areal.api.cli_args": {"PPOActorConfig": PPOActorConfig},
        "areal.trainer.rl_trainer": {"PPOTrainer": FakeTrainer},
        "areal.utils.environ": {"is_single_controller": lambda: bool(single)},
    }
    for name in ("areal", "areal.trainer", "areal.trainer.ppo", "areal.engine", "areal.api"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, contents in fakes.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.0.4")
    adapters = [f"{OURS}.{name}" for name in ("actor", "fsdp", "trainer")]
    for name in adapters:
        monkeypatch.delitem(sys.modules, name, raising=False)
    actor, _, trainer = (importlib.import_module(name) for name in adapters)
    yield SimpleNamespace(actor=actor, trainer=trainer, logged=logged, warned=warned, single=single)
    for name in adapters:
        monkeypatch.delitem(sys.modules, name)


def advantages_of(areal, data, *meta, engine=None, config=None, **brace):
    config = config or PPOActorConfig(brace=brace)
    actor = areal.actor.BracePPOActor(config, engine or FakeEngine(PPOActorConfig()))
    return actor._compute_advantages({name: x.clone() for name, x in data.items()}, *meta)


@pytest.mark.parametrize("meta", [(), ("groups",)])
def test_targets_are_the_cores_and_a_reward_on_a_tool_token_is_the_last_actions(areal, meta):
    data = rollout()
    wanted = expected(data, 2)
    found = advantages_of(areal, data, *meta, window=2)
    torch.testing.assert_close(found["returns"], wanted.targets)
    torch.testing.assert_close(found["advantages"], wanted.advantages)
    assert areal.logged["rewards/moved"] == 1
    assert areal.logged["scopes"] == {"brace"}


def test_discount_and_lambda_are_areals(areal):
    data = rollout()
    config = PPOActorConfig(brace={"window": 3, "rho_clip": 1.5}, discount=0.9, gae_lambda=0.8)
    found = advantages_of(areal, data, config=config)
    torch.testing.assert_close(found["returns"], expected(data, 3, rho_clip=1.5, gamma=0.9, lam=0.8).targets)


def test_areals_normalisation_is_applied_to_ours_with_its_own_arguments(areal):
    data = rollout()
    found = advantages_of(areal, data, config=PPOActorConfig(brace={"window": 2}, normalise=True))
    torch.testing.assert_close(found["advantages"], expected(data, 2).advantages * 2.0)
    torch.testing.assert_close(found["returns"], expected(data, 2).targets)


def test_overwritten_log_probs_are_read_before(areal):
    data = rollout()
    config = PPOActorConfig(brace={"window": 2}, use_decoupled_loss=False, recompute_logprob=True)
    found = advantages_of(areal, data, config=config)
    torch.testing.assert_close(found["returns"], expected(data, 2).targets)
    torch.testing.assert_close(found["logprobs"], data["prox_logp"] * found["loss_mask"])


def test_junk_where_the_policy_wrote_nothing_changes_nothing(areal):
    data = rollout()
    clean = advantages_of(areal, data, window=2)
    mask = data["loss_mask"] > 0
    spoiled = data | {"logprobs": torch.where(mask, data["logprobs"], JUNK)}
    for name in ("values", "prox_logp"):
        spoiled[name] = torch.where(rolled(mask), data[name], JUNK)
    found = advantages_of(areal, spoiled, window=2)
    for name in ("returns", "advantages", "logprobs"):
        torch.testing.assert_close(found[name], clean[name])


def test_tokens_that_a_workflow_rejected_leave_the_loss_and_stay_in_the_targets(areal):
    data = rollout()
    data["loss_mask"][0, 6:] = 0
    found = advantages_of(areal, data, window=2)
    torch.testing.assert_close(found["returns"], expected(rollout(), 2).targets)
    assert not found["loss_mask"][0, 5:].any()


def test_stamps_that_mean_something_else_are_not_read(areal):
    data = rollout()
    written = data["loss_mask"] > 0
    assert torch.equal(written_by_policy(data), written)
    every_token = data | {"versions": torch.full((3, 8), 3)}
    assert torch.equal(written_by_policy(every_token), written)
    none = data | {"versions": torch.full((3, 8), -1)}
    assert torch.equal(written_by_policy(none), written)
    del data["versions"]
    assert torch.equal(written_by_policy(data), written)


def test_a_first_token_of_the_policy_does_not_wrap_to_the_end():
    mask = torch.tensor([[1, 0, 1]], dtype=torch.bool)
    assert rolled(mask).tolist() == [[False, True, False]]


@pytest.mark.parametrize(
    ("missing", "words"), [("values", "add a critic section"), ("prox_logp", "actor.use_decoupled_loss=true")]
)
def test_a_missing_tensor_is_named_with_the_setting_that_brings_it(areal, missing, words):
    data = rollout()
    del data[missing]
    with pytest.raises(DataError, match=f"{missing}: missing.*{words}"):
        advantages_of(areal, data)


def test_estimators_without_ratios_need_no_forward_pass_of_the_policy(areal):
    data = rollout()
    del data["prox_logp"]
    found = advantages_of(areal, data, value_target="monte_carlo")
    mask = rolled(data["loss_mask"]) > 0
    assert torch.equal(found["returns"], torch.where(mask, data["rewards"][:, None], 0.0))


def test_stale_tokens_with_todays_log_probs_are_warned_of(areal):
    data = rollout()
    data["prox_logp"] = torch.roll(data["logprobs"], -1, -1)
    advantages_of(areal, data)
    assert len(areal.warned) == 1
    assert "tokens of version 3 have exactly the log-probs of today's policy" in areal.warned[0]
    fresh = FakeEngine(PPOActorConfig())
    fresh.version = 3
    advantages_of(areal, data, engine=fresh)
    assert len(areal.warned) == 1


def test_the_trainer_gives_the_actor_an_engine_of_ours_and_nobody_else(areal):
    config = areal.trainer.with_brace(PPOConfig)()
    trainer = areal.trainer.BracePPOTrainer(config)
    assert type(trainer.actor).__name__ == "BraceFSDPPPOActor"
    assert isinstance(trainer.actor.actor, areal.actor.BracePPOActor)
    assert trainer.actor.groups == ["d1"]
    reference = PPOActorConfig()
    assert trainer._create_train_engine(reference, SimpleNamespace(backend="fsdp")) == "AReaL's own"


def test_workers_are_told_a_class_that_they_can_import(areal):
    areal.single.append(True)
    controller = areal.trainer.BracePPOTrainer(areal.trainer.with_brace(PPOConfig)()).actor
    engine = controller.train_engine
    assert getattr(importlib.import_module(engine.__module__), engine.__name__) is engine
    assert controller.scheduler == "scheduler"


def test_a_users_configuration_keeps_its_fields(areal):
    config = areal.trainer.with_brace(PPOConfig)()
    assert config.seed == 7
    assert config.actor.brace == {}
    assert isinstance(config, PPOConfig)


def test_the_trainer_refuses_a_configuration_that_keeps_brace_from_working(areal):
    config = areal.trainer.with_brace(PPOConfig)()
    config.critic = None
    config.actor.brace = {"gamma": 0.9}
    with pytest.raises(ConfigError, match=r"critic: not there.*actor\.brace\.gamma: not an option here"):
        areal.trainer.BracePPOTrainer(config)


@pytest.mark.parametrize("found", ["0.5.1", "1.1.0", "3.0"])
def test_other_versions_are_refused_with_the_range(found):
    from brace_rl.integrations.areal.versions import check_areal

    check_areal("1.0.4")
    check_areal("2.0.0")
    with pytest.raises(UnsupportedVersionError, match=f"AReaL {found}: brace-rl supports 1.0 and 2.0"):
        check_areal(found)


GOOD = {
    "actor": {"backend": "fsdp:d4", "use_decoupled_loss": True, "kl_ctl": 0.0, "temperature": 1.0, "gae_lambda": 1.0},
    "critic": {"path": "model"},
    "gconfig": {"temperature": 1.0},
    "rollout": {"backend": "sglang:d4"},
}


def changed(key, value):
    *parents, last = key.split(".")
    config = {name: dict(section) for name, section in GOOD.items()}
    node = config
    for parent in parents:
        node = node[parent]
    node[last] = value
    return config


def test_a_good_configuration_has_no_finding():
    assert config_findings(GOOD) == []


@pytest.mark.parametrize(
    ("key", "value", "severity", "mend"),
    [
        ("critic", None, "error", "add a critic section"),
        ("actor.backend", "other:d1", "error", "use one of fsdp"),
        ("actor.use_decoupled_loss", False, "error", "actor.recompute_logprob=true"),
        ("actor.prox_logp_method", "loglinear", "error", "prox_logp_method=recompute"),
        ("actor.temperature", 0.7, "warning", "actor.temperature: ${gconfig.temperature}"),
        ("gconfig.top_p", 0.9, "warning", "gconfig.top_p=1.0"),
        ("gconfig.top_k", 50, "warning", "gconfig.top_k=-1"),
        ("gconfig.frequency_penalty", 0.1, "warning", "gconfig.frequency_penalty=0.0"),
        ("actor.kl_ctl", 0.1, "warning", "actor.kl_ctl=0.0"),
        ("actor.mask_no_eos_with_zero", True, "warning", "mask_no_eos_with_zero=false"),
        ("actor.gae_lambda", 0.95, "warning", "set actor.gae_lambda=1.0"),
        ("actor.brace", {"rho": 2}, "error", "docs/areal.md"),
    ],
)
def test_each_trap_is_found_alone_and_with_its_mend(key, value, severity, mend):
    (finding,) = config_findings(changed(key, value))
    assert finding.severity == severity
    assert mend in finding.mend
    assert key.rsplit(".", 1)[-1] in finding.what


def test_a_temperature_is_wrong_with_vllm_only():
    config = changed("gconfig.temperature", 0.7)
    config["actor"]["temperature"] = 0.7
    assert config_findings(config) == []
    config["rollout"] = {"backend": "vllm:d4"}
    (finding,) = config_findings(config)
    assert "log-probs from before the temperature" in finding.what


def test_recomputed_log_probs_are_as_good_as_decoupled_ones():
    config = changed("actor.use_decoupled_loss", False)
    config["actor"]["recompute_logprob"] = True
    assert config_findings(config) == []
