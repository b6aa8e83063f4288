"""The estimator on TorchRL's own losses, estimators and collectors. Needs TorchRL 0.14, and Gymnasium for the last."""

import copy

import pytest
import torch
from torch import nn

from brace_rl.errors import ConfigError, DataError

pytest.importorskip("torchrl")

from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch.distributions import Categorical, Normal
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import A2CLoss, ClipPPOLoss, ReinforceLoss
from torchrl.objectives.value import GAE, VTrace
from torchrl.objectives.value.functional import vtrace_advantage_estimate

from brace_rl.integrations.torchrl.estimator import BraceEstimator, enable

BATCH, STEPS, OBSERVED, ACTIONS = 4, 40, 3, 5
FRAMES = 256
GAMMA = torch.tensor(0.97, dtype=torch.float64)
EXACT = {"rtol": 0.0, "atol": 1e-12}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def make_actor(dtype=torch.float64):
    logits = TensorDictModule(nn.Linear(OBSERVED, ACTIONS, dtype=dtype), in_keys=["observation"], out_keys=["logits"])
    return ProbabilisticActor(logits, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True)


def make_critic(dtype=torch.float64):
    return ValueOperator(nn.Linear(OBSERVED, 1, dtype=dtype), in_keys=["observation"])


def trajectories(actor, dtype=torch.float64):
    """A batch as a collector returns it, sampled from ``actor``; episodes end or are cut off along the rows."""
    observed = torch.randn(BATCH, STEPS + 1, OBSERVED, dtype=dtype)
    done = torch.rand(BATCH, STEPS, 1) < 0.1
    terminated = done & (torch.rand(BATCH, STEPS, 1) < 0.5)
    after = torch.where(done, torch.randn(BATCH, STEPS, OBSERVED, dtype=dtype), observed[:, 1:])
    batch = TensorDict(
        {
            "observation": observed[:, :-1],
            "next": {
                "observation": after,
                "reward": torch.randn(BATCH, STEPS, 1, dtype=dtype),
                "done": done,
                "terminated": terminated,
            },
        },
        batch_size=[BATCH, STEPS],
        names=[None, "time"],
    )
    with torch.no_grad():
        sampled = actor.get_dist(batch).sample()
        batch["action"] = sampled
        batch["action_log_prob"] = actor.get_dist(batch).log_prob(sampled)
    return batch


@pytest.fixture
def actor():
    return make_actor()


@pytest.fixture
def critic():
    return make_critic()


@pytest.fixture
def batch(actor):
    """Sampled from another policy than the actor's."""
    stale = copy.deepcopy(actor)
    with torch.no_grad():
        for parameter in stale.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return trajectories(stale)


def ends_of(batch):
    ends = batch["next", "done"].clone()
    ends[:, -1] = True
    return ends


SAME_AS_VTRACE = {
    "vtrace": {"value_target": "vtrace"},
    "capped": {"value_target": "capped", "window": STEPS},
    "brace": {"value_target": "brace", "window": STEPS},
}


@pytest.mark.parametrize("name", SAME_AS_VTRACE)
@pytest.mark.parametrize(("rho_clip", "c_clip"), [(1.0, 1.0), (1.2, 1.1)])
def test_with_a_window_as_long_as_the_row_targets_are_torchrls_vtrace(actor, critic, batch, name, rho_clip, c_clip):
    # TorchRL scores the action that the actor would take, so that is the action taken here.
    batch["action"] = actor.get_dist(batch).logits.argmax(-1)
    if name == "brace":
        # BRACE's last residual has weight 1, V-trace's the last ratio: alike where that ratio is 1.
        judged = actor.get_dist(batch).log_prob(batch["action"]).detach()
        batch["action_log_prob"] = torch.where(ends_of(batch)[..., 0], judged, batch["action_log_prob"])
    clips = [torch.tensor(x, dtype=torch.float64) for x in (rho_clip, c_clip)]
    common = {"gamma": GAMMA, "value_network": critic, "actor_network": actor}
    theirs = VTrace(**common, rho_thresh=clips[0], c_thresh=clips[1])(batch.copy())
    ours = BraceEstimator(**common, rho_clip=rho_clip, c_clip=c_clip, **SAME_AS_VTRACE[name])(batch.copy())
    torch.testing.assert_close(ours["value_target"], theirs["value_target"], **EXACT)
    weights = (actor.get_dist(batch).log_prob(batch["action"]) - batch["action_log_prob"]).exp().clamp(max=rho_clip)
    torch.testing.assert_close(weights[..., None] * ours["advantage"], theirs["advantage"], **EXACT)


def test_sampled_actions_give_torchrls_vtrace_of_the_actions_taken(actor, critic, batch):
    ours = BraceEstimator(
        gamma=GAMMA, value_network=critic, actor_network=actor, value_target="vtrace", rho_clip=1.0, c_clip=1.0
    )(batch.copy())
    _, wanted = vtrace_advantage_estimate(
        GAMMA,
        log_pi=actor.get_dist(batch).log_prob(batch["action"])[..., None],
        log_mu=batch["action_log_prob"][..., None],
        state_value=critic(batch.copy())["state_value"],
        next_state_value=critic(batch["next"].copy())["state_value"],
        reward=batch["next", "reward"],
        done=batch["next", "done"],
        terminated=batch["next", "terminated"],
    )
    torch.testing.assert_close(ours["value_target"], wanted.detach(), **EXACT)


def test_gae_is_torchrls_gae(critic, batch):
    # TorchRL keeps lambda in float32: 0.75 is the same number there.
    theirs = GAE(gamma=GAMMA, lmbda=torch.tensor(0.75), value_network=critic)(batch.copy())
    ours = BraceEstimator(gamma=GAMMA, value_network=critic, value_target="gae", lam=0.75)(batch.copy())
    for key in ("value_target", "advantage"):
        torch.testing.assert_close(ours[key], theirs[key].detach(), **EXACT)


def test_float32_stays_float32_and_agrees_to_its_precision():
    actor, critic = make_actor(torch.float32), make_critic(torch.float32)
    batch = trajectories(actor, torch.float32)
    batch["action"] = actor.get_dist(batch).logits.argmax(-1)
    common = {"gamma": 0.97, "value_network": critic, "actor_network": actor}
    theirs = VTrace(**common)(batch.copy())["value_target"]
    ours = BraceEstimator(**common, value_target="vtrace", rho_clip=1.0, c_clip=1.0)(batch.copy())["value_target"]
    assert ours.dtype == torch.float32
    assert ours.shape == (BATCH, STEPS, 1)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_data_of_the_actor_itself_need_no_correction(actor, critic):
    batch = trajectories(actor)
    estimator = BraceEstimator(gamma=GAMMA, window=5, value_network=critic, actor_network=actor)
    returns = BraceEstimator(gamma=GAMMA, value_target="monte_carlo", value_network=critic)
    torch.testing.assert_close(estimator(batch.copy())["value_target"], returns(batch.copy())["value_target"])
    torch.testing.assert_close(estimator.metrics["ratio/mean"], torch.tensor(1.0, dtype=torch.float64))


LOSSES = {"PPO": ClipPPOLoss, "A2C": A2CLoss, "REINFORCE": ReinforceLoss}


@pytest.mark.parametrize("functional", [True, False])
@pytest.mark.parametrize("loss_class", LOSSES.values(), ids=LOSSES.keys())
def test_a_loss_trains_on_its_estimates(actor, critic, batch, loss_class, functional):
    loss = loss_class(actor, critic, functional=functional)
    loss.make_value_estimator(BraceEstimator.for_loss(loss, gamma=GAMMA, window=7))
    alone = BraceEstimator(gamma=GAMMA, window=7, value_network=critic, actor_network=actor)(batch.copy())
    within = batch.copy()
    networks = {"params": loss.critic_network_params.detach()} if functional else {}
    loss.value_estimator(within, **networks)
    torch.testing.assert_close(within["value_target"], alone["value_target"], **EXACT)
    terms = loss(batch.copy())
    sum(value for name, value in terms.items() if name.startswith("loss_")).backward()
    assert all(parameter.grad is not None for parameter in loss.parameters() if parameter.requires_grad)
    given = loss(alone.select("observation", "action", "action_log_prob", "next", "advantage", "value_target"))
    for name in ("loss_objective", "loss_critic"):
        if name in terms.keys():  # noqa: SIM118
            torch.testing.assert_close(given[name], terms[name])


def test_the_name_is_known_to_a_loss_once_it_was_enabled(actor, critic, batch):
    loss = ClipPPOLoss(actor, critic)
    with pytest.raises(NotImplementedError, match="not implemented for loss ClipPPOLoss"):
        loss.make_value_estimator("brace", window=7)
    enable(loss)
    loss.make_value_estimator("brace", window=7, gamma=0.5)
    assert isinstance(loss.value_estimator, BraceEstimator)
    assert loss.value_estimator.options.gamma == 0.5
    loss(batch)
    assert not any(name.startswith("_value_estimator") for name in loss.state_dict())


def test_a_loss_is_judged_by_the_actor_as_it_is_now(actor, critic, batch):
    loss = ClipPPOLoss(actor, critic)
    estimator = BraceEstimator.for_loss(loss, gamma=GAMMA, window=7)
    params = loss.critic_network_params.detach()
    before = estimator(batch.copy(), params=params)["value_target"]
    with torch.no_grad():
        for parameter in loss.actor_network_params.parameters():
            parameter.add_(torch.randn_like(parameter))
    after = estimator(batch.copy(), params=params)["value_target"]
    with loss.actor_network_params.to_module(loss.actor_network):
        now = copy.deepcopy(loss.actor_network)
    wanted = BraceEstimator(gamma=GAMMA, window=7, value_network=critic, actor_network=now)(batch.copy())
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, wanted["value_target"], **EXACT)


def test_keys_are_the_losses(actor, critic, batch):
    loss = ClipPPOLoss(actor, critic)
    loss.set_keys(advantage="how_good", value_target=("critic", "target"), reward="gain", sample_log_prob="log_mu")
    loss.make_value_estimator(BraceEstimator.for_loss(loss, gamma=GAMMA, window=7))
    batch.rename_key_("action_log_prob", "log_mu")
    batch.rename_key_(("next", "reward"), ("next", "gain"))
    loss.set_keys(terminated="over")
    batch.rename_key_(("next", "terminated"), ("next", "over"))
    loss.value_estimator(batch, params=loss.critic_network_params)
    assert batch["how_good"].shape == batch["critic", "target"].shape == (BATCH, STEPS, 1)


def test_time_may_come_first(actor, critic, batch):
    estimator = BraceEstimator(gamma=GAMMA, window=7, value_network=critic, actor_network=actor)
    wanted = estimator(batch.copy())["value_target"]
    turned = batch.transpose(0, 1).contiguous()
    torch.testing.assert_close(estimator(turned.copy(), time_dim=0)["value_target"], wanted.transpose(0, 1), **EXACT)
    torch.testing.assert_close(estimator(turned.copy())["value_target"], wanted.transpose(0, 1), **EXACT)


def test_values_that_are_there_are_kept_if_asked(actor, critic, batch):
    batch["state_value"] = torch.zeros(BATCH, STEPS, 1, dtype=torch.float64)
    batch["next", "state_value"] = torch.zeros(BATCH, STEPS, 1, dtype=torch.float64)
    common = {"gamma": GAMMA, "window": 7, "actor_network": actor}
    kept = BraceEstimator(**common, value_network=critic, skip_existing=True)(batch.copy())
    read = BraceEstimator(**common, value_network=None)(batch.copy())
    torch.testing.assert_close(kept["value_target"], read["value_target"], **EXACT)
    anew = BraceEstimator(**common, value_network=critic)(batch.copy())
    assert not torch.allclose(anew["value_target"], read["value_target"])


def test_one_call_of_the_critic_gives_the_same_with_room_for_every_cut(actor, critic, batch):
    common = {"gamma": GAMMA, "window": 7, "value_network": critic, "actor_network": actor}
    twice = BraceEstimator(**common)(batch.copy())
    once = BraceEstimator(**common, shifted=True, shifted_budget=STEPS)(batch.copy())
    torch.testing.assert_close(once["value_target"], twice["value_target"], **EXACT)


def test_steps_that_one_call_leaves_out_are_none(actor, critic, batch):
    batch["next", "terminated"][:] = False
    batch["next", "done"][:] = False
    batch["next", "done"][:, 9] = True
    common = {"gamma": GAMMA, "window": 7, "value_network": critic, "actor_network": actor}
    once = BraceEstimator(**common, shifted=True)(batch.copy())
    assert once["shifted_valid"].sum(1).tolist() == [STEPS - 1] * BATCH
    shorter = BraceEstimator(**common)(batch[:, : STEPS - 1].copy())
    torch.testing.assert_close(once["value_target"][:, : STEPS - 1], shorter["value_target"], **EXACT)
    assert not once["value_target"][:, -1].any()
    assert not once["advantage"][:, -1].any()


def test_padding_changes_nothing(actor, critic, batch):
    estimator = BraceEstimator(gamma=GAMMA, window=7, value_network=critic, actor_network=actor)
    wanted = estimator(batch[:, :30].copy())["value_target"]
    padded = batch.copy()
    padded[:, 30:] = torch.zeros_like(padded[:, 30:])
    padded["collector", "mask"] = (torch.arange(STEPS) < 30).expand(BATCH, STEPS)
    torch.testing.assert_close(estimator(padded)["value_target"][:, :30], wanted, **EXACT)
    assert not padded["value_target"][:, 30:].any()


def test_what_a_loss_leaves_out_changes_no_target(actor, critic, batch):
    loss = ClipPPOLoss(actor, critic)
    loss.make_value_estimator(BraceEstimator.for_loss(loss, gamma=GAMMA, window=7, whiten=True))
    batch["kept"] = torch.rand(BATCH, STEPS) < 0.5
    params = loss.critic_network_params
    whole = loss.value_estimator(batch.copy(), params=params)
    before = loss(whole)["loss_objective"]
    loss.loss_mask_key = "kept"
    part = loss.value_estimator(batch.copy(), params=params)
    assert torch.equal(part["value_target"], whole["value_target"])
    assert not torch.allclose(loss(part)["loss_objective"], before)


def test_tensors_may_be_passed_by_name(actor, critic, batch):
    estimator = BraceEstimator(gamma=GAMMA, window=7, value_network=critic, actor_network=actor)
    wanted = estimator(batch.copy())
    advantage, target = estimator(
        observation=batch["observation"],
        action=batch["action"],
        action_log_prob=batch["action_log_prob"],
        next_observation=batch["next", "observation"],
        next_reward=batch["next", "reward"],
        next_done=batch["next", "done"],
        next_terminated=batch["next", "terminated"],
    )
    torch.testing.assert_close(advantage, wanted["advantage"], **EXACT)
    torch.testing.assert_close(target, wanted["value_target"], **EXACT)


def test_an_action_of_several_parts_has_the_ratio_of_the_whole(critic, batch):
    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.which, self.where = (nn.Linear(OBSERVED, n, dtype=torch.float64) for n in (ACTIONS, 1))

        def forward(self, observed):
            where = self.where(observed)[..., 0]
            return self.which(observed), where, torch.ones_like(where)

    parameters = [("params", "which", "logits"), ("params", "where", "loc"), ("params", "where", "scale")]
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(TwoHeads(), in_keys=["observation"], out_keys=parameters),
        ProbabilisticTensorDictModule(
            in_keys=["params"],
            out_keys=["which", "where"],
            distribution_class=CompositeDistribution,
            distribution_kwargs={"distribution_map": {"which": Categorical, "where": Normal}},
            return_log_prob=True,
        ),
    )
    with torch.no_grad():
        actor(batch)
    parts = ["which_log_prob", "where_log_prob"]
    batch["which_log_prob"] = batch["which_log_prob"] - 0.1
    batch["where_log_prob"] = batch["where_log_prob"] - 0.2
    estimator = BraceEstimator(gamma=GAMMA, window=7, value_network=critic, actor_network=actor)
    estimator.set_keys(sample_log_prob=parts)
    estimator(batch)
    wanted = torch.tensor(0.3, dtype=torch.float64).exp()
    torch.testing.assert_close(estimator.metrics["ratio/mean"], wanted)


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("action_log_prob", "build the actor with return_log_prob=True"),
        ("action", "action: not in the batch"),
        (("next", "terminated"), "set_keys names the entry"),
        (("next", "reward"), "set_keys names the entry"),
    ],
)
def test_what_is_missing_is_named_with_what_brings_it(actor, critic, batch, missing, words):
    batch.pop(missing)
    estimator = BraceEstimator(gamma=GAMMA, window=7, value_network=critic, actor_network=actor)
    with pytest.raises(DataError, match=words):
        estimator(batch)


def test_merged_steps_are_refused(actor, critic, batch):
    batch["steps_to_next_obs"] = torch.full((BATCH, STEPS, 1), 3)
    with pytest.raises(DataError, match="leave MultiStep out"):
        BraceEstimator(gamma=GAMMA, value_network=critic, actor_network=actor)(batch)


def test_an_actor_is_asked_for_where_ratios_are_needed(critic):
    with pytest.raises(ConfigError, match="actor_network: missing, and value_target = brace needs it"):
        BraceEstimator(gamma=GAMMA, value_network=critic)


def test_a_collectors_batches_are_estimated_as_they_come():
    pytest.importorskip("gymnasium")
    from torchrl.collectors import Collector
    from torchrl.collectors.utils import split_trajectories
    from torchrl.envs import GymEnv, StepCounter, TransformedEnv

    logits = TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["logits"])
    actor = ProbabilisticActor(logits, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True)
    critic = ValueOperator(nn.Linear(4, 1), in_keys=["observation"])
    loss = ClipPPOLoss(actor, critic)
    loss.make_value_estimator(BraceEstimator.for_loss(loss, gamma=0.9, window=0))
    collector = Collector(
        create_env_fn=lambda: TransformedEnv(GymEnv("CartPole-v1", categorical_action_encoding=True), StepCounter(25)),
        policy=actor,
        frames_per_batch=FRAMES,
        total_frames=FRAMES,
    )
    [batch] = list(collector)
    collector.shutdown()
    assert torch.isfinite(loss(batch.copy())["loss_objective"])
    params = loss.critic_network_params
    loss.value_estimator(batch, params=params)
    done, terminated = batch["next", "done"][:, 0], batch["next", "terminated"][:, 0]
    assert (done & ~terminated).any()
    assert terminated.any()
    # The return, from behind: every reward is 1.
    after, wanted = batch["next", "state_value"][:, 0], torch.zeros(FRAMES)
    for step in reversed(range(FRAMES)):
        if done[step] or step == FRAMES - 1:
            behind = torch.where(terminated[step], 0.0, after[step])
        else:
            behind = wanted[step + 1]
        wanted[step] = 1 + 0.9 * behind
    torch.testing.assert_close(batch["value_target"][:, 0], wanted)
    split = split_trajectories(batch.exclude("advantage", "value_target", "state_value", ("next", "state_value")))
    assert not split["collector", "mask"].all()
    loss.value_estimator(split, params=params)
    mask = split["collector", "mask"]
    mask = mask if mask.ndim == 2 else mask[..., 0]
    torch.testing.assert_close(split["value_target"][mask], batch["value_target"])
