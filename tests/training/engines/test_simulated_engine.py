"""The simulated engine keeps the contract of engines and a time of its own; its clock is a fake here."""

from __future__ import annotations

import math

import pytest
import torch

from brace_rl.training.engines import simulated
from brace_rl.training.engines.simulated import ResponseLengths, SimulatedEngine
from brace_rl.training.types import GenerationRequest, SamplingParams

EOS = 3
RATE = 10.0


class Clock:
    """Stands still unless somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(simulated, "time", made)
    return made


def engine(*, slots=2, median=10, spread=0.0, longest=50):
    lengths = ResponseLengths(median, spread, longest)
    return SimulatedEngine(vocabulary=8, eos_token_id=EOS, slots=slots, tokens_per_s=RATE, lengths=lengths)


def requests(count, *, new=60, **more):
    return [GenerationRequest(f"r{i}", (1, 2), new, seed=i, **more) for i in range(count)]


def run(made):
    results = {}
    while made.unfinished:
        results |= {result.session: result for result in made.step()}
    return results


def test_tokens_come_at_the_rate_of_the_slots(clock):
    made = engine(slots=2)
    made.submit(requests(6))
    assert len(run(made)) == 6
    # Six turns of 10 tokens, two at a time, 10 tokens a second.
    assert clock.now == pytest.approx(103.0, abs=0.02)


def test_a_step_that_comes_late_costs_the_simulated_machine_nothing(clock):
    made = engine(slots=2)
    made.submit(requests(6))
    made.step()
    clock.now = 103.001
    assert len(made.step()) == 6


def test_time_without_work_is_not_worked_off(clock):
    made = engine(slots=1)
    assert made.step() == []
    clock.now += 50.0
    made.submit(requests(1))
    run(made)
    assert clock.now == pytest.approx(151.0, abs=0.02)


def test_results_depend_on_the_seed_alone(clock):
    results = []
    for slots in (1, 4):
        made = engine(slots=slots, spread=0.8)
        made.submit(requests(9))
        results.append(run(made))
    assert results[0] == results[1]
    assert len({len(result.token_ids) for result in results[0].values()}) > 3


def test_the_end_of_sequence_closes_turns_that_are_not_cut(clock):
    made = engine(spread=0.8)
    made.submit(requests(20, new=9))
    for result in run(made).values():
        assert EOS not in result.token_ids[:-1]
        assert (result.token_ids[-1] == EOS) == (result.finish_reason == "stop")
        assert result.finish_reason == "stop" or len(result.token_ids) == 9
        assert result.logprobs == [-math.log(7)] * len(result.token_ids)


def test_every_token_carries_the_version_it_was_made_under(clock):
    made = engine(slots=2)
    made.update_weights({"w": torch.zeros(1)}, 4)
    made.submit(requests(3))
    while clock.now < 100.5:
        assert made.step() == []
    made.update_weights({"w": torch.zeros(1)}, 5)
    results = run(made)
    before = results["r0"].versions.count(4)
    assert before in (5, 6)
    assert results["r0"].versions == results["r1"].versions == [4] * before + [5] * (10 - before)
    assert results["r2"].versions == [5] * 10


def test_lengths_are_cut_and_have_the_median_asked_for():
    lengths = ResponseLengths(median=60, spread=0.8, longest=200)
    drawn = sorted(lengths.of(seed) for seed in range(2001))
    assert drawn[-1] == 200
    assert abs(drawn[1000] - 60) < 5
    assert {ResponseLengths(7, 0.0, 9).of(seed) for seed in range(5)} == {7}


@pytest.mark.parametrize(
    "wrong",
    [
        GenerationRequest("x", (), 1, seed=0),
        GenerationRequest("x", (1,), 0, seed=0),
        GenerationRequest("x", (1,), 1, seed=0, sampling=SamplingParams(top_k=2)),
    ],
)
def test_what_cannot_be_served_is_refused(wrong, clock):
    made = engine()
    with pytest.raises(ValueError, match="session 'x'"):
        made.submit([*requests(1), wrong])
    assert made.unfinished == 0
