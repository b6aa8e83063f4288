"""Configurations and settings that a doctor is given: read before anything is imported, or refused in one line."""

import pytest

from brace_rl.doctor import areal, openrlhf, skyrl, torchrl
from brace_rl.doctor.settings import LARGEST_BYTES, read_settings
from brace_rl.errors import BraceError

ANSWER = {"brace": "0.1.0", "error": None, "seam": [], "settings": None, "refused": None}
INSTALLED = {
    areal: {"areal": "1.0.4"},
    openrlhf: {"openrlhf": "0.11.2"},
    skyrl: {"skyrl": "0.3.0"},
    torchrl: {"torchrl": "0.14.1", "tensordict": "0.14.3"},
}
every_framework = pytest.mark.parametrize("framework", INSTALLED, ids=lambda module: module.__name__.rpartition(".")[2])


@pytest.fixture
def doctor(call_doctor):
    return lambda framework, *given, **answer: call_doctor(
        framework, {**ANSWER, **INSTALLED[framework]}, *given, **answer
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 3000, "nested too deeply"),
        (b"a: " * 10, "cannot be read as settings"),
        (b"\xff\xfe\x00", "cannot be read as settings"),
        (b"a: 1\n" * LARGEST_BYTES, "bytes, more than any configuration"),
        (b"- 1", "holds list, must be a mapping"),
        (b"a: !!python/object:os.system {}", "cannot be read as settings"),
    ],
    ids=["deep", "broken", "binary", "huge", "list", "code"],
)
def test_a_file_that_is_no_configuration_is_one_line(tmp_path, content, message):
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    with pytest.raises(BraceError, match=message) as caught:
        read_settings(path)
    assert "\n" not in str(caught.value)


def test_a_folder_and_a_missing_file_are_told_apart(tmp_path):
    with pytest.raises(BraceError, match="is no file; name one"):
        read_settings(tmp_path)
    with pytest.raises(BraceError, match="no such file"):
        read_settings(tmp_path / "none.yaml")


def test_a_bad_file_is_refused_before_the_framework_is_asked(monkeypatch, doctor, tmp_path):
    error, output = doctor(areal, str(tmp_path))
    assert isinstance(error, BraceError)
    assert output == ""


@pytest.mark.parametrize(
    ("framework", "setting", "what"),
    [
        (areal, "actor.brace.rho_clip=abc", "actor.brace.rho_clip = 'abc': must be a number"),
        (areal, "actor.brace=[5]", "actor.brace = [5]: must hold options, such as actor.brace.window=100"),
        (areal, "actor=[1]", "actor = [1]: must be a section of settings"),
        (openrlhf, "--brace.rho_clip=abc", "brace.rho_clip = 'abc': must be a number"),
        (openrlhf, "--brace=[5]", "brace = [5]: must hold options"),
        (skyrl, "trainer.algorithm.brace.rho_clip=abc", "trainer.algorithm.brace.rho_clip = 'abc': must be a number"),
        (skyrl, "trainer.algorithm.brace=[5]", "trainer.algorithm.brace = [5]: must hold options"),
        (skyrl, "trainer.algorithm=[5]", "trainer.algorithm = [5]: must be a section of settings"),
        (torchrl, "brace.rho_clip=abc", "brace.rho_clip = 'abc': must be a number"),
        (torchrl, "brace.gamma=null", "brace.gamma = None: must be a number"),
        (torchrl, "brace.whiten=maybe", "brace.whiten = 'maybe': must be true or false"),
    ],
)
def test_an_option_of_the_wrong_kind_is_a_finding(doctor, framework, setting, what):
    code, output = doctor(framework, setting)
    assert code == 1
    assert f"error: {what}" in output


def test_a_setting_may_be_given_as_two_words_and_a_flag_alone_is_true(doctor):
    level = "--algo.advantage.is_correction_level"
    code, output = doctor(openrlhf, level, "token", "--brace.window", "100", "--brace.whiten_all")
    assert code == 1
    assert "brace.whiten_all: no such option" in output
    assert doctor(openrlhf, level, "token", "--brace.window", "100")[0] == 0


def test_a_value_without_a_key_is_named(doctor):
    error, _ = doctor(torchrl, "=5")
    assert "=5: a value without a key" in str(error)


@every_framework
def test_a_package_that_is_not_installed_but_found_is_a_warning(doctor, framework):
    code, output = doctor(framework, brace=None)
    assert code == 1
    assert "warning: brace-rl: found by its path, and not installed" in output
    assert "mend: pip install --no-deps brace-rl" in output
