"""The embedded engine: what it returns is what the model says, whatever shares the batch with it."""

from __future__ import annotations

import engine_checks
import pytest
import torch
from engine_checks import (
    POSITIONS,
    VOCABULARY,
    check_a_session_continued_after_new_weights_sees_nothing_of_the_old,
    check_logprobs_are_those_of_the_distribution_sampled_from,
    check_weights_are_copied,
    check_weights_that_change_in_flight_give_both_versions,
    expected_logprobs,
    request,
    run,
)
from transformers import MambaConfig, MambaForCausalLM

from brace_rl.errors import ModelError
from brace_rl.training.engines.embedded import EmbeddedEngine
from brace_rl.training.types import SamplingParams

KINDS = ["llama", "gpt2", "mistral-sliding", "gemma2-mixed-sliding"]
TOLERANCE = 2e-5


def mixed_requests(prompts, **more):
    return [request(f"r{i}", prompt, 1 + (7 * i) % 23, seed=100 + i, **more) for i, prompt in enumerate(prompts)]


def assert_logprobs(result, expected):
    engine_checks.assert_logprobs(result, expected, TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_and_entropies_equal_a_full_forward(kind, build_model, letters, random_prompts):
    model = build_model(kind)
    engine = EmbeddedEngine(model, letters, slots=4)
    prompts = random_prompts(13, lengths=(1, 30))
    for result, logits in check_logprobs_are_those_of_the_distribution_sampled_from(engine, model, prompts, TOLERANCE):
        entropies = torch.distributions.Categorical(logits=logits).entropy()
        torch.testing.assert_close(torch.tensor(result.entropies).double(), entropies, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_results_do_not_depend_on_slots_or_neighbours(kind, build_model, letters, random_prompts):
    requests = mixed_requests(random_prompts(9))
    by_slots = []
    for slots in (1, 3, 9):
        engine = EmbeddedEngine(build_model(kind), letters, slots=slots)
        engine.submit(requests)
        by_slots.append(run(engine))
    for other in by_slots[1:]:
        for name, result in by_slots[0].items():
            assert other[name].token_ids == result.token_ids
            assert_logprobs(other[name], torch.tensor(result.logprobs))


def test_the_same_calls_give_bit_identical_results_whatever_the_engine_did_before(build_model, letters, random_prompts):
    requests = mixed_requests(random_prompts(12, lengths=(1, 40)))
    fresh = EmbeddedEngine(build_model(), letters, slots=5)
    fresh.submit(requests)
    expected = run(fresh)
    used = EmbeddedEngine(build_model(), letters, slots=5)
    used.submit([request("old", range(50), 40, seed=9), request("older", range(3), 20, seed=8)])
    for name in run(used):
        used.release(name)
    used.submit(requests)
    assert run(used) == expected


def test_a_freed_slot_is_filled_in_the_next_step(build_model, letters):
    engine = EmbeddedEngine(build_model(), letters, slots=2)
    engine.submit([request("long", [1, 2], 9), request("short", [3], 2), request("next", [4, 5, 6], 7)])
    finished_at = {}
    step = 0
    while engine.unfinished:
        step += 1
        finished_at.update({result.session: step for result in engine.step()})
    # "next" takes over from "short" after step 2 and needs 7 more; "long" runs beside both.
    assert finished_at == {"long": 9, "short": 2, "next": 9}


@pytest.mark.parametrize("kind", KINDS)
def test_continued_session_equals_the_full_context_served_afresh(kind, build_model, letters, random_prompts):
    prompts = random_prompts(6, seed=3)
    engine = EmbeddedEngine(build_model(kind), letters, slots=3)
    contexts = dict(enumerate(prompts))
    for turn in range(3):
        engine.submit([request(f"s{i}", context, 3 + i, seed=i) for i, context in contexts.items()])
        results = run(engine)
        afresh = EmbeddedEngine(build_model(kind), letters, slots=6)
        afresh.submit([request(f"s{i}", context, 3 + i, seed=i) for i, context in contexts.items()])
        expected = run(afresh)
        for i, context in contexts.items():
            name = f"s{i}"
            assert results[name].token_ids == expected[name].token_ids
            assert_logprobs(results[name], torch.tensor(expected[name].logprobs))
            # Observations of different lengths, one of them empty.
            contexts[i] = (*context, *results[name].token_ids, *range(10, 10 + (i + turn) % 4))


def count_fed_tokens(engine):
    """Record how many tokens each forward is fed, padding included."""
    fed = []
    forward = engine._forward

    def counting(input_ids, **arguments):
        fed.append(input_ids.numel())
        return forward(input_ids, **arguments)

    engine._forward = counting
    return fed


def test_a_continued_session_feeds_only_what_is_new(build_model, letters):
    engine = EmbeddedEngine(build_model(), letters, slots=2)
    engine.submit([request("s", range(20), 4)])
    tokens = run(engine)["s"].token_ids
    fed = count_fed_tokens(engine)
    engine.submit([request("s", [*range(20), *tokens, 7, 8], 1)])
    run(engine)
    # 23 tokens are cached; the last sampled one and the first of the observation come before the decode step's own.
    assert fed == [2, 1]


def test_a_changed_context_is_computed_from_scratch(build_model, letters, full_logits):
    model = build_model()
    engine = EmbeddedEngine(model, letters, slots=2)
    engine.submit([request("s", range(20), 4)])
    run(engine)
    changed = (5, *range(1, 20), 3, 4, 5, 6, 7)
    engine.submit([request("s", changed, 6)])
    result = run(engine)["s"]
    assert_logprobs(
        result, expected_logprobs(full_logits(model, changed + tuple(result.token_ids), 25), result.token_ids)
    )


def test_a_context_no_longer_than_the_cache_is_computed_from_scratch(build_model, letters, full_logits):
    model = build_model()
    engine = EmbeddedEngine(model, letters, slots=2)
    engine.submit([request("s", range(20), 4)])
    run(engine)
    engine.submit([request("s", range(20), 4, seed=1)])
    result = run(engine)["s"]
    logits = full_logits(model, (*range(20), *result.token_ids), 20)
    assert_logprobs(result, expected_logprobs(logits, result.token_ids))


def test_more_sessions_than_slots_finish_all_their_turns(build_model, letters, random_prompts, full_logits):
    model = build_model()
    engine = EmbeddedEngine(model, letters, slots=2)
    contexts = {f"s{i}": prompt for i, prompt in enumerate(random_prompts(11, seed=5))}
    turns = dict.fromkeys(contexts, 0)
    engine.submit([request(name, context, 3, seed=4) for name, context in contexts.items()])
    while engine.unfinished:
        for result in engine.step():
            name = result.session
            logits = full_logits(model, contexts[name] + tuple(result.token_ids), len(contexts[name]))
            assert_logprobs(result, expected_logprobs(logits, result.token_ids))
            contexts[name] += (*result.token_ids, 9)
            turns[name] += 1
            if turns[name] < 3:
                engine.submit([request(name, contexts[name], 3, seed=4)])
    assert set(turns.values()) == {3}


def test_sessions_finished_together_and_never_released_are_evicted(build_model, letters, random_prompts):
    engine = EmbeddedEngine(build_model(), letters, slots=2)
    prompts = random_prompts(7)
    engine.submit([request(f"s{i}", prompt, 2) for i, prompt in enumerate(prompts)])
    first = run(engine)
    engine.step()
    assert len(engine._parked) == 2
    engine.submit([request(f"s{i}", (*p, *first[f"s{i}"].token_ids), 2) for i, p in enumerate(prompts)])
    assert len(run(engine)) == 7


def test_a_released_session_is_forgotten(build_model, letters):
    engine = EmbeddedEngine(build_model(), letters, slots=2)
    engine.submit([request("s", range(20), 4)])
    tokens = run(engine)["s"].token_ids
    engine.release("s")
    engine.release("never seen")
    fed = count_fed_tokens(engine)
    engine.submit([request("s", [*range(20), *tokens], 1)])
    run(engine)
    assert fed == [23, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_change_in_flight_give_both_versions(kind, build_model, letters, random_prompts):
    old, new = build_model(kind, seed=0), build_model(kind, seed=1)
    engine = EmbeddedEngine(build_model(kind, seed=2), letters, slots=3)
    assert engine.version == -1
    check_weights_that_change_in_flight_give_both_versions(engine, old, new, random_prompts(5), TOLERANCE)


def test_a_session_continued_after_new_weights_sees_only_them(build_model, letters):
    engine = EmbeddedEngine(build_model(seed=0), letters, slots=2)
    check_a_session_continued_after_new_weights_sees_nothing_of_the_old(
        engine, build_model(seed=1), range(10), TOLERANCE
    )


def test_weights_are_copied(build_model, letters):
    check_weights_are_copied(EmbeddedEngine(build_model(), letters, slots=1), build_model(seed=1), (1, 2, 3), TOLERANCE)


def test_tied_weights_may_be_given_under_either_name_or_both_but_not_differ(build_model, letters):
    state = build_model("llama", seed=1).state_dict()
    engine = EmbeddedEngine(build_model("llama"), letters, slots=1)
    outputs = []
    for left_out in ("lm_head.weight", "model.embed_tokens.weight", None):
        engine.update_weights(build_model("llama").state_dict(), 0)
        engine.update_weights({name: tensor for name, tensor in state.items() if name != left_out}, 1)
        engine.submit([request("s", [1, 2, 3], 5)])
        outputs.append(run(engine)["s"])
        engine.release("s")
    assert outputs[0] == outputs[1] == outputs[2]
    with pytest.raises(ModelError, match=r"ties .*, which differ"):
        engine.update_weights({**state, "lm_head.weight": state["lm_head.weight"] + 1}, 2)


def test_weights_that_do_not_fit_are_refused_and_change_nothing(build_model, letters):
    state = build_model(seed=1).state_dict()
    engine = EmbeddedEngine(build_model(), letters, slots=1)
    engine.submit([request("s", [1, 2, 3], 5)])
    expected = run(engine)["s"]
    engine.release("s")
    norm = "model.norm.weight"
    with pytest.raises(ModelError, match=f"missing {norm}"):
        engine.update_weights({name: tensor for name, tensor in state.items() if name != norm}, 1)
    with pytest.raises(ModelError, match=r"unknown model\.extra"):
        engine.update_weights({**state, "model.extra": torch.zeros(1)}, 1)
    with pytest.raises(ModelError, match=rf"{norm} has shape \(3,\), the model's is \(32,\)"):
        engine.update_weights({**state, norm: torch.zeros(3)}, 1)
    assert engine.version == -1
    engine.submit([request("s", [1, 2, 3], 5)])
    assert run(engine)["s"].logprobs == expected.logprobs


def test_kept_ids_and_renormalisation_in_a_batch_of_different_samplings(
    build_model, letters, random_prompts, full_logits
):
    model = build_model()
    engine = EmbeddedEngine(model, letters, slots=4)
    samplings = [SamplingParams(), SamplingParams(0.8, top_p=0.7), SamplingParams(1.2, top_k=5), SamplingParams(0.0)]
    requests = [
        request(f"r{i}", prompt, 8, seed=i, sampling=samplings[i % 4]) for i, prompt in enumerate(random_prompts(8))
    ]
    engine.submit(requests)
    results = run(engine)
    for r in requests:
        result, params = results[r.session], r.sampling
        logits = full_logits(model, r.token_ids + tuple(result.token_ids), len(r.token_ids))
        if params.temperature == 0:
            assert result.token_ids == logits.argmax(-1).tolist()
        logits = logits / (params.temperature or 1.0)
        if not params.truncates:
            assert result.kept_ids is None
        else:
            assert len(result.kept_ids) == 8
            for step, kept in enumerate(result.kept_ids):
                order = logits[step].softmax(-1).sort(descending=True)
                if params.top_k:
                    expected = order.indices[: params.top_k]
                else:
                    expected = order.indices[: int((order.values.cumsum(0) < params.top_p).sum()) + 1]
                assert kept == sorted(expected.tolist())
                assert result.token_ids[step] in kept
                cut = torch.full_like(logits[step], -torch.inf)
                cut[kept] = logits[step][kept]
                logits[step] = cut
        assert_logprobs(result, expected_logprobs(logits, result.token_ids))


def test_stop_tokens_and_texts_end_the_turn_with_the_token_that_completes_them(build_model, letters, random_prompts):
    prompts = random_prompts(6, seed=2)
    plain = EmbeddedEngine(build_model(), letters, slots=6)
    plain.submit([request(f"r{i}", prompt, 40, seed=i) for i, prompt in enumerate(prompts)])
    unstopped = run(plain)
    for i in range(6):
        token_ids = unstopped[f"r{i}"].token_ids
        # The text of two neighbouring tokens, begun and ended inside them where they have more than one letter.
        text = letters.decode(token_ids[9:11])[:-1] or letters.decode(token_ids[9:11])
        for stop in ({"stop": (text,)}, {"stop_token_ids": (token_ids[10], 2)}):
            engine = EmbeddedEngine(build_model(), letters, slots=2)
            engine.submit([request("s", prompts[i], 40, seed=i, **stop)])
            result = run(engine)["s"]
            if "stop" in stop:
                ends = [n for n in range(1, 41) if text in letters.decode(token_ids[:n])]
            else:
                ends = [n for n in range(1, 41) if token_ids[n - 1] in stop["stop_token_ids"]]
            assert result.token_ids == token_ids[: ends[0]]
            assert result.finish_reason == "stop"


def test_a_stop_text_in_the_prompt_does_not_count(build_model, letters):
    engine = EmbeddedEngine(build_model(), letters, slots=1)
    start = letters.convert_tokens_to_ids("</")
    # Any first token would complete the text if the prompt were looked at.
    engine.submit([request("s", [start], 1, stop=tuple("</" + letters.decode([i]) for i in range(VOCABULARY)))])
    assert run(engine)["s"].finish_reason == "length"


def test_generation_ends_at_the_last_position_of_the_model(build_model, letters):
    engine = EmbeddedEngine(build_model("gpt2"), letters, slots=1)
    engine.submit([request("s", [1] * (POSITIONS - 5), 50)])
    result = run(engine)["s"]
    assert len(result.token_ids) == 5
    assert result.finish_reason == "length"
    with pytest.raises(ValueError, match="no room"):
        engine.submit([request("t", [1] * POSITIONS, 1)])


def test_requests_that_cannot_be_served_are_refused_and_queue_nothing(build_model, letters):
    engine = EmbeddedEngine(build_model(), letters, slots=1)
    engine.submit([request("busy", [1], 3)])
    for bad, message in [
        (request("s", [], 1), "empty context"),
        (request("s", [1], 0), "max_new_tokens must be at least 1"),
        (request("s", [VOCABULARY], 1), "between 0 and 60"),
        (request("s", [-1], 1), "between 0 and 60"),
        (request("busy", [1], 1), "not finished"),
        (request("fine", [1], 1), "not finished"),
    ]:
        with pytest.raises(ValueError, match=message):
            engine.submit([request("fine", [1], 1), bad])
    assert engine.unfinished == 1
    with pytest.raises(ValueError, match="at least 1"):
        EmbeddedEngine(build_model(), letters, slots=0)


def test_models_without_a_key_value_cache_are_refused(letters):
    mamba = MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1))
    with pytest.raises(ModelError, match=r"mamba: .*attention"):
        EmbeddedEngine(mamba, letters, slots=1)


def test_a_diverged_model_is_an_error_and_leaves_no_trace_once_replaced(build_model, letters, full_logits):
    good = build_model(seed=1)
    engine = EmbeddedEngine(build_model(), letters, slots=2)
    broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in good.state_dict().items()}
    engine.update_weights(broken, 1)
    engine.submit([request("s", range(12), 5), request("t", [3], 5)])
    with pytest.raises(ModelError, match="not finite"):
        engine.step()
    engine.update_weights(good.state_dict(), 2)
    results = run(engine)
    for name, prompt in (("s", tuple(range(12))), ("t", (3,))):
        logits = full_logits(good, prompt + tuple(results[name].token_ids), len(prompt))
        assert_logprobs(results[name], expected_logprobs(logits, results[name].token_ids))


def test_bfloat16_models_report_logprobs_of_what_they_sampled(build_model, letters, random_prompts):
    engine = EmbeddedEngine(build_model().to(torch.bfloat16), letters, slots=4)
    engine.submit([request(f"r{i}", prompt, 12, seed=i) for i, prompt in enumerate(random_prompts(4))])
    for result in run(engine).values():
        assert all(logprob <= 0 for logprob in result.logprobs)
        assert len({round(logprob, 5) for logprob in result.logprobs}) > 6


def test_a_finished_turn_is_replaced_at_once_however_many_slots_there_are_and_however_long_the_others_run(build_model):
    engine = EmbeddedEngine(build_model("llama"), None, slots=32)
    lengths = [1, *[40] * 31, 1]
    engine.submit([request(str(i), (1, 2, 3), length, seed=i) for i, length in enumerate(lengths)])
    done = {}
    for step in range(10):
        done |= {result.session: step for result in engine.step()}
    assert done == {"0": 0, "32": 1}
