"""BRACE's SkyRL trainers as subclasses of the real ones: real configuration, real steps, only the workers are fakes.

Needs SkyRL 0.3 and what its trainer imports, and Python 3.12; no GPU and no inference engine.
"""

import pickle
import sys
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

from brace_rl import core
from brace_rl.doctor.skyrl_probe import probe
from brace_rl.errors import ConfigError, DataError

trainer_module = pytest.importorskip("skyrl.train.trainer")

from skyrl.backends.skyrl_train.distributed.dispatch import WorkerOutput  # noqa: E402
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry, ppo_critic_loss  # noqa: E402
from skyrl.train.entrypoints import main_base  # noqa: E402
from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer  # noqa: E402
from skyrl.train.utils import validate_cfg  # noqa: E402

from brace_rl.integrations.skyrl import launch, trainers  # noqa: E402

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}
JUNK = 50.0

SETTINGS = {
    "trainer.policy.model.path": "policy",
    "trainer.critic.model.path": "critic",
    "trainer.algorithm.advantage_estimator": "gae",
    "trainer.logger": "console",
    "trainer.train_batch_size": 2,
    "trainer.policy_mini_batch_size": 2,
    "trainer.critic_mini_batch_size": 2,
    "trainer.enable_ray_gpu_monitor": "false",
    "generator.inference_engine.enable_ray_prometheus_stats": "false",
    "trainer.placement.colocate_all": "false",
    "trainer.placement.policy_num_gpus_per_node": 1,
    "trainer.placement.critic_num_gpus_per_node": 1,
    "trainer.placement.ref_num_gpus_per_node": 1,
    "generator.n_samples_per_prompt": 2,
    "data.dataloader.num_workers": 0,
}
ASYNCHRONOUS = {
    "trainer.fully_async.enabled": "true",
    "trainer.fully_async.num_parallel_generation_workers": 2,
    "trainer.algorithm.policy_loss_type": "rollout_is",
}
PLAIN = [[1] * 7, [1] * 4, [1] * 5, [1] * 2]
WITH_TOOLS = [[1, 1, 0, 0, 1, 1, 1], [1, 0, 1, 0], [1] * 5, [1, 1]]
REWARDS = [1.0, 0.5, -1.0, 1.0]


def configuration(**changes):
    """SkyRL's configuration from its own parser and past its own checks, with BRACE's node."""
    given = {**SETTINGS, **{key.replace("__", "."): value for key, value in changes.items()}}
    config = launch.config_from_arguments([f"{key}={value}" for key, value in given.items()])
    validate_cfg(config)
    return config


class Dispatch:
    """In the place of SkyRL's remote workers: values and log-probs drawn by seed, and a record of what was trained on.

    Junk stands wherever the response has no token, as it does when a model runs over padding.
    """

    def __init__(self, dp_size=1, noise=0.2):
        self.dp_size, self.noise = dp_size, noise
        self.trained = {}

    def get_lcm_dp_size(self):
        return self.dp_size

    def empty_cache(self, model=None): ...

    def stage_data(self, model, data, boundaries):
        return [data[start:end] for start, end in boundaries]

    def forward_from_staged(self, model, chunk):
        return self.forward(model, chunk)

    def forward(self, model, data):
        """One row of output per row of data; equal sequences get equal numbers."""
        rows, width = len(data["sequences"]), data.metadata["response_length"]
        key = "values" if model == "critic" else "logprobs"
        outputs = []
        for row in range(rows):
            generator = torch.Generator().manual_seed(int(data["sequences"][row].sum()))
            mu, value, drift = (torch.randn(width, generator=generator) for _ in range(3))
            drawn = value if model == "critic" else mu - 2 + self.noise * drift
            outputs.append({key: drawn.tolist()})
        return WorkerOutput(loss_fn_outputs=outputs, metrics={})

    def forward_backward_from_staged(self, model, chunk):
        self.trained.setdefault(model, []).append(chunk)
        return WorkerOutput(loss_fn_outputs=[], metrics={"loss": 0.0})

    def optim_step(self, model):
        return 1.0


def rollout(masks, *, dispatch, reward_at=-1):
    """What a generator hands the trainer: token ids, log-probs under mu, a reward per token."""
    width = max(map(len, masks))
    output = {
        "prompt_token_ids": [[7, 8, 9], [7, 8, 9], [5, 6], [5, 6]],
        "response_ids": [[20 + row] * len(mask) for row, mask in enumerate(masks)],
        "loss_masks": [list(mask) for mask in masks],
        "rewards": [[0.0] * len(mask) for mask in masks],
        "rollout_logprobs": [],
        "stop_reasons": ["stop"] * len(masks),
        "rollout_metrics": None,
    }
    for row, mask in enumerate(masks):
        output["rewards"][row][reward_at] = REWARDS[row]
        ids = output["prompt_token_ids"][row] + output["response_ids"][row]
        generator = torch.Generator().manual_seed(sum(ids))
        mu = torch.randn(width, generator=generator)[width - len(mask) :] - 2
        # SkyRL writes 0 for tokens that were not sampled.
        output["rollout_logprobs"].append((mu * torch.tensor(mask)).tolist())
    return output, ["a", "a", "b", "b"]


TOKENIZER = SimpleNamespace(pad_token_id=0, decode=lambda ids: str(ids))


def trainer_of(cls, config, dispatch):
    """A trainer as SkyRL's experiment makes it, before it has workers."""
    dataset = None
    if issubclass(cls, FullyAsyncRayPPOTrainer):
        dataset = Prompts()
    trainer = cls(
        cfg=config,
        tracker=None,
        tokenizer=TOKENIZER,
        train_dataset=dataset,
        eval_dataset=None,
        inference_engine_client=None,
        generator=None,
        colocate_pg=None,
    )
    trainer.dispatch = dispatch
    return trainer


class Prompts(list):
    """SkyRL's data set of prompts."""

    def __init__(self):
        super().__init__({"uid": str(number)} for number in range(4))

    def collate_fn(self, items):
        return items


def step(trainer, masks=PLAIN, *, rewards=None, change=None):
    """SkyRL's own steps from a generator's output to a trained batch; returns the batch that training saw."""
    output, uids = rollout(masks, dispatch=trainer.dispatch)
    if rewards is not None:
        output["rewards"] = rewards
    output, uids = trainer.postprocess_generator_output(output, uids)
    data = trainer.convert_to_training_input(output, uids)
    data = trainer.fwd_logprobs_values_reward(data)
    if change is not None:
        change(data)
    before = {name: x.clone() for name, x in data.items() if isinstance(x, torch.Tensor)}
    data = trainer.compute_advantages_and_returns(data)
    found = {name: x.clone() for name, x in data.items() if isinstance(x, torch.Tensor)}
    data.pop("rewards")
    trainer.train_critic_and_policy(data)
    return SimpleNamespace(**{**before, **found}, metadata=data.metadata)


def both(name, changes=None, **brace):
    """SkyRL's trainer and BRACE's, of the same settings."""
    ours = {f"trainer__algorithm__brace__{key}": value for key, value in brace.items()}
    plain = configuration(**(changes or {}))
    corrected = configuration(**(changes or {}), **ours)
    base = getattr(trainer_module, name, FullyAsyncRayPPOTrainer)
    return (
        trainer_of(base, plain, Dispatch()),
        trainer_of(getattr(trainers, f"Brace{name}"), corrected, Dispatch()),
    )


SYNCHRONOUS_NAME, ASYNCHRONOUS_NAME = "RayPPOTrainer", "FullyAsyncRayPPOTrainer"


def cores_targets(found, mask, window):
    return core.brace_targets(
        values=found.values,
        rewards=found.rewards,
        behavior_logprobs=found.rollout_logprobs,
        target_logprobs=found.action_log_probs,
        policy_mask=mask,
        window=window,
    ).targets


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({"window": 0}, {}),
        ({"value_target": "gae"}, {"trainer__algorithm__lambd": 0.9, "trainer__algorithm__gamma": 0.99}),
    ],
)
def test_without_corrections_a_step_equals_skyrls_own_gae(options, changes):
    skyrl, brace = both(SYNCHRONOUS_NAME, changes, **options)
    theirs, ours = step(skyrl), step(brace)
    mask = ours.response_mask.bool()
    for name in ("returns", "advantages"):
        torch.testing.assert_close(getattr(ours, name)[mask], getattr(theirs, name)[mask], **TOLERANCE)
    for model in ("critic", "policy"):
        (trained,), (wanted,) = brace.dispatch.trained[model], skyrl.dispatch.trained[model]
        for name in ("returns", "advantages"):
            torch.testing.assert_close(trained[name][mask], wanted[name][mask], **TOLERANCE)
    assert brace.all_metrics["loss/avg_raw_advantages_abs"] == pytest.approx(
        skyrl.all_metrics["loss/avg_raw_advantages_abs"], rel=1e-5
    )


@pytest.mark.parametrize("name", [SYNCHRONOUS_NAME, ASYNCHRONOUS_NAME])
def test_a_step_stores_the_cores_targets(name):
    changes = {key.replace(".", "__"): value for key, value in ASYNCHRONOUS.items()}
    _, brace = both(name, changes if name == ASYNCHRONOUS_NAME else None, window=2)
    found = step(brace, WITH_TOOLS)
    mask = found.loss_mask.bool()
    assert mask.sum() == sum(map(sum, WITH_TOOLS)) < found.response_mask.sum()
    torch.testing.assert_close(found.returns, cores_targets(found, mask, 2), **TOLERANCE)
    (trained,) = brace.dispatch.trained["critic"]
    assert torch.equal(trained["returns"], found.returns)
    assert not [name for name in trained if name.startswith("brace")]


def test_in_fully_asynchronous_training_skyrl_leaves_pi_out_and_brace_does_not():
    changes = {key.replace(".", "__"): value for key, value in ASYNCHRONOUS.items()}
    skyrl, brace = both(ASYNCHRONOUS_NAME, changes, window=2)
    step(skyrl), step(brace)
    assert skyrl.dispatch.trained["critic"][0]["action_log_probs"] is None
    assert brace.dispatch.trained["critic"][0]["action_log_probs"] is not None


@pytest.mark.parametrize("loss", ["rollout_is", "dppo"])
def test_pi_in_the_batch_changes_no_loss_that_does_without_it(loss):
    config = configuration(trainer__algorithm__policy_loss_type=loss).trainer.algorithm
    generator = torch.Generator().manual_seed(0)
    now, pi, mu, advantages = (torch.randn(2, 3, generator=generator) for _ in range(4))
    mask = torch.ones(2, 3)
    losses = [
        PolicyLossRegistry.get(loss)(now, old, advantages, config=config, loss_mask=mask, rollout_logprobs=mu)[0]
        for old in (None, pi)
    ]
    assert torch.equal(*losses)


def test_values_on_tool_tokens_reach_skyrls_targets_and_not_braces():
    def junk(data):
        tool = data["response_mask"].bool() & ~data["loss_mask"].bool()
        data["values"] = torch.where(tool, JUNK, data["values"])

    skyrl, brace = both(SYNCHRONOUS_NAME, {"trainer__algorithm__lambd": 0.9}, value_target="gae")
    theirs, ours = ([step(trainer, WITH_TOOLS, change=change) for change in (None, junk)] for trainer in (skyrl, brace))
    mask = ours[0].loss_mask.bool()
    assert (theirs[0].returns - theirs[1].returns)[mask].abs().max() > 1.0
    assert torch.equal(ours[0].returns, ours[1].returns)
    assert torch.equal(ours[0].advantages, ours[1].advantages)


def test_a_reward_on_a_tool_token_reaches_the_tokens_before_it():
    rewards = [[0.0] * len(mask) for mask in WITH_TOOLS]
    rewards[0][3] = 5.0
    _, brace = both(SYNCHRONOUS_NAME, window=0)
    found = step(brace, WITH_TOOLS, rewards=rewards)
    assert found.returns[0].tolist() == [5.0, 5.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert brace.all_metrics["brace/rewards/moved"] == 1.0


def test_skyrls_filter_of_groups_changes_no_target():
    rewards = [1.0, 1.0, 0.0, 1.0]
    filtered = {"trainer__algorithm__zero_variance_filter": "true"}
    _, brace = both(SYNCHRONOUS_NAME, window=2)
    _, filtering = both(SYNCHRONOUS_NAME, filtered, window=2)
    kept, rejected = step(brace, rewards=rewards), step(filtering, rewards=rewards)
    assert rejected.loss_mask[:2].sum() == 0 < kept.loss_mask[:2].sum()
    assert torch.equal(rejected.returns, kept.returns)
    assert rejected.advantages[:2].eq(0).all()


def test_off_policy_correction_rejects_in_the_loss_and_changes_no_target():
    correcting = {
        "trainer__algorithm__off_policy_correction__sequence_mask_metric": "geometric",
        "trainer__algorithm__off_policy_correction__outlier_token_is_threshold_high": 1.05,
    }
    _, brace = both(SYNCHRONOUS_NAME, window=2)
    _, correct = both(SYNCHRONOUS_NAME, correcting, window=2)
    plain, corrected = step(brace, WITH_TOOLS), step(correct, WITH_TOOLS)
    assert torch.equal(corrected.returns, plain.returns)
    assert torch.equal(corrected.loss_mask, plain.loss_mask)
    losses = []
    for trainer in (brace, correct):
        (batch,) = trainer.dispatch.trained["policy"]
        losses.append(
            PolicyLossRegistry.get("regular")(
                batch["action_log_probs"],
                batch["action_log_probs"],
                batch["advantages"],
                config=trainer.cfg.trainer.algorithm,
                loss_mask=batch["loss_mask"],
                rollout_logprobs=batch["rollout_logprobs"],
            )[0]
        )
    assert not torch.equal(*losses)


def test_rows_that_fill_up_a_batch_are_nobodys():
    whole = {"trainer__recompute_old_logprobs_per_minibatch": "false"}
    config = configuration(**whole, trainer__algorithm__brace__window=2)
    alone = step(trainer_of(trainers.BraceRayPPOTrainer, config, Dispatch()), WITH_TOOLS)
    filled = step(trainer_of(trainers.BraceRayPPOTrainer, config, Dispatch(dp_size=3)), WITH_TOOLS)
    assert filled.metadata["pad_size"] == 2
    for name in ("returns", "advantages"):
        torch.testing.assert_close(getattr(filled, name)[:4], getattr(alone, name), **TOLERANCE)
        assert getattr(filled, name)[4:].eq(0).all()


def test_skyrls_critic_loss_is_taken_on_the_targets():
    _, brace = both(SYNCHRONOUS_NAME, window=2)
    step(brace, WITH_TOOLS)
    (batch,) = brace.dispatch.trained["critic"]
    config = brace.cfg.trainer.algorithm
    at_targets, _ = ppo_critic_loss(
        batch["returns"], batch["returns"], batch["returns"], config, loss_mask=batch["loss_mask"]
    )
    away, _ = ppo_critic_loss(batch["values"], batch["values"], batch["returns"], config, loss_mask=batch["loss_mask"])
    assert at_targets == 0.0 < away


def test_a_generator_without_log_probs_is_told_which_setting_brings_them():
    _, brace = both(SYNCHRONOUS_NAME, window=2)
    output, uids = rollout(PLAIN, dispatch=brace.dispatch)
    output["rollout_logprobs"] = None
    data = brace.convert_to_training_input(*brace.postprocess_generator_output(output, uids))
    data = brace.fwd_logprobs_values_reward(data)
    with pytest.raises(DataError, match=r"generator\.sampling_params\.logprobs=1"):
        brace.compute_advantages_and_returns(data)


@pytest.mark.parametrize(("changes", "name"), [({}, SYNCHRONOUS_NAME), (ASYNCHRONOUS, ASYNCHRONOUS_NAME)])
def test_the_experiment_makes_the_trainer_that_the_configuration_asks_for(changes, name):
    config = configuration(**{key.replace(".", "__"): value for key, value in changes.items()})
    experiment = object.__new__(launch.BracePPOExp)
    parts = ("tracker", "eval_dataset", "inference_engine_client", "generator", "colocate_pg")
    trainer = experiment.get_trainer(cfg=config, tokenizer=TOKENIZER, train_dataset=Prompts(), **dict.fromkeys(parts))
    assert type(trainer) is getattr(trainers, f"Brace{name}")
    assert isinstance(trainer, getattr(trainer_module, name, FullyAsyncRayPPOTrainer))


def test_the_configuration_travels_to_workers():
    config = configuration(trainer__algorithm__brace__window="auto", trainer__algorithm__brace__c_clip=1.0)
    arrived = pickle.loads(pickle.dumps(config))
    assert arrived.trainer.algorithm.brace == {"window": "auto", "c_clip": 1.0}
    assert asdict(arrived) == asdict(config)


def test_skyrls_entry_point_can_be_told_to_call_this_one(monkeypatch):
    called = []
    monkeypatch.setattr(launch, "launch", called.append)
    override = "trainer.override_entrypoint=brace_rl.integrations.skyrl"
    monkeypatch.setattr(sys, "argv", ["main_base", override, "trainer.algorithm.brace.window=3"])
    main_base.main()
    assert called == [[override, "trainer.algorithm.brace.window=3"]]
    config = launch.config_from_arguments(called[0])
    assert config.trainer.algorithm.brace == {"window": 3}


def test_the_launcher_refuses_before_ray_is_started():
    with pytest.raises(ConfigError, match=r"critic\.model\.path = None.*advantage_estimator = grpo"):
        launch.launch(["trainer.policy.model.path=policy"])


def test_the_doctor_finds_what_brace_overrides_in_the_real_classes():
    answer = probe(["trainer.algorithm.brace.window=7"])
    assert (answer["error"], answer["seam"], answer["refused"]) == (None, [], None)
    assert answer["settings"]["trainer"]["algorithm"]["brace"] == {"window": 7}
    assert "Invalid fields {'windw'}" in probe(["trainer.algorithm.windw=7"])["refused"]
