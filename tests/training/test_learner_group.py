"""The learner's processes as the training loop sees them: one learner, started, resumed and lost as a whole."""

import copy
import os
import signal
from contextlib import contextmanager

import pytest
import torch
from test_learner import make_learner, random_batch, tiny_config

from brace_rl.errors import BraceError, DivergedError, ModelError
from brace_rl.training.learner_group import LearnerGroup
from brace_rl.training.rank_processes import rank_processes
from brace_rl.training.wire import batch_from_tensors, batch_tensors

SIZE = 2
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


def group_config(sharding="none", size=SIZE, **schedule):
    optim = {"learner_ranks": size, "micro_batch_tokens": 24, "actor_lr": 1e-3, "critic_lr": 1e-3}
    schedule = {"mode": "sync", "max_staleness": 0, "timeout_s": 900.0, "learner_threads": 1} | schedule
    return tiny_config(optim=optim, schedule=schedule, model={"sharding": sharding})


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """The architecture of the learner's actor, with other weights than those that are trained."""
    folder = tmp_path_factory.mktemp("model")
    make_learner(tiny_config(), seed=9).actor.save_pretrained(folder)
    return str(folder)


@contextmanager
def group_of(config, model_dir, launch=rank_processes):
    start = make_learner(config)
    with launch(config, model_dir) as (peers, meeting):
        group = LearnerGroup(start.actor, start.critic, config, peers=peers, meeting=meeting)
        try:
            yield group, peers
        finally:
            group.close()


def alone(updates, config):
    learner = make_learner(config)
    return learner, [learner.update(random_batch(seed=seed)) for seed in range(updates)]


def assert_same_weights(one, other):
    for module, its in ((one.actor, other.actor), (one.critic, other.critic)):
        for a, b in zip(module.state_dict().values(), its.state_dict().values(), strict=True):
            torch.testing.assert_close(a, b, **TOLERANCE)


def check_that_a_group_trains_is_saved_and_goes_on_as_one_learner(config, model_dir, launch):
    plain = group_config()
    learner, figures = alone(2, plain)
    with group_of(config, model_dir, launch) as (group, _):
        own = [group.update(random_batch(seed=seed)) for seed in range(2)]
        for mine, theirs in zip(own, figures, strict=True):
            padding = ("tokens/evaluate", "tokens/update")
            assert {n: x for n, x in mine.items() if n not in padding} == pytest.approx(
                {n: x for n, x in theirs.items() if n not in padding}, abs=1e-5, rel=1e-5
            )
        group.gather()
        assert_same_weights(group, learner)
        for name, optimizer in learner.optimizers.items():
            for mine, theirs in zip(
                group.optimizers[name].state_dict()["state"].values(),
                optimizer.state_dict()["state"].values(),
                strict=True,
            ):
                torch.testing.assert_close(mine, theirs, **TOLERANCE)
        assert (group.version, group.counters()) == (2, pytest.approx(learner.counters()))
        torch.testing.assert_close(
            group.evaluate(random_batch()).values, learner.evaluate(random_batch()).values, equal_nan=True, **TOLERANCE
        )
        # As after a crash: weights, optimisers and counters come from rank 0, whatever the others had.
        fresh, _ = alone(1, plain)
        for module, saved in ((group.actor, fresh.actor), (group.critic, fresh.critic)):
            module.load_state_dict(saved.state_dict())
        for name, optimizer in group.optimizers.items():
            optimizer.load_state_dict(copy.deepcopy(fresh.optimizers[name].state_dict()))
        group.restore(fresh.counters(), fresh.tensors)
        fresh.update(random_batch(seed=5))
        group.update(random_batch(seed=5))
        group.gather()
        assert_same_weights(group, fresh)
        assert group.version == 2


@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_a_group_trains_is_saved_and_goes_on_as_one_learner(sharding, model_dir):
    check_that_a_group_trains_is_saved_and_goes_on_as_one_learner(group_config(sharding), model_dir, rank_processes)


def test_an_error_in_an_update_ends_the_group_and_is_the_learners_own(model_dir):
    with group_of(group_config(), model_dir) as (group, peers):
        torch.nn.init.constant_(group.critic.head.bias, float("nan"))
        with pytest.raises(DivergedError, match=r"step 1: values"):
            group.update(random_batch())
        with pytest.raises(BraceError, match=r"rank 1 of the learner .* is gone"):
            group.update(random_batch())
        assert not any(os.path.exists(f"/proc/{peer.pid}") for peer in peers)


def test_a_rank_that_dies_is_named_instead_of_waited_for(model_dir):
    with group_of(group_config(), model_dir) as (group, peers):
        group.update(random_batch())
        os.kill(peers[0].pid, signal.SIGKILL)
        with pytest.raises(BraceError, match=r"rank 1 of the learner \(process \d+\) is gone"):
            group.update(random_batch(seed=1))


def test_among_several_ranks_the_one_that_died_is_named(model_dir):
    with group_of(group_config(size=4), model_dir) as (group, peers):
        os.kill(peers[2].pid, signal.SIGKILL)
        with pytest.raises(BraceError, match=r"rank 3 of the learner \(process \d+\) is gone"):
            group.update(random_batch())


class SilentPeer:
    """A rank that has reported ``told``, or nothing."""

    def __init__(self, told=None):
        self.told = told

    def failure(self):
        return self.told

    def close(self):
        pass


LOST = RuntimeError("Traceback ...\n[/pytorch/third_party/gloo/gloo/pair.cc:5] Connection closed by peer [127.0.0.1]:6")


@pytest.mark.parametrize(
    ("reported", "raised", "message"),
    [
        ((LOST, None), LOST, r"^rank 0 .* \(no word from rank 2\); resume .*: \[/pytorch/.*closed by peer \S+$"),
        ((LOST, BraceError("rank 2 is gone")), LOST, r"^rank 2 is gone$"),
        ((None, DivergedError("values")), RuntimeError("another one"), r"^values$"),
    ],
)
def test_that_ranks_lost_each_other_is_told_only_where_nothing_explains_it(reported, raised, message):
    group = object.__new__(LearnerGroup)
    group.config, group._peers = group_config(), [SilentPeer(told) for told in reported]
    with pytest.raises(BraceError, match=message), group._or_close():
        raise raised


def test_a_rank_that_cannot_be_built_says_why(tmp_path):
    with pytest.raises(ModelError, match="no such model folder"), group_of(group_config(), str(tmp_path / "none")):
        pass


def test_a_batch_survives_the_way_to_another_rank():
    batch = random_batch(kept=True)
    again = batch_from_tensors(batch_tensors(batch))
    assert (again.lengths, again.kept_ids) == (batch.lengths, batch.kept_ids)
    for name in ("input_ids", "policy_mask", "behavior_logprobs", "rewards", "versions", "truncated", "groups"):
        torch.testing.assert_close(getattr(again, name), getattr(batch, name), equal_nan=True)
    assert batch_from_tensors(batch_tensors(random_batch())).kept_ids is None
