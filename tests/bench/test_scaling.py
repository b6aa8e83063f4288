"""The measurements over Ray, on its stand-in of threads: their arithmetic, not how long anything takes."""

import sys
from pathlib import Path

import pytest

from brace_rl.bench import scaling
from brace_rl.bench.scaling import Workload, measure_long_tails, measure_scaling
from brace_rl.training.engines.simulated import ResponseLengths
from brace_rl.training.types import derive_seed

sys.path.insert(0, str(Path(__file__).parents[1] / "training" / "ray_backend"))
from fake_ray import fake_cluster

SHORT = Workload(slots=4, tokens_per_s=1000.0, lengths=ResponseLengths(20, 0.0, 20), weights=10)


def test_each_number_of_workers_is_held_against_its_ideal():
    with fake_cluster():
        rows = measure_scaling(SHORT, workers=(1, 2), rounds=2)
    assert [(row["workers"], row["ideal tokens/s"]) for row in rows] == [(1, 4000.0), (2, 8000.0)]
    for row in rows:
        assert row["share of ideal"] == pytest.approx(row["tokens/s"] / row["ideal tokens/s"])
        assert row["tokens/s"] > 0


def test_responses_have_the_lengths_of_the_workload_which_the_bounds_are_made_of():
    tailed = Workload(slots=8, tokens_per_s=1e6, lengths=ResponseLengths(20, 0.8, 60), weights=10)
    with fake_cluster(), scaling._backend(tailed, 1) as (backend, prompts):
        requests = prompts.submit(40, version=0)
        groups = {}
        while len(groups) < len(requests):
            groups |= {group.request.index: group.trajectories[0] for group in backend.collect()}
    lengths = [tailed.lengths.of(derive_seed(request.seed, 0)) for request in requests]
    assert [len(groups[request.index].response_ids) for request in requests] == lengths
    assert len(set(lengths)) > 10


def test_schedules_are_held_against_their_bounds_and_each_other():
    with fake_cluster():
        sync, asynchronous, ratio = measure_long_tails(SHORT, workers=1, max_staleness=2, train_s=0.01, steps=3)
    assert (sync["schedule"], asynchronous["schedule"]) == ("synchronous", "asynchronous")
    # A step makes 4 responses of 20 tokens; they take 0.02 s, the trainer 0.01 s.
    assert sync["bound"] == pytest.approx(80 / 0.03)
    assert asynchronous["bound"] == pytest.approx(80 / 0.02)
    assert ratio["bound"] == pytest.approx(1.5)
    assert ratio["tokens/s"] == pytest.approx(asynchronous["tokens/s"] / sync["tokens/s"])
    for row in (sync, asynchronous, ratio):
        assert row["share of bound"] == pytest.approx(row["tokens/s"] / row["bound"])


def test_a_trainer_slower_than_the_responses_sets_the_asynchronous_bound():
    bounds = scaling._bounds(SHORT, 4, train_s=0.1)
    assert bounds["asynchronous"] == pytest.approx(80 / 0.1)
    assert bounds["synchronous"] == pytest.approx(80 / 0.12)
