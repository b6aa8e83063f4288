"""BRACE on OpenRLHF's own classes: its experience maker beside ours, on its own experiences, and reached by its hook.

Packages that need a GPU are stood in for where they are missing; see ``openrlhf_stand_ins.py``.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("openrlhf")

from openrlhf_stand_ins import stand_in

from brace_rl import core
from brace_rl.errors import ConfigError
from brace_rl.integrations.openrlhf import hook
from brace_rl.integrations.openrlhf.options import VARIABLE

stand_in()
trainer = pytest.importorskip("openrlhf.trainer.ppo_trainer")
OWN = trainer.RemoteExperienceMaker

from openrlhf.trainer.ppo_utils.experience import Experience  # noqa: E402
from openrlhf.trainer.ppo_utils.kl_controller import FixedKLController  # noqa: E402
from openrlhf.utils.config import hierarchize  # noqa: E402

from brace_rl.integrations.openrlhf.maker import BraceExperienceMaker  # noqa: E402

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}

MASKS = ([0, 0, 1, 1, 1, 0, 0, 1, 1], [0, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 0], [0, 1, 1, 1])
"""Around a tool span; on its own; before a trailing tool span; shorter. Prompts are there too, as in OpenRLHF."""

SETTINGS = {
    "algo.advantage.estimator": "gae",
    "algo.advantage.gamma": 1.0,
    "algo.advantage.lambd": 1.0,
    "algo.advantage.no_std_norm": False,
    "algo.advantage.is_correction_level": "token",
    "rollout.n_samples_per_prompt": 2,
    "rollout.micro_batch_size": 2,
    "rollout.max_new_tokens": 8,
    "rollout.top_p": 1.0,
    "reward.clip_range": (-10, 10),
    "train.async_enable": False,
    "train.dynamic_batch_enable": False,
    "data.max_len": 16,
}


def maker(cls, kl=0.0, **settings):
    """An experience maker with OpenRLHF's settings, as its own command nests them; models are not needed."""
    args = hierarchize(argparse.Namespace(**{**SETTINGS, **settings}))
    tokenizer = SimpleNamespace(pad_token_id=0)
    return cls(None, None, None, None, FixedKLController(kl), SimpleNamespace(args=args), tokenizer)


def samples(seed=0, masks=MASKS):
    """One experience per response, as the models' forward passes fill them in."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for mask, reward in zip(masks, (1.0, 0.5, -1.0, 2.0), strict=True):
        mask = torch.tensor([mask])
        draw = [torch.randn(mask.shape, generator=generator) for _ in range(4)]
        tokens = mask.shape[1] + 1
        found.append(
            Experience(
                sequences=torch.ones(1, tokens, dtype=torch.long),
                attention_mask=torch.ones(1, tokens, dtype=torch.long),
                action_mask=mask,
                action_log_probs=(-draw[0].abs() + 0.2 * draw[1]) * mask,
                rollout_log_probs=-draw[0].abs() * mask,
                values=draw[2] * mask,
                kl=draw[3] * mask,
                rewards=torch.tensor([reward]),
                response_length=mask.sum(1),
                truncated=torch.tensor([False]),
                total_length=torch.tensor([float(tokens)]),
                prompts=["p"],
                labels=["l"],
                info={"reward": torch.tensor([reward])},
            )
        )
    return found


def computed(cls, kl=0.0, masks=MASKS, **settings):
    """Batched by OpenRLHF, which pads two responses to one width, and given advantages."""
    made = maker(cls, kl, **settings)
    return made.compute_advantages_and_returns(made.split_rollout_samples(samples(masks=masks)))


def expected(experience, window, rewards=None, **options):
    """What the core says about an experience whose reward is on the last action."""
    mask = experience.action_mask > 0
    if rewards is None:
        rewards = torch.zeros(mask.shape)
        rewards[torch.arange(len(mask)), mask.long().cumsum(1).argmax(1)] = experience.rewards.float()
    return core.brace_targets(
        values=experience.values,
        rewards=rewards,
        behavior_logprobs=experience.rollout_log_probs,
        target_logprobs=experience.action_log_probs,
        policy_mask=mask,
        window=window,
        **options,
    )


@pytest.fixture(autouse=True)
def node(monkeypatch):
    """Sets the options that a launcher would; returns a function that does."""

    def put(**options):
        monkeypatch.setenv(VARIABLE, json.dumps(options))

    put(window=2)
    return put


def test_returns_are_the_cores():
    for experience in computed(BraceExperienceMaker):
        torch.testing.assert_close(experience.returns, expected(experience, 2).targets, **TOLERANCE)
        assert experience.info["brace/window/mean"].tolist() == [2.0, 2.0]


def test_a_kl_penalty_in_the_rewards_reaches_the_returns():
    drawn = torch.nn.utils.rnn.pad_sequence([e.kl[0] for e in samples()], batch_first=True).split(2)
    for experience, kl in zip(computed(BraceExperienceMaker, kl=0.1), drawn, strict=True):
        width = experience.action_mask.shape[1]
        rewards = -0.1 * kl[:, :width]
        rewards[torch.arange(2), experience.action_mask.cumsum(1).argmax(1)] += experience.rewards.float()
        torch.testing.assert_close(experience.returns, expected(experience, 2, rewards).targets, **TOLERANCE)


@pytest.mark.parametrize("no_std_norm", [False, True])
def test_window_zero_equals_openrlhfs_own_gae_at_lambda_one(node, no_std_norm):
    node(window=0)
    settings = {"algo.advantage.no_std_norm": no_std_norm}
    pairs = zip(computed(OWN, **settings), computed(BraceExperienceMaker, **settings), strict=True)
    for own, ours in pairs:
        mask = own.action_mask > 0
        torch.testing.assert_close(ours.returns[mask], own.returns[mask], **TOLERANCE)
        torch.testing.assert_close(ours.advantages[mask], own.advantages[mask], **TOLERANCE)


def test_gae_below_lambda_one_equals_openrlhfs_own_without_tools_and_only_there(node):
    node(value_target="gae")
    settings = {"algo.advantage.lambd": 0.9}
    plain = ([0, 1, 1, 1], [0, 1, 1, 1, 1, 1], [0, 0, 1, 1], [1, 1, 1, 1])
    for own, ours in zip(
        computed(OWN, masks=plain, **settings), computed(BraceExperienceMaker, masks=plain, **settings), strict=True
    ):
        mask = own.action_mask > 0
        torch.testing.assert_close(ours.returns[mask], own.returns[mask], **TOLERANCE)
    own, ours = (computed(cls, **settings)[0] for cls in (OWN, BraceExperienceMaker))
    before_the_tool = slice(2, 5)
    assert (own.returns[0, before_the_tool] - ours.returns[0, before_the_tool]).abs().min() > 1e-3


def test_junk_outside_the_actions_changes_nothing():
    made = maker(BraceExperienceMaker)
    clean = computed(BraceExperienceMaker)
    spoiled = made.split_rollout_samples(samples())
    for experience in spoiled:
        outside = experience.action_mask == 0
        for x in (experience.values, experience.action_log_probs, experience.rollout_log_probs):
            x[outside] = torch.nan
    for one, other in zip(made.compute_advantages_and_returns(spoiled), clean, strict=True):
        torch.testing.assert_close(one.returns, other.returns)
        torch.testing.assert_close(one.advantages, other.advantages)


def test_all_that_openrlhf_computes_besides_is_its_own():
    for own, ours in zip(computed(OWN, kl=0.1), computed(BraceExperienceMaker, kl=0.1), strict=True):
        for name in ("sequences", "action_mask", "values", "rewards", "action_log_probs", "rollout_log_probs"):
            torch.testing.assert_close(getattr(ours, name), getattr(own, name))
        torch.testing.assert_close(ours.info["return"], own.info["return"])
        assert ours.kl is own.kl is None


def test_settings_that_keep_brace_from_working_are_refused():
    with pytest.raises(ConfigError, match="is_correction_level = off"):
        maker(BraceExperienceMaker, **{"algo.advantage.is_correction_level": "off"})


def test_the_trainers_of_this_process_make_ours_once_the_hook_has_run(monkeypatch):
    monkeypatch.setattr(trainer, "RemoteExperienceMaker", OWN)
    hook.install()
    args = hierarchize(
        argparse.Namespace(
            **SETTINGS,
            **{
                "algo.kl.target": None,
                "algo.kl.init_coef": 0.0,
                "logger.wandb.key": None,
                "logger.tensorboard_dir": None,
            },
            **{"ckpt.best_metric_key": ""},
        )
    )
    parts = [SimpleNamespace(args=args), None, None, None, None, None, SimpleNamespace(pad_token_id=0)]
    made = trainer.BasePPOTrainer(*parts)
    assert type(made.experience_maker) is BraceExperienceMaker


def where_experiences_are_made():
    """Runs in a worker of Ray: what OpenRLHF's trainers there would use, and the options they would read."""
    import sys

    sys.path[:0] = os.environ["BRACE_TEST_PATH"].split(os.pathsep)
    from openrlhf_stand_ins import stand_in

    stand_in()
    from openrlhf.trainer.ppo_trainer import RemoteExperienceMaker

    from brace_rl.integrations.openrlhf.options import node_from_environment

    return RemoteExperienceMaker.__module__, node_from_environment()


@pytest.mark.slow
def test_a_worker_of_ray_finds_ours_and_its_options(monkeypatch):
    ray = pytest.importorskip("ray")
    from brace_rl.integrations.openrlhf.launch import runtime_environment

    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parents[1] / "src")])
    environment = runtime_environment({"window": 7})
    environment["env_vars"] |= {"BRACE_TEST_PATH": paths, "PYTHONPATH": paths}
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    local = {"num_cpus": 1, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    ray.init(**local, log_to_driver=False, logging_level="ERROR", runtime_env=environment)
    try:
        code = ray.cloudpickle
        code.register_pickle_by_value(sys.modules[__name__])
        module, options = ray.get(ray.remote(where_experiences_are_made).remote(), timeout=500)
    finally:
        ray.shutdown()
    assert module == "brace_rl.integrations.openrlhf.maker"
    assert options == {"window": 7}
