"""BRACE's experience maker and launcher on fakes of what OpenRLHF and Ray have."""

import importlib
import json
import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from brace_rl import core
from brace_rl.errors import ConfigError, DataError
from brace_rl.integrations.openrlhf import hook, launch, options
from brace_rl.integrations.openrlhf.checks import config_findings
from brace_rl.integrations.openrlhf.estimate import openrlhf_estimates
from brace_rl.integrations.openrlhf.options import VARIABLE, settings_from_arguments, split_arguments
from brace_rl.integrations.token_level import TokenLevelOptions
from brace_rl.integrations.versions import UnsupportedVersionError

MAKER = "brace_rl.integrations.openrlhf.maker"
MASKS = ([[0, 1, 1, 0, 0, 1, 1, 0], [0, 0, 1, 1, 1, 0, 0, 0]], [[0, 1, 1, 1, 1]])
"""Two experiences: around a tool span and behind a longer prompt, and one response of its own width."""


def made(seed=0):
    """Experiences as OpenRLHF leaves them before its advantages, with the rewards of tokens it makes for each."""
    generator = torch.Generator().manual_seed(seed)
    experiences, rewards = [], []
    for rows, given in zip(MASKS, ([1.0, -0.5], [2.0]), strict=True):
        mask = torch.tensor(rows)
        draw = [torch.randn(mask.shape, generator=generator) for _ in range(3)]
        reward = torch.zeros(mask.shape)
        for row, value in enumerate(given):
            reward[row, mask[row].nonzero().max()] = value
        experiences.append(
            SimpleNamespace(
                action_mask=mask,
                values=draw[0] * mask,
                action_log_probs=(-draw[1].abs() + 0.2 * draw[2]) * mask,
                rollout_log_probs=-draw[1].abs() * mask,
                info={},
            )
        )
        rewards.append(reward)
    return experiences, rewards


def expected(experience, rewards, window):
    return core.brace_targets(
        values=experience.values,
        rewards=rewards,
        behavior_logprobs=experience.rollout_log_probs,
        target_logprobs=experience.action_log_probs,
        policy_mask=experience.action_mask > 0,
        window=window,
    )


def estimates(experiences, rewards, divide_by_std=True, **given):
    given = {"window": 2, "whiten": False} | given
    wanted = TokenLevelOptions(**given)
    return openrlhf_estimates(experiences=experiences, rewards=rewards, options=wanted, divide_by_std=divide_by_std)


def test_targets_are_the_cores_in_experiences_of_any_width():
    experiences, rewards = made()
    found = estimates(experiences, rewards)
    for experience, reward, returns in zip(experiences, rewards, found.returns, strict=True):
        torch.testing.assert_close(returns, expected(experience, reward, 2).targets)
    assert found.metrics["brace/window/mean"] == 2.0


@pytest.mark.parametrize("divide_by_std", [True, False])
def test_advantages_are_normalised_over_all_experiences(divide_by_std):
    experiences, rewards = made()
    found = estimates(experiences, rewards, divide_by_std)
    masks = [experience.action_mask > 0 for experience in experiences]
    raw = [expected(e, r, 2).advantages[m] for e, r, m in zip(experiences, rewards, masks, strict=True)]
    whole = torch.cat(raw)
    spread = whole.std(correction=0) if divide_by_std else 1.0
    wanted = (whole - whole.mean()) / spread
    torch.testing.assert_close(torch.cat([a[m] for a, m in zip(found.advantages, masks, strict=True)]), wanted)
    assert not any(advantages[~mask].any() for advantages, mask in zip(found.advantages, masks, strict=True))


def test_an_automatic_window_is_one_for_all_experiences():
    experiences, rewards = made()
    found = estimates(experiences, rewards, window="auto", auto_eps=0.5)
    window = int(found.metrics["brace/window/mean"])
    for experience, reward, returns in zip(experiences, rewards, found.returns, strict=True):
        torch.testing.assert_close(returns, expected(experience, reward, window).targets)


def test_junk_on_prompt_tool_and_padding_changes_nothing():
    clean = estimates(*made())
    experiences, rewards = made()
    for experience, reward in zip(experiences, rewards, strict=True):
        outside = experience.action_mask == 0
        for x in (experience.values, experience.action_log_probs, experience.rollout_log_probs, reward):
            x[outside] = math.nan
    found = estimates(experiences, rewards)
    for name in ("returns", "advantages"):
        for one, other in zip(getattr(found, name), getattr(clean, name), strict=True):
            torch.testing.assert_close(one, other)


def test_a_reward_behind_the_last_action_is_the_last_actions():
    experiences, rewards = made()
    moved = [reward.clone() for reward in rewards]
    moved[0][0, 7], moved[0][0, 6] = moved[0][0, 6].clone(), 0.0
    found, wanted = estimates(experiences, moved), estimates(experiences, rewards)
    torch.testing.assert_close(found.returns[0], wanted.returns[0])
    assert found.metrics["brace/rewards/moved"] == 1


@pytest.mark.parametrize(
    ("missing", "words"), [("values", "estimator gae"), ("rollout_log_probs", "is_correction_level token")]
)
def test_a_missing_tensor_is_named_with_the_setting_that_brings_it(missing, words):
    experiences, rewards = made()
    setattr(experiences[1], missing, None)
    with pytest.raises(DataError, match=f"{missing}: missing.*{words}"):
        estimates(experiences, rewards)


def test_estimators_without_ratios_need_no_log_probs():
    experiences, rewards = made()
    for experience in experiences:
        experience.rollout_log_probs = None
    found = estimates(experiences, rewards, value_target="monte_carlo")
    assert torch.equal(found.returns[1], torch.tensor([[0.0, 2.0, 2.0, 2.0, 2.0]]))


class FakeMaker:
    """OpenRLHF's experience maker, as far as BRACE's goes through it."""

    def __init__(self, strategy):
        self.args = strategy.args

    def compute_advantages_and_returns(self, experiences):
        for experience, reward in zip(experiences, made()[1], strict=True):
            found = self.get_advantages_and_returns(experience.values, reward, experience.action_mask, 1.0, 1.0)
            experience.advantages, experience.returns = found
            experience.kl = None
        return experiences

    def get_advantages_and_returns(self, values, rewards, action_mask, gamma, lambd):
        return torch.full_like(values, -9.0), torch.full_like(values, -9.0)


def strategy(**advantage):
    section = SimpleNamespace(
        **{"estimator": "gae", "gamma": 1.0, "lambd": 1.0, "is_correction_level": "token"} | advantage
    )
    return SimpleNamespace(
        args=SimpleNamespace(algo=SimpleNamespace(advantage=section), train=SimpleNamespace(async_enable=True))
    )


@pytest.fixture
def openrlhf(monkeypatch):
    """Fakes of the modules that the maker imports; yields its class, what it warns of, and OpenRLHF's trainers."""
    warned = []
    trainers = ModuleType(hook.TRAINER_MODULE)
    trainers.RemoteExperienceMaker = FakeMaker
    fakes = {
        "openrlhf.trainer.ppo_utils.experience_maker": {"RemoteExperienceMaker": FakeMaker},
        "openrlhf.utils.logging_utils": {"init_logger": lambda name: SimpleNamespace(warning=warned.append)},
    }
    for name in ("openrlhf", "openrlhf.trainer", "openrlhf.trainer.ppo_utils", "openrlhf.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, contents in fakes.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, hook.TRAINER_MODULE, trainers)
    monkeypatch.delitem(sys.modules, MAKER, raising=False)
    maker = importlib.import_module(MAKER)
    yield SimpleNamespace(maker=maker.BraceExperienceMaker, warned=warned, trainers=trainers)
    monkeypatch.delitem(sys.modules, MAKER)


def test_the_maker_changes_targets_advantages_and_log_only(openrlhf, monkeypatch):
    monkeypatch.setenv(VARIABLE, json.dumps({"window": 3}))
    experiences, rewards = made()
    found = openrlhf.maker(strategy()).compute_advantages_and_returns(experiences)
    for experience, reward in zip(found, rewards, strict=True):
        torch.testing.assert_close(experience.returns, expected(experience, reward, 3).targets)
        assert experience.info["brace/window/mean"].tolist() == [3.0] * len(reward)
        assert experience.kl is None
    assert openrlhf.warned == []


def test_asynchronous_rollouts_with_todays_log_probs_are_warned_of(openrlhf):
    experiences, _ = made()
    for experience in experiences:
        experience.rollout_log_probs = experience.action_log_probs.clone()
    openrlhf.maker(strategy()).compute_advantages_and_returns(experiences)
    assert "exactly the log-prob of today's policy" in openrlhf.warned[0]


def test_the_maker_refuses_settings_that_keep_brace_from_working(openrlhf, monkeypatch):
    monkeypatch.setenv(VARIABLE, json.dumps({"lam": 0.9}))
    with pytest.raises(
        ConfigError, match=r"estimator = rloo.*brace\.lam: not an option here; set --algo\.advantage\.lambd"
    ):
        openrlhf.maker(strategy(estimator="rloo"))


def test_the_hook_puts_ours_where_openrlhfs_trainers_look(openrlhf):
    hook.install()
    assert issubclass(openrlhf.trainers.RemoteExperienceMaker, FakeMaker)
    assert openrlhf.trainers.RemoteExperienceMaker is openrlhf.maker


def test_the_hook_is_found_by_the_name_that_ray_is_given():
    module, _, name = hook.HOOK.rpartition(".")
    assert getattr(importlib.import_module(module), name) is hook.install


def test_arguments_are_split_and_read():
    given = ["--brace.window", "50", "--actor.num_nodes", "2", "--brace.value_target=vtrace", "--train.async_enable"]
    node, rest = split_arguments([*given, "--reward.clip_range", "-5", "5", "--data.prompt_dataset", "a/b"])
    assert node == {"window": 50, "value_target": "vtrace"}
    assert settings_from_arguments(rest) == {
        "actor": {"num_nodes": 2},
        "train": {"async_enable": True},
        "reward": {"clip_range": [-5, 5]},
        "data": {"prompt_dataset": "a/b"},
    }
    with pytest.raises(ConfigError, match=r"--brace\.window: has no value"):
        split_arguments(["--brace.window", "--train.async_enable"])


@pytest.fixture
def launched(monkeypatch):
    """Call the launcher without OpenRLHF and Ray; returns how Ray was started, and the arguments that were left."""

    def call(*arguments, version="0.11.2"):
        started, ran = [], []
        ray = ModuleType("ray")
        ray.init = lambda **given: started.append(given)
        monkeypatch.setitem(sys.modules, "ray", ray)
        monkeypatch.setattr(launch, "version", lambda name: version)
        monkeypatch.setattr(launch, "install", lambda: ran.append("hook"))
        monkeypatch.setattr(launch.runpy, "run_module", lambda name, **_: ran.append((name, sys.argv[1:])))
        monkeypatch.setattr(sys, "argv", ["program"])
        monkeypatch.setenv(VARIABLE, "")
        launch.launch(arguments)
        return started, ran

    return call


KEPT = ("--algo.advantage.is_correction_level", "token")


def test_every_worker_gets_hook_and_options_before_openrlhf_runs(launched, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    (started,), ran = launched("--brace.window", "7", *KEPT, "--critic.num_nodes", "1")
    environment = started["runtime_env"]
    assert environment["worker_process_setup_hook"] == hook.HOOK
    assert json.loads(environment["env_vars"][VARIABLE]) == {"window": 7}
    assert environment["env_vars"]["NCCL_DEBUG"] == "INFO"
    assert ran == ["hook", ("openrlhf.cli.train_ppo_ray", [*KEPT, "--critic.num_nodes", "1"])]


def test_the_launcher_refuses_before_ray_is_started(launched):
    with pytest.raises(ConfigError, match="log-probs that tokens were sampled with are not asked for"):
        launched("--brace.window", "7")
    with pytest.raises(ConfigError, match=r"brace\.windows: no such option"):
        launched("--brace.windows", "7", *KEPT)


@pytest.mark.parametrize("version", ["0.10.4", "0.12.0"])
def test_other_versions_are_refused_with_the_range(launched, version):
    with pytest.raises(UnsupportedVersionError, match=f"OpenRLHF {version}: brace-rl supports at least 0.11 and below"):
        launched(*KEPT, version=version)


def changed(key, value):
    settings = {"algo": {"advantage": {"estimator": "gae", "is_correction_level": "token"}}, "rollout": {"top_p": 1.0}}
    *parents, last = key.split(".")
    node = settings
    for parent in parents:
        node = node[parent]
    node[last] = value
    return settings


@pytest.mark.parametrize(
    ("key", "value", "severity", "mend"),
    [
        ("algo.advantage.estimator", "rloo", "error", "estimator gae"),
        ("algo.advantage.is_correction_level", "off", "error", "is_correction_level token"),
        ("algo.advantage.lambd", 0.95, "warning", "set algo.advantage.lambd=1.0"),
        ("algo.advantage.gamma", "much", "error", "docs/openrlhf.md"),
        ("rollout.top_p", 0.9, "warning", "rollout.top_p 1.0"),
    ],
)
def test_each_trap_is_found_alone_and_with_its_mend(key, value, severity, mend):
    (finding,) = config_findings(changed(key, value), {})
    assert finding.severity == severity
    assert mend in finding.mend
    assert key.rsplit(".", 1)[-1] in finding.what


def test_the_older_switch_keeps_log_probs_too():
    assert config_findings({"algo": {"advantage": {"is_correction_enable": True}}}, {}) == []


def test_log_probs_are_asked_for_only_where_ratios_are():
    assert config_findings({}, {"value_target": "gae"}) == []
    assert [finding.severity for finding in config_findings({}, {})] == ["error"]


def test_options_leave_discount_lambda_and_whitening_to_openrlhf():
    found = options.options_from_settings({"window": 5}, {"algo": {"advantage": {"gamma": 0.9, "lambd": 0.8}}})
    assert (found.window, found.gamma, found.lam, found.whiten) == (5, 0.9, 0.8, False)
