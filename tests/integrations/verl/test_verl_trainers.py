"""BRACE's verl trainers on fakes of what verl has: they change two numbers per token, and nothing else."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from brace_rl import core
from brace_rl.errors import ConfigError, DataError
from brace_rl.integrations.token_level import TokenLevelOptions
from brace_rl.integrations.verl.estimate import verl_estimates

LENGTHS = (5, 3, 1)


class Columns(dict):
    """Of a batch, as verl's store keeps them: rows of their own length."""

    def to_padded_tensor(self, padding=0.0):
        return {name: x.to_padded_tensor(padding) for name, x in self.items()}


class Store:
    """What holds a batch between the steps of a verl trainer."""

    def __init__(self):
        self.columns = Columns()
        self.writes = []

    def kv_batch_get(self, *, keys, partition_id, select_fields):
        return Columns({name: self.columns[name] for name in select_fields})

    def kv_batch_put(self, *, keys, partition_id, fields):
        self.writes.append(sorted(fields))
        self.columns.update(fields)
        return BATCH


class Config(dict):
    """A configuration, by attribute or by key."""

    def __getattr__(self, name):
        return self[name]

    def __setattr__(self, name, value):
        self[name] = value


class Batch:
    keys = ("a", "b", "pad")
    partition_id = "train"
    tags = ({"min_global_steps": 3}, {"min_global_steps": 3}, {"is_padding": True})

    def __len__(self):
        return len(self.keys)


BATCH = Batch()


def nested(rows):
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def configuration(**brace):
    return Config(
        trainer=Config(v1=Config(trainer_mode="brace_sync")),
        actor_rollout_ref=Config(rollout=Config(calculate_log_probs=True)),
        algorithm=Config(adv_estimator="gae", gamma=1.0, lam=1.0, use_kl_in_reward=False, brace=Config(brace)),
        critic=Config(enable=None),
    )


class FakeTrainer:
    """verl's base trainer, as far as BRACE's goes through it."""

    def __init__(self, config):
        self.config = config
        self.mode_at_init = config.trainer.v1.trainer_mode
        self.use_critic = True
        self.global_steps = 4

    def _compute_advantage(self, batch, metrics):
        store = sys.modules["transfer_queue"].store
        metrics["verl/own"] = 1.0
        junk = nested([torch.full((length,), -9.0) for length in LENGTHS])
        mask = store.columns["response_mask"].to_padded_tensor(0).clone()
        mask[0, 4] = 0
        rejected = nested([mask[row, :length] for row, length in enumerate(LENGTHS)])
        return store.kv_batch_put(
            keys=batch.keys,
            partition_id=batch.partition_id,
            fields={"advantages": junk, "returns": junk, "response_mask": rejected},
        )


def response_to_nested(tensor, mask):
    return nested([tensor[row, :length] for row, length in enumerate(LENGTHS)])


@pytest.fixture
def verl(monkeypatch):
    """Fakes of the modules that the trainers import; yields their module, the store and verl's registry."""
    store, registry = Store(), {}
    v1 = ModuleType("verl.trainer.ppo.v1")
    for name in ("PPOTrainerSync", "PPOTrainerColocateAsync", "PPOTrainerSeparateAsync"):
        setattr(v1, name, type(name, (FakeTrainer,), {}))

    class OpenDict:
        def __init__(self, config): ...
        def __enter__(self): ...
        def __exit__(self, *error): ...

    fakes = {
        "transfer_queue": {"store": store, "kv_batch_get": store.kv_batch_get, "kv_batch_put": store.kv_batch_put},
        "omegaconf": {"OmegaConf": SimpleNamespace(to_container=lambda config: config), "open_dict": OpenDict},
        "tensordict": {"TensorDict": lambda fields, batch_size: fields},
        "verl.trainer.ppo.v1.trainer_base": {
            "register_trainer": lambda name: lambda cls: registry.setdefault(name, cls),
        },
        "verl.utils.torch_functional": {"masked_whiten": lambda advantages, mask: advantages * 2.0},
        "verl.workers.utils.padding": {"response_to_nested": response_to_nested},
    }
    for parent in ("verl", "verl.trainer", "verl.trainer.ppo", "verl.utils", "verl.workers", "verl.workers.utils"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, "verl.trainer.ppo.v1", v1)
    for name, contents in fakes.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "brace_rl.integrations.verl.trainers", raising=False)
    trainers = importlib.import_module("brace_rl.integrations.verl.trainers")
    trainers.register(v1)
    yield SimpleNamespace(trainers=trainers, store=store, registry=registry)
    monkeypatch.delitem(sys.modules, "brace_rl.integrations.verl.trainers")


@pytest.fixture
def filled(verl):
    """The store with a batch: five tokens of which two are a tool's, three tokens, and a padding row of one."""
    generator = torch.Generator().manual_seed(0)

    def draw():
        return nested([torch.randn(length, generator=generator) for length in LENGTHS])

    masks = [torch.tensor([1, 1, 0, 0, 1]), torch.tensor([1, 1, 1]), torch.tensor([0])]
    rewards = [torch.zeros(length) for length in LENGTHS]
    rewards[0][4], rewards[1][2] = 1.0, 2.0
    verl.store.columns = Columns(
        values=draw(),
        rollout_log_probs=draw(),
        old_log_probs=draw(),
        rm_scores=nested(rewards),
        response_mask=nested(masks),
    )
    return verl


def expected(store, window):
    """What the core says about the batch, on the mask from before verl's rejection."""
    padded = {name: x.to_padded_tensor(0) for name, x in store.columns.items() if name != "advantages"}
    return core.brace_targets(
        values=padded["values"],
        rewards=padded["rm_scores"],
        behavior_logprobs=padded["rollout_log_probs"],
        target_logprobs=padded["old_log_probs"],
        policy_mask=torch.tensor([[1, 1, 0, 0, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.bool),
        window=window,
    )


def test_each_of_verls_trainers_gets_one_that_builds_on_it(verl):
    bases = {name: trainer.__mro__[2].__name__ for name, trainer in verl.registry.items()}
    assert bases == {
        "brace_sync": "PPOTrainerSync",
        "brace_colocate_async": "PPOTrainerColocateAsync",
        "brace_separate_async": "PPOTrainerSeparateAsync",
    }


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_verl_takes_a_trainer_for_the_one_it_builds_on(verl, mode):
    assert verl.registry[f"brace_{mode}"](configuration()).mode_at_init == mode


def test_stored_targets_are_the_cores_and_rejection_changes_none(filled):
    trainer = filled.registry["brace_sync"](configuration(window=2))
    metrics = {}
    trainer._compute_advantage(BATCH, metrics)
    wanted = expected(filled.store, 2)
    columns = filled.store.columns
    torch.testing.assert_close(columns["returns"].to_padded_tensor(0), wanted.targets)
    # The stand-in for verl's whitening doubles.
    torch.testing.assert_close(columns["advantages"].to_padded_tensor(0), wanted.advantages * 2.0)
    assert filled.store.writes == [["advantages", "response_mask", "returns"], ["advantages", "returns"]]


def test_verls_own_metrics_stay_and_ours_are_added(filled):
    trainer = filled.registry["brace_sync"](configuration(window=2))
    metrics = {}
    trainer._compute_advantage(BATCH, metrics)
    assert metrics["verl/own"] == 1.0
    assert metrics["brace/rows/without_action"] == 1.0
    assert metrics["brace/window/mean"] == 2.0


def test_stale_responses_whose_ratios_are_all_one_are_warned_of(filled, caplog):
    trainer = filled.registry["brace_sync"](configuration(window=2))
    filled.store.columns["rollout_log_probs"] = filled.store.columns["old_log_probs"]
    trainer._compute_advantage(BATCH, {})
    assert caplog.text == ""
    trainer.global_steps = 9
    filled.store.columns["response_mask"] = nested([torch.ones(length, dtype=torch.int64) for length in LENGTHS])
    trainer._compute_advantage(BATCH, {})
    assert "step 9: responses of version 3 have exactly the log-probs of today's policy" in caplog.text


def test_a_configuration_in_which_nothing_would_be_corrected_is_refused(verl):
    config = configuration()
    config.actor_rollout_ref.rollout.calculate_log_probs = False
    config.critic.enable = False
    with pytest.raises(ConfigError, match=r"critic.enable = False.*calculate_log_probs = False.*calculate_log_probs=T"):
        verl.registry["brace_sync"](config)


@pytest.mark.parametrize("missing", ["values", "rollout_log_probs"])
def test_a_missing_tensor_is_an_error_with_the_setting_that_brings_it(missing):
    tensor, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.int64)
    given = dict.fromkeys(("rewards", "values", "rollout_log_probs", "old_log_probs"), tensor)
    with pytest.raises(DataError, match=f"{missing}: missing"):
        verl_estimates(
            **{**given, missing: None},
            action_mask=mask,
            response_mask=mask,
            options=TokenLevelOptions(),
            whiten=lambda advantages, mask: advantages,
        )
