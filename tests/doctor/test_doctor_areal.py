"""``brace doctor areal``: what it says, and its exit codes. AReaL itself is not needed: the probe is a fake."""

from functools import partial

import pytest

from brace_rl.doctor import areal, areal_probe, seam

HEALTHY = {"areal": "1.0.4", "brace": "0.1.0", "error": None, "seam": []}

GOOD = """
actor: {backend: "fsdp:d1", use_decoupled_loss: true, kl_ctl: 0.0, temperature: "${gconfig.temperature}"}
gconfig: {temperature: 0.9}
critic: {path: "${actor.path}", backend: "${actor.backend}"}
"""


@pytest.fixture
def doctor(call_doctor):
    return partial(call_doctor, areal, HEALTHY)


@pytest.fixture
def good(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(GOOD)
    return str(path)


def test_a_healthy_installation_is_said_to_be_one(doctor):
    code, output = doctor()
    assert code == 0
    assert "areal: 1.0.4" in output
    assert output.endswith("nothing to mend\n")


def test_a_good_configuration_with_references_is_found_good(doctor, good):
    code, output = doctor(good)
    assert (code, output.splitlines()[-2:]) == (0, ["configuration: good", "nothing to mend"])


def test_settings_over_a_file_are_examined_with_their_mends(doctor, good):
    code, output = doctor(good, "actor.use_decoupled_loss=false", "actor.brace.window=-1")
    assert code == 1
    assert "error: actor.brace.window = -1" in output
    code, output = doctor(good, "actor.use_decoupled_loss=false", "gconfig.temperature=1.0")
    assert code == 1
    assert "  mend: set actor.use_decoupled_loss=true" in output
    assert output.endswith("1 thing to mend\n")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"areal": None}, "AReaL: not installed"),
        ({"areal": "1.2.0"}, "brace-rl supports 1.0 and 2.0"),
        ({"error": "ModuleNotFoundError: No module named 'ray'"}, "AReaL cannot be imported: ModuleNotFoundError"),
        ({"seam": ["areal.x:f: not there"]}, "areal.x:f: not there"),
    ],
)
def test_what_is_wrong_with_an_installation_is_said(doctor, answer, words):
    code, output = doctor(**answer)
    assert code == 1
    assert words in output


def test_a_process_without_areal_says_so(monkeypatch):
    monkeypatch.setattr(seam, "installed_version", lambda name: None)
    found = areal_probe.probe()
    assert (found["areal"], found["error"], found["seam"]) == (None, None, [])
