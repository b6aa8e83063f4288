"""TorchRL's rows, with episodes behind one another, steps that are none, and flags: TorchRL itself is not needed."""

import math

import pytest
import torch

from brace_rl import core
from brace_rl.errors import ConfigError, DataError
from brace_rl.integrations.token_level import TokenLevelOptions
from brace_rl.integrations.torchrl.estimate import torchrl_estimates
from brace_rl.integrations.torchrl.options import check_not_differentiable, config_findings, options_from
from brace_rl.integrations.torchrl.versions import check_torchrl
from brace_rl.integrations.versions import UnsupportedVersionError

JUNK = math.nan
ROWS, STEPS = 3, 24

OPTIONS = {
    "brace": {"window": 3},
    "auto": {"window": "auto", "auto_eps": 0.5},
    "auto_path": {"window": "auto_path", "auto_budget": 0.3},
    "capped": {"value_target": "capped", "window": 3},
    "vtrace": {"value_target": "vtrace"},
    "gae": {"value_target": "gae", "lam": 0.9},
    "monte_carlo": {"value_target": "monte_carlo"},
    "own advantage": {"window": 3, "advantage": "gae", "policy_lam": 0.8},
}
every_option = pytest.mark.parametrize("chosen", OPTIONS.values(), ids=OPTIONS.keys())


def rows_of_steps(seed=0):
    """``[B, T, 1]`` rows of episodes; a third of their ends are cut off, and the last of a row goes on behind it."""
    generator = torch.Generator().manual_seed(seed)
    shape = (ROWS, STEPS, 1)
    values, after, rewards, drift = torch.randn(4, *shape, generator=generator, dtype=torch.float64)
    done = torch.rand(shape, generator=generator) < 0.2
    done[0] = False
    terminated = done & (torch.rand(shape, generator=generator) < 0.66)
    following = torch.cat([values[:, 1:], after[:, -1:]], dim=1)
    next_values = torch.where(done, after, following)
    sampled = -torch.rand(shape, generator=generator, dtype=torch.float64)
    return {
        "values": values,
        "next_values": torch.where(terminated, JUNK, next_values),
        "rewards": rewards,
        "done": done,
        "terminated": terminated,
        "sample_log_prob": sampled,
        "actor_log_prob": sampled + 0.3 * drift,
        "valid": None,
    }


def estimates(given, chosen, time_dim=1):
    return torchrl_estimates(**given, options=options_from({"gamma": 0.9, **chosen}), time_dim=time_dim)


def episodes(given):
    """Rows and spans of the episodes, each with the value behind its last step."""
    for row in range(ROWS):
        ends = given["done"][row, :, 0].nonzero().flatten().tolist()
        first = 0
        for last in sorted({*ends, STEPS - 1}):
            ended = bool(given["terminated"][row, last])
            yield row, slice(first, last + 1), 0.0 if ended else float(given["next_values"][row, last])
            first = last + 1


@every_option
def test_every_episode_of_a_row_is_estimated_as_if_alone(chosen):
    if chosen.get("window") == "auto":
        pytest.skip("one window for the whole batch")
    given = rows_of_steps()
    found = estimates(given, chosen)
    seen = 0
    for row, span, after in episodes(given):
        alone = {name: x if x is None else x[row, span][None] for name, x in given.items()}
        alone["next_values"][0, -1] = after
        alone["terminated"] = torch.zeros_like(alone["terminated"])
        alone["done"] = torch.zeros_like(alone["done"])
        wanted = estimates(alone, chosen)
        torch.testing.assert_close(found.value_target[row, span][None], wanted.value_target)
        torch.testing.assert_close(found.advantage[row, span][None], wanted.advantage)
        seen += 1
    assert seen > ROWS


def test_targets_are_the_cores():
    given = rows_of_steps()
    found = estimates(given, {"window": 4, "rho_clip": 1.3, "c_clip": 1.05, "lam": 0.97})
    for row, span, after in episodes(given):
        here = {name: None if x is None else x[row, span, 0][None] for name, x in given.items()}
        wanted = core.brace_targets(
            values=here["values"],
            rewards=here["rewards"],
            behavior_logprobs=here["sample_log_prob"],
            target_logprobs=here["actor_log_prob"],
            policy_mask=torch.ones_like(here["done"]),
            bootstrap_values=torch.tensor([after], dtype=torch.float64),
            window=4,
            rho_clip=1.3,
            c_clip=1.05,
            gamma=0.9,
            lam=0.97,
        )
        torch.testing.assert_close(found.value_target[row, span, 0], wanted.targets[0])
        torch.testing.assert_close(found.advantage[row, span, 0], wanted.advantages[0])


def test_an_episode_that_is_cut_off_bootstraps_and_one_that_ends_does_not():
    # Returns at gamma 1/2: ended 1 + 1/2; cut off 1 + 1/2 + 1/4 * 8; running on at the row's end 1 + 1/2 * 4.
    ones = torch.ones(1, 5, 1)
    done = torch.tensor([0, 1, 0, 1, 0]).bool().view(1, 5, 1)
    terminated = torch.tensor([0, 1, 0, 0, 0]).bool().view(1, 5, 1)
    next_values = torch.tensor([0.0, JUNK, 0.0, 8.0, 4.0]).view(1, 5, 1)
    found = estimates(
        {
            "values": torch.zeros(1, 5, 1),
            "next_values": next_values,
            "rewards": ones,
            "done": done,
            "terminated": terminated,
            "sample_log_prob": None,
            "actor_log_prob": None,
            "valid": None,
        },
        {"value_target": "monte_carlo", "gamma": 0.5},
    )
    assert found.value_target.flatten().tolist() == [1.5, 1.0, 3.5, 5.0, 3.0]


@every_option
def test_steps_that_are_none_are_as_if_they_were_not_there(chosen):
    given = rows_of_steps()
    whole = estimates({name: x if x is None else x[:, :16] for name, x in given.items()}, chosen)
    padded = {name: x for name, x in given.items() if x is not None}
    valid = torch.zeros(ROWS, STEPS, 1, dtype=torch.bool)
    valid[:, :16] = True
    for name, x in padded.items():
        padded[name] = x & valid if x.dtype == torch.bool else torch.where(valid, x, JUNK)
    # Junk rewards are 1e30 rather than NaN: a reward behind the last step must not be given to it either.
    padded["rewards"] = torch.where(valid, given["rewards"], 1e30)
    found = estimates({**padded, "valid": valid}, chosen)
    torch.testing.assert_close(found.value_target[:, :16], whole.value_target)
    torch.testing.assert_close(found.advantage[:, :16], whole.advantage)
    assert not found.value_target[:, 16:].any()
    assert not found.advantage[:, 16:].any()


@every_option
def test_a_hole_in_a_row_ends_what_stands_before_it(chosen):
    if chosen.get("window") == "auto":
        pytest.skip("one window for the whole batch")
    given = rows_of_steps()
    valid = torch.ones(ROWS, STEPS, 1, dtype=torch.bool)
    valid[:, 10:12] = False
    found = estimates({**given, "valid": valid}, chosen)
    for part in (slice(0, 10), slice(12, STEPS)):
        alone = estimates({name: x if x is None else x[:, part] for name, x in given.items()}, chosen)
        torch.testing.assert_close(found.value_target[:, part], alone.value_target)
        torch.testing.assert_close(found.advantage[:, part], alone.advantage)


@every_option
def test_the_time_dimension_may_be_any_and_agents_may_follow_it(chosen):
    one = rows_of_steps(seed=1)
    other = rows_of_steps(seed=2)
    both = {name: x if x is None else torch.stack([x, other[name]], dim=2) for name, x in one.items()}
    apart = estimates({name: x if x is None else torch.cat([x, other[name]]) for name, x in one.items()}, chosen)
    wanted = torch.stack([apart.value_target[:ROWS], apart.value_target[ROWS:]], dim=2)
    assert torch.equal(estimates(both, chosen).value_target, wanted)
    time_first = {name: x if x is None else x.movedim(1, 0) for name, x in both.items()}
    assert torch.equal(estimates(time_first, chosen, time_dim=0).value_target, wanted.movedim(1, 0))


def test_shuffled_steps_are_refused():
    given = rows_of_steps()
    order = torch.randperm(STEPS, generator=torch.Generator().manual_seed(0))
    shuffled = {name: x if x is None else x[:, order] for name, x in given.items()}
    with pytest.raises(DataError, match="must hold whole trajectories, neither shuffled nor n-step"):
        estimates(shuffled, {"window": 3})


def test_next_values_of_somewhat_older_parameters_are_let_pass():
    given = rows_of_steps()
    given["next_values"] = 0.9 * given["next_values"] + 0.1
    assert estimates(given, {"window": 3}).value_target.isfinite().all()


@pytest.mark.parametrize("name", ["rewards", "done", "terminated", "next_values"])
def test_an_entry_of_another_shape_is_named(name):
    given = rows_of_steps()
    given[name] = given[name][..., 0]
    with pytest.raises(DataError, match=r"got \[3, 24\], must be \[3, 24, 1\] like the values"):
        estimates(given, {"window": 3})


def test_what_is_not_finite_is_named():
    given = rows_of_steps()
    given["values"][0, 3] = JUNK
    given["next_values"][0, 2] = JUNK
    with pytest.raises(DataError, match="values: nan at row 0, position 3"):
        estimates(given, {"window": 3})


def test_options_keep_the_papers_defaults_and_torchrls_two():
    assert options_from({}) == TokenLevelOptions(gamma=0.99, whiten=False)
    assert options_from({"window": 7, "gamma": 0.9, "whiten": True}) == TokenLevelOptions(window=7, gamma=0.9)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rho_thresh": 1.0}, "rho_thresh: no such option; it is called rho_clip here"),
        ({"average_adv": True}, "average_adv: no such option; it is called whiten here"),
        ({"windows": 3}, "windows: no such option; there are value_target, window"),
        ({"gamma": 0.0}, "gamma = 0.0"),
    ],
)
def test_an_option_that_cannot_be_meant_is_named(given, message):
    with pytest.raises(ConfigError, match=message):
        options_from(given)


def test_a_gradient_is_not_promised():
    check_not_differentiable(False)
    with pytest.raises(ConfigError, match="set differentiable=False"):
        check_not_differentiable(True)


@pytest.mark.parametrize("version", ["0.13.2", "0.15.0", "1.0", "not installed"])
def test_other_versions_are_refused_with_the_range(version):
    with pytest.raises(UnsupportedVersionError, match=r"supports at least 0\.14 and below 0\.15"):
        check_torchrl(version)
    check_torchrl("0.14.1+cpu")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "brace: not there"),
        ({"brace": 16}, "brace = 16: must hold the estimator's arguments"),
        ({"brace": {"lmbda": 0.9}}, "brace.lmbda: no such option; it is called lam here"),
        ({"brace": {"differentiable": True}}, "brace.differentiable = True"),
        ({"brace": {"lam": 0.95, "window": 100}}, "the return keeps at most 0.0059 of its weight"),
    ],
)
def test_every_trap_of_a_configuration_is_found(settings, words):
    [finding] = config_findings(settings)
    assert words in finding.what
    assert finding.mend


@pytest.mark.parametrize("node", [{"window": 16}, {"window": "auto_path"}, {"value_target": "vtrace", "lam": 0.9}])
def test_a_good_configuration_gives_no_finding(node):
    assert config_findings({"brace": node}) == []
