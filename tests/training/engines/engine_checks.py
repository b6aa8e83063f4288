"""What the tests of several engines share: turns, full forwards to compare with, and promises every engine keeps."""

from __future__ import annotations

import torch

from brace_rl.training.types import GenerationRequest, SamplingParams

VOCABULARY, POSITIONS = 61, 96
"""Of the models that conftest.py makes."""


def request(session, token_ids, new, *, seed=0, **more):
    return GenerationRequest(session=session, token_ids=tuple(token_ids), max_new_tokens=new, seed=seed, **more)


def run(engine):
    """Step until nothing is left; results by session."""
    results = {}
    while engine.unfinished:
        for result in engine.step():
            assert result.session not in results
            results[result.session] = result
    return results


def full_logits(model, ids, start):
    """float64 logits that predict ``ids[start:]``, from one uncached forward."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits
    return logits[0, start - 1 : -1].double()


def expected_logprobs(logits, tokens, temperature=1.0):
    return (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def assert_logprobs(result, expected, tolerance):
    torch.testing.assert_close(torch.tensor(result.logprobs).double(), expected.double(), atol=tolerance, rtol=0)


def assert_is_of(model, context, result, tolerance):
    """The log-probs of a turn at temperature 1 are the model's."""
    logits = full_logits(model, (*context, *result.token_ids), len(context))
    assert_logprobs(result, expected_logprobs(logits, result.token_ids), tolerance)


def check_logprobs_are_those_of_the_distribution_sampled_from(engine, model, prompts, tolerance):
    """``engine`` has the weights of ``model``. Yields each result with its logits, divided by its temperature."""
    temperatures = [1.0, 0.6, 1.5]
    requests = [
        request(f"r{i}", prompt, 1 + (7 * i) % 23, seed=i, sampling=SamplingParams(temperature=temperatures[i % 3]))
        for i, prompt in enumerate(prompts)
    ]
    engine.submit(requests)
    results = run(engine)
    assert set(results) == {r.session for r in requests}
    for r in requests:
        result = results[r.session]
        assert len(result.token_ids) == r.max_new_tokens
        assert result.finish_reason == "length"
        logits = full_logits(model, r.token_ids + tuple(result.token_ids), len(r.token_ids))
        assert_logprobs(result, expected_logprobs(logits, result.token_ids, r.sampling.temperature), tolerance)
        yield result, logits / r.sampling.temperature


def check_weights_that_change_in_flight_give_both_versions(engine, old, new, prompts, tolerance):
    """``engine`` has three slots; there are five prompts."""
    engine.update_weights(old.state_dict(), 6)
    requests = [request(f"r{i}", prompt, 9, seed=i) for i, prompt in enumerate(prompts)]
    engine.submit(requests)
    for _ in range(4):
        assert engine.step() == []
    engine.update_weights(new.state_dict(), 7)
    assert (engine.version, engine.unfinished) == (7, 5)
    results = run(engine)
    for i, r in enumerate(requests):
        result = results[r.session]
        # Three were being decoded when the weights changed, two still waited.
        before = 4 if i < 3 else 0
        assert result.versions == [6] * before + [7] * (9 - before)
        ids, start = r.token_ids + tuple(result.token_ids), len(r.token_ids)
        by_old = expected_logprobs(full_logits(old, ids, start), result.token_ids)
        by_new = expected_logprobs(full_logits(new, ids, start), result.token_ids)
        assert_logprobs(result, torch.cat((by_old[:before], by_new[before:])), tolerance)


def check_a_session_continued_after_new_weights_sees_nothing_of_the_old(engine, new, prompt, tolerance):
    engine.submit([request("s", prompt, 4)])
    context = (*prompt, *run(engine)["s"].token_ids, 3)
    engine.update_weights(new.state_dict(), 1)
    engine.submit([request("s", context, 4)])
    assert_is_of(new, context, run(engine)["s"], tolerance)


def check_weights_are_copied(engine, new, prompt, tolerance):
    weights = {name: tensor.clone() for name, tensor in new.state_dict().items()}
    engine.update_weights(weights, 1)
    for tensor in weights.values():
        tensor.zero_()
    engine.submit([request("s", prompt, 5)])
    assert_is_of(new, prompt, run(engine)["s"], tolerance)
