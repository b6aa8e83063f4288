"""The doctors in front of installations that are not there: what a probe answers is given by the test."""

import json

import pytest
from click.testing import CliRunner

from brace_rl.cli import brace


@pytest.fixture
def call_doctor(monkeypatch):
    """Call a doctor; returns its exit code, or what it raised, and its output."""

    def call(module, healthy, *arguments, **answer):
        monkeypatch.setattr(module, "_ask_process", lambda *_: {**healthy, **answer})
        done = CliRunner().invoke(brace, ["doctor", module.__name__.rpartition(".")[2], *arguments])
        raised = done.exception is not None and not isinstance(done.exception, SystemExit)
        return (done.exception if raised else done.exit_code), done.output

    return call


@pytest.fixture
def settings_file(tmp_path):
    def write(settings):
        path = tmp_path / "config.yaml"
        path.write_text(json.dumps(settings))
        return str(path)

    return write
