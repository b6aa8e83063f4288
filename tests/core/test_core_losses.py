"""Losses and whitening: hand-worked numbers, gradients, micro-batches, extremes."""

from __future__ import annotations

import math

import pytest
import torch

from brace_rl import core


def test_value_loss_worked_by_hand():
    """clip 1/2, V_old = 0. Token by token (V, target): plain error, clipped error, the larger.

    (0.25, 1): 0.5625, 0.5625 -> 0.5625.  (1, 1): 0, (1/2 - 1)^2 = 0.25 -> 0.25.  (-1, 0): 1, 0.25 -> 1.
    Half the mean of the three: (0.5625 + 0.25 + 1) / 6. Only the second is decided by the clip.
    Gradient: (V - target) / 3 where the plain error decides, 0 where the clip does: (-0.25, 0, -1/3).
    """
    values = torch.tensor([[0.25, 1.0, -1.0, 9.0]], requires_grad=True)
    result = core.value_loss(
        values=values,
        old_values=torch.tensor([[0.0, 0.0, 0.0, math.nan]]),
        targets=torch.tensor([[1.0, 1.0, 0.0, math.inf]]),
        policy_mask=torch.tensor([[True, True, True, False]]),
    )
    result.loss.backward()
    assert result.loss.item() == pytest.approx(1.8125 / 6)
    assert result.clip_fraction.item() == pytest.approx(1 / 3)
    assert torch.allclose(values.grad, torch.tensor([[-0.25, 0.0, -1 / 3, 0.0]]))


def test_value_loss_without_a_clip_is_half_the_mean_squared_error():
    g = torch.Generator().manual_seed(0)
    values, old, targets = torch.randn(3, 2, 5, generator=g)
    mask = torch.ones(2, 5, dtype=torch.bool)
    result = core.value_loss(values=values, old_values=old, targets=targets, policy_mask=mask, value_clip=math.inf)
    assert result.loss.item() == pytest.approx((values - targets).square().mean().item() / 2)
    assert result.clip_fraction.item() == 0


def test_ppo_loss_worked_by_hand():
    """Ratios (1/2, 2, 2, 1/2), A = (1, 1, -1, -1), clip to [0.8, 1.28]:

    -A w = (-0.5, -2, 2, 0.5); clipped (-0.8, -1.28, 1.28, 0.8); larger: (-0.5, -1.28, 2, 0.8); mean 0.255.
    The second and fourth are clipped. d/d log pi of an unclipped term is -A w: gradient (-0.5, 0, 2, 0) / 4.
    """
    log_ratio = torch.tensor([[0.5, 2.0, 2.0, 0.5]]).log()
    target = (log_ratio - 1.0).requires_grad_()
    result = core.ppo_clip_loss(
        target_logprobs=target,
        behavior_logprobs=torch.full((1, 4), -1.0),
        advantages=torch.tensor([[1.0, 1.0, -1.0, -1.0]]),
        policy_mask=torch.ones(1, 4, dtype=torch.bool),
    )
    result.loss.backward()
    assert result.loss.item() == pytest.approx(0.255, abs=1e-6)
    assert result.clip_fraction.item() == 0.5
    assert torch.allclose(target.grad, torch.tensor([[-0.125, 0.0, 0.5, 0.0]]), atol=1e-6)


def test_dual_clip_bounds_a_negative_advantage_alone():
    kw = {
        "behavior_logprobs": torch.zeros(1, 2),
        "advantages": torch.tensor([[-1.0, 1.0]]),
        "policy_mask": torch.ones(1, 2, dtype=torch.bool),
        "dual_clip": 3.0,
    }
    target = torch.tensor([[10.0, 10.0]]).log().requires_grad_()
    result = core.ppo_clip_loss(target_logprobs=target, **kw)
    result.loss.backward()
    assert result.loss.item() == pytest.approx((3.0 - 1.28) / 2)
    assert torch.equal(target.grad, torch.zeros(1, 2))


@pytest.mark.parametrize("rule", ["actor", "critic"])
def test_micro_batches_add_up_to_the_batch(rule):
    g = torch.Generator().manual_seed(1)
    a, b, c = torch.randn(3, 6, 7, generator=g, dtype=torch.float64)
    mask = torch.rand(6, 7, generator=g) < 0.6

    def loss(rows: slice, denominator: torch.Tensor | None) -> core.LossResult:
        if rule == "actor":
            names = ("target_logprobs", "behavior_logprobs", "advantages")
            function = core.ppo_clip_loss
        else:
            names = ("values", "old_values", "targets")
            function = core.value_loss
        inputs = dict(zip(names, (a[rows], b[rows], c[rows]), strict=True))
        return function(**inputs, policy_mask=mask[rows], denominator=denominator)

    whole = loss(slice(0, 6), None)
    parts = [loss(slice(i, i + 2), mask.sum()) for i in (0, 2, 4)]
    assert sum(p.loss for p in parts).item() == pytest.approx(whole.loss.item(), abs=1e-12)
    assert sum(p.clip_fraction for p in parts).item() == pytest.approx(whole.clip_fraction.item())


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_masked_junk_reaches_neither_loss_nor_gradient(junk):
    mask = torch.tensor([[True, False, True]])
    clean = torch.tensor([[-1.0, -2.0, -3.0]])
    dirty = torch.tensor([[-1.0, junk, -3.0]])
    for function, names in (
        (core.ppo_clip_loss, ("target_logprobs", "behavior_logprobs", "advantages")),
        (core.value_loss, ("values", "old_values", "targets")),
    ):
        trained = [x.clone().requires_grad_() for x in (clean, dirty)]
        losses = []
        for x, other in zip(trained, (clean, dirty), strict=True):
            inputs = dict(zip(names, (x, other - 0.3, other), strict=True))
            losses.append(function(**inputs, policy_mask=mask).loss)
            losses[-1].backward()
        assert losses[0].item() == losses[1].item()
        assert torch.equal(trained[0].grad, trained[1].grad)


@pytest.mark.parametrize("log_ratio", [-2000.0, 2000.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_ratio_extremes_stay_finite(log_ratio, advantage):
    target = torch.tensor([[log_ratio]], requires_grad=True)
    result = core.ppo_clip_loss(
        target_logprobs=target,
        behavior_logprobs=torch.zeros(1, 1),
        advantages=torch.full((1, 1), advantage),
        policy_mask=torch.ones(1, 1, dtype=torch.bool),
    )
    result.loss.backward()
    assert result.loss.isfinite()
    assert target.grad.isfinite().all()


def test_only_the_trained_tensor_gets_a_gradient():
    mask = torch.ones(1, 3, dtype=torch.bool)
    tensors = [torch.randn(1, 3, requires_grad=True) for _ in range(6)]
    core.ppo_clip_loss(
        target_logprobs=tensors[0], behavior_logprobs=tensors[1], advantages=tensors[2], policy_mask=mask
    ).loss.backward()
    core.value_loss(values=tensors[3], old_values=tensors[4], targets=tensors[5], policy_mask=mask).loss.backward()
    assert [x.grad is not None for x in tensors] == [True, False, False, True, False, False]


def test_losses_of_an_empty_mask_are_zero_with_a_zero_gradient():
    x = torch.randn(2, 3, requires_grad=True)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    loss = core.value_loss(values=x, old_values=x, targets=x, policy_mask=mask).loss
    loss = loss + core.ppo_clip_loss(target_logprobs=x, behavior_logprobs=x, advantages=x, policy_mask=mask).loss
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(x.grad, torch.zeros(2, 3))


def test_bfloat16_losses_are_computed_in_float32():
    x = torch.full((1, 300), 0.001, dtype=torch.bfloat16)
    mask = torch.ones(1, 300, dtype=torch.bool)
    result = core.value_loss(values=x, old_values=x, targets=x + 1, policy_mask=mask)
    assert result.loss.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip_low": 0.0}, "clip_low = 0.0"),
        ({"clip_low": 1.5}, "clip_low = 1.5"),
        ({"clip_high": -0.1}, "clip_high = -0.1"),
        ({"dual_clip": 1.0}, "dual_clip = 1.0: must be above 1"),
    ],
)
def test_clips_out_of_range_are_refused(change, message):
    x, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match=message):
        core.ppo_clip_loss(target_logprobs=x, behavior_logprobs=x, advantages=x, policy_mask=mask, **change)
    with pytest.raises(ValueError, match="value_clip = 0: must be above 0"):
        core.value_loss(values=x, old_values=x, targets=x, policy_mask=mask, value_clip=0)


def test_whitening_gives_mean_zero_and_variance_one_over_the_mask():
    g = torch.Generator().manual_seed(2)
    x = 5 + 3 * torch.randn(6, 9, generator=g, dtype=torch.float64)
    mask = torch.rand(6, 9, generator=g) < 0.5
    x = torch.where(mask, x, math.nan)
    white = core.whiten(x, mask)
    assert white[mask].mean().item() == pytest.approx(0, abs=1e-12)
    assert white[mask].std(correction=0).item() == pytest.approx(1, abs=1e-12)
    assert bool((white[~mask] == 0).all())
    # order and spacing are kept: an affine map with positive slope
    shift, scale = x[mask].mean(), x[mask].std(correction=0)
    assert torch.allclose(white[mask] * scale + shift, x[mask])


@pytest.mark.parametrize("value", [0.0, 0.1, -7.3, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_whitening_equal_advantages_gives_zeros(value, dtype):
    x = torch.full((3, 333), value, dtype=dtype)
    assert torch.equal(core.whiten(x, torch.ones(3, 333, dtype=torch.bool)), torch.zeros_like(x))
    one = torch.zeros(3, 333, dtype=torch.bool)
    one[1, 5] = True
    assert torch.equal(core.whiten(x, one), torch.zeros_like(x))
    assert torch.equal(core.whiten(x, torch.zeros_like(one)), torch.zeros_like(x))


def test_whitening_scales_up_small_advantages():
    x = torch.tensor([[1e-20, -1e-20, 3e-20]])
    white = core.whiten(x, torch.ones(1, 3, dtype=torch.bool))
    assert white.std(correction=0).item() == pytest.approx(1, rel=1e-4)
