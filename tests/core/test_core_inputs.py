"""What is refused, in which words, and what is never asked of the host."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from estimators import estimate, every_estimator, random_batch

from brace_rl import core


@pytest.mark.parametrize("argument", ["values", "behavior_logprobs", "target_logprobs"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_at_a_policy_token_names_argument_row_and_position(argument, bad):
    batch = random_batch(0)
    batch["policy_mask"][2, 7] = True
    batch[argument][2, 7] = bad
    with pytest.raises(ValueError, match=rf"{argument}: {bad} at row 2, position 7"):
        core.brace_targets(**batch)


@every_estimator
def test_non_finite_reward_is_refused_even_off_the_policy_tokens(estimator):
    batch = random_batch(1)
    batch["policy_mask"][1, 3] = False
    batch["rewards"][1, 3] = math.nan
    with pytest.raises(ValueError, match="rewards: nan at row 1, position 3"):
        estimate(estimator, batch)


@every_estimator
def test_reward_before_the_first_policy_token_names_the_row(estimator):
    batch = random_batch(2)
    batch["policy_mask"][3, :2] = False
    batch["rewards"][3, 1] = 0.5
    with pytest.raises(ValueError, match=r"rewards: 0\.5 at row 3, position 1 comes before the first policy token"):
        estimate(estimator, batch)


def test_reward_before_the_first_policy_token_of_a_packed_response_names_the_row():
    batch = random_batch(3, rows=2)
    ids = torch.tensor([[1] * 6 + [2] * 6]).expand(2, -1)
    batch["policy_mask"][:, [2, 9]] = True
    batch["policy_mask"][1, 6] = False
    batch["rewards"][1, 6] = 1.0
    core.brace_targets(**batch)  # without segments it belongs to the token before
    with pytest.raises(ValueError, match=r"rewards: 1\.0 at row 1, position 6 comes before the first policy token"):
        core.brace_targets(**batch, segment_ids=ids)


def test_overflow_of_a_sum_of_finite_values_is_no_error():
    batch = {k: v.float() if v.is_floating_point() else v for k, v in random_batch(4).items()}
    batch["values"][:] = 3e38
    assert (
        core.monte_carlo_targets(**{k: batch[k] for k in ("values", "rewards", "policy_mask")}).targets.isfinite().all()
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": torch.zeros(4, 11)}, r"values: got \[4, 11\], must be \[4, 12\]"),
        ({"values": torch.zeros(4, 12, dtype=torch.long)}, "values: got torch.int64, must be a floating-point"),
        ({"policy_mask": torch.ones(4, 12)}, "policy_mask: got torch.float32, must be bool"),
        ({"policy_mask": torch.ones(4, dtype=torch.bool)}, r"policy_mask: got \[4\], must be \[batch, tokens\]"),
        ({"behavior_logprobs": None}, "behavior_logprobs: got NoneType, must be a torch tensor"),
        ({"values": [[0.0] * 12] * 4}, "values: got list, must be a torch tensor; use torch.as_tensor"),
        ({"policy_mask": torch.ones(4, 12).bool().numpy()}, "policy_mask: got ndarray, must be a torch tensor"),
        ({"window": "auto"}, "window = 'auto': must be an int .* drift_window or path_windows choose"),
        ({"window": -1}, "window = -1: must be at least 0"),
        ({"window": 2.5}, "window = 2.5: must be an int"),
        ({"window": True}, "window = True: must be an int"),
        ({"window": torch.full((4, 12), -2)}, "window: negative at row 0"),
        ({"window": torch.zeros(4, dtype=torch.long)}, r"window: got \[4\] torch.int64"),
        ({"window": torch.zeros(4, 12)}, r"window: got \[4, 12\] torch.float32"),
        ({"rho_clip": 0.0}, "rho_clip = 0.0: must be above 0"),
        ({"c_clip": -1.0}, "c_clip = -1.0: must be above 0"),
        ({"c_clip": math.nan}, "c_clip = nan: must be above 0"),
        ({"gamma": 1.5}, "gamma = 1.5: must be above 0 and at most 1"),
        ({"gamma": 0.0}, "gamma = 0.0: must be above 0 and at most 1"),
        ({"lam": 1.01}, "lam = 1.01: must be between 0 and 1"),
        ({"bootstrap_values": torch.zeros(3)}, r"bootstrap_values: got \[3\], must be \[4\]"),
        ({"bootstrap_values": torch.zeros(4, dtype=torch.long)}, "bootstrap_values: got torch.int64"),
        ({"bootstrap_values": torch.tensor([0.0, 0.0, math.nan, 0.0])}, "bootstrap_values: nan at row 2"),
        ({"segment_ids": torch.zeros(4, 12)}, r"segment_ids: got \[4, 12\] torch.float32"),
        (
            {"segment_ids": torch.zeros(4, 12, dtype=torch.long), "bootstrap_values": torch.zeros(4)},
            r"bootstrap_values: got \[4\], must be \[4, 12\] with segment_ids",
        ),
        (
            {"segment_ids": torch.zeros(4, 12, dtype=torch.long), "bootstrap_values": torch.full((4, 12), math.inf)},
            "bootstrap_values: inf at row 0",
        ),
    ],
)
def test_bad_arguments_are_named_with_the_mend(change, message):
    with pytest.raises(ValueError, match=message):
        core.brace_targets(**(random_batch(5) | change))


def test_bootstrap_is_not_read_where_nothing_was_sampled():
    batch = random_batch(6)
    batch["policy_mask"][1] = False
    batch["rewards"][1] = 0.0
    got = core.brace_targets(**batch, bootstrap_values=torch.tensor([1.0, math.nan, 0.0, 0.0], dtype=torch.float64))
    assert got.targets.isfinite().all()
    ids = torch.zeros(4, 12, dtype=torch.long)
    last = (batch["policy_mask"] * torch.arange(12)).argmax(1)
    spread = torch.full((4, 12), math.nan, dtype=torch.float64)
    spread[torch.arange(4), last] = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    packed = core.brace_targets(**batch, bootstrap_values=spread, segment_ids=ids)
    assert torch.allclose(packed.targets, got.targets, atol=1e-12)


def test_float_log_probs_above_zero_are_accepted():
    """Rounding puts log-probs a hair above 0; that is no reason to stop a run."""
    batch = random_batch(7)
    batch["behavior_logprobs"][:] = 1e-6
    assert core.brace_targets(**batch).targets.isfinite().all()


@every_estimator
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("window", ["int", "tensor"])
def test_unchecked_nothing_is_read_back_from_the_device(estimator, packed, window):
    """Meta tensors have no data, so whatever needs a value on the host (item, nonzero, a branch) fails on them."""
    shape = (3, 40)
    floats = {
        k: torch.empty(shape, device="meta") for k in ("values", "rewards", "behavior_logprobs", "target_logprobs")
    }
    mask = torch.empty(shape, dtype=torch.bool, device="meta")
    options = {
        "window": 7 if window == "int" else torch.empty(shape, dtype=torch.long, device="meta"),
        "bootstrap_values": torch.empty(shape if packed else shape[:1], device="meta"),
        "segment_ids": torch.empty(shape, dtype=torch.long, device="meta") if packed else None,
    }
    got = estimate(estimator, {**floats, "policy_mask": mask}, check_inputs=False, gamma=0.9, lam=0.9, **options)
    assert got.targets.shape == shape
    assert got.targets.device.type == "meta"


def test_unchecked_windows_and_losses_read_nothing_back():
    shape = (3, 40)
    lp, mask = torch.empty(shape, device="meta"), torch.empty(shape, dtype=torch.bool, device="meta")
    ratios = {"behavior_logprobs": lp, "target_logprobs": lp, "policy_mask": mask}
    rows = torch.empty(3, device="meta")
    results = [
        core.window_weights(**ratios, window=9, check_inputs=False),
        core.path_windows(**ratios, budget=1.0, check_inputs=False),
        core.drift_window(**ratios, eps=0.5, check_inputs=False).window,
        core.critic_free_advantages(**ratios, returns=rows, baselines=rows, check_inputs=False),
        core.whiten(lp, mask),
        core.value_loss(values=lp, old_values=lp, targets=lp, policy_mask=mask).loss,
        core.ppo_clip_loss(
            target_logprobs=lp, behavior_logprobs=lp, advantages=lp, policy_mask=mask, dual_clip=3.0
        ).loss,
    ]
    assert all(x.device.type == "meta" for x in results)


@every_estimator
def test_unchecked_gives_the_same_numbers(estimator):
    batch = random_batch(8)
    batch["values"] = torch.where(batch["policy_mask"], batch["values"], math.nan)
    checked = estimate(estimator, batch, window=3)
    unchecked = estimate(estimator, batch, window=3, check_inputs=False)
    assert torch.equal(checked.targets, unchecked.targets)


def test_unchecked_nan_at_a_policy_token_is_not_hidden():
    batch = random_batch(9, holes=False)
    batch["values"][0, 5] = math.nan
    assert core.brace_targets(**batch, check_inputs=False).targets[0, 5].isnan()


def test_importing_core_loads_torch_and_nothing_heavy():
    heavy = ("transformers", "ray", "datasets", "matplotlib", "pydantic", "tensorboard", "vllm", "brace_rl.training")
    code = (
        "import sys, brace_rl.core, brace_rl.diagnostics.batch\n"
        f"found = [m for m in {heavy!r} if m in sys.modules]\n"
        "assert 'torch' in sys.modules\n"
        "sys.exit(f'loaded {found}' if found else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
