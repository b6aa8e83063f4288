"""An engine, a tokenizer, tasks and a picklable driver factory that need no model and repeat exactly."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from brace_rl.errors import DataError
from brace_rl.tasks.base import Environment, Problem, StepResult, Task
from brace_rl.training.engines.base import Engine
from brace_rl.training.rollout import RolloutDriver
from brace_rl.training.types import Generation, GenerationRequest, RolloutRequest, SamplingParams, derive_seed


class FakeTokenizer:
    """One token per ASCII character; id 0 is the end of sequence, id 1 a tag that counts as a special token."""

    eos_token_id = 0
    pad_token_id = 0
    special: ClassVar = {0: "<eos>", 1: "<tag>"}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        for token_id, name in self.special.items():
            text = text.replace(name, chr(token_id))
        return [ord(character) for character in text]

    def decode(
        self, token_ids: Iterable[int], skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        assert not clean_up_tokenization_spaces
        special = dict.fromkeys(self.special, "") if skip_special_tokens else self.special
        return "".join(special.get(token_id, chr(token_id)) for token_id in token_ids)


class FakeEngine(Engine):
    """Emits ``burst`` tokens per turn and step: those of ``reply``, or letters that depend on (seed, position).

    The log-prob of a token is minus the value of the weights, all of whose elements must be the same number: a torn
    or outdated copy shows.
    """

    def __init__(
        self,
        *,
        slots: int = 4,
        reply: Callable[[GenerationRequest], str] | None = None,
        burst: int = 1,
        step_s: float = 0.0,
        newest_first: bool = False,
        max_context_tokens: int | None = None,
    ) -> None:
        self.version = -1
        self.max_context_tokens = max_context_tokens
        self.value = 0.0
        self.requests: list[GenerationRequest] = []
        self.released: list[str] = []
        self._tokenizer = FakeTokenizer()
        self._slots = slots
        self._reply = reply
        self._burst = burst
        self._step_s = step_s
        self._newest_first = newest_first
        self._queue: deque[GenerationRequest] = deque()
        self._active: dict[str, tuple[GenerationRequest, Generation]] = {}

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            if not request.token_ids or request.max_new_tokens < 1:
                raise ValueError(f"session {request.session}: cannot be served")
        self.requests += requests
        self._queue += requests

    def step(self) -> list[Generation]:
        time.sleep(self._step_s)
        while self._queue and len(self._active) < self._slots:
            request = self._queue.popleft()
            kept: list[list[int]] | None = [] if request.sampling.truncates else None
            self._active[request.session] = (request, Generation(request.session, kept_ids=kept))
        finished = [g for request, g in self._active.values() if self._extend(request, g)]
        for generation in finished:
            del self._active[generation.session]
        return finished[::-1] if self._newest_first else finished

    def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        values = torch.cat([tensor.detach().reshape(-1).float() for tensor in weights.values()])
        if not torch.all(values == values[0]):
            raise ValueError(f"weights of version {version} are torn")
        self.value = float(values[0])
        self.version = version

    def release(self, session: str) -> None:
        self.released.append(session)

    @property
    def unfinished(self) -> int:
        return len(self._queue) + len(self._active)

    def _extend(self, request: GenerationRequest, generation: Generation) -> bool:
        """Add tokens to a turn; whether it is finished."""
        for _ in range(self._burst):
            token_id = self._next_token(request, len(generation.token_ids))
            generation.token_ids.append(token_id)
            generation.logprobs.append(-self.value)
            generation.versions.append(self.version)
            generation.entropies.append(0.5)
            if generation.kept_ids is not None:
                generation.kept_ids.append([token_id])
            text = self._tokenizer.decode(generation.token_ids[-16:])
            if token_id in request.stop_token_ids or any(text.endswith(stop) for stop in request.stop):
                generation.finish_reason = "stop"
                return True
            if len(generation.token_ids) == request.max_new_tokens:
                generation.finish_reason = "length"
                return True
        return False

    def _next_token(self, request: GenerationRequest, written: int) -> int:
        if self._reply is not None:
            ids = [*self._tokenizer.encode(self._reply(request), add_special_tokens=False), 0]
            return ids[written]
        return ord("a") + derive_seed(request.seed, len(request.token_ids) + written) % 26


class ScriptedEnvironment(Environment):
    """Answers turn ``i`` with ``script[i]``, or raises it; remembers the actions."""

    def __init__(self, script: Sequence[StepResult | Exception]) -> None:
        self.script = script
        self.actions: list[str] = []

    async def step(self, action: str) -> StepResult:
        self.actions.append(action)
        result = self.script[len(self.actions) - 1]
        if isinstance(result, Exception):
            raise result
        return result


class FakeTask(Task):
    """Every problem gets a :class:`ScriptedEnvironment`; by default one turn, reward 1."""

    def __init__(
        self,
        script: Sequence[StepResult | Exception] = (StepResult(reward=1.0, done=True, success=True),),
        *,
        stop: tuple[str, ...] = (),
    ) -> None:
        self.script = script
        self.stop = stop
        self.environments: list[ScriptedEnvironment] = []

    def train_problems(self) -> Sequence[Problem]:
        return [fake_problem(i) for i in range(8)]

    def eval_problems(self) -> Sequence[Problem]:
        return [fake_problem(i) for i in range(8, 12)]

    def environment(self, problem: Problem) -> Environment:
        self.environments.append(ScriptedEnvironment(self.script))
        return self.environments[-1]


def fake_problem(index: int) -> Problem:
    """A problem whose prompt names it."""
    return Problem(id=f"p{index}", prompt=f"q{index}:", answer="x")


def fake_request(
    index: int,
    *,
    samples: int = 1,
    issued_version: int = 0,
    max_response_tokens: int = 8,
    sampling: SamplingParams = SamplingParams(),  # noqa: B008
) -> RolloutRequest:
    """A request for ``fake_problem(index)``, its seed derived from ``index``."""
    return RolloutRequest(
        index=index,
        problem=fake_problem(index),
        samples=samples,
        issued_version=issued_version,
        sampling=sampling,
        max_response_tokens=max_response_tokens,
        seed=derive_seed("fake", index),
    )


def fake_weights(version: int, size: int = 1000) -> dict[str, torch.Tensor]:
    """Weights for :class:`FakeEngine`: every element is the version."""
    return {"w": torch.full((size,), float(version)), "b": torch.full((), float(version), dtype=torch.bfloat16)}


@dataclass(frozen=True)
class FakeFactory:
    """Builds a driver around the fakes; picklable.

    Attributes:
        build_s, step_s: seconds spent building, and per engine step.
        failure: text of a DataError (or, with "!" before it, a RuntimeError) raised while building.
    """

    slots: int = 4
    burst: int = 1
    build_s: float = 0.0
    step_s: float = 0.0
    failure: str = ""

    def build(self) -> RolloutDriver:
        time.sleep(self.build_s)
        if self.failure.startswith("!"):
            raise RuntimeError(self.failure)
        if self.failure:
            raise DataError(self.failure)
        engine = FakeEngine(slots=self.slots, burst=self.burst, step_s=self.step_s)
        return RolloutDriver(engine, FakeTask(), FakeTokenizer(), max_prompt_tokens=64)  # type: ignore[arg-type]
