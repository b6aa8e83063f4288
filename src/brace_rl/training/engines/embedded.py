"""The embedded engine: a ``transformers`` model in this process, continuous batching over a key-value cache."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from brace_rl.errors import ModelError
from brace_rl.training.engines.base import Engine
from brace_rl.training.engines.kv_slots import KVSlots, RowStates
from brace_rl.training.engines.model import forward_arguments, load_weights, max_positions
from brace_rl.training.engines.sampling import Draw, counter_uniforms, draw
from brace_rl.training.engines.stopping import StopRule
from brace_rl.training.types import Generation, GenerationRequest

_PREFILL_TOKENS = 8192
"""Most padded new tokens of one prefill forward (a single longer row goes alone); bounds its memory."""
_PAD_ID = 0
"""Fed at masked positions; any id of the vocabulary will do."""


@dataclass
class _Row:
    """A turn in a slot. All of ``tokens`` but the last are cached; the last is fed by the next decode step."""

    request: GenerationRequest
    tokens: list[int]
    max_length: int
    stop: StopRule
    result: Generation
    done: bool = False
    released: bool = False

    @property
    def cached(self) -> int:
        """Tokens in the cache once the row has joined."""
        return len(self.tokens) - 1


@dataclass(frozen=True)
class _Parked:
    """The cached tokens of a session between two of its turns."""

    tokens: tuple[int, ...]
    states: RowStates


@dataclass
class _Batch:
    """What a decode step needs on the device, one entry per row in use. Rebuilt whenever the rows change."""

    lengths: Tensor
    pending: Tensor
    seeds: Tensor
    temperatures: Tensor
    top_ps: Tensor | None
    top_ks: Tensor | None
    width: int
    truncates: list[bool]


class EmbeddedEngine(Engine):
    """Generates turns with a causal language model of ``transformers``.

    A step gives every free slot to a queued turn, feeds what is new of those to the model in left-padded sub-batches,
    then decodes one token for every turn in a slot. Turns whose session
    is still cached go first, otherwise first come, first served. The cached tokens of a finished turn are copied out
    of its slot and kept until the session is continued, released, or no longer among the last ``slots`` to finish. A
    session that is not generating never holds a slot, so queued turns cannot wait for one.

    Context and output of a turn together are limited to the model's ``max_position_embeddings``: a turn that reaches
    it finishes with "length" early.

    Args:
        model: a causal language model on its device. The engine owns it: puts it in eval mode, overwrites its weights.
        tokenizer: its tokenizer; decodes sampled tokens to look for stop texts.
        slots: most turns decoded together.

    Raises:
        ModelError: the model has layers other than full or sliding-window attention.
        ValueError: ``slots`` below 1.
    """

    def __init__(self, model: Any, tokenizer: Any, *, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"slots: needs at least 1, got {slots}")
        self.version = -1
        self._model = model.eval()
        self._tokenizer = tokenizer
        self._slots = slots
        self._device = model.device
        config = model.config.get_text_config(decoder=True)
        self.max_context_tokens = max_positions(config)
        self._vocabulary = model.get_input_embeddings().weight.shape[0]
        self._forward_arguments = forward_arguments(model)
        self._waiting: deque[GenerationRequest] = deque()
        self._continuing: deque[GenerationRequest] = deque()
        self._unfinished: set[str] = set()
        self._parked: OrderedDict[str, _Parked] = OrderedDict()
        self._rows: list[_Row] = []
        self._batch: _Batch | None = None
        self._stale_cache = False
        self._stop_rules: dict[tuple[tuple[str, ...], tuple[int, ...]], StopRule] = {}
        self._cache = KVSlots(model.config, slots)
        self._probe()

    @torch.inference_mode()
    def _probe(self) -> None:
        """One token through the model, which shows the cache the shapes of its states, or that it keeps none."""
        token = torch.full((1, 1), _PAD_ID, device=self._device)
        self._forward(token, attention_mask=torch.ones_like(token), position_ids=torch.zeros_like(token))
        if not all(layer.is_initialized for layer in self._cache.stores):
            raise ModelError(
                f"{self._model.config.model_type}: the model does not keep its past in a key-value cache; "
                "use another model or another engine"
            )
        self._cache.make_room(rows=0, live_width=0, width=1)

    @property
    def unfinished(self) -> int:
        """Turns queued or in flight."""
        return len(self._unfinished)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue turns.

        Raises:
            ValueError: an empty context, no new tokens, a token id outside the vocabulary, a context that fills all of
                the model's positions, or a session whose previous turn is unfinished. Nothing is queued then.
        """
        sessions = set(self._unfinished)
        for request in requests:
            self._check(request, sessions)
            sessions.add(request.session)
        cached = {row.request.session for row in self._rows if row.done and not row.released}
        for request in requests:
            self._unfinished.add(request.session)
            known = request.session in self._parked or request.session in cached
            (self._continuing if known else self._waiting).append(request)

    def _check(self, request: GenerationRequest, busy: set[str]) -> None:
        name, length = f"session {request.session!r}", len(request.token_ids)
        if not length:
            raise ValueError(f"{name}: empty context")
        if request.max_new_tokens < 1:
            raise ValueError(f"{name}: max_new_tokens must be at least 1, got {request.max_new_tokens}")
        if request.session in busy:
            raise ValueError(f"{name}: its previous turn is not finished")
        if min(request.token_ids) < 0 or max(request.token_ids) >= self._vocabulary:
            raise ValueError(f"{name}: token ids must be between 0 and {self._vocabulary - 1}")
        if self.max_context_tokens is not None and length >= self.max_context_tokens:
            raise ValueError(
                f"{name}: a context of {length} tokens leaves no room in the model's "
                f"{self.max_context_tokens} positions"
            )

    def release(self, session: str) -> None:
        """Forget what is cached for a session that will not be continued; a turn in flight is not touched."""
        self._parked.pop(session, None)
        for row in self._rows:
            if row.done and row.request.session == session:
                row.released = True

    @torch.inference_mode()
    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copy a ``state_dict`` into the model and drop everything cached from the old weights.

        A name may be missing if the model ties it to one that is given.

        Raises:
            ModelError: names or shapes that are not the model's. The weights are unchanged then.
        """
        load_weights(self._model, weights)
        self.version = version
        self._parked.clear()
        self._cache.clear()
        self._stale_cache = True

    @torch.inference_mode()
    def step(self) -> list[Generation]:
        """Advance everything in flight by one token; return the turns that finished, in slot order.

        Raises:
            ModelError: the model's outputs are not finite.
        """
        self._retire()
        joining = self._admit()
        if self._stale_cache:
            joining = [(row, None) for row in self._rows] + joining
            self._rows, self._stale_cache = [], False
        if joining:
            self._join(joining)
        if not self._rows:
            return []
        batch = self._batch = self._batch or self._make_batch()
        drawn = self._decode(batch)
        return self._record(batch, drawn)

    def _retire(self) -> None:
        """Take finished turns out of their slots, park what may be continued, and close the gaps."""
        finished = [slot for slot, row in enumerate(self._rows) if row.done]
        if not finished:
            return
        if not self._stale_cache:
            for slot in finished:
                row = self._rows[slot]
                if not row.released:
                    states = self._cache.take(slot, row.cached)
                    self._parked[row.request.session] = _Parked(tuple(row.tokens[: row.cached]), states)
            while len(self._parked) > self._slots:
                self._parked.popitem(last=False)
        left = len(self._rows) - len(finished)
        targets = [slot for slot in finished if slot < left]
        sources = [slot for slot in range(left, len(self._rows)) if not self._rows[slot].done]
        if targets and not self._stale_cache:
            self._cache.move(sources, targets, max(self._rows[slot].cached for slot in sources))
        for source, target in zip(sources, targets, strict=True):
            self._rows[target] = self._rows[source]
        del self._rows[left:]
        self._batch = None

    def _admit(self) -> list[tuple[_Row, _Parked | None]]:
        """Turns for the free slots, each with what is cached of its context."""
        joining: list[tuple[_Row, _Parked | None]] = []
        while len(self._rows) + len(joining) < self._slots and (self._continuing or self._waiting):
            request = (self._continuing or self._waiting).popleft()
            parked = self._parked.pop(request.session, None)
            # The cache must end before the last token of the context, which the decode step feeds.
            if parked and parked.tokens != request.token_ids[:-1][: len(parked.tokens)]:
                parked = None
            joining.append((self._make_row(request), parked))
        return joining

    def _make_row(self, request: GenerationRequest) -> _Row:
        key = (request.stop, request.stop_token_ids)
        if key not in self._stop_rules:
            self._stop_rules[key] = StopRule(self._tokenizer, *key)
        max_length = len(request.token_ids) + request.max_new_tokens
        if self.max_context_tokens is not None:
            max_length = min(max_length, self.max_context_tokens)
        kept: list[list[int]] | None = [] if request.sampling.truncates else None
        result = Generation(session=request.session, kept_ids=kept)
        return _Row(request, list(request.token_ids), max_length, self._stop_rules[key], result)

    def _join(self, joining: list[tuple[_Row, _Parked | None]]) -> None:
        """Give rows the next free slots and feed the model all but the last token of what they lack."""
        starts = {id(row): len(parked.tokens) if parked else 0 for row, parked in joining}
        joining = sorted(joining, key=lambda pair: pair[0].cached - starts[id(pair[0])])
        live, live_width = len(self._rows), max((row.cached for row in self._rows), default=0)
        width = max(live_width, max(row.cached for row, _ in joining))
        self._cache.make_room(rows=live, live_width=live_width, width=width)
        for slot, (row, parked) in enumerate(joining, start=live):
            if parked:
                self._cache.put(slot, parked.states, before=row.cached - len(parked.tokens))
        rows = [row for row, _ in joining]
        new = [row.cached - starts[id(row)] for row in rows]
        first = 0
        while first < len(rows):
            last = first + 1
            while last < len(rows) and (last + 1 - first) * new[last] <= _PREFILL_TOKENS:
                last += 1
            if new[last - 1]:
                self._prefill(rows[first:last], new[first:last], live + first)
            first = last
        self._rows += rows
        self._batch = None

    def _prefill(self, rows: Sequence[_Row], new: Sequence[int], first_slot: int) -> None:
        """Feed the last ``new[i]`` cached-to-be tokens of each row, left-padded."""
        queries, width = max(new), max(row.cached for row in rows)
        ids = [
            [_PAD_ID] * (queries - count) + row.tokens[row.cached - count : row.cached]
            for row, count in zip(rows, new, strict=True)
        ]
        lengths = self._tensor([row.cached for row in rows])
        # Distance to the row's end, counted in columns: 0 is the newest.
        ages = torch.arange(width - 1, -1, -1, device=self._device)
        is_new = ages[-queries:] < self._tensor(new).unsqueeze(-1)
        self._cache.extend(first_row=first_slot, width=width, is_new=is_new)
        self._forward(
            self._tensor(ids),
            attention_mask=(ages < lengths.unsqueeze(-1)).long(),
            position_ids=(lengths.unsqueeze(-1) - 1 - ages[-queries:]).clamp_min_(0),
        )

    def _make_batch(self) -> _Batch:
        rows = self._rows
        sampling = [row.request.sampling for row in rows]
        cuts = any(params.truncates for params in sampling)
        return _Batch(
            lengths=self._tensor([row.cached for row in rows]),
            pending=self._tensor([row.tokens[-1] for row in rows]),
            seeds=self._tensor([row.request.seed for row in rows]),
            temperatures=self._tensor([params.temperature for params in sampling]),
            top_ps=self._tensor([params.top_p for params in sampling]) if cuts else None,
            top_ks=self._tensor([params.top_k for params in sampling]) if cuts else None,
            width=max(row.cached for row in rows),
            truncates=[params.truncates for params in sampling],
        )

    def _decode(self, batch: _Batch) -> Draw:
        """Feed every row's pending token, which becomes one more column, and draw the next ones."""
        rows = len(self._rows)
        self._cache.make_room(rows=rows, live_width=batch.width, width=batch.width)
        batch.width += 1
        self._cache.append_column(rows=rows, width=batch.width)
        ages = torch.arange(batch.width - 1, -1, -1, device=self._device)
        lengths = batch.lengths.unsqueeze(-1)
        logits = self._forward(
            batch.pending.unsqueeze(-1), attention_mask=(ages <= lengths).long(), position_ids=lengths
        )
        batch.lengths = batch.lengths + 1
        drawn = draw(
            logits,
            uniforms=counter_uniforms(seeds=batch.seeds, positions=batch.lengths),
            temperatures=batch.temperatures,
            top_ps=batch.top_ps,
            top_ks=batch.top_ks,
        )
        batch.pending = drawn.token_ids
        return drawn

    def _record(self, batch: _Batch, drawn: Draw) -> list[Generation]:
        """Append the drawn tokens to their turns and return those that ended."""
        token_ids = drawn.token_ids.tolist()
        logprobs, entropies = torch.stack((drawn.logprobs, drawn.entropies)).tolist()
        if not math.isfinite(sum(logprobs)):
            self._stale_cache = True  # holds a token that was not accepted
            raise ModelError(f"the model's outputs under weight version {self.version} are not finite (NaN or inf)")
        if drawn.kept is not None:
            self._record_kept(drawn.kept, batch.truncates)
        ended = []
        for row, token, logprob, entropy in zip(self._rows, token_ids, logprobs, entropies, strict=True):
            row.tokens.append(token)
            result = row.result
            result.token_ids.append(token)
            result.logprobs.append(logprob)
            result.entropies.append(entropy)
            result.versions.append(self.version)
            stopped = row.stop.ends(result.token_ids)
            if stopped or len(row.tokens) >= row.max_length:
                result.finish_reason = "stop" if stopped else "length"
                row.done = True
                self._unfinished.remove(row.request.session)
                ended.append(result)
        return ended

    def _record_kept(self, kept: Tensor, truncates: Sequence[bool]) -> None:
        # Rows that cut nothing keep the whole vocabulary, which is not worth listing.
        cutting = torch.tensor(truncates, device=self._device).unsqueeze(-1)
        for row in self._rows:
            if row.result.kept_ids is not None:
                row.result.kept_ids.append([])
        for slot, token in (kept & cutting).nonzero().tolist():
            kept_ids = self._rows[slot].result.kept_ids
            if kept_ids is not None:
                kept_ids[-1].append(token)

    def _forward(self, input_ids: Tensor, *, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        """Logits ``[B, V]`` after the last of the input tokens."""
        arguments = {"attention_mask": attention_mask, "position_ids": position_ids, "logits_to_keep": 1}
        arguments = {name: value for name, value in arguments.items() if name in self._forward_arguments}
        # transformers renamed the argument; the old name still works there but warns.
        cache_name = "cache" if "cache" in self._forward_arguments else "past_key_values"
        output = self._model(input_ids=input_ids, use_cache=True, **{cache_name: self._cache}, **arguments)
        logits: Tensor = output.logits[:, -1]
        return logits

    def _tensor(self, values: Any) -> Tensor:
        return torch.tensor(values, device=self._device)
