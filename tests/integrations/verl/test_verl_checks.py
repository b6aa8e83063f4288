"""Every trap of a verl configuration is found, and a good configuration has none."""

import pytest

from brace_rl.integrations.verl.checks import config_findings

GOOD = {
    "trainer": {"use_v1": True, "v1": {"trainer_mode": "brace_sync", "sync": {}}},
    "actor_rollout_ref": {"rollout": {"calculate_log_probs": True, "top_p": 1.0, "top_k": -1}},
    "algorithm": {"adv_estimator": "gae", "gamma": 1.0, "lam": 1.0, "rollout_correction": {"bypass_mode": False}},
    "critic": {"enable": None},
}


def changed(key, value):
    """The good configuration with one dotted key set."""
    *parents, last = key.split(".")
    config = {name: dict(section) for name, section in GOOD.items()}
    node = config
    for parent in parents:
        node[parent] = dict(node.get(parent, {}))
        node = node[parent]
    node[last] = value
    return config


def test_a_good_configuration_has_no_finding():
    assert config_findings(GOOD) == []


@pytest.mark.parametrize(
    ("key", "value", "severity", "mend"),
    [
        ("actor_rollout_ref.rollout.calculate_log_probs", False, "error", "calculate_log_probs=True"),
        ("algorithm.rollout_correction.bypass_mode", True, "error", "bypass_mode=False"),
        ("critic.enable", False, "error", "set critic.enable=True"),
        ("algorithm.adv_estimator", "grpo", "error", "set algorithm.adv_estimator=gae"),
        ("algorithm.use_pf_ppo", True, "error", "set algorithm.use_pf_ppo=False"),
        ("trainer.use_v1", False, "error", "set trainer.use_v1=True"),
        ("trainer.v1.trainer_mode", "separate_async", "warning", "trainer_mode=brace_separate_async"),
        ("trainer.v1.trainer_mode", "brace_asynk", "error", "one of brace_sync, brace_colocate_async"),
        ("algorithm.brace", [5], "error", "docs/verl.md"),
        ("trainer.v1.brace_separate_async", {"parameter_sync_step": 2}, "error", "move them to trainer.v1.separate"),
        ("actor_rollout_ref.rollout.top_p", 0.9, "warning", "top_p=1.0"),
        ("actor_rollout_ref.rollout.top_k", 50, "warning", "top_k=-1"),
        ("algorithm.lam", 0.95, "warning", "set algorithm.lam=1.0"),
        ("algorithm.brace", {"rho": 2}, "error", "docs/verl.md"),
    ],
)
def test_each_trap_is_found_alone_and_with_its_mend(key, value, severity, mend):
    (finding,) = config_findings(changed(key, value))
    assert finding.severity == severity
    assert mend in finding.mend
    assert key.rsplit(".", 1)[-1] in finding.what


@pytest.mark.parametrize(
    ("route", "wanted"),
    [
        ("trainers", ["trainer.v1.trainer_mode = sync"]),
        ("patch", ["algorithm.brace", "actor_rollout_ref.rollout.calculate_log_probs = False"]),
    ],
)
def test_an_empty_configuration_counts_as_verls_defaults(route, wanted):
    assert [finding.what.split(":")[0] for finding in config_findings({}, route=route)] == wanted


def test_log_probs_are_asked_for_only_where_ratios_are():
    config = changed("actor_rollout_ref.rollout.calculate_log_probs", False)
    config["algorithm"] = {**config["algorithm"], "brace": {"value_target": "monte_carlo"}}
    assert config_findings(config) == []


def test_an_absent_limit_of_the_distribution_is_no_limit():
    for neutral in (-1, 0):
        assert config_findings(changed("actor_rollout_ref.rollout.top_k", neutral)) == []


def test_the_patched_versions_need_the_node_and_no_trainer():
    config = changed("trainer.use_v1", False)
    (finding,) = config_findings(config, route="patch")
    assert finding.what.startswith("algorithm.brace: not there")
    config["algorithm"] = {**config["algorithm"], "brace": {"window": 10}}
    assert config_findings(config, route="patch") == []
