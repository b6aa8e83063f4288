"""Figures against the batch functions, hand-worked numbers and known truth; streaming changes nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from rollout_rows import clean_rows, policy_indices, write_rows

from brace_rl import core
from brace_rl.diagnose import reader
from brace_rl.diagnose.advice import drift_reach, recommendations
from brace_rl.diagnose.chunk import collate
from brace_rl.diagnose.collect import Collector
from brace_rl.diagnose.columns import parse_maps
from brace_rl.diagnose.diagnosis import diagnose
from brace_rl.diagnose.response import response_from_row
from brace_rl.diagnose.settings import Settings
from brace_rl.diagnose.siblings import Siblings
from brace_rl.diagnose.statistics import Statistics, statistics_of
from brace_rl.diagnostics import batch

NAMES = parse_maps([])


def responses_of(rows):
    return [response_from_row(row, NAMES, f"r: row {i}") for i, row in enumerate(rows)]


def collected(rows, settings: Settings, size: int) -> Statistics:
    collector = Collector(settings)
    responses = responses_of(rows)
    for first in range(0, len(responses), size):
        collector.add(responses[first : first + size])
    return statistics_of(collector)


@pytest.fixture(scope="module")
def rows():
    return clean_rows(prompts=15, gain=0.5, longest=150)


@pytest.mark.parametrize("settings", [Settings(), Settings(window=7, rho_clip=1.5, c_clip=1.0, lam=0.97)])
def test_streamed_figures_are_those_of_one_batch(rows, settings):
    chunk = collate(responses_of(rows))
    found = collected(rows, settings, size=4)
    ratios = {"behavior_logprobs": chunk.behavior_logprobs, "target_logprobs": chunk.target_logprobs}
    wanted = batch.ratio_statistics(
        **ratios, policy_mask=chunk.policy_mask, c_clip=settings.c_clip, gamma=settings.gamma, lam=settings.lam
    )
    assert found.ratio.mean.value == pytest.approx(float(wanted["ratio/mean"]), rel=1e-9)
    assert found.ratio.ess.value == pytest.approx(float(wanted["ratio/ess"]), rel=1e-9)
    assert found.ratio.drift.value == pytest.approx(float(wanted["drift/m"]), rel=1e-9)
    assert found.ratio.sigma.value == pytest.approx(float(wanted["drift/sigma"]), rel=1e-6)
    assert found.ratio.largest_log == pytest.approx(float(wanted["ratio/log_abs_max"]), rel=1e-9)

    common = {"values": chunk.values, "rewards": chunk.rewards, "policy_mask": chunk.policy_mask}
    returns = core.monte_carlo_targets(**common).targets
    options = {"window": settings.window, "rho_clip": settings.rho_clip, "c_clip": settings.c_clip, "lam": settings.lam}
    targets = core.brace_targets(**common, **ratios, **options).targets
    slopes = batch.reward_slopes(values=chunk.values, targets=targets, returns=returns, policy_mask=chunk.policy_mask)
    assert len(found.bins) == 3
    for b in found.bins:
        name = f"beta/horizon_{b.low}_{'up' if b.high is None else b.high}"
        assert b.beta["brace"].value == pytest.approx(float(slopes[name]), rel=1e-7)
    inside = chunk.policy_mask
    assert found.shift.value == pytest.approx(float((targets - returns)[inside].mean()), rel=1e-7)
    weights = core.window_weights(
        **ratios, policy_mask=inside, window=settings.window, c_clip=settings.c_clip, lam=settings.lam
    )
    assert max(b.weight_max for b in found.bins) == pytest.approx(float(weights.max()), rel=1e-9)


def test_chunks_and_their_order_change_no_figure(rows):
    one, many = collected(rows, Settings(), size=1000), collected(rows[::-1], Settings(), size=3)
    assert many.reward.bias.value == pytest.approx(one.reward.bias.value, rel=1e-9)
    assert many.reward.bias.low == pytest.approx(one.reward.bias.low, rel=1e-9)
    assert many.ratio.response_ess == pytest.approx(one.ratio.response_ess, rel=1e-9)
    assert many.ratio.histogram == one.ratio.histogram
    assert many.critic.explained_variance.value == pytest.approx(one.critic.explained_variance.value, rel=1e-9)


def test_importance_weights_are_the_products_however_large():
    """Log weights 600 and 600 + log 3, rewards 0 and 1: E_pi[R] = 3/4, E_mu[R] = 1/2, ESS = 16/10."""
    rows = [
        {"behavior_logprobs": [-650.0 - 30], "target_logprobs": [-50.0 - 30], "reward": 0.0},
        {"behavior_logprobs": [-650.0 - 30], "target_logprobs": [-50.0 - 30 + math.log(3)], "reward": 1.0},
    ]
    for size in (1, 2):
        found = collected(rows, Settings(), size=size)
        assert found.reward.under_pi.value == pytest.approx(0.75)
        assert found.reward.bias.value == pytest.approx(0.25)
        assert found.ratio.response_ess == pytest.approx(1.6)


def test_bias_and_gap_cover_the_truth():
    """One token, mu = (1/2, 1/2), pi = (0.8, 0.2), R = 1 for the first: b = 0.3; V = 1/2 is exact for mu: g = 0.3."""
    rng = np.random.default_rng(3)
    mu, pi = math.log(0.5), (math.log(0.8), math.log(0.2))
    tokens = rng.integers(0, 2, 2000)
    rows = [{"behavior_logprobs": [mu], "target_logprobs": [pi[a]], "values": [0.5], "reward": 1.0 - a} for a in tokens]
    found = collected(rows, Settings(), size=100)
    for e in (found.reward.bias, found.reward.critic_gap, found.reward.critic_gap_first):
        assert e.low < 0.3 < e.high
        assert e.high - e.low < 0.06
    assert found.reward.under_mu.low < 0.5 < found.reward.under_mu.high


def test_interval_by_prompt_is_wider_where_responses_to_a_prompt_agree():
    rewards = np.repeat(np.random.default_rng(0).normal(size=40), 10)
    base = [{"behavior_logprobs": [-1.0], "target_logprobs": [-1.0], "reward": float(r)} for r in rewards]
    grouped = [row | {"prompt_id": i // 10} for i, row in enumerate(base)]
    alone, together = (collected(r, Settings(), size=50).reward.under_mu for r in (base, grouped))
    assert together.value == alone.value
    ratio = (together.high - together.low) / (alone.high - alone.low)
    assert ratio == pytest.approx(math.sqrt(10), rel=0.25)


def test_ratio_at_lag_zero_stands_apart(rows):
    found = collected(rows, Settings(), size=10)
    assert [lag.label for lag in found.lags] == ["0", "1", "2", "3 to 4"]
    sigmas = [lag.log_sigma.value for lag in found.lags]
    assert sigmas == sorted(sigmas)
    assert found.fresh is found.lags[0]
    assert sum(lag.tokens for lag in found.lags) == found.counts.tokens
    low, middle, high = found.lags[3].quantiles
    logs = [
        row["target_logprobs"][i] - row["behavior_logprobs"][i]
        for row in rows
        for i in policy_indices(row)
        if row["versions"][i] == row["current_version"] - 3
    ]
    for got, share in ((low, 0.05), (middle, 0.5), (high, 0.95)):
        assert math.log(got) == pytest.approx(float(np.quantile(logs, share)), abs=0.02)


def test_recommended_window_keeps_the_weight():
    rows = clean_rows(prompts=30, gain=1.0, longest=200)
    found = collected(rows, Settings(eps=0.2), size=50)
    window, rho, c = recommendations(found)
    drift = found.ratio.drift_by_clip[c.value]
    assert math.exp(window.value * drift) >= 0.2 > math.exp((window.value + 1) * drift)
    assert found.ratio.cut_by_clip[rho.value] <= 0.01 < found.ratio.cut_by_clip[1.2]
    assert "Eq. 45" in window.reason
    assert "the paper's 1.2 would cut" in rho.reason
    assert "the paper's" in c.reason


def test_without_drift_the_window_is_the_whole_response():
    found = collected(clean_rows(prompts=12, noise=0.001), Settings(), size=50)
    window, rho, c = recommendations(found)
    assert window.value == found.counts.most_policy_tokens - 1
    assert (rho.value, c.value) == (1.2, 1.1)
    assert drift_reach(0.0, 0.1) == math.inf


def test_memory_held_does_not_grow_with_rows():
    responses = (responses_of([{"values": [0.0] * 100}])[0] for _ in range(5000))
    largest = max(len(chunk) * 100 for chunk in reader.chunks(responses, tokens=6400))
    assert largest == 6400


def test_siblings_are_compared_where_they_part():
    """Same three tokens, a tool token, then another: V agrees before it (0.4) and differs by 0.25 and 0.5 after it."""
    common = {"prompt_id": "p", "current_version": 1, "policy_mask": [1, 1, 1, 0, 1, 1, 1]}
    rows = [
        common | {"token_ids": [5, 6, 7, 9, 1, 2, 3], "values": [0.1, 0.2, 0.3, None, 0.4, 0.5, 0.5]},
        common | {"token_ids": [5, 6, 7, 9, 4, 2, 3], "values": [0.1, 0.2, 0.3, None, 0.4, 0.25, 0.0]},
        common | {"token_ids": [8, 6, 7, 9, 4, 2, 3], "values": [9.0] * 7, "current_version": 2},
    ]
    siblings = Siblings()
    for response in responses_of(rows):
        siblings.add(response)
    assert siblings.pairs == 1
    assert siblings.differences.tolist() == [0.0, 0.25, 0.5]
    assert (siblings.earlier_pairs, siblings.earlier_difference) == (1, 0.0)


def test_siblings_are_not_compared_beside_tool_output():
    """There a shifted column holds the tool's entry, so V seems to differ where only the layout does."""
    common = {"prompt_id": "p", "token_ids": [5, 6, 1, 2, 3, 4], "values": [0.1] * 6}
    rows = [common, common | {"token_ids": [5, 6, 9, 2, 3, 4], "policy_mask": [1, 1, 1, 0, 1, 1]}]
    siblings = Siblings()
    for response in responses_of(rows):
        siblings.add(response)
    assert siblings.pairs == 0


def test_a_response_longer_than_a_chunk_comes_alone():
    short, long = responses_of([{"values": [0.0] * 3}, {"values": [0.0] * 50}])
    assert [len(c) for c in reader.chunks(iter([short, short, long, short]), tokens=10)] == [2, 1, 1]


def test_missing_columns_switch_figures_off_and_are_named(tmp_path):
    full = clean_rows(prompts=10)
    kept = ("behavior_logprobs", "target_logprobs", "rewards")
    path = write_rows(tmp_path / "r.jsonl", [{name: row[name] for name in kept} for row in full])
    for row in full:  # NaN at tool tokens, but no mask: such rows must be left out, not believed
        assert any(math.isnan(x) for x in row["behavior_logprobs"])
    found = diagnose([path], names=NAMES, settings=Settings())
    assert found.statistics.critic is None
    assert found.statistics.beta == {}
    assert found.statistics.lags == ()
    needed = {m.figure: m.columns for m in found.missing}
    assert needed["explained variance, value error"] == ("values",)
    assert needed["ratios by version lag, engine mismatch apart from staleness"] == ("versions", "current_version")
    assert found.statistics.counts.rows_not_finite == len(full)


def test_numbers_on_non_policy_tokens_change_nothing(rows):
    def junk(row):
        changed = dict(row)
        for name in ("behavior_logprobs", "target_logprobs", "values"):
            changed[name] = [x if m else 1e9 for x, m in zip(row[name], row["policy_mask"], strict=True)]
        return changed

    clean, dirty = collected(rows, Settings(), size=50), collected([junk(row) for row in rows], Settings(), size=50)
    assert repr(dirty) == repr(clean)  # NaN is not equal to itself


def test_core_functions_get_float64(rows):
    assert collate(responses_of(rows[:2])).values.dtype == torch.float64
