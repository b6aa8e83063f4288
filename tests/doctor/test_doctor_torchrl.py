"""``brace doctor torchrl``: what it says, and its exit codes. TorchRL itself is not needed: the probe is a fake."""

from functools import partial

import pytest

from brace_rl.doctor import torchrl, torchrl_probe
from brace_rl.integrations.versions import installed_version

HEALTHY = {"torchrl": "0.14.1", "tensordict": "0.14.3", "brace": "0.1.0", "error": None, "seam": []}


@pytest.fixture
def doctor(call_doctor):
    return partial(call_doctor, torchrl, HEALTHY)


def test_a_healthy_installation_is_said_to_be_one(doctor):
    code, output = doctor()
    assert code == 0
    assert "torchrl: 0.14.1\ntensordict: 0.14.3\n" in output
    assert output.endswith("estimator: registered as brace\nnothing to mend\n")


def test_good_arguments_are_found_good(doctor, tmp_path):
    path = tmp_path / "arguments.yaml"
    path.write_text("brace: {window: 16, rho_clip: 1.0}\n")
    code, output = doctor(str(path), "brace.gamma=0.99")
    assert (code, output.splitlines()[-2:]) == (0, ["configuration: good", "nothing to mend"])


@pytest.mark.parametrize(
    ("arguments", "what", "mend"),
    [
        (["brace.rho_thresh=1.0"], "error: brace.rho_thresh: no such option; it is called rho_clip here", "docs/"),
        (["brace.differentiable=true"], "error: brace.differentiable = True", "docs/torchrl.md"),
        (["brace.lam=0.95", "brace.window=100"], "warning: brace.lam = 0.95", "set brace.lam=1.0"),
        (["window=16"], "warning: brace: not there", "add it: brace.window=16"),
    ],
)
def test_every_finding_comes_with_its_mend(doctor, arguments, what, mend):
    code, output = doctor(*arguments)
    assert code == 1
    assert what in output
    assert mend in output.split("mend: ")[1]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"torchrl": None}, "TorchRL: not installed"),
        ({"torchrl": "0.15.0"}, "torchrl 0.15.0: brace-rl supports at least 0.14 and below 0.15"),
        ({"error": "ImportError: cannot import name 'TensorDict'"}, "TorchRL cannot be imported: ImportError"),
        ({"seam": ["ValueEstimatorBase: takes no shifted"]}, "error: ValueEstimatorBase: takes no shifted"),
    ],
)
def test_what_is_wrong_with_an_installation_is_said(doctor, answer, words):
    code, output = doctor(**answer)
    assert code == 1
    assert words in output
    assert "estimator: registered" not in output


def test_the_probe_says_what_is_installed():
    found = torchrl_probe.probe()
    assert found["torchrl"] == installed_version("torchrl")
    assert found["seam"] == []
    assert found["error"] is None
