"""BRACE's SkyRL trainers on fakes of what they go through: two numbers per token change, in SkyRL's tensor layout."""

import importlib
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import pytest
import torch

from brace_rl import core
from brace_rl.errors import ConfigError, DataError
from brace_rl.integrations.skyrl import main
from brace_rl.integrations.skyrl.checks import config_findings
from brace_rl.integrations.skyrl.estimate import right_aligned, skyrl_estimates
from brace_rl.integrations.skyrl.options import options_from_algorithm
from brace_rl.integrations.skyrl.versions import check_skyrl
from brace_rl.integrations.token_level import TokenLevelOptions
from brace_rl.integrations.versions import UnsupportedVersionError

WIDTH = 6
WRITTEN = [[1, 1, 0, 0, 1, 1], [1, 1, 1, 1], [1, 1]]
"""What the generator says the policy wrote: two tool tokens in the first of three responses."""

TARGET_INPUTS = ("values", "rewards", "rollout_logprobs", "action_log_probs")
GOOD = {
    "trainer": {
        "critic": {"model": {"path": "model"}},
        "algorithm": {"advantage_estimator": "gae", "gamma": 1.0, "lambd": 1.0, "brace": {}},
        "fully_async": {"enabled": False},
    },
    "generator": {"sampling_params": {"logprobs": 1}},
}


def with_setting(key, value):
    """The good configuration with one entry changed."""

    def changed(node, parts):
        first, *rest = parts
        return {**node, first: changed(node.get(first, {}), rest) if rest else value}

    return changed(GOOD, key.split("."))


def drawn_tensors(*, rows=3, seed=0):
    """Tensors of a batch; junk wherever the policy wrote nothing."""
    generator = torch.Generator().manual_seed(seed)
    mask = right_aligned(WRITTEN, rows=rows, width=WIDTH)
    drawn = {name: torch.randn(rows, WIDTH, generator=generator) for name in TARGET_INPUTS}
    drawn["rewards"] = torch.zeros(rows, WIDTH)
    drawn["rewards"][:, -1] = torch.tensor([1.0, 2.0, -1.0, 9.0][:rows])
    for name in ("values", "rollout_logprobs", "action_log_probs"):
        drawn[name] = torch.where(mask, drawn[name], 77.0)
    return drawn, mask


def cores_targets(drawn, mask, window):
    return core.brace_targets(
        values=drawn["values"],
        rewards=drawn["rewards"],
        behavior_logprobs=drawn["rollout_logprobs"],
        target_logprobs=drawn["action_log_probs"],
        policy_mask=mask,
        window=window,
    )


def estimates(drawn, mask, *, loss_mask=None, **options):
    return skyrl_estimates(
        **drawn,
        action_mask=mask,
        loss_mask=(mask if loss_mask is None else loss_mask).float(),
        options=TokenLevelOptions(whiten=False, **options),
        whiten=lambda advantages, mask: advantages * 2.0,
    )


def test_masks_of_responses_end_in_the_last_column():
    aligned = right_aligned([[1, 0, 1], [1], []], rows=4, width=4)
    wanted = [[0, 1, 0, 1], [0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert aligned.tolist() == [[bool(x) for x in row] for row in wanted]


@pytest.mark.parametrize("window", [0, 2, 100])
def test_returns_are_the_cores_targets(window):
    drawn, mask = drawn_tensors()
    found = estimates(drawn, mask, window=window)
    wanted = cores_targets(drawn, mask, window)
    assert torch.equal(found.returns, wanted.targets)
    # The stand-in for SkyRL's whitening doubles.
    assert torch.equal(found.advantages, wanted.advantages * 2.0)


def test_what_stands_on_tool_and_padding_tokens_changes_nothing():
    drawn, mask = drawn_tensors()
    clean = estimates(drawn, mask, window=2)
    for name in ("values", "rollout_logprobs", "action_log_probs"):
        drawn[name] = torch.where(mask, drawn[name], float("nan"))
    dirty = estimates(drawn, mask, window=2)
    assert torch.equal(dirty.returns, clean.returns)
    assert torch.equal(dirty.advantages, clean.advantages)


def test_a_reward_on_a_tool_token_belongs_to_the_last_token_written_before():
    drawn, mask = drawn_tensors()
    drawn["rewards"][0, 3] = 5.0
    moved = estimates(drawn, mask, window=2)
    drawn["rewards"][0, 3], drawn["rewards"][0, 1] = 0.0, 5.0
    assert torch.equal(moved.returns, estimates(drawn, mask, window=2).returns)
    assert moved.metrics["brace/rewards/moved"] == 1.0


def test_rejection_affects_the_loss_only():
    drawn, mask = drawn_tensors()
    kept = estimates(drawn, mask, window=2)
    loss_mask = mask.clone()
    loss_mask[1] = False
    rejected = estimates(drawn, mask, loss_mask=loss_mask, window=2)
    assert torch.equal(rejected.returns, kept.returns)
    assert rejected.advantages[1].eq(0).all()
    assert torch.equal(rejected.advantages[0], kept.advantages[0])


def test_an_end_token_whose_log_prob_is_not_known_is_not_corrected():
    drawn, mask = drawn_tensors()
    drawn["action_log_probs"][0, -1] = -12.0
    drawn["rollout_logprobs"][0, -1] = 0.0
    found = estimates(drawn, mask, window=4)
    drawn["rollout_logprobs"][0, -1] = -12.0
    assert torch.equal(found.returns, cores_targets(drawn, mask, 4).targets)
    assert found.metrics["brace/logprobs/placeholders"] == 1.0


def test_a_batch_with_one_token_left_to_train_on_has_no_spread_to_whiten():
    drawn, mask = drawn_tensors()
    loss_mask = torch.zeros_like(mask)
    loss_mask[2, -1] = True
    assert estimates(drawn, mask, loss_mask=loss_mask).advantages.eq(0).all()


@pytest.mark.parametrize(
    ("missing", "setting"),
    [
        ("values", "trainer.critic.model.path"),
        ("rollout_logprobs", "generator.sampling_params.logprobs=1"),
        ("action_log_probs", "_skip_policy_forward"),
    ],
)
def test_a_missing_tensor_is_an_error_with_the_setting_that_brings_it(missing, setting):
    drawn, mask = drawn_tensors()
    drawn[missing] = None
    with pytest.raises(DataError, match=f"{missing}: missing.*{setting}"):
        estimates(drawn, mask)


def test_targets_without_ratios_need_no_log_probs():
    drawn, mask = drawn_tensors()
    drawn |= {"rollout_logprobs": None, "action_log_probs": None}
    found = estimates(drawn, mask, value_target="gae", lam=0.9)
    wanted = core.gae_targets(values=drawn["values"], rewards=drawn["rewards"], policy_mask=mask, lam=0.9)
    assert torch.equal(found.returns, wanted.targets)


@pytest.mark.parametrize("version", ["0.2.9", "0.4.0", "1.0", "main"])
def test_a_skyrl_that_the_adapter_was_not_made_for_is_refused(version):
    with pytest.raises(UnsupportedVersionError, match=r"at least 0\.3 and below 0\.4"):
        check_skyrl(version)


def test_the_supported_skyrl_is_not_refused():
    check_skyrl("0.3.0")


def test_options_come_from_the_node_and_discounts_from_skyrl():
    options = options_from_algorithm({"gamma": 0.9, "lambd": 0.8, "brace": {"window": "auto", "c_clip": 1.0}})
    assert (options.gamma, options.lam, options.window, options.c_clip) == (0.9, 0.8, "auto", 1.0)
    assert not options.whiten


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"lam": 0.9}, r"brace\.lam: not an option here; set trainer\.algorithm\.lambd"),
        ({"whiten": True}, r"brace\.whiten: not an option here"),
        ({"windw": 3}, r"brace\.windw: no such option"),
        ({"window": -1}, r"brace\.window = -1: must be a whole number"),
    ],
)
def test_a_wrong_option_is_named(node, message):
    with pytest.raises(ConfigError, match=message):
        options_from_algorithm({"brace": node})


def test_a_good_configuration_has_no_findings():
    assert config_findings(GOOD) == []


@pytest.mark.parametrize(
    ("key", "value", "severity"),
    [
        ("trainer.critic.model.path", None, "error"),
        ("trainer.algorithm.advantage_estimator", "grpo", "error"),
        ("generator.step_wise_trajectories", True, "error"),
        ("trainer.fully_async.simulate_training", True, "error"),
        ("generator.sampling_params.logprobs", None, "error"),
        ("generator.chat_template.name_or_path", "qwen3_with_thinking", "error"),
        ("trainer.algorithm.brace", {"rho_clip": -1.0}, "error"),
        ("trainer.algorithm.advantage_batch_normalize", True, "warning"),
        ("trainer.algorithm.zero_variance_filter", True, "warning"),
        ("generator.apply_overlong_filtering", True, "warning"),
        ("trainer.algorithm.temperature", 0.5, "warning"),
        ("generator.sampling_params.temperature", 0.7, "warning"),
        ("generator.sampling_params.top_p", 0.9, "warning"),
        ("generator.sampling_params.top_k", 20, "warning"),
        ("generator.sampling_params.min_p", 0.1, "warning"),
        ("generator.sampling_params.repetition_penalty", 1.1, "warning"),
        ("trainer.algorithm.lambd", 0.95, "warning"),
    ],
)
def test_every_trap_is_found_alone_and_with_its_mend(key, value, severity):
    (finding,) = config_findings(with_setting(key, value))
    assert finding.severity == severity
    assert key.rpartition(".")[2] in finding.what
    assert finding.mend


@pytest.mark.parametrize(
    ("key", "value"),
    [
        # Rejection inside the policy loss, after targets and advantages.
        ("trainer.algorithm.off_policy_correction", {"tis_ratio_type": "token", "sequence_mask_metric": "geometric"}),
        ("trainer.algorithm.off_policy_correction", {"outlier_token_is_threshold_low": 1e-4}),
        ("trainer.fully_async.enabled", True),
        ("generator.max_turns", 8),
    ],
)
def test_settings_that_do_no_harm_are_not_found(key, value):
    assert config_findings(with_setting(key, value)) == []


def test_log_probs_of_the_distribution_sampled_from_make_any_temperature_good():
    config = with_setting("generator.sampling_params.temperature", 0.7)
    engine = {"engine_init_kwargs": {"logprobs_mode": "processed_logprobs"}}
    config["generator"]["inference_engine"] = engine
    assert config_findings(config) == []


def test_without_ratios_log_probs_are_nobodys_concern():
    config = with_setting("trainer.algorithm.brace", {"value_target": "gae"})
    config["generator"] = {"sampling_params": {"logprobs": None, "temperature": 0.7}}
    assert config_findings(config) == []


@dataclass
class Configuration:
    """A configuration of SkyRL, as far as BRACE's trainers read it."""

    trainer: dict = field(default_factory=lambda: GOOD["trainer"])
    generator: dict = field(default_factory=lambda: GOOD["generator"])


class Batch(dict):
    """SkyRL's batch of tensors."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self.metadata = {}


class FakeTrainer:
    """SkyRL's trainer, as far as BRACE's go through it: its filter, its padding rows, its numbers."""

    def __init__(self, cfg, tracker=None):
        self.cfg, self.tracker = cfg, tracker
        self.all_metrics = {"skyrl/own": 1.0}

    def _skip_policy_forward(self, training_input):
        return True

    def postprocess_generator_output(self, generator_output, uids, metrics_uids=None):
        generator_output["loss_masks"] = [
            [0] * len(mask) if uid == "filtered" else mask
            for mask, uid in zip(generator_output["loss_masks"], uids, strict=True)
        ]
        return generator_output, uids

    def convert_to_training_input(self, generator_output, uids):
        assert "brace_action_masks" not in generator_output
        drawn, _ = drawn_tensors(rows=4)
        for name in drawn:
            drawn[name][3] = drawn[name][0]
        loss_mask = right_aligned(generator_output["loss_masks"], rows=4, width=WIDTH)
        return Batch({**drawn, "loss_mask": loss_mask.float()})

    def compute_advantages_and_returns(self, data):
        assert "brace_action_mask" not in data
        data["advantages"] = data["returns"] = torch.full((4, WIDTH), -9.0)
        data.metadata["metrics"] = {"avg_advantages": -9.0, "avg_advantages_abs": 9.0, "avg_response_length": 4.0}
        self.all_metrics["loss/avg_raw_advantages"] = -9.0
        return data


@pytest.fixture
def trainers(monkeypatch):
    """BRACE's module of trainers, over fakes of the modules that it imports."""

    def whiten(values, mask):
        return values * 2.0

    fakes = {
        "skyrl.backends.skyrl_train.utils.ppo_utils": {"masked_whiten": whiten},
        "skyrl.train.trainer": {"RayPPOTrainer": FakeTrainer},
        "skyrl.train.fully_async_trainer": {
            "FullyAsyncRayPPOTrainer": type("FullyAsyncRayPPOTrainer", (FakeTrainer,), {})
        },
    }
    for name, contents in fakes.items():
        parts = name.split(".")
        for end in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "brace_rl.integrations.skyrl.trainers", raising=False)
    yield importlib.import_module("brace_rl.integrations.skyrl.trainers")
    monkeypatch.delitem(sys.modules, "brace_rl.integrations.skyrl.trainers")


def configuration(**brace):
    algorithm = {**GOOD["trainer"]["algorithm"], "brace": brace}
    return Configuration(trainer={**GOOD["trainer"], "algorithm": algorithm})


def step(trainer, uids=("a", "b", "c")):
    """What SkyRL does between generation and training; returns the batch."""
    output = {"loss_masks": [list(mask) for mask in WRITTEN]}
    output, uids = trainer.postprocess_generator_output(output, list(uids), metrics_uids=None)
    data = trainer.convert_to_training_input(output, uids)
    return trainer.compute_advantages_and_returns(data)


@pytest.mark.parametrize("name", ["BraceRayPPOTrainer", "BraceFullyAsyncRayPPOTrainer"])
def test_a_trainer_writes_the_cores_targets_and_leaves_rows_that_fill_up_alone(trainers, name):
    data = step(getattr(trainers, name)(cfg=configuration(window=2), tracker="kept"))
    drawn, mask = drawn_tensors(rows=4)
    for tensor in drawn.values():
        tensor[3] = tensor[0]
    wanted = cores_targets(drawn, mask, 2)
    assert torch.equal(data["returns"], wanted.targets)
    assert torch.equal(data["advantages"], wanted.advantages * 2.0)
    assert data["returns"][3].eq(0).all()


def test_a_filtered_response_keeps_its_targets(trainers):
    trainer = trainers.BraceRayPPOTrainer(configuration(window=2))
    kept, filtered = step(trainer), step(trainer, uids=("a", "filtered", "c"))
    assert filtered["loss_mask"][1].eq(0).all()
    assert torch.equal(filtered["returns"], kept["returns"])
    assert filtered["advantages"][1].eq(0).all()


def test_skyrls_own_figures_stay_and_those_of_advantages_are_braces(trainers):
    trainer = trainers.BraceRayPPOTrainer(configuration(window=2))
    data = step(trainer)
    mask = right_aligned(WRITTEN, rows=4, width=WIDTH)
    mean = data["advantages"][mask].mean().item()
    assert trainer.all_metrics["skyrl/own"] == 1.0
    assert trainer.all_metrics["brace/window/mean"] == 2.0
    assert trainer.all_metrics["loss/avg_raw_advantages"] == pytest.approx(mean)
    assert data.metadata["metrics"]["avg_advantages"] == pytest.approx(mean)
    assert data.metadata["metrics"]["avg_response_length"] == 4.0


def test_a_batch_from_elsewhere_is_taken_by_its_loss_mask(trainers):
    drawn, mask = drawn_tensors(rows=4)
    data = trainers.BraceRayPPOTrainer(configuration(window=2)).compute_advantages_and_returns(
        Batch({**drawn, "loss_mask": mask.float()})
    )
    assert torch.equal(data["returns"], cores_targets(drawn, mask, 2).targets)


@pytest.mark.parametrize(("value_target", "skipped"), [("brace", False), ("vtrace", False), ("gae", True)])
def test_the_policys_log_probs_are_computed_where_targets_need_them(trainers, value_target, skipped):
    trainer = trainers.BraceFullyAsyncRayPPOTrainer(configuration(value_target=value_target))
    assert trainer._skip_policy_forward(SimpleNamespace()) is skipped


def test_a_configuration_in_which_nothing_would_be_corrected_is_refused(trainers):
    config = configuration()
    config.trainer = {**config.trainer, "critic": {"model": {"path": None}}}
    config.generator = {"sampling_params": {"logprobs": None}}
    with pytest.raises(ConfigError, match=r"critic.model.path = None.*sampling_params.logprobs = None.*logprobs=1"):
        trainers.BraceRayPPOTrainer(config)


def test_the_command_says_what_is_wrong_in_one_line(monkeypatch, capsys):
    def launch(arguments):
        raise ConfigError(f"{arguments[0]}: refused")

    module = ModuleType("brace_rl.integrations.skyrl.launch")
    module.launch = launch
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sys, "argv", ["skyrl", "a.b=1"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "error: a.b=1: refused\n"
