"""``brace doctor openrlhf``: what it says, and its exit codes. OpenRLHF is not needed: the probe is a fake."""

from functools import partial

import pytest

from brace_rl.doctor import openrlhf, openrlhf_probe, seam

HEALTHY = {"openrlhf": "0.11.2", "brace": "0.1.0", "error": None, "seam": []}
KEPT = "--algo.advantage.is_correction_level=token"


@pytest.fixture
def doctor(call_doctor):
    return partial(call_doctor, openrlhf, HEALTHY)


def test_a_healthy_installation_is_said_to_be_one(doctor):
    code, output = doctor()
    assert code == 0
    assert "openrlhf: 0.11.2\n" in output
    assert output.endswith("trainers: the hook reaches them\nnothing to mend\n")


@pytest.mark.parametrize("dashes", ["--", ""])
def test_good_settings_are_found_good(doctor, dashes):
    code, output = doctor(dashes + KEPT.lstrip("-"), f"{dashes}brace.window=100")
    assert (code, output.splitlines()[-2:]) == (0, ["settings: good", "nothing to mend"])


def test_every_finding_comes_with_its_mend(doctor):
    code, output = doctor("--brace.window=100", "--algo.advantage.lambd=0.95")
    assert code == 1
    assert "error: algo.advantage.is_correction_level = off" in output
    assert "  mend: set --algo.advantage.is_correction_level token" in output
    assert "warning: algo.advantage.lambd = 0.95 with brace.window = 100" in output
    assert output.endswith("2 things to mend\n")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"openrlhf": None}, "OpenRLHF: not installed"),
        ({"openrlhf": "0.9.0"}, "brace-rl supports at least 0.11 and below 0.12"),
        ({"error": "ModuleNotFoundError: No module named 'deepspeed'"}, "cannot be imported: ModuleNotFoundError"),
        ({"seam": ["x: the hook has not reached it"]}, "x: the hook has not reached it"),
    ],
)
def test_what_is_wrong_with_an_installation_is_said(doctor, answer, words):
    code, output = doctor(**answer)
    assert code == 1
    assert words in output


def test_a_process_without_openrlhf_says_so(monkeypatch):
    monkeypatch.setattr(seam, "installed_version", lambda name: None)
    found = openrlhf_probe.probe()
    assert (found["openrlhf"], found["error"], found["seam"]) == (None, None, [])
