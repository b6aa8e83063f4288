"""An engine without a model: tokens come at a fixed rate, as from a machine elsewhere that this one only waits for.

It shows the system around an engine, its schedules, its faults and how it scales, at a size the model would hide.
"""

from __future__ import annotations

import heapq
import math
import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from brace_rl.training.engines.base import Engine
from brace_rl.training.types import Generation, GenerationRequest, derive_seed

if TYPE_CHECKING:
    import torch

    from brace_rl.config import Config
    from brace_rl.training.rollout import RolloutDriver


@dataclass(frozen=True)
class ResponseLengths:
    """Log-normal lengths of turns, cut at ``longest``.

    Attributes:
        median: tokens.
        spread: standard deviation of the logarithm; 0: every turn has ``median`` tokens.
        longest: tokens.
    """

    median: float
    spread: float
    longest: int

    def of(self, seed: int) -> int:
        """The length that belongs to a seed, at least 1."""
        drawn = self.median * math.exp(self.spread * random.Random(seed).gauss(0.0, 1.0))
        return min(self.longest, max(1, round(drawn)))


@dataclass
class _Row:
    """A turn in a slot. ``versions`` holds (tokens made by then, version) for each version but the present one."""

    request: GenerationRequest
    started: float
    length: int
    versions: list[tuple[int, int]] = field(default_factory=list)


class SimulatedEngine(Engine):
    """Decodes ``slots`` turns together, each at ``tokens_per_s``, whatever the load of this machine.

    Slots work in a time of their own: a slot that became free takes the next turn at the instant it did, even if
    :meth:`step` is called later, so that a busy core does not slow the simulated machine down.

    Tokens are uniform over the vocabulary without the end-of-sequence token, which closes a turn whose length is below
    the limit; both are functions of the request's seed. Log-probs are those of a uniform policy, and weights change
    nothing but the version.

    Args:
        vocabulary: tokens, the end of sequence included.
        eos_token_id: closes turns.
        slots: turns decoded together.
        tokens_per_s: of one turn.
        lengths: of turns, the end of sequence included.
        tick_s: longest a step takes.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        eos_token_id: int,
        slots: int,
        tokens_per_s: float,
        lengths: ResponseLengths,
        tick_s: float = 0.01,
    ) -> None:
        self.version = -1
        self._words = [token for token in range(vocabulary) if token != eos_token_id]
        self._eos_token_id = eos_token_id
        self._tokens_per_s = tokens_per_s
        self._lengths = lengths
        self._tick_s = tick_s
        self._waiting: deque[tuple[float, GenerationRequest]] = deque()
        # Instants at which slots became free, and turns in slots by the instant at which they end.
        self._free = [0.0] * slots
        self._rows: list[tuple[float, int, _Row]] = []
        self._admitted = 0

    @property
    def unfinished(self) -> int:
        """Turns queued or in flight."""
        return len(self._waiting) + len(self._rows)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue turns.

        Raises:
            ValueError: an empty context, no new tokens, or a sampling that cuts tokens off.
        """
        for request in requests:
            if not request.token_ids or request.max_new_tokens < 1 or request.sampling.truncates:
                raise ValueError(f"session {request.session!r}: empty, without new tokens, or sampled with a cut")
        now = time.monotonic()
        self._waiting += [(now, request) for request in requests]

    def step(self) -> list[Generation]:
        """Let time pass until a turn ends, ``tick_s`` at most; return the turns that ended."""
        self._admit()
        if not self._rows:
            return []
        now = time.monotonic()
        until = min(self._rows[0][0], now + self._tick_s)
        if until > now:
            time.sleep(until - now)
        ended = []
        now = time.monotonic()
        while self._rows and self._rows[0][0] <= now:
            instant, _, row = heapq.heappop(self._rows)
            heapq.heappush(self._free, instant)
            ended.append(self._finish(row))
            self._admit()
        return ended

    def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Note the version: tokens made from now on carry it."""
        now = time.monotonic()
        for _, _, row in self._rows:
            made = min(row.length, max(0, int((now - row.started) * self._tokens_per_s)))
            row.versions.append((made, self.version))
        self.version = version

    def release(self, session: str) -> None:
        """Nothing is cached."""

    def _admit(self) -> None:
        while self._waiting and self._free:
            submitted, request = self._waiting.popleft()
            started = max(submitted, heapq.heappop(self._free))
            length = min(request.max_new_tokens, self._lengths.of(request.seed))
            row = _Row(request, started, length)
            heapq.heappush(self._rows, (started + length / self._tokens_per_s, self._admitted, row))
            self._admitted += 1

    def _finish(self, row: _Row) -> Generation:
        length = row.length
        drawn = random.Random(derive_seed(row.request.seed, len(row.request.token_ids)))
        token_ids = drawn.choices(self._words, k=length)
        is_stopped = length == self._lengths.of(row.request.seed)
        if is_stopped:
            token_ids[-1] = self._eos_token_id
        versions: list[int] = []
        for made, version in (*row.versions, (length, self.version)):
            versions += [version] * (made - len(versions))
        entropy = math.log(len(self._words))
        return Generation(
            session=row.request.session,
            token_ids=token_ids,
            logprobs=[-entropy] * length,
            versions=versions,
            entropies=[entropy] * length,
            finish_reason="stop" if is_stopped else "length",
        )


@dataclass(frozen=True)
class SimulatedSpec:
    """A :class:`~brace_rl.training.driver_spec.DriverFactory` of the recipe's task over a simulated engine."""

    config: Config
    tokens_per_s: float
    lengths: ResponseLengths

    def build(self) -> RolloutDriver:
        """Build the task with its own tokenizer, and put the engine behind the driver.

        Raises:
            BraceError: the task cannot be used, or has no tokenizer of its own.
        """
        from brace_rl.tasks import build_task
        from brace_rl.training.rollout import RolloutDriver

        config = self.config
        task = build_task(config.task, config.warm_start, config.run.seed)
        tokenizer = task.build_tokenizer()
        engine = SimulatedEngine(
            vocabulary=len(tokenizer),
            eos_token_id=int(tokenizer.eos_token_id),
            slots=config.rollout.slots,
            tokens_per_s=self.tokens_per_s,
            lengths=self.lengths,
        )
        return RolloutDriver(engine, task, tokenizer, max_prompt_tokens=config.rollout.max_prompt_tokens)
