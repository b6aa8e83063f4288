"""Draws: counter-based, exact under truncation, distributed as they say."""

from __future__ import annotations

import math

import pytest
import torch

from brace_rl.training.engines.sampling import counter_uniforms, draw

ROWS = 20_000


def splitmix64(state):
    """The generator's output function on Python integers: the reference."""
    mask = (1 << 64) - 1
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


def uniforms(count, seed=0):
    return counter_uniforms(seeds=torch.full((count,), seed), positions=torch.arange(count))


def draw_same(logits, count, *, temperature=1.0, top_p=1.0, top_k=0, seed=0):
    """``count`` draws from one row of logits."""
    return draw(
        logits.expand(count, -1),
        uniforms=uniforms(count, seed),
        temperatures=torch.full((count,), temperature),
        top_ps=torch.full((count,), top_p),
        top_ks=torch.full((count,), top_k),
    )


def test_uniforms_equal_the_reference_on_unbounded_integers():
    golden, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1
    seeds, positions = [0, 1, 2**62 + 12345, 2**63 - 1], [0, 1, 77, 2**31]
    got = counter_uniforms(seeds=torch.tensor(seeds), positions=torch.tensor(positions))
    for value, seed, position in zip(got.tolist(), seeds, positions, strict=True):
        bits = splitmix64((splitmix64((seed + golden) & mask) + (position + 1) * golden) & mask)
        assert value == ((bits >> 16) + 0.5) / 2**48


def test_uniforms_depend_on_seed_and_position_alone():
    one = counter_uniforms(seeds=torch.tensor([5, 6, 7]), positions=torch.tensor([10, 11, 12]))
    other = counter_uniforms(seeds=torch.tensor([7, 5]), positions=torch.tensor([12, 10]))
    assert one[2] == other[0]
    assert one[0] == other[1]


def test_uniforms_are_uniform_along_positions_and_along_seeds():
    along_positions = uniforms(ROWS)
    along_seeds = counter_uniforms(seeds=torch.arange(ROWS), positions=torch.full((ROWS,), 3))
    for sample in (along_positions, along_seeds):
        counts = torch.histc(sample, bins=64, min=0, max=1)
        chi_square = float(((counts - ROWS / 64) ** 2 / (ROWS / 64)).sum())
        assert chi_square < 103.4  # 99.9 % quantile, 63 degrees of freedom
        serial = torch.corrcoef(torch.stack((sample[:-1], sample[1:])))[0, 1]
        assert abs(float(serial)) < 4 / math.sqrt(ROWS)


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.7, 1.0, 0), (1.3, 0.8, 0), (1.0, 1.0, 5), (0.9, 0.9, 7)]
)
def test_frequencies_match_the_reported_probabilities(temperature, top_p, top_k):
    torch.manual_seed(0)
    logits = torch.randn(1, 12) * 1.5
    drawn = draw_same(logits, ROWS, temperature=temperature, top_p=top_p, top_k=top_k)
    counts = torch.bincount(drawn.token_ids, minlength=12).double()
    kept = drawn.kept[0]
    probs = torch.zeros(12, dtype=torch.float64)
    probs[drawn.token_ids] = drawn.logprobs.double().exp()
    assert torch.equal(counts > 0, kept)
    assert float(probs.sum()) == pytest.approx(1.0, abs=1e-5)
    chi_square = float(((counts - ROWS * probs)[kept] ** 2 / (ROWS * probs)[kept]).sum())
    # 99.9 % quantile by Wilson and Hilferty's cube
    freedom = int(kept.sum()) - 1
    assert chi_square < freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3


def test_top_k_comes_before_top_p_and_top_p_counts_the_rest_as_all():
    # Probabilities 0.4, 0.3, 0.2, 0.1. Of the first three (0.9 in all) 0.4 / 0.9 = 0.44 and 0.7 / 0.9 = 0.78.
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    assert draw_same(logits, 1, top_k=3, top_p=0.75).kept.tolist() == [[False, True, False, True]]
    # Without top-k 0.7 falls short of 0.75 and the third stays.
    assert draw_same(logits, 1, top_p=0.75).kept.tolist() == [[False, True, True, True]]
    assert draw_same(logits, 1, top_p=1e-6).kept.tolist() == [[False, True, False, False]]


def test_top_p_of_one_and_top_k_of_zero_keep_tokens_of_no_measurable_mass():
    logits = torch.tensor([[0.0, -40.0, -200.0]])
    assert draw_same(logits, 1).kept.all()


def test_ties_go_to_the_smaller_id():
    logits = torch.zeros(1, 6)
    assert draw_same(logits, 1, top_k=2).kept.tolist() == [[True, True, False, False, False, False]]
    greedy = draw(logits, uniforms=uniforms(1), temperatures=torch.zeros(1))
    assert greedy.token_ids.tolist() == [0]


def test_logprobs_are_renormalised_over_the_kept_set():
    torch.manual_seed(1)
    logits = torch.randn(1, 30) * 2
    drawn = draw_same(logits, 50, temperature=0.8, top_p=0.9)
    cut = (logits / 0.8).masked_fill(~drawn.kept[:1], -torch.inf).double().log_softmax(-1)[0]
    torch.testing.assert_close(drawn.logprobs.double(), cut[drawn.token_ids], atol=1e-6, rtol=0)


def test_greedy_rows_report_the_untempered_distribution_beside_sampled_rows():
    torch.manual_seed(2)
    logits = torch.randn(3, 20)
    drawn = draw(
        logits,
        uniforms=uniforms(3),
        temperatures=torch.tensor([0.0, 1.0, 0.0]),
        top_ps=torch.tensor([0.5, 0.5, 1.0]),
        top_ks=torch.tensor([3, 0, 0]),
    )
    full = logits.log_softmax(-1)
    assert drawn.token_ids[0] == logits[0].argmax()
    assert drawn.kept[0].all()
    torch.testing.assert_close(drawn.logprobs[[0, 2]], full.max(-1).values[[0, 2]])
    torch.testing.assert_close(drawn.entropies, -(full.exp() * full).sum(-1))


def test_a_row_does_not_depend_on_what_its_neighbours_cut():
    torch.manual_seed(3)
    logits = torch.randn(2, 50)
    shared = {"uniforms": uniforms(2), "temperatures": torch.ones(2)}
    alone = draw(logits, **shared)
    beside = draw(logits, **shared, top_ps=torch.tensor([1.0, 0.3]), top_ks=torch.tensor([0, 4]))
    assert alone.token_ids[0] == beside.token_ids[0]
    torch.testing.assert_close(alone.logprobs[0], beside.logprobs[0], atol=1e-6, rtol=0)


def test_masked_logits_are_never_drawn_and_half_precision_is_computed_in_float32():
    logits = torch.full((1, 9), -torch.inf, dtype=torch.bfloat16)
    logits[0, 4], logits[0, 6] = 1.0, 1.5
    drawn = draw(logits.expand(500, -1), uniforms=uniforms(500), temperatures=torch.ones(500))
    assert set(drawn.token_ids.tolist()) == {4, 6}
    assert drawn.logprobs.dtype == torch.float32
    assert torch.isfinite(drawn.entropies).all()
    expected = torch.tensor([1.0, 1.5]).log_softmax(-1)
    torch.testing.assert_close(drawn.logprobs, expected[(drawn.token_ids == 6).long()])
