"""What every actor rule must do, whatever it is: one table of rules and options, one test per promise."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from actor_reference import CASES, REJECTING, TENSORS, every_case, random_batch, with_target

from brace_rl import core
from brace_rl.actor import RULES, SELECTORS, ActorBatch, ActorLoss, MissingInputError
from brace_rl.actor.options import RULE_OPTIONS, RuleOptions
from brace_rl.errors import BraceError

METRICS = {"clip_fraction", "rejected_fraction", "capped_fraction", "active_fraction", "weight_mean"}


def run(case: str, batch: ActorBatch) -> tuple[ActorLoss, torch.Tensor]:
    """The rule's result, and the gradient of its loss."""
    rule, options = CASES[case]
    result = RULES[rule](batch, **options)
    result.loss.backward()
    return result, batch.target_logprobs.grad


def options_of(case: str) -> RuleOptions:
    rule, options = CASES[case]
    trainer = {"beta": 0.9} if rule == "ppo_ewma" else {}
    return RULE_OPTIONS[rule](**options, **trainer)


def test_the_table_holds_every_rule():
    assert {rule for rule, _ in CASES.values()} == set(RULES)
    assert list(RULES) == [
        "ppo", "decoupled", "a3po", "ppo_ewma", "ppo_ewma_revised", "icepop", "kpop", "estr", "dis", "tis", "gspo",
        "cispo", "m2po",
    ]  # fmt: skip


@every_case
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
def test_junk_outside_the_mask_changes_nothing(case, junk):
    batch = random_batch(1)
    dirty = {name: torch.where(batch.loss_mask, getattr(batch, name).detach().double(), junk) for name in TENSORS}
    clean, clean_gradient = run(case, with_target(batch, version_lag=batch.version_lag.double()))
    got, gradient = run(case, with_target(batch, **dirty))
    assert got.loss.item() == clean.loss.item()
    assert torch.equal(gradient, clean_gradient)
    assert got.metrics == clean.metrics


@every_case
def test_infinite_ratios_give_finite_losses_gradients_and_metrics(case):
    """Two log-probs of a response at minus infinity, every pair of roles in turn, for either sign of the advantage."""
    for first, second in itertools.product(TENSORS[:3], repeat=2):
        for advantage in (-1.0, 1.0):
            tensors = {x: torch.full((2, 4), -1.0) for x in TENSORS[:3]}
            tensors[first][0, 1] = -math.inf
            tensors[second][0, 2] = -math.inf
            batch = with_target(
                random_batch(2, rows=2, columns=4, dtype=torch.float32),
                **tensors,
                advantages=torch.full((2, 4), advantage),
                loss_mask=torch.ones(2, 4, dtype=torch.bool),
            )
            result, gradient = run(case, batch)
            where = (first, second, advantage)
            assert result.loss.isfinite(), where
            assert gradient.isfinite().all(), where
            assert all(x.isfinite() for x in result.metrics.values()), where


@every_case
def test_a_target_that_is_not_a_number_shows_in_the_loss(case):
    """A diverged policy must not be rejected token by token until nothing is left to see."""
    batch = random_batch(3)
    target = batch.target_logprobs.detach().clone()
    target[0, 0] = math.nan
    result, _ = run(case, with_target(batch, target_logprobs=target))
    assert result.loss.isnan()


@every_case
def test_gradient_flows_into_the_target_alone(case):
    rule, options = CASES[case]
    batch = random_batch(4)
    watched = {name: getattr(batch, name).detach().double().clone().requires_grad_() for name in TENSORS}
    result = RULES[rule](replace(batch, **watched), **options)
    result.loss.backward()
    assert [name for name, x in watched.items() if x.grad is not None] == ["target_logprobs"]
    assert not any(x.requires_grad for x in result.metrics.values())


@every_case
def test_at_ratio_one_the_gradient_is_the_policy_gradient(case):
    """-A/N at every token: no weight, no mask and no clip has anything to say."""
    batch = random_batch(5)
    same = dict.fromkeys(TENSORS[:3], batch.behavior_logprobs)
    result, gradient = run(case, with_target(batch, **same))
    wanted = torch.where(batch.loss_mask, -batch.advantages, 0.0) / batch.loss_mask.sum()
    assert torch.allclose(gradient, wanted, rtol=1e-12, atol=1e-15)
    assert result.metrics["active_fraction"].item() == 1
    assert result.metrics["weight_mean"].item() == pytest.approx(1)
    assert result.metrics["rejected_fraction"].item() == 0


@pytest.mark.parametrize("case", REJECTING)
def test_a_batch_that_is_rejected_whole_gives_zero_loss_and_says_so(case):
    """All ratios are e^3 or more."""
    batch = random_batch(6)
    far = {name: torch.full((4, 9), x) for name, x in zip(TENSORS[:3], (-2.0, -8.0, -5.0), strict=True)}
    result, gradient = run(case, with_target(batch, **far, version_lag=torch.full((4, 9), 5)))
    assert result.loss.item() == 0
    assert torch.equal(gradient, torch.zeros(4, 9))
    assert {name: x.item() for name, x in result.metrics.items()} == {
        "clip_fraction": 0, "rejected_fraction": 1, "capped_fraction": 0, "active_fraction": 0, "weight_mean": 0,
    }  # fmt: skip


@pytest.mark.parametrize("case", [case for case in CASES if case not in REJECTING])
def test_rules_without_a_mask_reject_nothing(case):
    result, _ = run(case, random_batch(6, spread=2.0))
    assert result.metrics["rejected_fraction"].item() == 0


@every_case
def test_a_batch_without_tokens_has_loss_zero_and_a_zero_gradient(case):
    batch = random_batch(7)
    result, gradient = run(case, with_target(batch, loss_mask=torch.zeros(4, 9, dtype=torch.bool)))
    assert result.loss.item() == 0
    assert torch.equal(gradient, torch.zeros(4, 9, dtype=torch.float64))
    assert {x.item() for x in result.metrics.values()} == {0.0}


@every_case
def test_rejection_leaves_the_mask_and_with_it_the_value_targets_alone(case):
    batch = random_batch(8, spread=1.5)
    mask = batch.loss_mask.clone()

    def targets(policy_mask: torch.Tensor) -> torch.Tensor:
        last = policy_mask.long().cumsum(1).argmax(1, keepdim=True)
        rewards = torch.zeros(4, 9, dtype=torch.float64).scatter(1, last, 1.0) * policy_mask
        return core.brace_targets(
            values=batch.behavior_entropy,
            rewards=rewards,
            policy_mask=policy_mask,
            behavior_logprobs=batch.behavior_logprobs,
            target_logprobs=batch.target_logprobs.detach(),
        ).targets

    before = targets(mask)
    run(case, batch)
    assert torch.equal(batch.loss_mask, mask)
    assert torch.equal(targets(batch.loss_mask), before)


@every_case
def test_micro_batches_add_up_to_the_minibatch(case):
    rule, options = CASES[case]
    batch = random_batch(9, rows=7)
    whole, gradient = run(case, with_target(batch))
    keep = SELECTORS[rule](batch, **options) if rule in SELECTORS else None
    losses, gradients, metrics = [], [], []
    for rows in (slice(0, 3), slice(3, 4), slice(4, 7)):
        part = {name: getattr(batch, name)[rows] for name in (*TENSORS[1:], "loss_mask")}
        part["keep"] = None if keep is None else keep[rows]
        micro = with_target(
            batch, target_logprobs=batch.target_logprobs[rows], denominator=batch.loss_mask.sum(), **part
        )
        result, micro_gradient = run(case, micro)
        losses.append(result.loss)
        gradients.append(micro_gradient)
        metrics.append(result.metrics)
    assert torch.stack(losses).sum().item() == pytest.approx(whole.loss.item(), rel=1e-12, abs=1e-14)
    assert torch.allclose(torch.cat(gradients), gradient, rtol=1e-12, atol=1e-15)
    assert set(whole.metrics) == METRICS
    for name, wanted in whole.metrics.items():
        assert sum(m[name] for m in metrics).item() == pytest.approx(wanted.item(), abs=1e-12), name


@every_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(case, dtype):
    half = random_batch(10, dtype=dtype)
    wide = with_target(half, **{name: getattr(half, name).float() for name in TENSORS})
    result, gradient = run(case, half)
    wanted, wanted_gradient = run(case, wide)
    assert result.loss.dtype == torch.float32
    assert result.loss.item() == wanted.loss.item()
    assert torch.equal(gradient, wanted_gradient.to(dtype))


@every_case
def test_no_rule_waits_for_the_device(case):
    """Tensors without data: whatever asks for a value fails."""
    rule, options = CASES[case]
    batch = random_batch(11)
    absent = {name: getattr(batch, name).detach().to("meta") for name in (*TENSORS, "loss_mask")}
    result = RULES[rule](with_target(batch, **absent), **options)
    assert result.loss.shape == ()
    result.loss.backward()


@every_case
def test_a_rule_reads_what_its_options_say_it_needs_and_nothing_else(case):
    rule, _ = CASES[case]
    options = options_of(case)
    needs = {
        "behavior_logprobs": options.needs_behavior,
        "proximal_logprobs": options.needs_proximal,
        "behavior_entropy": options.needs_entropy,
        "version_lag": options.needs_version_lag,
    }
    batch = random_batch(12)
    wanted, _ = run(case, with_target(batch))
    least, _ = run(case, with_target(batch, **{name: None for name, needed in needs.items() if not needed}))
    assert least.loss.item() == wanted.loss.item()
    for name, needed in needs.items():
        if needed:
            with pytest.raises(MissingInputError, match=f"^{rule}: {name} missing from the batch; ..") as error:
                run(case, with_target(batch, **{name: None}))
            assert isinstance(error.value, BraceError)
            assert "\n" not in str(error.value)
    assert options.whole_minibatch == (rule in SELECTORS)
    assert options.fresh_only == (case.endswith("-U"))


def test_missing_inputs_say_how_to_get_them():
    batch = random_batch(13)
    with pytest.raises(MissingInputError, match="the embedded engine records it"):
        RULES["estr"](replace(batch, behavior_entropy=None), tau=1.0)
    with pytest.raises(MissingInputError, match=r"averaged weights \(brace_rl.actor.weight_average.WeightAverage\)"):
        RULES["ppo_ewma"](replace(batch, proximal_logprobs=None))
    with pytest.raises(MissingInputError, match="without gradient, before the first optimiser step"):
        RULES["decoupled"](replace(batch, proximal_logprobs=None))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_mask": torch.ones(4, 9)}, r"loss_mask: got \[4, 9\] torch.float32, must be \[batch, tokens\] bool"),
        ({"advantages": torch.ones(4, 8)}, r"advantages: got \[4, 8\], must be \[4, 9\] like loss_mask"),
        ({"behavior_entropy": torch.ones(9)}, r"behavior_entropy: got \[9\], must be \[4, 9\]"),
        ({"keep": torch.ones(4, 9)}, "keep: got torch.float32, must be bool"),
        ({"target_logprobs": None}, "target_logprobs: got NoneType, must be a tensor"),
        ({"loss_mask": [[True]]}, "loss_mask: got list, must be a tensor"),
        (
            {"behavior_logprobs": torch.ones(4, 9, dtype=torch.long)},
            "behavior_logprobs: got torch.int64, must be floating",
        ),
        ({"denominator": 0}, "denominator: got 0, must be above 0 and finite"),
        ({"denominator": math.nan}, "denominator: got nan"),
    ],
)
def test_a_batch_that_cannot_be_meant_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(random_batch(14), **change)


@pytest.mark.parametrize(
    ("rule", "options", "message"),
    [
        ("ppo", {"edge": "B"}, r"ppo: edge = 'B'; must be 'E' \(target/behavior\) or 'U' \(target/proximal\)"),
        ("dis", {"edge": "B"}, "dis: edge = 'B'"),
        ("cispo", {"edge": "B"}, "cispo: edge = 'B'"),
        ("gspo", {"edge": "X"}, "gspo: edge = 'X'"),
        ("icepop", {"edge": "U"}, r"icepop: edge = 'U'; must be 'B' \(proximal/behavior\) or 'E'"),
        ("kpop", {"edge": "U"}, "kpop: edge = 'U'"),
        ("estr", {"edge": "U", "tau": 1.0}, "estr: edge = 'U'"),
        ("m2po", {"edge": "U"}, "m2po: edge = 'U'"),
        ("decoupled", {"weight_cap": 0.0}, "decoupled: weight_cap = 0.0; must be above 0"),
        ("decoupled", {"over_cap": "drop"}, "decoupled: over_cap = 'drop'; must be 'mask' or 'clamp'"),
        ("a3po", {"weight_cap": math.inf}, "a3po: weight_cap = inf; must be above 0 and finite"),
        ("ppo_ewma", {"ratio_cap": 0.5}, "ppo_ewma: ratio_cap = 0.5; must be at least 1"),
        ("ppo_ewma_revised", {"low": 2.0, "high": 1.0}, "ppo_ewma_revised: low = 2.0, high = 1.0; need 0 <= low"),
        ("icepop", {"high": math.inf}, "icepop: low = 0.5, high = inf"),
        ("kpop", {"phi": "wide"}, "kpop: phi = wide; must be above 0"),
        ("estr", {"tau": True}, "estr: tau = True; must be above 0"),
        ("kpop", {"phi": -1.0}, "kpop: phi = -1.0; must be above 0"),
        ("estr", {"tau": 0.0}, "estr: tau = 0.0; must be above 0"),
        ("estr", {"tau": 1.0, "eps": -0.1}, "estr: eps = -0.1; must be at least 0"),
        ("dis", {"eps_low": 1.5}, "dis: eps_low = 1.5; must be above 0 and at most 1"),
        ("dis", {"eps_high": 0.0}, "dis: eps_high = 0.0"),
        ("tis", {"level": "row"}, "tis: level = 'row'; must be 'token', 'sequence' or 'geometric'"),
        ("tis", {"cap": 0.0}, "tis: cap = 0.0"),
        ("tis", {"level": "geometric", "low": -1.0}, "tis: low = -1.0"),
        ("cispo", {"cap": -2.0}, "cispo: cap = -2.0"),
        ("m2po", {"tau": math.nan}, "m2po: tau = nan"),
    ],
)  # fmt: skip
def test_options_out_of_range_are_refused(rule, options, message):
    with pytest.raises(ValueError, match=message):
        RULES[rule](random_batch(15), **options)
