"""Ways to generate responses of very different lengths with one model, measured on the same requests.

* ``embedded engine``: continuous batching, a finished row is replaced at once.
* ``generate()``: batches of the same size through ``model.generate``; a batch lasts as long as its longest response.
* ``transformers manager``: the continuous-batching manager that ships with ``transformers``.
* ``vLLM engine``: vLLM behind the same contract as the embedded engine, where it is installed.

All sample at temperature 1, nothing ends a response early, and only tokens that were asked for are counted.
"""

from __future__ import annotations

import copy
import logging
import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from brace_rl.training.engines.base import Engine
from brace_rl.training.engines.embedded import EmbeddedEngine
from brace_rl.training.engines.vllm import VLLMEngine
from brace_rl.training.types import GenerationRequest

_PAGE_TOKENS = 32
"""Cache page of the transformers manager; its own default, 256, wastes most of a page on short responses."""
_HEAD_SIZE = 32
"""The smallest that vLLM has kernels for."""
_STOP_TIMEOUT_S = 10.0
_WARM_UP_REQUESTS = 4


@dataclass(frozen=True)
class _Job:
    prompt: tuple[int, ...]
    new_tokens: int


def compare_generation(
    *,
    device: torch.device | str = "cpu",
    requests: int = 192,
    slots: int = 64,
    prompt_tokens: tuple[int, int] = (10, 40),
    mean_new_tokens: int = 40,
    max_new_tokens: int = 240,
    hidden_size: int = 96,
    layers: int = 3,
    vocabulary: int = 64,
    seed: int = 0,
    manager_timeout_s: float = 30.0,
) -> list[dict[str, Any]]:
    """Tokens per second of each, one row each.

    Response lengths are exponentially distributed, so most are short and a few reach ``max_new_tokens``. The model is
    a Llama with random weights in float32; torch's thread count is left as it is.

    Args:
        device: where the model runs.
        requests: responses to generate.
        slots: sequences decoded together, by each.
        prompt_tokens: shortest and longest prompt.
        manager_timeout_s: the transformers manager is given up after this; the row then says so.

    Returns:
        Rows with ``method``, ``tokens``, ``seconds``, ``tokens_per_second``, ``relative`` (to ``generate()``),
        ``slots``, ``threads`` and ``note``. The figures are None where the method could not run; ``note`` says why.
    """
    jobs = _jobs(requests, prompt_tokens, mean_new_tokens, max_new_tokens, vocabulary, seed)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden_size // _HEAD_SIZE),
        max_position_embeddings=prompt_tokens[1] + max_new_tokens,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).to(device).eval()
    engine = EmbeddedEngine(copy.deepcopy(model), None, slots=slots)
    methods: list[tuple[str, Callable[[Sequence[_Job]], str]]] = [
        ("embedded engine", lambda jobs: _run_engine(engine, jobs)),
        ("generate()", lambda jobs: _run_generate(model, jobs, slots)),
        ("transformers manager", lambda jobs: _run_manager(model, jobs, slots, manager_timeout_s)),
    ]
    with ExitStack() as stack:
        if find_spec("vllm") is not None:
            folder = stack.enter_context(TemporaryDirectory())
            methods.append(("vLLM engine", _vllm_runner(model, folder, slots)))
        rows = [_measure(name, run, jobs, slots) for name, run in methods]
    baseline = next(row["tokens_per_second"] for row in rows if row["method"] == "generate()")
    for row in rows:
        rate = row["tokens_per_second"]
        row["relative"] = rate / baseline if rate and baseline else None
    return rows


def _jobs(
    count: int, prompt_tokens: tuple[int, int], mean: int, longest: int, vocabulary: int, seed: int
) -> list[_Job]:
    rng = random.Random(seed)
    return [
        _Job(
            prompt=tuple(rng.randrange(vocabulary) for _ in range(rng.randint(*prompt_tokens))),
            new_tokens=min(longest, 1 + int(rng.expovariate(1 / mean))),
        )
        for _ in range(count)
    ]


def _measure(name: str, run: Callable[[Sequence[_Job]], str], jobs: Sequence[_Job], slots: int) -> dict[str, Any]:
    row: dict[str, Any] = {"method": name, "tokens": None, "seconds": None, "tokens_per_second": None}
    try:
        run(jobs[:_WARM_UP_REQUESTS])
        start = time.perf_counter()
        note = run(jobs)
        seconds = time.perf_counter() - start
    except Exception as error:  # a method that cannot run here is a row of the table, not the end of it
        note = f"cannot run: {type(error).__name__}: {error}"
    else:
        tokens = sum(job.new_tokens for job in jobs)
        row |= {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}
    return {**row, "slots": slots, "threads": torch.get_num_threads(), "note": note}


def _vllm_runner(model: Any, folder: str, slots: int) -> Callable[[Sequence[_Job]], str]:
    """Starts vLLM at the first call, which is not measured."""
    engines: list[Engine] = []

    def run(jobs: Sequence[_Job]) -> str:
        if not engines:
            model.save_pretrained(folder)
            engines.append(VLLMEngine(folder, None, dtype="float32", slots=slots))
        return _run_engine(engines[0], jobs).replace(", entropies", "")

    return run


def _run_engine(engine: Engine, jobs: Sequence[_Job]) -> str:
    engine.submit([GenerationRequest(str(i), job.prompt, job.new_tokens, seed=i) for i, job in enumerate(jobs)])
    tokens = 0
    while engine.unfinished:
        for result in engine.step():
            engine.release(result.session)
            tokens += len(result.token_ids)
    _check(tokens, jobs)
    return "log-probs, entropies and versions recorded"


def _run_generate(model: Any, jobs: Sequence[_Job], slots: int) -> str:
    tokens = wasted = 0
    for first in range(0, len(jobs), slots):
        batch = jobs[first : first + slots]
        width, longest = max(len(job.prompt) for job in batch), max(job.new_tokens for job in batch)
        ids = torch.tensor([[0] * (width - len(job.prompt)) + list(job.prompt) for job in batch])
        ids = ids.to(model.device)
        mask = torch.tensor([[0] * (width - len(job.prompt)) + [1] * len(job.prompt) for job in batch])
        config = _sampling_config(longest)
        output = model.generate(input_ids=ids, attention_mask=mask.to(model.device), generation_config=config)
        tokens += sum(min(job.new_tokens, len(row) - width) for job, row in zip(batch, output.tolist(), strict=True))
        wasted += sum(longest - job.new_tokens for job in batch)
    _check(tokens, jobs)
    return f"{wasted / (wasted + tokens):.0%} of its tokens were not asked for; no log-probs"


def _run_manager(model: Any, jobs: Sequence[_Job], slots: int, timeout_s: float) -> str:
    from transformers import ContinuousBatchingConfig

    # It reports at ERROR level that it cannot size its memory without psutil; the sizes are given here.
    logger = logging.getLogger("ContinuousBatchingLogger")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    pages = max((len(job.prompt) + job.new_tokens) // _PAGE_TOKENS + 1 for job in jobs)
    config = ContinuousBatchingConfig(
        page_size=_PAGE_TOKENS,
        num_blocks=slots * pages,
        max_batch_tokens=max(slots * 2, max(len(job.prompt) for job in jobs)),
        max_requests_per_batch=slots,
        return_logprobs=True,
    )
    longest = max(job.new_tokens for job in jobs)
    manager = model.init_continuous_batching(
        generation_config=_sampling_config(longest), continuous_batching_config=config
    )
    deadline = time.monotonic() + timeout_s
    try:
        manager.start()
        for job in jobs:
            manager.add_request(list(job.prompt), max_new_tokens=job.new_tokens)
        tokens = finished = 0
        while finished < len(jobs):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{finished} of {len(jobs)} responses in {timeout_s:.0f} s")
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(result.error)
                finished += 1
                tokens += len(result.generated_tokens)
            elif not manager.is_running():
                raise RuntimeError("its generation thread stopped")
    finally:
        manager.stop(block=True, timeout=_STOP_TIMEOUT_S)
        logger.setLevel(level)
    _check(tokens, jobs)
    return "log-probs recorded; keeps stale cache entries when weights change"


def _sampling_config(new_tokens: int) -> GenerationConfig:
    return GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=new_tokens,
        pad_token_id=0,
    )


def _check(tokens: int, jobs: Sequence[_Job]) -> None:
    asked = sum(job.new_tokens for job in jobs)
    if tokens != asked:
        raise RuntimeError(f"{tokens} tokens came back, {asked} were asked for")
