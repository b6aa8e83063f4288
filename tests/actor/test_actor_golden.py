"""Golden losses and gradients, and the token-by-token sums of actor_reference.py, reproduced by the rules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from actor_reference import CASES, TENSORS, every_case, random_batch, reference, with_target

from brace_rl.actor import RULES, ActorBatch

TOLERANCE = 1e-9
SLOPE_TOLERANCE = 1e-7
"""Of central differences."""

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "actor_losses.json").read_text())["cases"]


def as_batch(case: dict) -> ActorBatch:
    tensors = {name: torch.tensor(case[name], dtype=torch.float64) for name in TENSORS}
    tensors["target_logprobs"].requires_grad_()
    return ActorBatch(**tensors, loss_mask=torch.tensor(case["loss_mask"]))


def test_golden_file_holds_what_it_is_thought_to_hold():
    assert len(GOLDEN) == 76
    assert {case["rule"] for case in GOLDEN} == {
        "ppo", "decoupled", "a3po", "icepop", "kpop", "estr", "dis", "tis", "cispo",
    }  # fmt: skip


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"])
def test_golden_actor_losses_and_gradients_are_reproduced(case):
    batch = as_batch(case)
    loss, _ = RULES[case["rule"]](batch, **case["options"])
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], rel=0, abs=TOLERANCE)
    wanted = torch.tensor(case["grad"], dtype=torch.float64)
    assert (batch.target_logprobs.grad - wanted).abs().max().item() < TOLERANCE


def test_reference_reproduces_the_golden_file():
    """So that the reference may stand in for the file where the file has no case."""
    for case in GOLDEN:
        loss, gradient = reference(case["rule"], as_batch(case), case["options"])
        assert loss == pytest.approx(case["loss"], rel=0, abs=TOLERANCE), case["name"]
        worst = (torch.tensor(gradient, dtype=torch.float64) - torch.tensor(case["grad"])).abs().max().item()
        assert worst < SLOPE_TOLERANCE, case["name"]


@every_case
@pytest.mark.parametrize("spread", [0.02, 0.25, 1.0])
def test_rules_agree_with_the_sums_token_by_token(case, spread):
    rule, options = CASES[case]
    for seed in range(3):
        batch = random_batch(seed, spread=spread)
        loss, _ = RULES[rule](batch, **options)
        loss.backward()
        wanted, gradient = reference(rule, batch, options)
        assert loss.item() == pytest.approx(wanted, rel=1e-12, abs=1e-12)
        worst = (batch.target_logprobs.grad - torch.tensor(gradient, dtype=torch.float64)).abs().max().item()
        assert worst < SLOPE_TOLERANCE


@pytest.mark.parametrize("rule", ["decoupled", "a3po", "ppo_ewma", "icepop", "kpop", "tis", "gspo", "cispo", "dis"])
def test_published_defaults_are_those_of_the_reference(rule):
    batch = random_batch(7, spread=1.0)
    wanted, _ = reference(rule, batch, {})
    assert RULES[rule](with_target(batch)).loss.item() == pytest.approx(wanted, abs=1e-12)
