"""Single rules: numbers worked by hand, boundaries, reductions to one another, properties."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from actor_reference import CASES, every_case, random_batch, with_target
from hypothesis import given, settings
from hypothesis import strategies as st

from brace_rl import core
from brace_rl.actor import RULES, SELECTORS, ActorBatch


def batch_of(*, target=None, behavior=None, proximal=None, advantages=None, mask=None, **others) -> ActorBatch:
    """One row from ratios to a common log-prob of -1; what is not given is 1."""
    rows = [x for x in (target, behavior, proximal, advantages) if x is not None]
    ones = [1.0] * len(rows[0])

    def logprobs(ratios):
        return torch.tensor([ones if ratios is None else ratios], dtype=torch.float64).log() - 1

    return ActorBatch(
        target_logprobs=logprobs(target).requires_grad_(),
        behavior_logprobs=logprobs(behavior),
        proximal_logprobs=logprobs(proximal),
        advantages=torch.tensor([ones if advantages is None else advantages], dtype=torch.float64),
        loss_mask=torch.ones(1, len(ones), dtype=torch.bool) if mask is None else torch.tensor([mask]),
        **{name: torch.tensor([x], dtype=torch.float64) for name, x in others.items()},
    )


def gradient_of(rule: str, batch: ActorBatch, **options) -> list[float]:
    RULES[rule](batch, **options).loss.backward()
    return (batch.target_logprobs.grad[0] * batch.loss_mask.sum()).tolist()


def test_decoupled_worked_by_hand():
    """B = (2, 8), U = (1.1, 1): the second weight is above 5. Loss -(2 * 1.1) / 2, or with clamp -(2.2 + 5) / 2."""
    batch = batch_of(proximal=[2.0, 8.0], target=[2.2, 8.0])
    masked = RULES["decoupled"](batch)
    assert masked.loss.item() == pytest.approx(-1.1)
    assert masked.metrics["rejected_fraction"].item() == 0.5
    assert masked.metrics["weight_mean"].item() == pytest.approx(1.0)
    clamped = RULES["decoupled"](batch, over_cap="clamp")
    assert clamped.loss.item() == pytest.approx(-3.6)
    assert clamped.metrics["capped_fraction"].item() == 0.5
    assert clamped.metrics["weight_mean"].item() == pytest.approx(3.5)


@pytest.mark.parametrize(("lag", "alpha"), [(0, 0.0), (1, 0.0), (2, 0.5), (4, 0.75)])
def test_a3po_splits_the_ratio_by_the_version_lag(lag, alpha):
    """E = 1.21: weight E^alpha, unclipped ratio E^(1 - alpha); their product, and so the gradient, is -1.21."""
    batch = batch_of(target=[1.21], version_lag=[float(lag)])
    result = RULES["a3po"](batch)
    assert result.metrics["weight_mean"].item() == pytest.approx(1.21**alpha)
    result.loss.backward()
    assert batch.target_logprobs.grad.item() == pytest.approx(-1.21)


def test_a3po_at_lag_one_is_ppo_on_the_behavior_policy():
    batch = random_batch(0)
    got = RULES["a3po"](replace(batch, version_lag=torch.ones(4, 9)), weight_cap=1.001)
    assert got.loss.item() == pytest.approx(RULES["ppo"](batch).loss.item(), abs=1e-15)


def test_ppo_ewma_caps_the_total_ratio():
    """E = (150, 3): with a cap of 100 the first gradient is that of ratio 100, the second is untouched."""
    batch = batch_of(target=[150.0, 3.0], proximal=[140.0, 2.9])
    assert gradient_of("ppo_ewma", batch) == pytest.approx([-100.0, -3.0])
    assert RULES["ppo_ewma"](with_target(batch)).metrics["capped_fraction"].item() == 0.5


def test_ppo_ewma_under_a_loose_cap_is_decoupled_ppo():
    batch = random_batch(1)
    wanted = RULES["decoupled"](batch, weight_cap=1e6)
    assert RULES["ppo_ewma"](batch, ratio_cap=1e6).loss.item() == pytest.approx(wanted.loss.item(), abs=1e-14)


def test_bands_hold_their_bounds():
    batch = batch_of(proximal=[0.25, 0.5, 1.0, 4.0, 8.0], target=[0.25, 0.5, 1.0, 4.0, 8.0])
    bounds = {"low": 0.5, "high": 4.0}
    # the ratios pass through a logarithm, so the bounds move by an ulp
    wide = {"low": 0.5 * (1 - 1e-15), "high": 4.0 * (1 + 1e-15)}
    tight = {"low": 0.5 * (1 + 1e-12), "high": 4.0 * (1 - 1e-12)}
    assert gradient_of("icepop", batch, **wide) == pytest.approx([0, -0.5, -1, -4, 0])
    assert gradient_of("icepop", with_target(batch), **tight) == pytest.approx([0, 0, -1, 0, 0])
    assert gradient_of("ppo_ewma_revised", with_target(batch), **wide) == pytest.approx([0, -1, -1, -1, 0])
    assert RULES["icepop"](with_target(batch), **bounds).metrics["rejected_fraction"].item() >= 0.4


def test_icepop_has_no_weight_where_the_clip_holds_the_ratio():
    """E = (1.1, 1.3, 6): PPO's clip at 1.28 decides on the second, the band rejects the third."""
    batch = batch_of(target=[1.1, 1.3, 6.0])
    result = RULES["icepop"](batch, edge="E")
    assert result.loss.item() == pytest.approx(-(1.1 + 1.28) / 3)
    assert [result.metrics[x].item() for x in ("clip_fraction", "rejected_fraction", "active_fraction")] == (
        pytest.approx([1 / 3] * 3)
    )
    assert gradient_of("icepop", with_target(batch), edge="E") == pytest.approx([-1.1, 0, 0])


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ("icepop", {}),
        ("kpop", {}),
        ("estr", {"tau": 1.0, "edge": "B"}),
        ("dis", {}),
        ("m2po", {}),
        ("ppo_ewma_revised", {"low": 0.5, "high": 2.0}),
        ("tis", {"level": "geometric"}),
    ],
)
def test_no_mask_keeps_a_token_whose_behavior_is_not_a_number(rule, options):
    batch = batch_of(target=[1.0, 1.0], behavior=[math.nan, 1.0], behavior_entropy=[1.0, 1.0])
    rejected = RULES[rule](batch, **options).metrics["rejected_fraction"].item()
    assert rejected == (1.0 if rule == "tis" else 0.5)  # tis decides on a whole response


def test_a_trust_region_without_its_entropy_is_shut():
    batch = batch_of(target=[1.0, 1.0], behavior_entropy=[math.nan, 1.0])
    assert RULES["estr"](batch, tau=1.0).metrics["rejected_fraction"].item() == 0.5


def kpop_keeps(proximal: float, behavior: float, phi: float, dtype=torch.float64) -> bool:
    x = torch.tensor([[proximal]], dtype=dtype)
    batch = ActorBatch(
        target_logprobs=x,
        proximal_logprobs=x,
        behavior_logprobs=torch.tensor([[behavior]], dtype=dtype),
        advantages=torch.ones(1, 1, dtype=dtype),
        loss_mask=torch.ones(1, 1, dtype=torch.bool),
    )
    return RULES["kpop"](batch, phi=phi).metrics["rejected_fraction"].item() == 0


def test_kpop_threshold_is_the_larger_of_the_two_divergences():
    """p = 1/2, q = 1/4: D(p||q) = log(2)/2 + log(2/3)/2 = 0.1438, D(q||p) = log(1/2)/4 + 3 log(3/2)/4 = 0.1308."""
    larger = math.log(2) / 2 + math.log(2 / 3) / 2
    for p, q in ((0.5, 0.25), (0.25, 0.5)):
        assert kpop_keeps(math.log(p), math.log(q), larger * (1 + 1e-9))
        assert not kpop_keeps(math.log(p), math.log(q), larger * (1 - 1e-9))


def test_kpop_keeps_an_unlikely_token_at_a_ratio_icepop_rejects():
    assert kpop_keeps(-12.0, -14.0, 0.1)
    assert not kpop_keeps(-0.1, -2.1, 0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kpop_near_certainty(dtype):
    """1 - p = 1e-6 and 1 - q = 1e-2: D(q||p) = 0.99 log 0.99 + 0.01 log 1e4 = 0.0821, as good in float32."""
    log_p, log_q = math.log1p(-1e-6), math.log1p(-1e-2)
    assert kpop_keeps(log_p, log_q, 0.083, dtype)
    assert not kpop_keeps(log_p, log_q, 0.081, dtype)
    assert kpop_keeps(0.0, 0.0, 1e-9, dtype)
    assert kpop_keeps(1e-7, 0.0, 1e-9, dtype)  # rounding above certainty
    assert kpop_keeps(0.0, -1e-6, 1e-4, dtype)  # rounded to certainty against all but certain
    assert kpop_keeps(-1e-6, 0.0, 1e-4, dtype)
    assert not kpop_keeps(0.0, -0.5, 2.0, dtype)  # certain against doubt
    assert not kpop_keeps(-math.inf, -0.5, 2.0, dtype)  # impossible against likely


def test_estr_widens_with_the_entropy():
    """delta = log 1.2 = 0.182, squared 0.0332: kept at tau = 0.1 from an entropy of 0.322 on."""
    batch = batch_of(target=[1.2, 1.2, 1.0], behavior_entropy=[0.31, 0.33, 0.0])
    assert gradient_of("estr", batch, tau=0.1) == pytest.approx([0, -1.2, -1.0])
    certain = batch_of(target=[1.0, 1.0, 1.0 + 1e-9], behavior_entropy=[0.0, -1e-7, -1e-7])
    assert gradient_of("estr", certain, tau=1.0, eps=0.0) == pytest.approx([-1, -1, 0])


def test_dis_ignores_the_sign_of_the_advantage_and_its_band_is_open():
    """At ratio 2 with A < 0 PPO would push the ratio back; DIS with eps_high = 1/2 drops the token either way."""
    batch = batch_of(target=[2.0, 2.0, 1.2, 1.2], advantages=[1.0, -1.0, 1.0, -1.0])
    assert gradient_of("dis", batch, eps_high=0.5) == pytest.approx([0, 0, -1.2, 1.2])
    bounds = torch.tensor([[0.5, 2.0]], dtype=torch.float64).log()
    assert bounds.exp().tolist() == [[0.5, 2.0]]
    at_bounds = replace(batch_of(target=[1.0, 1.0]), target_logprobs=bounds, behavior_logprobs=torch.zeros(1, 2))
    assert RULES["dis"](at_bounds, eps_low=0.5, eps_high=1.0).metrics["rejected_fraction"].item() == 1
    assert RULES["dis"](at_bounds, eps_low=0.51, eps_high=1.01).metrics["rejected_fraction"].item() == 0


def test_tis_levels_worked_by_hand():
    """B = (1.5, 1.5, 3): tokens min(., 2) = 1.5, 1.5, 2; product 6.75, capped at 2; geometric mean 6.75^(1/3) = 1.89.

    U is 1, so the gradient is the weight.
    """
    batch = batch_of(proximal=[1.5, 1.5, 3.0], target=[1.5, 1.5, 3.0])
    assert gradient_of("tis", batch) == pytest.approx([-1.5, -1.5, -2])
    assert gradient_of("tis", with_target(batch), level="sequence") == pytest.approx([-2] * 3)
    assert gradient_of("tis", with_target(batch), level="sequence", cap=10.0) == pytest.approx([-6.75] * 3)
    assert gradient_of("tis", with_target(batch), level="geometric") == pytest.approx([0] * 3)
    assert gradient_of("tis", with_target(batch), level="geometric", low=1.8, high=1.9) == pytest.approx([-1] * 3)


def test_tis_sequences_are_rows_and_leave_out_what_is_not_in_the_mask():
    batch = batch_of(proximal=[1.5, 9.0, 1.2], target=[1.5, 9.0, 1.2], mask=[True, False, True])
    assert gradient_of("tis", batch, level="sequence") == pytest.approx([-1.8, 0, -1.8])


def test_gspo_has_one_ratio_per_response():
    """Mean log r of (1.2, 1/1.2) is 0: s = 1 though neither token's ratio is, and nothing is clipped."""
    balanced = batch_of(target=[1.2, 1 / 1.2], advantages=[1.0, -2.0])
    assert gradient_of("gspo", balanced) == pytest.approx([-1, 2])
    off = batch_of(target=[1.001, 1.001], advantages=[1.0, -1.0])
    assert gradient_of("gspo", off) == pytest.approx([0, 1.001])
    assert RULES["gspo"](with_target(off)).metrics["clip_fraction"].item() == 0.5


def test_gspo_with_one_advantage_per_response_has_the_gradient_of_the_sequence_form():
    """d/d log pi_t of -A n s = -A n s / n."""
    batch = random_batch(3, rows=1, spread=1e-5)
    batch = with_target(batch, advantages=torch.full((1, 9), 0.7, dtype=torch.float64))
    RULES["gspo"](batch).loss.backward()
    target = batch.target_logprobs.detach().clone().requires_grad_()
    ratios = torch.where(batch.loss_mask, target - batch.behavior_logprobs, 0.0)
    n = batch.loss_mask.sum().double()
    (-0.7 * n * (ratios.sum() / n).exp() / n).backward()
    assert torch.allclose(batch.target_logprobs.grad, target.grad, rtol=1e-12, atol=0)


def test_cispo_keeps_the_gradient_of_every_token():
    batch = batch_of(target=[0.01, 1.0, 100.0])
    assert gradient_of("cispo", batch) == pytest.approx([-0.01, -1, -5])
    assert RULES["cispo"](with_target(batch)).metrics["active_fraction"].item() == 1


def test_m2po_drops_the_largest_moments_until_the_rest_average_below_tau():
    """Moments 0.01, 0.04, 0.09, 1: means of the smallest 0.01, 0.025, 0.0467, 0.285; three are left at tau = 0.05."""
    batch = batch_of(target=[math.exp(x) for x in (0.3, -0.1, 1.0, 0.2)])
    for tau, kept in ((0.05, [1, 1, 0, 1]), (0.04, [0, 1, 0, 1]), (0.3, [1] * 4), (0.005, [0] * 4)):
        assert SELECTORS["m2po"](batch, tau=tau).tolist() == [[bool(x) for x in kept]]
    result = RULES["m2po"](batch)
    assert result.loss.item() == pytest.approx(-(math.exp(-0.1) + math.exp(0.2)) / 4)
    assert result.metrics["rejected_fraction"].item() == 0.5


def test_m2po_threshold_is_strict_and_ties_go_to_the_earlier_token():
    """Moments 0, 1, 1: means 0, 1/2, 2/3."""
    logs = torch.tensor([[1.0, 0.0, 1.0]], dtype=torch.float64)
    batch = replace(batch_of(target=[1.0] * 3), target_logprobs=logs, behavior_logprobs=torch.zeros_like(logs))
    assert SELECTORS["m2po"](batch, tau=0.5).tolist() == [[False, True, False]]
    assert SELECTORS["m2po"](batch, tau=0.6).tolist() == [[True, True, False]]


def test_m2po_does_what_it_is_told_to_keep():
    batch = batch_of(target=[1.0, 3.0])
    told = replace(batch, keep=torch.tensor([[False, True]]))
    assert gradient_of("m2po", told) == pytest.approx([0, -3])


@pytest.mark.parametrize("rule", ["ppo", "kpop", "estr", "tis", "ppo_ewma_revised"])
def test_masks_that_keep_everything_leave_ppo(rule):
    loose = {
        "ppo": {"edge": "U"},
        "kpop": {"phi": 1e9},
        "estr": {"tau": 1e9, "edge": "B"},
        "tis": {"level": "geometric", "low": 0.0, "high": 1e9},
        "ppo_ewma_revised": {"low": 0.0, "high": 1e9},
    }
    batch = random_batch(4)
    wanted = core.ppo_clip_loss(
        target_logprobs=batch.target_logprobs,
        behavior_logprobs=batch.proximal_logprobs,
        advantages=batch.advantages,
        policy_mask=batch.loss_mask,
    )
    got = RULES[rule](batch, **loose[rule])
    assert got.loss.item() == wanted.loss.item()
    assert got.metrics["clip_fraction"].item() == wanted.clip_fraction.item()


@every_case
@settings(max_examples=10, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), spread=st.floats(0, 3), scale=st.floats(0.01, 100))
def test_losses_scale_with_the_advantages_and_do_not_depend_on_the_order_of_rows(case, seed, spread, scale):
    rule, options = CASES[case]
    batch = random_batch(seed, spread=spread)
    loss, metrics = RULES[rule](batch, **options)
    scaled = RULES[rule](replace(batch, advantages=scale * batch.advantages), **options).loss
    assert scaled.item() == pytest.approx(scale * loss.item(), rel=1e-9, abs=1e-12)
    order = torch.randperm(4, generator=torch.Generator().manual_seed(seed))
    names = ("target_logprobs", "behavior_logprobs", "proximal_logprobs", "advantages", "loss_mask")
    names = (*names, "behavior_entropy", "version_lag")
    moved = RULES[rule](replace(batch, **{name: getattr(batch, name)[order] for name in names}), **options)
    assert moved.loss.item() == pytest.approx(loss.item(), rel=1e-9, abs=1e-12)
    parts = [metrics[x].item() for x in ("active_fraction", "rejected_fraction", "clip_fraction")]
    assert sum(parts) == pytest.approx(1)
    assert all(-1e-12 <= part <= 1 + 1e-12 for part in parts)


@every_case
@settings(max_examples=10, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), spread=st.floats(0.01, 3))
def test_a_token_without_gradient_is_rejected_or_clipped_and_an_active_one_has_a_gradient(case, seed, spread):
    rule, options = CASES[case]
    batch = random_batch(seed, spread=spread)
    loss, metrics = RULES[rule](batch, **options)
    loss.backward()
    moving = (batch.target_logprobs.grad != 0).sum().item()
    assert moving == round(metrics["active_fraction"].item() * batch.loss_mask.sum().item())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), spread=st.floats(0, 2), tau=st.floats(1e-4, 2), edge=st.sampled_from(["E", "B"]))
def test_m2po_keeps_the_largest_set_of_smallest_moments_below_tau(seed, spread, tau, edge):
    batch = random_batch(seed, spread=spread)
    keep = SELECTORS["m2po"](batch, tau=tau, edge=edge)
    log_ratio = (batch.proximal_logprobs if edge == "B" else batch.target_logprobs.detach()) - batch.behavior_logprobs
    moments = log_ratio.square()
    assert not bool((keep & ~batch.loss_mask).any())
    kept = moments[keep].tolist()
    dropped = sorted(moments[batch.loss_mask & ~keep].tolist())
    if kept:
        assert math.fsum(kept) / len(kept) < tau * (1 + 1e-12)
    if dropped:
        assert max(kept, default=0.0) <= dropped[0]
        assert (math.fsum(kept) + dropped[0]) / (len(kept) + 1) >= tau * (1 - 1e-12)
