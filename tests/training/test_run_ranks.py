"""Whole runs on several ranks: the loop does not notice, and a run may go on with another number of them."""

import pytest
import torch
from test_run import losses_of, metrics_of, tiny_config, weights_of

from brace_rl.errors import ModelError
from brace_rl.training import run
from brace_rl.training.run import run_training

STEPS = 3

pytestmark = pytest.mark.slow


def config_of(ranks, sharding="none", steps=STEPS):
    return tiny_config(
        "sync",
        0,
        optim={"steps": steps, "learner_ranks": ranks, "actor_lr": 1e-3, "critic_lr": 1e-3},
        schedule={"timeout_s": 900, "learner_threads": 1},
        model={"sharding": sharding},
        run={"checkpoint_every": 2},
    )


def assert_same_run(one, other):
    for mine, theirs in zip(losses_of(one), losses_of(other), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5, rel=1e-4)
    for name, x in weights_of(one, STEPS).items():
        torch.testing.assert_close(weights_of(other, STEPS)[name], x, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_a_run_on_two_ranks_is_the_run_on_one_and_goes_on_on_one(sharding, tmp_path):
    run_training(config_of(1), tmp_path / "one")
    outcome = run_training(config_of(2, sharding, steps=2), tmp_path / "two")
    assert (outcome.status, outcome.summary["steps"]) == ("finished", 2)
    run_training(config_of(1), tmp_path / "two", resume=True)
    assert sorted(metrics_of(tmp_path / "two")) == [0, 1, 2, 3]
    assert_same_run(tmp_path / "one", tmp_path / "two")
    assert not torch.distributed.is_initialized()


def test_a_rank_that_cannot_start_leaves_no_run_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "_model_dir", lambda config, run_dir: str(tmp_path / "missing"))
    monkeypatch.setattr(run, "save_actor", lambda *args: None)
    with pytest.raises(ModelError, match="no such model folder"):
        run_training(config_of(2), tmp_path / "run")
    assert not (tmp_path / "run").exists()
