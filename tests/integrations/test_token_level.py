"""The function under every adapter: what the two masks mean, and which targets come out."""

import math

import pytest
import torch

from brace_rl import core
from brace_rl.integrations.token_level import TokenLevelOptions, token_level_estimates

JUNK = math.nan


def batch(rows=3, columns=12, seed=0):
    """Rows with a tool span in the middle and padding behind, junk wherever the policy wrote nothing."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(rows, columns, dtype=torch.bool)
    mask[:, 4:6] = False
    for row in range(rows):
        mask[row, columns - row :] = False
    draw = [torch.randn(rows, columns, generator=generator, dtype=torch.float64) for _ in range(3)]
    values, behavior = draw[0], -draw[1].abs()
    target = behavior + 0.2 * draw[2]
    values, behavior, target = (torch.where(mask, x, JUNK) for x in (values, behavior, target))
    rewards = torch.zeros(rows, columns, dtype=torch.float64)
    rewards[torch.arange(rows), columns - 1 - torch.arange(rows)] = torch.arange(rows, dtype=torch.float64) + 1
    return {
        "values": values,
        "rewards": rewards,
        "behavior_logprobs": behavior,
        "target_logprobs": target,
        "action_mask": mask,
    }


OPTIONS = {
    "brace": TokenLevelOptions(window=4, whiten=False),
    "auto": TokenLevelOptions(window="auto", auto_eps=0.5, whiten=False),
    "auto_path": TokenLevelOptions(window="auto_path", auto_budget=0.5, whiten=False),
    "capped": TokenLevelOptions(value_target="capped", window=4, whiten=False),
    "vtrace": TokenLevelOptions(value_target="vtrace", whiten=False),
    "gae": TokenLevelOptions(value_target="gae", lam=0.9, whiten=False),
    "monte_carlo": TokenLevelOptions(value_target="monte_carlo", whiten=False),
    "own advantage": TokenLevelOptions(window=4, advantage="gae", whiten=False),
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())


def test_tool_and_padding_slots_are_skipped_as_in_the_golden_row():
    # Four actions around a tool span, reward 1 at the end, gamma 1, lambda 0.95. Backwards, u = delta + 0.95 u_next:
    # V = .8 .9 .95 .9: u_3 = .1, u_2 = -.05 + .095 = .045, u_1 = .05 + .04275, u_0 = .1 + .0881125.
    values = torch.tensor([[0.8, 0.9, 7.0, JUNK, 0.95, 0.9, -3.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0, 0, 1, 1, 0]], dtype=torch.bool)
    rewards = torch.tensor([[0, 0, 0, 0, 0, 1.0, 0]], dtype=torch.float64)
    found = token_level_estimates(
        values=values,
        rewards=rewards,
        action_mask=mask,
        options=TokenLevelOptions(value_target="gae", lam=0.95, whiten=False),
    )
    wanted = torch.tensor([[0.9881125, 0.99275, 0, 0, 0.995, 1.0, 0]], dtype=torch.float64)
    torch.testing.assert_close(found.targets, wanted)


@every_option
def test_junk_outside_the_action_mask_changes_nothing(options):
    given = batch()
    clean = token_level_estimates(**given, options=options)
    for junk in (0.0, math.inf, -1e30):
        spoiled = {
            name: torch.where(given["action_mask"], x, junk) if name.endswith(("values", "logprobs")) else x
            for name, x in given.items()
        }
        spoiled["rewards"] = torch.where(given["action_mask"], given["rewards"], JUNK)
        found = token_level_estimates(**spoiled, options=options)
        torch.testing.assert_close(found.targets, clean.targets)
        torch.testing.assert_close(found.advantages, clean.advantages)


@every_option
def test_a_row_with_tool_spans_equals_its_actions_alone(options):
    given = batch(rows=1)
    found = token_level_estimates(**given, options=options)
    at = given["action_mask"][0]
    alone = token_level_estimates(**{name: x[:, at] for name, x in given.items()}, options=options)
    torch.testing.assert_close(found.targets[:, at], alone.targets)
    torch.testing.assert_close(found.advantages[:, at], alone.advantages)


@every_option
def test_rejection_changes_no_target_and_no_unwhitened_advantage(options):
    given = batch()
    kept = given["action_mask"].clone()
    kept[0] = False
    kept[1, -3:] = False
    whole = token_level_estimates(**given, options=options)
    rejected = token_level_estimates(**given, loss_mask=kept, options=options)
    assert torch.equal(rejected.targets, whole.targets)
    assert torch.equal(rejected.advantages, whole.advantages)


def test_whitening_is_over_the_tokens_that_the_loss_sees():
    given = batch()
    kept = given["action_mask"].clone()
    kept[0] = False
    found = token_level_estimates(**given, loss_mask=kept)
    seen = found.advantages[kept]
    torch.testing.assert_close(seen.mean(), torch.zeros((), dtype=seen.dtype), atol=1e-12, rtol=0)
    torch.testing.assert_close(seen.var(correction=0), torch.ones((), dtype=seen.dtype))
    assert not found.advantages[~kept].any()


@every_option
def test_a_reward_on_a_trailing_tool_token_belongs_to_the_last_action(options):
    given = batch()
    given["action_mask"][:, -4:] = False
    behind = token_level_estimates(**given, options=options)
    last = given["action_mask"].long().cumsum(1).argmax(1)
    moved = torch.zeros_like(given["rewards"])
    moved[torch.arange(len(last)), last] = given["rewards"].sum(1)
    on_action = token_level_estimates(**{**given, "rewards": moved}, options=options)
    torch.testing.assert_close(behind.targets, on_action.targets)
    torch.testing.assert_close(behind.advantages, on_action.advantages)
    assert behind.metrics["rewards/moved"] == 3
    assert on_action.metrics["rewards/moved"] == 0


def test_window_zero_is_monte_carlo_and_gae_at_lambda_one():
    given = batch()
    found = token_level_estimates(**given, options=TokenLevelOptions(window=0, whiten=False))
    common = {"values": given["values"], "rewards": given["rewards"], "policy_mask": given["action_mask"]}
    for same in (core.monte_carlo_targets(**common), core.gae_targets(**common, lam=1.0)):
        torch.testing.assert_close(found.targets, same.targets)
        torch.testing.assert_close(found.advantages, same.advantages)


@pytest.mark.parametrize("bootstrap", [False, True])
def test_targets_are_those_of_the_core(bootstrap):
    given = batch()
    common = {name: x for name, x in given.items() if name != "action_mask"}
    at_end = torch.tensor([0.5, 0.0, -1.0], dtype=torch.float64) if bootstrap else None
    options = {"window": 3, "rho_clip": 1.3, "c_clip": 1.05, "gamma": 0.99, "lam": 0.97}
    wanted = core.brace_targets(**common, policy_mask=given["action_mask"], bootstrap_values=at_end, **options)
    found = token_level_estimates(**given, bootstrap_values=at_end, options=TokenLevelOptions(**options, whiten=False))
    assert torch.equal(found.targets, wanted.targets)
    assert torch.equal(found.advantages, wanted.advantages)


@every_option
def test_packed_responses_equal_their_own_rows(options):
    given = batch(rows=2, columns=10)
    if options.window == "auto":
        pytest.skip("one window for the batch: the same tokens, hence the same window, but not for each row alone")
    packed = {name: x.reshape(1, -1) for name, x in given.items()}
    segments = torch.arange(2).repeat_interleave(10)[None]
    found = token_level_estimates(**packed, segment_ids=segments, options=options)
    apart = token_level_estimates(**given, options=options)
    torch.testing.assert_close(found.targets, apart.targets.reshape(1, -1))
    torch.testing.assert_close(found.advantages, apart.advantages.reshape(1, -1))


def test_rows_without_actions_are_left_out_and_counted():
    given = batch()
    alone = token_level_estimates(**{name: x[1:] for name, x in given.items()})
    given["action_mask"][0] = False
    given["rewards"][0] = JUNK
    found = token_level_estimates(**given)
    torch.testing.assert_close(found.targets[1:], alone.targets)
    torch.testing.assert_close(found.advantages[1:], alone.advantages)
    assert not found.targets[0].any()
    assert found.metrics["rows/without_action"] == 1
    assert found.metrics["rewards/moved"] == 0


def test_overwritten_log_probs_are_seen():
    given = batch()
    assert token_level_estimates(**given).metrics["ratio/all_one"] == 0
    given["behavior_logprobs"] = given["target_logprobs"].clone()
    assert token_level_estimates(**given).metrics["ratio/all_one"] == 1


def test_automatic_windows_are_those_of_the_core_and_reported():
    given = batch()
    ratios = {name: given[name] for name in ("behavior_logprobs", "target_logprobs")}
    windows = core.path_windows(**ratios, policy_mask=given["action_mask"], budget=0.5)
    found = token_level_estimates(**given, options=OPTIONS["auto_path"])
    assert found.metrics["window/mean"] == pytest.approx(float(windows[given["action_mask"]].double().mean()))
    assert token_level_estimates(**given, options=OPTIONS["brace"]).metrics["window/mean"] == 4


def test_estimators_without_ratios_need_no_log_probs():
    given = {name: x for name, x in batch().items() if not name.endswith("logprobs")}
    found = token_level_estimates(**given, options=OPTIONS["monte_carlo"])
    assert found.targets[0, 0] == 1
    with pytest.raises(ValueError, match="behavior_logprobs: missing, and value_target = brace needs it"):
        token_level_estimates(**given)


def test_nothing_carries_a_gradient():
    given = batch()
    for name in ("values", "target_logprobs"):
        given[name].requires_grad_(True)
    found = token_level_estimates(**given)
    assert not any(x.requires_grad for x in (found.targets, found.advantages, *found.metrics.values()))


def test_junk_at_an_action_is_an_error_that_says_where():
    given = batch()
    given["behavior_logprobs"][1, 3] = JUNK
    with pytest.raises(ValueError, match="behavior_logprobs: nan at row 1, position 3"):
        token_level_estimates(**given)
    given = batch()
    given["rewards"][2, 1] = math.inf
    with pytest.raises(ValueError, match="rewards: inf at row 2, position 1"):
        token_level_estimates(**given)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("rewards", lambda x: x.sum(1, keepdim=True), r"rewards: got \[3, 1\], must be \[3, 12\] like action_mask"),
        ("rewards", lambda x: x[0], r"rewards: got \[12\], must be \[3, 12\]"),
        ("rewards", lambda x: x.sum(), r"rewards: got \[\], must be"),
        ("rewards", lambda x: x.long(), "rewards: got torch.int64, must be a floating-point tensor"),
        ("rewards", lambda x: x.tolist(), "rewards: got list, must be a torch tensor"),
        ("rewards", lambda x: x.to("meta"), "rewards: is on meta, action_mask is on cpu"),
        ("values", lambda x: x[:, :-1], r"values: got \[3, 11\]"),
        ("action_mask", lambda x: x.long(), "action_mask: got torch.int64, must be bool; use action_mask.bool"),
        ("action_mask", lambda x: x[0], r"action_mask: got \[12\], must be \[batch, tokens\]"),
        ("action_mask", lambda x: x.tolist(), "action_mask: got list"),
        ("loss_mask", lambda x: torch.ones(3, 12), r"loss_mask: got \[3, 12\] torch.float32, must be \[3, 12\] bool"),
        ("loss_mask", lambda x: [True], "loss_mask: got list"),
        ("bootstrap_values", lambda x: 0.5, "bootstrap_values: got float, must be a torch tensor"),
        ("bootstrap_values", lambda x: [0.0] * 3, "bootstrap_values: got list"),
        ("segment_ids", lambda x: [[0] * 12] * 3, "segment_ids: got list"),
        ("options", lambda x: {"window": 5}, "options: got dict, must be TokenLevelOptions"),
    ],
)
def test_a_tensor_that_cannot_be_meant_is_named_and_never_broadcast(name, change, message):
    given = batch()
    given[name] = change(given.get(name))
    with pytest.raises(ValueError, match=message):
        token_level_estimates(**given)


@pytest.mark.parametrize(("rows", "columns"), [(0, 12), (3, 0)])
def test_a_batch_without_a_token_is_refused(rows, columns):
    given = {name: x[:rows, :columns] for name, x in batch().items()}
    with pytest.raises(ValueError, match=rf"action_mask: got \[{rows}, {columns}\]; a batch needs a row and a token"):
        token_level_estimates(**given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"value_target": "mc"}, "value_target = 'mc': must be one of brace"),
        ({"advantage": "group"}, "advantage = 'group': must be one of eq27, gae"),
        ({"window": -1}, "window = -1: must be a whole number"),
        ({"window": True}, "window = True"),
        ({"window": "path"}, "window = 'path'"),
        ({"window": 10**30}, "must be a whole number from 0 to 2147483647"),
        ({"rho_clip": "abc"}, "rho_clip = 'abc': must be a number"),
        ({"gamma": None}, "gamma = None: must be a number"),
        ({"lam": True}, "lam = True: must be a number"),
        ({"whiten": "false"}, "whiten = 'false': must be true or false"),
        ([1, 2], r"options = \[1, 2\]: must be a mapping"),
        ({"rho_clip": 0}, "rho_clip = 0"),
        ({"lam": 1.5}, "lam = 1.5"),
        ({"policy_lam": -0.1}, "policy_lam = -0.1"),
        ({"auto_eps": 1.0}, "auto_eps = 1.0"),
        ({"auto_budget": math.nan}, "auto_budget = nan"),
        ({"windows": 3}, "windows: no such option; there are value_target, window"),
    ],
)
def test_an_option_that_cannot_be_meant_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        TokenLevelOptions.from_mapping(options)
