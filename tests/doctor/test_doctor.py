"""``brace doctor verl``: what it says, and its exit codes. verl itself is not needed: the probe is a fake."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest

from brace_rl.doctor import verl
from brace_rl.doctor.settings import with_overrides
from brace_rl.errors import BraceError
from brace_rl.integrations.verl.checks import TRAINERS

HEALTHY = {
    "verl": "0.9.1",
    "brace": "0.1.0",
    "plugins": {"brace": "brace_rl.integrations.verl.plugin"},
    "registered": sorted(TRAINERS),
    "error": None,
}
GOOD = ["trainer.v1.trainer_mode=brace_sync", "actor_rollout_ref.rollout.calculate_log_probs=True"]


@pytest.fixture
def doctor(call_doctor):
    def call(*arguments, workers=False, **answer):
        return call_doctor(verl, HEALTHY, *([] if workers else ["--no-workers"]), *arguments, **answer)

    return call


def test_a_healthy_installation_is_said_to_be_one(doctor):
    code, output = doctor()
    assert code == 0
    assert "verl: 0.9.1" in output
    assert "driver: brace_colocate_async, brace_separate_async, brace_sync registered" in output
    assert output.endswith("nothing to mend\n")


def test_a_good_configuration_is_found_good(doctor, settings_file):
    code, output = doctor(settings_file({}), *GOOD)
    assert (code, output.splitlines()[-2:]) == (0, ["configuration: good", "nothing to mend"])


def test_every_finding_comes_with_its_mend(doctor, settings_file):
    bypass = "algorithm.rollout_correction.bypass_mode=True"
    code, output = doctor(settings_file({"critic": {"enable": False}}), *GOOD, bypass)
    assert code == 1
    assert "error: critic.enable = False" in output
    assert "  mend: set critic.enable=True" in output
    assert "  mend: set algorithm.rollout_correction.bypass_mode=False" in output
    assert output.endswith("2 things to mend\n")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"verl": None, "registered": []}, "verl: not installed"),
        ({"verl": "0.10.0", "registered": []}, "brace-rl supports 0.9.x"),
        ({"registered": []}, "verl has not loaded the plug-in"),
        ({"registered": [], "plugins": {}}, "pip install brace-rl in this environment"),
        ({"registered": [], "error": "ModuleNotFoundError: No module named 'transfer_queue'"}, "pip install Transfer"),
    ],
)
def test_what_is_wrong_with_an_installation_is_said(doctor, answer, words):
    code, output = doctor(**answer)
    assert code == 1
    assert words in output


def test_a_plug_in_kept_out_by_the_environment_is_seen(doctor, monkeypatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    code, output = doctor(registered=[])
    assert code == 1
    assert "VERL_USE_EXTERNAL_PLUGINS=none keeps it out" in output


def test_an_old_verl_is_examined_for_its_patches(doctor, settings_file):
    patched = ["verl.trainer.ppo.ray_trainer", "verl.experimental.separation.ray_trainer"]
    code, output = doctor(settings_file({}), *GOOD, "+algorithm.brace.window=5", verl="0.8.0", registered=patched)
    assert code == 0, output
    assert "ray_trainer patched" in output


class RayError(Exception):
    pass


@pytest.fixture
def cluster(monkeypatch):
    """A fake Ray; returns a function that sets what each node answers, or raises, and what starting it raises."""
    calls = []

    def install(*answers, start=None):
        def init(**options):
            calls.append(options)
            if start is not None:
                raise start

        def get(answer, timeout):
            if isinstance(answer, Exception):
                raise answer
            return answer

        waiting = iter(answers)
        task = SimpleNamespace(remote=lambda: next(waiting))
        ray = ModuleType("ray")
        ray.__spec__ = ModuleSpec("ray", None)
        ray.init, ray.get, ray.shutdown = init, get, lambda: calls.append("shutdown")
        ray.nodes = lambda: [
            {"Alive": True, "NodeID": str(i), "NodeManagerAddress": f"10.0.0.{i}"} for i in range(len(answers))
        ]
        ray.remote = lambda **_: lambda probe: SimpleNamespace(options=lambda **_: task)
        ray.exceptions = SimpleNamespace(RayError=RayError)
        strategies = ModuleType("ray.util.scheduling_strategies")
        strategies.NodeAffinitySchedulingStrategy = lambda node, soft: node
        for name, module in (("ray", ray), ("ray.util", ModuleType("ray.util")), (strategies.__name__, strategies)):
            monkeypatch.setitem(sys.modules, name, module)
        return calls

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return install


def test_every_node_is_asked_and_a_ray_started_here_stays_on_this_machine(doctor, cluster):
    calls = cluster(HEALTHY, HEALTHY)
    code, output = doctor(workers=True)
    assert code == 0
    assert "workers: registered on 2 of 2 nodes" in output
    assert calls[0]["_node_ip_address"] == "127.0.0.1"
    assert calls[-1] == "shutdown"


def test_a_node_without_the_plug_in_is_named(doctor, cluster):
    cluster(HEALTHY, {**HEALTHY, "registered": []}, RayError("No module named 'brace_rl'"))
    code, output = doctor(workers=True)
    assert code == 1
    assert "workers: registered on 1 of 3 nodes" in output
    assert "error: worker on 10.0.0.1: nothing registered" in output
    assert "error: worker on 10.0.0.2: No module named 'brace_rl'" in output


def test_a_ray_that_does_not_start_is_a_finding(doctor, cluster):
    cluster(start=Exception("The current node timed out"))
    code, output = doctor(workers=True)
    assert code == 1
    assert "error: workers: Ray cannot be started: The current node timed out" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.yaml"], "missing.yaml: no such file"),
        (["one.yaml", "two.yaml"], "two.yaml: a second configuration file"),
    ],
)
def test_input_that_cannot_be_used_is_named(doctor, arguments, message):
    error, _ = doctor(*arguments)
    assert isinstance(error, BraceError)
    assert message in str(error)


def test_a_file_that_holds_no_settings_is_named(doctor, settings_file):
    error, _ = doctor(settings_file([1, 2]))
    assert isinstance(error, BraceError)
    assert "holds list, must be a mapping" in str(error)


def test_overrides_are_laid_over_settings_as_values():
    settings = with_overrides({"a": {"b": 1}}, ["a.c=True", "+x.y=[1, 2]", "++a.b=null", "a.d=0.9_1.1"])
    assert settings == {"a": {"b": None, "c": True, "d": "0.9_1.1"}, "x": {"y": [1, 2]}}
    with pytest.raises(BraceError, match="b holds a value"):
        with_overrides({"a": {"b": 1}}, ["a.b.c=2"])
