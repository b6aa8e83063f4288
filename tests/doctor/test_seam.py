"""What a probe finds other than expected in a framework's functions; the framework is a made-up module."""

import sys
from types import ModuleType

import pytest

from brace_rl.doctor.seam import differences, found_here
from brace_rl.integrations.versions import UnsupportedVersionError

STEP = "some_framework:Trainer.step"


class Trainer:
    def step(self, batch, group=None, *rest, some=1, **more): ...

    def make(self, batch, parts): ...


@pytest.fixture(autouse=True)
def framework(monkeypatch):
    module = ModuleType("some_framework")
    module.Trainer = Trainer
    monkeypatch.setitem(sys.modules, "some_framework", module)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (("self", "batch"), []),
        (("self", "batch", "group"), []),
        (("self", "data"), [f"{STEP}: takes (self, batch), expected (self, data)"]),
        (("self",), [f"{STEP}: asks for batch too"]),
    ],
)
def test_a_changed_function_is_seen(wanted, found):
    assert differences({STEP: wanted}) == found


def test_a_function_that_is_gone_is_seen():
    assert differences({"some_framework:Trainer.leap": ()}) == ["some_framework:Trainer.leap: not there"]


def test_further_arguments_are_no_difference_where_they_are_handed_on():
    make = "some_framework:Trainer.make"
    assert differences({make: ("self", "batch")}) == [f"{make}: asks for parts too"]
    assert differences({make: ("self", "batch")}, may_ask_for_more=(make,)) == []


def refuse(version):
    raise UnsupportedVersionError(version)


def test_nothing_is_imported_of_a_version_that_is_not_supported():
    found = found_here("torch", check_version=refuse, look=lambda: pytest.fail("looked"))
    assert (found["error"], found["seam"]) == (None, [])


def test_a_framework_that_cannot_be_imported_is_told_in_one_line():
    def look():
        raise ImportError("no\n  such")

    found = found_here("torch", "no-such-package", check_version=str, look=look)
    assert (found["no-such-package"], found["error"], found["seam"]) == (None, "ImportError: no such", [])
