"""The learner's ranks as actors of a cluster: as processes, but placed by Ray, and lost as Ray tells."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
from ray_environment import is_loopback, listening_here_and_below
from test_learner import random_batch
from test_learner_group import check_that_a_group_trains_is_saved_and_goes_on_as_one_learner as check_group
from test_learner_group import group_config, group_of, model_dir
from test_run import assert_same_weights, figures_of, metrics_of, weights_of
from test_run_ranks import STEPS
from test_run_ranks import config_of as local_config

from brace_rl.errors import BraceError, DivergedError, ModelError, WaitTimeoutError
from brace_rl.training import rank_actors as launcher
from brace_rl.training import run
from brace_rl.training.learner_group import LearnerGroup
from brace_rl.training.models import resolve_device
from brace_rl.training.rank_actors import rank_actors
from brace_rl.training.run import run_training

__all__ = ["model_dir"]

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.slow]

KILLED_AT = 2
"""Step after which a rank is killed."""
TOO_MANY = 1000
"""CPUs, for any machine that tests run on."""


@pytest.fixture(scope="module", autouse=True)
def _preloaded():
    """What the stand-in's processes would import one after the other."""
    multiprocessing.set_forkserver_preload(["torch", "transformers", "brace_rl.training.rank_actors"])


def config_of(ranks, kind, **arguments):
    sections = local_config(ranks, **arguments).model_dump()
    sections["backend"]["kind"] = kind
    return type(local_config(1)).model_validate(sections)


def kill(peer):
    import ray

    ray.kill(peer._actor)


@pytest.mark.parametrize(("size", "sharding"), [(2, "none"), (4, "none"), (2, "fsdp2")])
def test_a_group_of_actors_trains_is_saved_and_goes_on_as_one_learner(size, sharding, model_dir):
    check_group(group_config(sharding, size), model_dir, rank_actors)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_run_is_that_of_as_many_processes(ranks, tmp_path):
    for kind in ("local", "ray"):
        run_training(config_of(ranks, kind), tmp_path / kind)
    mine, theirs = figures_of(tmp_path / "ray"), figures_of(tmp_path / "local")
    assert len(mine) == STEPS + 1
    assert mine == [pytest.approx(row, abs=1e-5, rel=1e-5, nan_ok=True) for row in theirs]
    expected = weights_of(tmp_path / "local", STEPS)
    for name, x in weights_of(tmp_path / "ray", STEPS).items():
        torch.testing.assert_close(x, expected[name], atol=1e-5, rtol=1e-5)
    assert not torch.distributed.is_initialized()


class MortalGroup(LearnerGroup):
    """Rank 1 dies after some steps."""

    def update(self, batch):
        if self.version == KILLED_AT:
            kill(self._peers[0])
        return super().update(batch)


def test_a_rank_that_dies_ends_the_run_in_one_line_and_the_run_is_resumed(tmp_path, monkeypatch):
    config = config_of(2, "ray")
    run_training(config, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(run, "LearnerGroup", MortalGroup)
        with pytest.raises(
            BraceError, match=r"rank 1 of the learner \(an actor\) is gone \(.*resume the run"
        ) as caught:
            run_training(config, tmp_path / "broken")
    assert "\n" not in str(caught.value)
    assert max(metrics_of(tmp_path / "broken")) == KILLED_AT
    assert run_training(config, tmp_path / "broken", resume=True).status == "finished"
    assert_same_weights(weights_of(tmp_path / "broken", STEPS), weights_of(tmp_path / "whole", STEPS))


def test_among_several_ranks_the_one_that_died_is_named(model_dir):
    with group_of(group_config(size=4), model_dir, rank_actors) as (group, peers):
        group.update(random_batch())
        kill(peers[2])
        with pytest.raises(BraceError, match=r"rank 3 of the learner \(an actor\) is gone"):
            group.update(random_batch(seed=1))
        with pytest.raises(BraceError, match=r"rank 1 of the learner \(an actor\) is gone \(it was ended"):
            group.update(random_batch(seed=1))


def test_an_error_in_an_update_is_the_learners_own(model_dir):
    with group_of(group_config(), model_dir, rank_actors) as (group, _):
        torch.nn.init.constant_(group.critic.head.bias, float("nan"))
        with pytest.raises(DivergedError, match=r"step 1: values"):
            group.update(random_batch())


def test_a_rank_that_cannot_be_built_says_why(tmp_path):
    missing = group_of(group_config(), str(tmp_path / "none"), rank_actors)
    with pytest.raises(ModelError, match="no such model folder"), missing:
        pass


def test_a_rank_that_finds_no_place_is_a_timeout_that_asks_for_what_it_needs(model_dir):
    config = group_config(learner_threads=TOO_MANY, timeout_s=1.0)
    expected = r"rank 0 of the learner waited 1 s for rank 1 \(an actor, said nothing yet: has the cluster the CPUs"
    with pytest.raises(WaitTimeoutError, match=expected), group_of(config, model_dir, rank_actors):
        pass


def test_a_cluster_started_for_the_ranks_has_room_for_the_rollouts_too_and_ends_with_them(model_dir, monkeypatch):
    import ray

    started, ended = [], []
    monkeypatch.setattr(launcher, "join_cluster", lambda address, **asked: started.append((address, asked)) or True)
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append(True))
    with rank_actors(group_config(size=3, learner_threads=2, rollout_threads=3), model_dir) as (peers, _):
        assert (len(peers), ended) == (2, [])
    assert started == [("", {"cpus": 2 * 2 + 1 * 3, "kept": resolve_device("auto")})]
    assert ended == [True]


def test_ranks_of_a_cluster_on_this_machine_listen_on_loopback_only(model_dir):
    pytest.importorskip("psutil")
    with group_of(group_config(), model_dir, rank_actors):
        listening = listening_here_and_below()
    assert len(listening) >= 3  # where they meet, and each rank
    assert all(map(is_loopback, listening)), listening
