"""Intervals hold what they promise, and say what it would take where they are too wide."""

from __future__ import annotations

import numpy as np
import pytest

from brace_rl.probe.estimate import FIGURES, Sample, by_position

PROMPTS, POSITIONS, CONTINUATIONS = 12, 2, 6
VALUE = 0.5


def draw(rng, *, effect=0.1, spread=0.15, prompts=PROMPTS, continuations=CONTINUATIONS):
    """Bernoulli returns whose chance varies from prompt to prompt; both positions of a prompt share it."""
    centre = np.clip(0.4 + spread * rng.standard_normal(prompts), 0.05, 0.8)
    chance = np.repeat(centre, POSITIONS)[:, None]
    uniforms = rng.random((prompts * POSITIONS, continuations))
    return Sample(
        prompts=np.repeat(np.arange(prompts), POSITIONS),
        positions=np.tile(np.arange(POSITIONS), prompts),
        tokens=np.tile(np.arange(POSITIONS), prompts),
        values=np.full(prompts * POSITIONS, VALUE),
        returns_pi=(uniforms < chance + effect).astype(float),
        returns_mu=(uniforms < chance).astype(float),
    )


def test_95_percent_intervals_cover_in_about_95_percent_of_small_samples():
    rng = np.random.default_rng(0)
    population = np.clip(0.4 + 0.15 * np.random.default_rng(1).standard_normal(10**6), 0.05, 0.8).mean()
    exact = {"v_mu": population, "b": 0.1, "g_mu": VALUE - population}
    hits = dict.fromkeys(exact, 0)
    trials = 300
    for trial in range(trials):
        overall, _ = by_position(draw(rng), ["0", "1"], seed=trial)
        for name, truth in exact.items():
            e = overall.figures[name].estimate
            hits[name] += e.low <= truth <= e.high
    for name, count in hits.items():
        assert 0.92 < count / trials < 0.99, (name, count)


def test_the_noise_share_tells_continuations_from_prompts():
    rng = np.random.default_rng(3)
    noisy, _ = by_position(draw(rng, spread=0.0, prompts=200), ["0", "1"], seed=0)
    spread, _ = by_position(draw(rng, spread=0.3, prompts=200, continuations=200), ["0", "1"], seed=0)
    assert noisy.figures["v_pi"].noise_share > 0.8
    assert spread.figures["v_pi"].noise_share < 0.1


@pytest.mark.parametrize(("spread", "seed"), [(0.0, 1), (0.02, 5)])
def test_what_is_called_needed_is_about_enough(spread, seed):
    """With that many prompts or continuations, the interval is about as wide as the effect was estimated large."""
    rng = np.random.default_rng(seed)
    sample = draw(rng, effect=0.07, spread=spread)
    measured = by_position(sample, ["0", "1"], seed=0)[0].figures["g_pi"]
    needed = measured.needed
    assert needed is not None
    effect = abs(measured.estimate.value)
    more_prompts = by_position(draw(rng, effect=0.07, spread=spread, prompts=needed.prompts), ["0", "1"], seed=0)[0]
    e = more_prompts.figures["g_pi"].estimate
    assert (e.high - e.low) / 2 == pytest.approx(effect, rel=0.5)
    if needed.continuations is not None:
        denser = draw(rng, effect=0.07, spread=spread, continuations=needed.continuations)
        e = by_position(denser, ["0", "1"], seed=0)[0].figures["g_pi"].estimate
        assert (e.high - e.low) / 2 == pytest.approx(effect, rel=0.6)


def test_a_resolved_effect_needs_nothing_and_an_absent_one_cannot_be_had():
    rng = np.random.default_rng(0)
    clear, _ = by_position(draw(rng, effect=0.2, prompts=100), ["0", "1"], seed=0)
    assert clear.figures["b"].is_resolved
    assert clear.figures["b"].needed is None
    same, _ = by_position(draw(rng, effect=0.0), ["0", "1"], seed=0)
    e = same.figures["b"].estimate
    assert (e.value, e.low, e.high) == (0, 0, 0)
    assert not same.figures["b"].is_resolved


def test_squared_gaps_are_free_of_the_noise_in_them():
    """Both policies equal to the critic in mean, one with much more noise: neither is nearer."""
    rng = np.random.default_rng(0)
    states = 4000
    returns_pi = rng.choice([0.0, 1.0], (states, 4))
    returns_mu = VALUE + rng.choice([-0.01, 0.01], (states, 4))
    ids = np.arange(states)
    flat = np.zeros_like(ids)
    overall, _ = by_position(Sample(ids, flat, flat, np.full(states, VALUE), returns_pi, returns_mu), ["0"], seed=0)
    e = overall.figures["staleness"].estimate
    assert e.low < 0 < e.high
    assert abs(e.value) < 0.01
    assert overall.figures["staleness"].noise_share == pytest.approx(1, abs=0.5)


def test_one_prompt_has_no_interval():
    sample = draw(np.random.default_rng(0), prompts=1)
    overall, groups = by_position(sample, ["0", "1"], seed=0)
    for group in (overall, *groups):
        for name in FIGURES:
            measured = group.figures[name]
            assert np.isnan(measured.estimate.low)
            assert np.isnan(measured.noise_share)
            assert measured.needed is None


def test_positions_take_their_own_states_only():
    sample = draw(np.random.default_rng(0))
    _, groups = by_position(sample, ["0", "1"], seed=0)
    for position, group in enumerate(groups):
        own = sample.positions == position
        assert group.figures["v_pi"].estimate.value == pytest.approx(sample.returns_pi[own].mean())
        assert (group.states, group.prompts, group.token_mean) == (PROMPTS, PROMPTS, position)
