"""``brace doctor skyrl``: what it says, and its exit codes. SkyRL itself is not needed: the probe is a fake."""

from functools import partial

import pytest

from brace_rl.doctor import seam, skyrl
from brace_rl.doctor.skyrl_probe import probe
from brace_rl.errors import BraceError

HEALTHY = {"skyrl": "0.3.0", "brace": "0.1.0", "error": None, "seam": [], "settings": None, "refused": None}
GOOD = ["trainer.critic.model.path=model", "trainer.algorithm.advantage_estimator=gae"]


@pytest.fixture
def doctor(call_doctor):
    return partial(call_doctor, skyrl, HEALTHY)


def test_a_healthy_installation_is_said_to_be_one(doctor):
    code, output = doctor()
    assert code == 0
    assert output.splitlines() == [
        "skyrl: 0.3.0",
        "brace-rl: 0.1.0",
        "trainers: what BRACE overrides is there",
        "nothing to mend",
    ]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"skyrl": None}, "SkyRL: not installed"),
        ({"skyrl": "0.2.0"}, "SkyRL 0.2.0: brace-rl supports at least 0.3 and below 0.4"),
        ({"error": "ModuleNotFoundError: No module named 'ray'"}, "cannot be imported: ModuleNotFoundError"),
        ({"seam": ["trainer: takes (self, batch), expected (self, data)"]}, "error: trainer: takes (self, batch)"),
    ],
)
def test_what_is_wrong_with_an_installation_is_said_with_its_mend(doctor, answer, words):
    code, output = doctor(**answer)
    assert code == 1
    assert words in output
    assert "mend: pip install 'skyrl[fsdp]==0.3.0'" in output
    assert "what BRACE overrides is there" not in output


def test_a_good_configuration_is_found_good(doctor, settings_file):
    code, output = doctor(settings_file({"trainer": {"seed": 1}}), *GOOD)
    assert (code, output.splitlines()[-2:]) == (0, ["configuration: good", "nothing to mend"])


@pytest.mark.parametrize(
    ("setting", "words", "mend"),
    [
        ("trainer.critic.model.path=null", "error: trainer.critic.model.path = None", "set trainer.critic.model.path"),
        (
            "generator.sampling_params.logprobs=null",
            "error: generator.sampling_params.logprobs = None",
            "set generator.sampling_params.logprobs=1",
        ),
        (
            "generator.step_wise_trajectories=true",
            "error: generator.step_wise_trajectories = True",
            "set generator.step_wise_trajectories=False",
        ),
        (
            "trainer.algorithm.zero_variance_filter=true",
            "warning: trainer.algorithm.zero_variance_filter = True",
            "set trainer.algorithm.zero_variance_filter=False",
        ),
        (
            "generator.apply_overlong_filtering=true",
            "warning: generator.apply_overlong_filtering = True",
            "set generator.apply_overlong_filtering=False",
        ),
        ("trainer.algorithm.brace.windw=3", "error: trainer.algorithm.brace.windw: no such option", "docs/skyrl.md"),
    ],
)
def test_every_trap_of_a_configuration_comes_with_its_mend(doctor, settings_file, setting, words, mend):
    code, output = doctor(settings_file({}), *GOOD, setting)
    assert code == 1
    assert words in output
    assert f"  mend: {mend}" in output or mend in output
    assert output.endswith("1 thing to mend\n")


def test_rejection_inside_the_policy_loss_is_no_trap(doctor, settings_file):
    correction = "trainer.algorithm.off_policy_correction"
    code, _ = doctor(settings_file({}), *GOOD, f"{correction}.tis_ratio_type=token", f"{correction}.geo_mask_high=1.1")
    assert code == 0


def test_settings_alone_are_those_that_skyrl_made_of_them(doctor):
    composed = {"trainer": {"critic": {"model": {"path": None}}, "algorithm": {"advantage_estimator": "gae"}}}
    code, output = doctor(*GOOD, settings=composed)
    assert code == 1
    assert "error: trainer.critic.model.path = None" in output


def test_settings_that_skyrl_would_refuse_are_named(doctor):
    error, _ = doctor(*GOOD, refused="ValueError: Invalid fields {'windw'} for AlgorithmConfig.")
    assert isinstance(error, BraceError)
    assert "Invalid fields {'windw'}" in str(error)


def test_settings_alone_are_looked_at_without_skyrl_too(doctor):
    code, output = doctor(*GOOD, "generator.sampling_params.top_k=20", skyrl=None)
    assert code == 1
    assert "error: SkyRL: not installed" in output
    assert "warning: generator.sampling_params.top_k = 20" in output
    assert output.endswith("2 things to mend\n")


def test_without_skyrl_the_probe_says_so(monkeypatch):
    monkeypatch.setattr(seam, "installed_version", lambda distribution: None)
    assert probe(["trainer.seed=1"]) == {**HEALTHY, "skyrl": None, "brace": None}
