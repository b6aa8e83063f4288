"""Invariances that hold for every estimator, whatever the batch."""

from __future__ import annotations

import math

import pytest
import torch
from estimators import ESTIMATORS, estimate, every_estimator, random_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from brace_rl import core

seeds = st.integers(0, 2**31)
windows = st.sampled_from([0, 1, 2, 3, 7, 100])
names = st.sampled_from(list(ESTIMATORS))
gammas = st.sampled_from([1.0, 0.9])
JUNK = (math.nan, math.inf, -math.inf, 1e30)
TOKEN_INPUTS = ("values", "behavior_logprobs", "target_logprobs")
few = settings(max_examples=40, deadline=None)


def close(a: torch.Tensor, b: torch.Tensor, atol: float = 1e-10) -> bool:
    return torch.allclose(a, b, rtol=0, atol=atol)


@few
@given(names, seeds, windows, gammas, st.sampled_from(JUNK))
def test_junk_at_non_policy_tokens_changes_nothing(name, seed, window, gamma, junk):
    batch = random_batch(seed)
    wanted = estimate(name, batch, window=window, gamma=gamma)
    for key in TOKEN_INPUTS:
        batch[key] = torch.where(batch["policy_mask"], batch[key], junk)
    got = estimate(name, batch, window=window, gamma=gamma)
    assert torch.equal(got.targets, wanted.targets)
    assert torch.equal(got.advantages, wanted.advantages)


@few
@given(names, seeds, windows, gammas)
def test_rows_do_not_know_each_other(name, seed, window, gamma):
    batch = random_batch(seed)
    order = torch.randperm(4, generator=torch.Generator().manual_seed(seed))
    got = estimate(name, {k: v[order] for k, v in batch.items()}, window=window, gamma=gamma)
    wanted = estimate(name, batch, window=window, gamma=gamma)
    assert close(got.targets, wanted.targets[order])
    alone = estimate(name, {k: v[1:2] for k, v in batch.items()}, window=window, gamma=gamma)
    assert close(alone.targets[0], wanted.targets[1])


@few
@given(names, seeds, windows, gammas)
def test_masked_equals_compacted(name, seed, window, gamma):
    batch = random_batch(seed, rows=1, columns=20)
    mask = batch["policy_mask"][0]
    compact = {k: v[:, mask] for k, v in batch.items()}
    got, wanted = (estimate(name, b, window=window, gamma=gamma) for b in (batch, compact))
    assert close(got.targets[:, mask], wanted.targets)
    assert close(got.advantages[:, mask], wanted.advantages)
    assert bool((got.targets[:, ~mask] == 0).all() and (got.advantages[:, ~mask] == 0).all())


@few
@given(names, seeds, windows, gammas)
def test_linear_in_rewards_and_values_together(name, seed, window, gamma):
    a, b = random_batch(seed), random_batch(seed + 1)
    b |= {k: a[k] for k in ("behavior_logprobs", "target_logprobs", "policy_mask")}
    b["rewards"] = b["rewards"] * a["policy_mask"]
    mixed = a | {k: 2.0 * a[k] - 0.5 * b[k] for k in ("rewards", "values")}
    of_a, of_b, of_mixed = (estimate(name, x, window=window, gamma=gamma) for x in (a, b, mixed))
    for field in ("targets", "advantages"):
        wanted = 2.0 * getattr(of_a, field) - 0.5 * getattr(of_b, field)
        assert close(getattr(of_mixed, field), wanted, 1e-9)


@few
@given(names, seeds, windows, gammas)
def test_packed_equals_separate(name, seed, window, gamma):
    """Rows side by side in one row: full, with holes, empty, and truncated ones with a bootstrap value."""
    batch = random_batch(seed, rows=4, columns=9)
    batch["policy_mask"][2] = False
    batch["rewards"][2] = 0.0
    generator = torch.Generator().manual_seed(seed)
    bootstrap = torch.randn(4, generator=generator, dtype=torch.float64)
    wanted = estimate(name, batch, window=window, gamma=gamma, bootstrap_values=bootstrap)
    packed = {k: v.reshape(1, -1) for k, v in batch.items()}
    ids = torch.tensor([3, 8, 5, 8]).repeat_interleave(9)[None]
    got = estimate(
        name,
        packed,
        window=window,
        gamma=gamma,
        segment_ids=ids,
        bootstrap_values=bootstrap.repeat_interleave(9)[None],
    )
    assert close(got.targets, wanted.targets.reshape(1, -1))
    assert close(got.advantages, wanted.advantages.reshape(1, -1))


@few
@given(seeds, gammas)
def test_a_window_per_position_is_the_fixed_window_at_each_position(seed, gamma):
    batch = random_batch(seed)
    each = torch.randint(0, 15, (4, 12), generator=torch.Generator().manual_seed(seed))
    got = core.brace_targets(**batch, window=each, gamma=gamma).targets
    for window in range(15):
        wanted = core.brace_targets(**batch, window=window, gamma=gamma).targets
        here = each == window
        assert close(got[here], wanted[here])


@every_estimator
def test_reward_of_a_packed_neighbour_never_leaks(estimator):
    """An enormous reward next door must not even cost precision."""
    batch = {k: v.float() if v.is_floating_point() else v for k, v in random_batch(0, rows=1, columns=12).items()}
    ids = torch.tensor([[1] * 6 + [2] * 6])
    batch["policy_mask"][:, [4, 10]] = True
    wanted = estimate(estimator, batch, window=3, segment_ids=ids)
    batch["rewards"][0, 10] = 1e20
    got = estimate(estimator, batch, window=3, segment_ids=ids)
    assert torch.equal(got.targets[:, :6], wanted.targets[:, :6])


@every_estimator
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_computed_and_returned_in_float32(estimator, dtype):
    batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in random_batch(1).items()}
    got = estimate(estimator, batch, window=3)
    wanted = estimate(estimator, {k: v.float() if v.is_floating_point() else v for k, v in batch.items()}, window=3)
    exact = estimate(estimator, {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}, window=3)
    assert got.targets.dtype == got.advantages.dtype == torch.float32
    assert exact.targets.dtype == torch.float64
    assert torch.equal(got.targets, wanted.targets)
    assert close(got.targets.double(), exact.targets, 1e-5)


@every_estimator
@pytest.mark.parametrize("high", ["values", "rewards"])
def test_one_float64_input_makes_everything_float64(estimator, high):
    exact = random_batch(6)
    mixed = {k: v.float() if v.is_floating_point() and k != high else v for k, v in exact.items()}
    got = estimate(estimator, mixed, window=3)
    assert got.targets.dtype == torch.float64
    rounded = {k: v.double() if v.is_floating_point() else v for k, v in mixed.items()}
    assert torch.equal(got.targets, estimate(estimator, rounded, window=3).targets)


@every_estimator
def test_float32_stays_close_over_thousands_of_tokens(estimator):
    g = torch.Generator().manual_seed(0)
    shape = (2, 5000)
    batch = {
        "values": torch.rand(shape, generator=g),
        "rewards": torch.zeros(shape),
        "behavior_logprobs": -torch.rand(shape, generator=g),
        "policy_mask": torch.ones(shape, dtype=torch.bool),
    }
    batch["target_logprobs"] = batch["behavior_logprobs"] + 0.1 * torch.randn(shape, generator=g)
    batch["rewards"][:, -1] = 1.0
    got = estimate(estimator, batch, window=1000, c_clip=1.05)
    exact = estimate(
        estimator, {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}, window=1000, c_clip=1.05
    )
    scale = exact.targets.abs().max()
    assert ((got.targets.double() - exact.targets).abs().max() / scale).item() < 1e-4


@every_estimator
def test_targets_and_advantages_carry_no_gradient(estimator):
    batch = random_batch(2)
    for key in ("values", "rewards", "behavior_logprobs", "target_logprobs"):
        batch[key].requires_grad_()
    got = estimate(estimator, batch, window=3)
    assert not got.targets.requires_grad
    assert not got.advantages.requires_grad


@every_estimator
def test_inputs_are_not_written_to(estimator):
    batch = random_batch(3)
    before = {k: v.clone() for k, v in batch.items()}
    estimate(estimator, batch, window=3, bootstrap_values=torch.ones(4, dtype=torch.float64))
    assert all(torch.equal(before[k], batch[k]) for k in batch)


@every_estimator
def test_strided_inputs_are_served(estimator):
    batch = random_batch(4)
    strided = {k: v.t().contiguous().t() for k, v in batch.items()}
    assert not strided["values"].is_contiguous()
    assert torch.equal(estimate(estimator, strided, window=3).targets, estimate(estimator, batch, window=3).targets)


@every_estimator
def test_chunks_of_rows_do_not_show(estimator, monkeypatch):
    from brace_rl.core import layout

    batch = random_batch(5, rows=5)
    wanted = estimate(estimator, batch, window=3)
    monkeypatch.setattr(layout, "CPU_CHUNK_TOKENS", 24)
    got = estimate(estimator, batch, window=3)
    assert close(got.targets, wanted.targets)
    assert close(got.advantages, wanted.advantages)
