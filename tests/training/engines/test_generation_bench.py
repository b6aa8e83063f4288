"""The comparison runs all three methods on the same requests and counts the same tokens."""

from __future__ import annotations

import pytest

from brace_rl.bench.generation import compare_generation


def small(**more):
    return compare_generation(requests=6, slots=3, mean_new_tokens=4, max_new_tokens=12, hidden_size=16, **more)


def test_every_row_counts_the_same_tokens_and_its_figures_agree():
    rows = {row["method"]: row for row in small()}
    assert list(rows)[:3] == ["embedded engine", "generate()", "transformers manager"]
    ran = [row for row in rows.values() if row["tokens"] is not None]
    assert {"embedded engine", "generate()"} <= {row["method"] for row in ran}
    assert len({row["tokens"] for row in ran}) == 1
    for row in ran:
        assert row["tokens_per_second"] * row["seconds"] == pytest.approx(row["tokens"])
    assert rows["generate()"]["relative"] == 1.0
    if rows["transformers manager"]["tokens"] is None:
        assert rows["transformers manager"]["note"].startswith("cannot run: ")


def test_a_method_that_cannot_run_is_a_row_with_the_reason():
    manager = small(manager_timeout_s=-1.0)[2]
    assert manager["tokens"] is None
    assert manager["note"].startswith("cannot run: ")
