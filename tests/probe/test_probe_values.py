"""What is measured is the true value: against enumeration, against the response itself, and against nothing at all."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from probe_parts import (
    LETTERS,
    LIMIT,
    ExactValues,
    LettersTask,
    letters_config,
    pooled_z,
    shifted,
    tiny_critic,
    tiny_model,
)

from brace_rl.errors import BraceError
from brace_rl.probe.continuations import play_on
from brace_rl.probe.estimate import by_position, state_figures
from brace_rl.probe.options import Options, Positions
from brace_rl.probe.replay import check_replay
from brace_rl.probe.run import Parts, measure_parts
from brace_rl.probe.states import Response, Turns, cut_responses
from brace_rl.tasks.base import Problem, StepResult
from brace_rl.training.engines.embedded import EmbeddedEngine
from brace_rl.training.rollout import RolloutDriver
from brace_rl.training.types import RolloutRequest, SamplingParams, derive_seed

HALVES = Positions((0.0, 0.4, 0.8), are_shares=True)


def parts(mu, pi, *, task=None, config=None):
    return Parts(
        config=config or letters_config(),
        task=task or LettersTask(),
        tokenizer=LETTERS,
        load_behavior=lambda: mu,
        load_target=lambda: pi,
        critic=tiny_critic(),
    )


def exact_values(model, measurement, gamma=1.0):
    exact = ExactValues(model, gamma=gamma)
    found = []
    for state in measurement.states:
        response = measurement.responses[state.response]
        cut = state.cut
        found.append(exact.value(response.prompt_ids, response.response_ids[:cut], response.policy_mask[:cut]))
    return np.array(found)


@pytest.fixture(scope="module")
def measured():
    mu = tiny_model(0)
    pi = shifted(mu, 0.15)
    options = Options(prompts=24, positions=HALVES, continuations=32, seed=3)
    m = measure_parts(parts(mu, pi), options)
    return m, exact_values(pi, m), exact_values(mu, m)


def test_values_agree_with_enumeration(measured):
    m, v_pi, v_mu = measured
    figures = state_figures(m.sample)
    assert abs(v_pi - v_mu).mean() > 0.05  # the policies differ enough for the rest to mean something
    for name, exact in (("v_pi", v_pi), ("v_mu", v_mu), ("b", v_pi - v_mu), ("g_pi", m.sample.values - v_pi)):
        estimates, noise = figures[name]
        assert abs(pooled_z(estimates, exact, noise)) < 3, name
        varying = noise > 0
        assert 0.5 < np.mean((estimates - exact)[varying] ** 2 / noise[varying]) < 2, name


def test_intervals_cover_the_exact_means(measured):
    m, v_pi, v_mu = measured
    exact = {"v_pi": v_pi, "v_mu": v_mu, "b": v_pi - v_mu}
    exact |= {"g_pi": m.sample.values - v_pi, "g_mu": m.sample.values - v_mu}
    exact["staleness"] = exact["g_pi"] ** 2 - exact["g_mu"] ** 2
    overall, positions = by_position(m.sample, ["0", "0.4", "0.8"], seed=0)
    for name, of_state in exact.items():
        estimate = overall.figures[name].estimate
        assert estimate.low < of_state.mean() < estimate.high, name
        for i, group in enumerate(positions):
            e = group.figures[name].estimate
            assert e.low <= of_state[m.sample.positions == i].mean() <= e.high, (name, i)


def test_states_lie_inside_turns_and_after_tool_output(measured):
    m, _, _ = measured
    assert any(state.written for state in m.states)
    assert any(state.actions and not state.written for state in m.states)
    assert any(state.actions and state.written for state in m.states)


def test_common_random_numbers_make_b_less_noisy():
    mu = tiny_model(0)
    m = measure_parts(parts(mu, shifted(mu, 0.02)), Options(prompts=24, positions=HALVES, continuations=16))
    overall, _ = by_position(m.sample, ["0", "0.4", "0.8"], seed=0)
    assert 0 < overall.pairing < 0.5


def test_b_is_exactly_0_for_equal_policies():
    options = Options(prompts=12, positions=HALVES, continuations=4)
    m = measure_parts(parts(tiny_model(0), tiny_model(0)), options)
    assert m.sample.returns_pi.std() > 0
    np.testing.assert_array_equal(m.sample.returns_pi, m.sample.returns_mu)


def test_the_discount_counts_policy_tokens_after_the_cut_only():
    gamma = 0.5
    mu = tiny_model(0)
    options = Options(prompts=12, positions=HALVES, continuations=32, seed=1)
    m = measure_parts(parts(mu, mu, config=letters_config(algorithm={"gamma": gamma})), options)
    estimates, noise = state_figures(m.sample)["v_mu"]
    assert abs(pooled_z(estimates, exact_values(mu, m, gamma), noise)) < 3


def test_truncated_sampling_is_what_the_continuations_use_too():
    """With the likeliest token alone, every continuation of a state is the same and follows the response itself."""
    config = letters_config(rollout={"max_response_tokens": LIMIT, "max_prompt_tokens": 8, "top_k": 1})
    task = LettersTask()
    m = measure_parts(parts(tiny_model(2), tiny_model(2), task=task, config=config), Options(positions=HALVES))
    assert (m.sample.returns_mu == m.sample.returns_mu[:, :1]).all()


def test_the_critic_is_read_before_the_token(measured):
    m, _, _ = measured
    critic = tiny_critic()
    for i in (0, 7, 31):
        state = m.states[i]
        ids = torch.tensor([[*state.context, *state.written]])
        with torch.no_grad():
            expected = critic(ids, torch.ones_like(ids))[0, -1].item()
        assert m.sample.values[i] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("problem", [0, 3, 5, 8])
def test_playing_on_with_the_responses_own_random_numbers_repeats_it_from_every_cut(problem):
    """Turns, tool output, rewards and truncation included: a prefix is the very state it was."""
    task, config, model, seed = LettersTask(), letters_config(), tiny_model(1), 11
    chosen = task.eval_problems()[problem]
    engine = partial(EmbeddedEngine, model, LETTERS, slots=8)
    driver = RolloutDriver(engine(), task, LETTERS, max_prompt_tokens=8)
    # The seed play_on gives to the state of the first response at the first position.
    request = RolloutRequest(0, chosen, 1, 0, SamplingParams(), LIMIT, derive_seed(seed, "probe", chosen.id, 0, 0))
    driver.submit([request])
    while driver.unfinished:
        for group in driver.advance():
            original = group.trajectories[0]
    response = Response(chosen, *(tuple(x) for x in (original.prompt_ids, original.response_ids, original.policy_mask)))
    check_replay([response], task=task, tokenizer=LETTERS, config=config)
    heard = task.heard[:1]
    tokens = [i for i, is_policy in enumerate(original.policy_mask) if is_policy]
    for number, cut in enumerate(tokens):
        task.heard.clear()
        where = Positions((float(number),), are_shares=False)
        states = cut_responses([response], where, Turns(task, LETTERS), max_response_tokens=LIMIT)
        found = play_on(states, engine=engine(), task=task, tokenizer=LETTERS, config=config, samples=1, seed=seed)
        assert found.returns[0, 0] == sum(original.rewards[cut:]), number
        assert found.truncated[0, 0] == original.truncated
        assert task.heard == heard


class ForgetfulTask(LettersTask):
    """Gives another observation each time."""

    def environment(self, problem):
        environment = super().environment(problem)
        self.made = getattr(self, "made", 0) + 1
        observation = "abc"[self.made % 3]

        class Forgetful(type(environment)):
            async def step(self, action):
                result = await super().step(action)
                return result if result.done else StepResult(observation=observation)

        environment.__class__ = Forgetful
        return environment


def test_an_environment_that_does_not_repeat_itself_is_refused():
    with pytest.raises(
        BraceError, match=r"^problem p/\w+: replaying its turns gave another observation.*after \d of \d"
    ):
        measure_parts(parts(tiny_model(1), tiny_model(1), task=ForgetfulTask()), Options(positions=HALVES))


def test_at_the_prompt_alone_nothing_is_replayed():
    options = Options(prompts=3, positions=Positions((0.0,), are_shares=False), continuations=2)
    m = measure_parts(parts(tiny_model(1), tiny_model(1), task=ForgetfulTask()), options)
    assert len(m.states) == 3


class UnjudgedTask(LettersTask):
    """Cannot judge episodes in which the policy never wrote ``a``."""

    def environment(self, problem):
        environment = super().environment(problem)

        class Unjudged(type(environment)):
            async def step(self, action):
                result = await super().step(action)
                silent = result.done and not any("a" in turn for turn in self.turns)
                return StepResult(done=True, excluded=True) if silent else result

        environment.__class__ = Unjudged
        return environment


def test_pairs_with_an_unjudged_half_are_left_out():
    mu = tiny_model(0)
    options = Options(prompts=24, positions=Positions((0.0,), are_shares=False), continuations=16)
    m = measure_parts(parts(mu, shifted(mu, 0.15), task=UnjudgedTask()), options)
    unjudged = np.isnan(m.sample.returns_pi)
    assert 0 < unjudged.mean() < 0.8
    np.testing.assert_array_equal(unjudged, np.isnan(m.sample.returns_mu))
    overall, _ = by_position(m.sample, ["0"], seed=0)
    assert all(np.isfinite(measured.estimate.value) for measured in overall.figures.values())


def test_a_position_no_response_reaches_is_refused():
    response = Response(Problem("p", "ab", ""), (1, 2), (1, 3, 2), (True, False, True))
    turns = Turns(LettersTask(), LETTERS)
    with pytest.raises(BraceError, match=r"^--at: no response has a policy token 2 .* longest has 2"):
        cut_responses([response], Positions((0.0, 2.0), are_shares=False), turns, max_response_tokens=6)
