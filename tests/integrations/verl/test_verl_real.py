"""BRACE's trainers on verl's own classes and functions, with its store replaced by memory. Needs verl 0.9."""

from types import SimpleNamespace

import pytest
import torch

from brace_rl import core
from brace_rl.integrations.verl.options import options_from_algorithm

tq = pytest.importorskip("transfer_queue")
v1 = pytest.importorskip("verl.trainer.ppo.v1")

from omegaconf import OmegaConf  # noqa: E402
from verl.utils import tensordict_utils  # noqa: E402

LENGTHS = (9, 6, 4, 1)
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def nested(rows):
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def stored_columns(noise=0.1):
    """A batch as verl stores it: a tool span in the first response, and verl's padding row at the end."""
    generator = torch.Generator().manual_seed(0)
    draw = [[torch.randn(n, generator=generator) for n in LENGTHS] for _ in range(3)]
    masks = [torch.ones(n, dtype=torch.int64) for n in LENGTHS]
    masks[0][3:6] = 0
    masks[-1][:] = 0
    rewards = [torch.zeros(n) for n in LENGTHS]
    for row, reward in enumerate((1.0, 0.5, -1.0)):
        rewards[row][-1] = reward
    return {
        "uid": ["a", "b", "c", "pad"],
        "values": nested(draw[0]),
        "rollout_log_probs": nested(draw[1]),
        "old_log_probs": nested([mu + noise * x for mu, x in zip(draw[1], draw[2], strict=True)]),
        "rm_scores": nested(rewards),
        "response_mask": nested(masks),
    }


@pytest.fixture
def store(monkeypatch):
    """The columns of one batch, behind verl's functions to read and write them."""
    columns = stored_columns()

    def get(*, keys, partition_id, select_fields):
        return tensordict_utils.get_tensordict({name: columns[name] for name in select_fields if name in columns})

    def put(*, keys, partition_id, fields):
        columns.update({name: fields[name] for name in fields.keys()})  # noqa: SIM118
        return batch

    batch = tq.KVBatchMeta(
        keys=[f"{uid}_0_0" for uid in columns["uid"]],
        tags=[{"min_global_steps": 3} for _ in columns["uid"]],
        partition_id="train",
    )
    monkeypatch.setattr(tq, "kv_batch_get", get)
    monkeypatch.setattr(tq, "kv_batch_put", put)
    return SimpleNamespace(columns=columns, batch=batch)


def advantage_of(mode, store, *, correction=None, **brace):
    """Run a trainer's step as verl would; returns what it stored, padded, and its metrics."""
    config = OmegaConf.create(
        {
            "algorithm": {
                "adv_estimator": "gae",
                "gamma": 1.0,
                "lam": 1.0,
                "use_kl_in_reward": False,
                "rollout_correction": correction,
                "brace": brace,
            },
            "actor_rollout_ref": {"rollout": {"n": 1}},
        }
    )
    cls = v1.get_trainer_cls(mode)
    trainer = object.__new__(cls)
    trainer.config, trainer.global_steps = config, 4
    trainer._brace_options = options_from_algorithm(config.algorithm)
    metrics = {}
    trainer._compute_advantage(store.batch, metrics)
    padded = {name: x.to_padded_tensor(0) for name, x in store.columns.items() if name != "uid"}
    return SimpleNamespace(metrics=metrics, **padded)


def test_verl_has_loaded_the_plug_in_by_itself():
    names = {"brace_sync", "brace_colocate_async", "brace_separate_async"}
    assert names <= set(v1.trainer_base.TRAINER_REGISTRY)


def test_stored_targets_are_the_cores(store):
    mask = store.columns["response_mask"].to_padded_tensor(0).bool()
    found = advantage_of("brace_sync", store, window=3)
    wanted = core.brace_targets(
        values=found.values,
        rewards=found.rm_scores,
        behavior_logprobs=found.rollout_log_probs,
        target_logprobs=found.old_log_probs,
        policy_mask=mask,
        window=3,
    )
    torch.testing.assert_close(found.returns, wanted.targets, **TOLERANCE)
    assert found.metrics["brace/window/mean"] == 3.0


def test_window_zero_equals_verls_own_gae(store):
    verls = advantage_of("sync", store)
    ours = advantage_of("brace_sync", store, window=0)
    mask = ours.response_mask.bool()
    for name in ("returns", "advantages"):
        torch.testing.assert_close(getattr(ours, name)[mask], getattr(verls, name)[mask], **TOLERANCE)


def test_verls_rejection_changes_no_target(store):
    mask = store.columns["response_mask"]
    kept = advantage_of("brace_sync", store, window=3)
    store.columns["response_mask"] = mask
    correction = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.95_1.05"}
    rejected = advantage_of("brace_sync", store, correction=correction, window=3)
    assert rejected.response_mask.sum() < kept.response_mask.sum()
    assert torch.equal(rejected.returns, kept.returns)
