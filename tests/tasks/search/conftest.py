"""Lets the tests in this folder import ``loopback``, and talk to it whatever proxy is set."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("brace_rl.tasks.search.http._FIRST_PAUSE_S", 0.01)
