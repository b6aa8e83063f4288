"""Which problem an issue number means, and which weights a lagging batch is sampled from."""

import subprocess
import sys

import pytest
import torch
from fakes import fake_problem
from hypothesis import given
from hypothesis import strategies as st

from brace_rl.training.data import ProblemStream, SnapshotRing


def stream(seed=0, size=7):
    return ProblemStream([fake_problem(i) for i in range(size)], seed)


def ids(problems, indices):
    return [problems[i].id for i in indices]


@given(size=st.integers(1, 30), seed=st.integers(0, 2**62), epoch=st.integers(0, 1000))
def test_every_epoch_visits_each_problem_once(size, seed, epoch):
    visited = ids(stream(seed, size), range(epoch * size, (epoch + 1) * size))
    assert sorted(visited) == sorted(f"p{i}" for i in range(size))


def test_epochs_differ_in_order():
    problems = stream()
    orders = {tuple(ids(problems, range(7 * epoch, 7 * epoch + 7))) for epoch in range(5)}
    assert len(orders) > 1


@given(indices=st.lists(st.integers(0, 60), max_size=20))
def test_a_problem_depends_on_its_number_and_not_on_what_was_asked_before(indices):
    in_order = ids(stream(), range(61))
    assert ids(stream(), indices) == [in_order[i] for i in indices]


def test_a_problem_depends_on_the_seed():
    assert ids(stream(seed=1), range(14)) == ids(stream(seed=1), range(14))
    assert ids(stream(seed=1), range(14)) != ids(stream(seed=2), range(14))


def test_the_order_is_the_same_in_every_process():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from test_data_order import *; print(*ids(stream(), range(14)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, __file__.rpartition("/")[0]],
        env={"PYTHONHASHSEED": "17", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.split() == ids(stream(), range(14))


def weights(value):
    return {"a": torch.full((2,), float(value)), "b.c": torch.full((), float(value))}


def filled_ring(max_staleness, versions):
    ring = SnapshotRing(max_staleness)
    for version in range(versions):
        ring.store(weights(version), version)
    return ring


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_a_batch_is_sampled_from_the_weights_exactly_s_versions_old(max_staleness):
    ring = SnapshotRing(max_staleness)
    for version in range(6):
        ring.store(weights(version), version)
        lagged, source = ring.lagged(version)
        assert source == max(0, version - max_staleness)
        assert (lagged["a"].tolist(), lagged["b.c"].item()) == ([source, source], source)


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_the_ring_holds_no_version_that_nobody_will_ask_for(max_staleness):
    assert sorted(filled_ring(max_staleness, 6).snapshots) == list(range(5 - max_staleness, 6))


def test_a_snapshot_does_not_change_with_the_weights_it_was_taken_from():
    live, ring = weights(1), SnapshotRing(0)
    ring.store(live, 0)
    live["a"].fill_(9.0)
    assert ring.lagged(0)[0]["a"].tolist() == [1.0, 1.0]


def test_a_snapshot_carries_no_gradient():
    ring = SnapshotRing(0)
    ring.store({"a": torch.ones(2, requires_grad=True) * 2}, 0)
    assert not ring.lagged(0)[0]["a"].requires_grad


def test_the_ring_survives_a_checkpoint_and_ignores_what_is_not_its_own():
    ring = filled_ring(2, 5)
    restored = SnapshotRing(2)
    restored.load_tensors({**ring.tensors(), "other.1.a": torch.zeros(1)})
    assert sorted(restored.snapshots) == [2, 3, 4]
    for version in (2, 3, 4):
        assert restored.snapshots[version].keys() == {"a", "b.c"}
        assert torch.equal(restored.snapshots[version]["a"], ring.snapshots[version]["a"])
