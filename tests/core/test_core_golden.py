"""The golden numbers, and the plain sums of reference.py, reproduced by every estimator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from estimators import ESTIMATORS, estimate, every_estimator, random_batch
from reference import Options, batch_targets

from brace_rl import core

DATA = Path(__file__).parents[1] / "data"
TOLERANCE = 1e-9


def _golden_value_cases() -> list[dict]:
    return json.loads((DATA / "value_targets.json").read_text())["cases"]


def _as_batch(case: dict) -> dict[str, torch.Tensor]:
    batch = {k: torch.tensor(case[k], dtype=torch.float64) for k in ("values", "rewards")}
    batch["target_logprobs"] = torch.tensor(case["log_ratio"], dtype=torch.float64)
    batch["behavior_logprobs"] = torch.zeros_like(batch["values"])
    batch["policy_mask"] = torch.tensor(case["policy_mask"])
    return batch


def _options(case: dict) -> Options:
    p = case["params"]
    return Options(p["estimator"], p["k"], p["rho_bar"], p["c_bar"], p["gamma"], p["lam"])


def test_golden_file_holds_every_estimator_and_layout():
    cases = _golden_value_cases()
    assert len(cases) == 672
    assert {c["params"]["estimator"] for c in cases} == set(ESTIMATORS)


@pytest.mark.parametrize("name", list(ESTIMATORS))
@pytest.mark.parametrize("as_tensor", [False, True], ids=["int_window", "tensor_window"])
def test_golden_targets_and_advantages_are_reproduced(name, as_tensor):
    compared = 0
    for case in _golden_value_cases():
        o = _options(case)
        if o.estimator != name:
            continue
        batch = _as_batch(case)
        bootstrap = None if case["bootstrap"] is None else torch.tensor(case["bootstrap"], dtype=torch.float64)
        window = torch.full(batch["values"].shape, o.window) if as_tensor else o.window
        got = estimate(
            name,
            batch,
            window=window,
            rho_clip=o.rho_clip,
            c_clip=o.c_clip,
            gamma=o.gamma,
            lam=o.lam,
            bootstrap_values=bootstrap,
        )
        for found, wanted in ((got.targets, case["targets"]), (got.advantages, case["advantages"])):
            worst = (found - torch.tensor(wanted, dtype=torch.float64)).abs().max().item()
            assert worst < TOLERANCE, (case["name"], worst)
        compared += 1
    assert compared > 80


def test_reference_reproduces_the_golden_file():
    """So that the reference may stand in for the file where the file has no case."""
    for case in _golden_value_cases()[::7]:
        found = batch_targets(
            case["values"], case["rewards"], case["log_ratio"], case["policy_mask"], case["bootstrap"], _options(case)
        )
        for x, wanted in zip(found, (case["targets"], case["advantages"]), strict=True):
            found_tensor, wanted_tensor = (torch.tensor(y, dtype=torch.float64) for y in (x, wanted))
            assert torch.allclose(found_tensor, wanted_tensor, rtol=0, atol=TOLERANCE), case["name"]


@every_estimator
@pytest.mark.parametrize("window", [0, 1, 2, 5, 13, 31, 64, 1000])
@pytest.mark.parametrize("gamma", [1.0, 0.96])
def test_longer_sequences_agree_with_the_sums(estimator, window, gamma):
    batch = random_batch(window, rows=2, columns=70)
    o = Options(estimator, window, 1.2, 1.1, gamma, 0.98)
    log_ratios = batch["target_logprobs"] - batch["behavior_logprobs"]
    wanted = batch_targets(
        batch["values"].tolist(),
        batch["rewards"].tolist(),
        log_ratios.tolist(),
        batch["policy_mask"].tolist(),
        [0.5, -0.25],
        o,
    )
    got = estimate(
        estimator,
        batch,
        window=window,
        rho_clip=1.2,
        c_clip=1.1,
        gamma=gamma,
        lam=0.98,
        bootstrap_values=torch.tensor([0.5, -0.25], dtype=torch.float64),
    )
    for found, target in zip(got, wanted, strict=True):
        assert torch.allclose(found, torch.tensor(target, dtype=torch.float64), rtol=0, atol=1e-9)


@pytest.mark.parametrize("rho_clip", [0.6, 1.0, float("inf")])
@pytest.mark.parametrize("window", [0, 4, 1000])
def test_whatever_the_cap_the_last_residual_of_brace_keeps_weight_one(rho_clip, window):
    batch = random_batch(3, rows=3, columns=30)
    names = ("values", "rewards", "policy_mask")
    log_ratios = (batch["target_logprobs"] - batch["behavior_logprobs"]).tolist()
    values, rewards, mask = (batch[k].tolist() for k in names)
    wanted = batch_targets(values, rewards, log_ratios, mask, None, Options("brace", window, rho_clip, 1.1))
    for found, target in zip(core.brace_targets(**batch, window=window, rho_clip=rho_clip), wanted, strict=True):
        assert torch.allclose(found, torch.tensor(target, dtype=torch.float64), rtol=0, atol=TOLERANCE)


def _golden_ppo_cases() -> list[dict]:
    cases = json.loads((DATA / "actor_losses.json").read_text())["cases"]
    return [case for case in cases if case["rule"] == "ppo"]


@pytest.mark.parametrize("case", _golden_ppo_cases(), ids=lambda case: case["name"])
def test_golden_ppo_loss_and_gradient_are_reproduced(case):
    target = torch.tensor(case["target_logprobs"], dtype=torch.float64, requires_grad=True)
    result = core.ppo_clip_loss(
        target_logprobs=target,
        behavior_logprobs=torch.tensor(case["behavior_logprobs"], dtype=torch.float64),
        advantages=torch.tensor(case["advantages"], dtype=torch.float64),
        policy_mask=torch.tensor(case["loss_mask"]).bool(),
        **case["options"],
    )
    result.loss.backward()
    assert result.loss.item() == pytest.approx(case["loss"], abs=TOLERANCE)
    assert torch.allclose(target.grad, torch.tensor(case["grad"], dtype=torch.float64), rtol=0, atol=TOLERANCE)
