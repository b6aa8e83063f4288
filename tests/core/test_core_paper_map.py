"""docs/paper_map.md and docs/theory.md name functions and tests that exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import brace_rl.core as core

ROOT = Path(__file__).parents[2]


def test_every_test_named_in_the_paper_map_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs/paper_map.md").read_text())
    assert len(named) > 20
    for file, name in named:
        assert f"def {name}(" in (ROOT / file).read_text(), f"{file}::{name}"


def test_every_test_named_in_the_theory_exists():
    named = re.findall(r"`(test_\w+)`", (ROOT / "docs/theory.md").read_text())
    assert len(named) > 8
    sources = "".join(path.read_text() for path in (ROOT / "tests/core").glob("test_*.py"))
    for name in named:
        assert f"def {name}(" in sources, name


def test_every_function_named_in_the_paper_map_exists_and_none_is_left_out():
    rows = [line.split("|") for line in (ROOT / "docs/paper_map.md").read_text().splitlines() if line.startswith("| ")]
    named = {name for row in rows for name in re.findall(r"`([a-z_.]+)`", row[2])}
    for name in named - {"segment_ids", "bootstrap_values", "window"}:
        module, _, function = name.rpartition(".")
        assert hasattr(importlib.import_module(module) if module else core, function), name
    assert {name for name in core.__all__ if name[0].islower()} <= named
