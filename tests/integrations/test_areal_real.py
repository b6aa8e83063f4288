"""BRACE on AReaL's own classes: its actor beside ours, its configuration, and how it ships both to workers."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("areal.trainer.ppo.actor")

from areal.api.cli_args import GRPOConfig, NormConfig, PPOActorConfig, RejectionSamplingConfig, to_structured_cfg
from areal.infra.rpc.serialization import deserialize_value, serialize_value
from areal.trainer.ppo.actor import PPOActor
from areal.utils import stats_tracker
from areal.utils.dynamic_import import import_from_string
from omegaconf import OmegaConf
from transformers import LlamaConfig

from brace_rl import core
from brace_rl.errors import ConfigError, DataError
from brace_rl.integrations.areal.actor import BracePPOActor

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}
LENGTHS = (10, 9, 7, 6)
WRITTEN = ((3, 4, 7, 8, 9), (2, 3, 4, 5, 6, 7, 8), (3, 4, 6), (2, 3, 4))
"""Columns that the policy wrote: around a tool span, on its own, around a shorter one, and before a trailing one."""


def trajectories(seed=0, versions=4):
    """As AReaL's workflows return them: one dict per response, a row of its own length."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for length, columns, reward in zip(LENGTHS, WRITTEN, (1.0, 0.5, -1.0, 2.0), strict=True):
        mask = torch.zeros(1, length, dtype=torch.int32)
        mask[0, list(columns)] = 1
        draw = [torch.randn(1, length, generator=generator) for _ in range(3)]
        found.append(
            {
                "input_ids": torch.ones(1, length, dtype=torch.int32),
                "attention_mask": torch.ones(1, length, dtype=torch.bool),
                "loss_mask": mask,
                "logprobs": torch.where(mask > 0, -draw[0].abs(), 0.0),
                "versions": torch.where(mask > 0, versions, -1).int(),
                "rewards": torch.tensor([reward]),
                "values": draw[1],
                # AReaL's forward pass is rolled already: column t is of token t + 1.
                "prox_logp": torch.roll(torch.where(mask > 0, -draw[0].abs(), 0.0), -1, -1) + 0.2 * draw[2],
            }
        )
    return found


def config(brace=None, **settings):
    from brace_rl.integrations.areal.trainer import BraceActorConfig

    common = {"backend": "fsdp:d1", "kl_ctl": 0.0, "use_decoupled_loss": True} | settings
    return PPOActorConfig(**common) if brace is None else BraceActorConfig(brace=brace, **common)


ENGINE = SimpleNamespace(get_version=lambda: 5)


def ours(brace, data=None, **settings):
    return BracePPOActor(config(brace, **settings), ENGINE).compute_advantages(data or trajectories())


def theirs(data=None, **settings):
    return PPOActor(config(**settings), ENGINE).compute_advantages(data or trajectories())


def expected(row, data, window, **options):
    """What the core says about one response, its reward on its last action."""
    mask = torch.roll(data[row]["loss_mask"], -1, -1) > 0
    rewards = torch.zeros(mask.shape)
    rewards[0, mask[0].nonzero().max()] = data[row]["rewards"].item()
    return core.brace_targets(
        values=data[row]["values"],
        rewards=rewards,
        behavior_logprobs=torch.roll(data[row]["logprobs"], -1, -1),
        target_logprobs=data[row]["prox_logp"],
        policy_mask=mask,
        window=window,
        **options,
    )


@pytest.mark.parametrize("settings", [{}, {"use_decoupled_loss": False, "recompute_logprob": True}])
def test_targets_are_the_cores(settings):
    found = ours({"window": 2}, **settings)
    data = trajectories()
    for row, length in enumerate(LENGTHS):
        wanted = expected(row, data, 2)
        torch.testing.assert_close(found[row]["returns"][:, :length], wanted.targets, **TOLERANCE)
        torch.testing.assert_close(found[row]["advantages"][:, :length], wanted.advantages, **TOLERANCE)


@pytest.mark.parametrize("normalised", [False, True])
def test_window_zero_equals_areals_own_gae(normalised):
    # AReaL takes the longest row for cut off and adds its last token's value; it loses a reward on a tool token.
    norm = {"adv_norm": NormConfig(mean_level="batch", std_level="batch")} if normalised else {}
    data = trajectories()
    for trajectory in (data[0], data[3]):
        trajectory["rewards"].zero_()
        trajectory["values"].zero_()
    a, b = theirs([dict(x) for x in data], **norm), ours({"window": 0}, [dict(x) for x in data], **norm)
    for row in range(len(data)) if normalised else (1, 2):
        mask = a[row]["loss_mask"] > 0
        assert torch.equal(mask, b[row]["loss_mask"] > 0)
        for name in ("returns", "advantages"):
            torch.testing.assert_close(b[row][name][mask], a[row][name][mask], **TOLERANCE)


def test_gae_equals_areals_own_at_its_discount_and_lambda():
    settings = {"discount": 0.97, "gae_lambda": 0.9}
    a, b = theirs(**settings), ours({"value_target": "gae"}, **settings)
    for row in (1, 2):
        mask = a[row]["loss_mask"] > 0
        torch.testing.assert_close(b[row]["returns"][mask], a[row]["returns"][mask], **TOLERANCE)


def test_what_areal_gives_to_the_longest_row_and_takes_from_a_trailing_tool_span():
    data = trajectories()
    a, b = theirs(), ours({"window": 0})
    longest, trailing = (a[row]["loss_mask"] > 0 for row in (0, 3))
    bootstrap = data[0]["values"][0, -1]
    torch.testing.assert_close(a[0]["returns"][longest] - b[0]["returns"][longest], bootstrap.expand(5), **TOLERANCE)
    torch.testing.assert_close(a[3]["returns"][trailing], torch.zeros(3), **TOLERANCE)
    torch.testing.assert_close(b[3]["returns"][trailing], torch.full((3,), 2.0), **TOLERANCE)


def test_all_that_areal_computes_besides_is_its_own():
    a, b = theirs(kl_ctl=0.1), ours({"window": 2}, kl_ctl=0.1)
    for mine, own in zip(b, a, strict=True):
        assert mine.keys() == own.keys()
        for name in own.keys() - {"returns", "advantages"}:
            torch.testing.assert_close(mine[name], own[name])


def test_a_kl_penalty_in_the_rewards_reaches_the_targets():
    data = trajectories()
    found, plain = ours({"window": 0}, kl_ctl=0.1), ours({"window": 0})
    mask = found[1]["loss_mask"] > 0
    penalty = -0.1 * data[1]["logprobs"][data[1]["loss_mask"] > 0]
    from_here = penalty.flip(0).cumsum(0).flip(0)
    torch.testing.assert_close(found[1]["returns"][mask] - plain[1]["returns"][mask], from_here, **TOLERANCE)


def test_areals_rejection_comes_later_and_changes_no_target():
    rejection = RejectionSamplingConfig(level="token", action="mask", metric="ratio", upper=1.01)
    for one, other in zip(ours({"window": 2}, rejection_sampling=rejection), ours({"window": 2}), strict=True):
        assert torch.equal(one["returns"], other["returns"])
        assert torch.equal(one["loss_mask"], other["loss_mask"])


def test_junk_where_the_policy_wrote_nothing_changes_nothing():
    spoiled = trajectories()
    for x in spoiled:
        mask = x["loss_mask"] > 0
        x["logprobs"] = torch.where(mask, x["logprobs"], torch.nan)
        for name in ("values", "prox_logp"):
            x[name] = torch.where(torch.roll(mask, -1, -1), x[name], torch.nan)
    for one, other in zip(ours({"window": 2}, spoiled), ours({"window": 2}), strict=True):
        torch.testing.assert_close(one["returns"], other["returns"])
        torch.testing.assert_close(one["advantages"], other["advantages"])


def test_figures_reach_areals_log():
    stats_tracker.export()
    ours({"window": 2})
    logged = stats_tracker.export()
    assert logged["brace/window/mean"] == 2.0
    assert logged["brace/rewards/moved"] == 1.0
    assert logged["brace/ratio/all_one"] == 0.0


def test_a_policy_without_log_probs_of_its_own_is_refused():
    data = [{name: x for name, x in trajectory.items() if name != "prox_logp"} for trajectory in trajectories()]
    with pytest.raises(DataError, match=r"prox_logp: missing.*use_decoupled_loss"):
        ours({"window": 2}, data)


@dataclass
class Experiment(GRPOConfig):
    """A user's own."""

    reward_max_workers: int = 3


def test_areals_reader_takes_the_node_and_refuses_others():
    from brace_rl.integrations.areal.trainer import BraceActorConfig, with_brace

    given = OmegaConf.create(
        {
            "experiment_name": "x",
            "trial_name": "y",
            "reward_max_workers": 5,
            "actor": {
                "backend": "fsdp:d1",
                "experiment_name": "x",
                "trial_name": "y",
                "brace": {"window": "auto", "rho_clip": 1.3},
            },
        }
    )
    missing = {"rollout": {"backend": "sglang:d1"}, "tokenizer_path": "t", "train_dataset": {"path": "p"}}
    read = to_structured_cfg(OmegaConf.merge(given, missing), with_brace(Experiment))
    assert OmegaConf.to_container(read.actor.brace) == {"window": "auto", "rho_clip": 1.3}
    assert read.reward_max_workers == 5
    actor = OmegaConf.to_object(read.actor)
    assert isinstance(actor, BraceActorConfig)
    with pytest.raises(Exception, match="brace"):
        to_structured_cfg(OmegaConf.merge(given, missing), Experiment)


def test_a_worker_gets_the_configuration_and_the_engine_back_by_name(tmp_path):
    LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2).save_pretrained(
        tmp_path
    )
    sent = config({"window": 7}, discount=0.9, path=str(tmp_path))
    received = deserialize_value(serialize_value(sent))
    assert type(received) is type(sent)
    assert (received.brace, received.discount) == ({"window": 7}, 0.9)
    assert BracePPOActor(received, ENGINE)._brace_options.window == 7
    fsdp = pytest.importorskip("brace_rl.integrations.areal.fsdp")
    engine = import_from_string(f"{fsdp.__name__}.{fsdp.BraceFSDPPPOActor.__name__}")
    assert engine is fsdp.BraceFSDPPPOActor
    built = engine(received)
    assert isinstance(built.actor, BracePPOActor)
    assert built.actor.engine is built


def test_the_controller_of_areal_names_our_engine(monkeypatch):
    trainer = pytest.importorskip("brace_rl.integrations.areal.trainer")
    from areal.infra import TrainController

    monkeypatch.setattr(TrainController, "create_process_group", lambda self, parallel_strategy=None: None)
    monkeypatch.setattr(trainer, "is_single_controller", lambda: True)
    made = object.__new__(trainer.BracePPOTrainer)
    made.config, made.scheduler = SimpleNamespace(actor=config({"window": 2})), object()
    controller = made._create_train_engine(made.config.actor, SimpleNamespace(backend="fsdp", parallel=None))
    assert isinstance(controller, TrainController)
    assert controller.train_engine.__name__ == "BraceFSDPPPOActor"


def test_the_trainer_refuses_a_configuration_without_critic():
    from brace_rl.integrations.areal.trainer import BracePPOTrainer, with_brace

    experiment = object.__new__(with_brace(Experiment))
    experiment.actor, experiment.critic = config({"window": 2}), None
    for name in experiment.__dataclass_fields__:
        if not hasattr(experiment, name):
            setattr(experiment, name, None)
    with pytest.raises(ConfigError, match="critic: not there"):
        BracePPOTrainer(experiment)
