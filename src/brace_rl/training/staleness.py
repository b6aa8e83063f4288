"""When a prompt may be issued, and which answers make the next batch. No torch, no threads, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from brace_rl.errors import ConfigError, StalenessError
from brace_rl.training.types import RolloutGroup, RolloutRequest


class StalenessController:
    r"""Admission, batch forming and the ledger of prompts. The unit is the prompt with all its responses.

    Notation: ``B`` batch size; ``S`` = ``max_staleness``, the largest age of a consumed token; ``v`` the trainer's
    version (completed steps, so ``B v`` prompts are consumed); ``p <= v`` the newest version sent to the rollout side;
    ``L <= S`` the ``lookahead``. A prompt is *outstanding* while it is in flight or its answer is buffered. Its
    version ``a`` is that of its oldest token, and, while it is in flight, ``issued_version``, below which no token can
    fall (:class:`~brace_rl.training.backends.base.Backend` keeps that promise).

    **Admission** (AReaL, arXiv 2505.24298): prompt ``n = 1, 2, ...``, dropped ones not counted, is issued while

        ``floor((n - 1) / B) <= p + L``

    with ``L = S`` for asynchronous rollouts and ``L = 0`` where a batch is issued only when the trainer wants it.

    **Batch**, ``too_old = "wait"``: the ``B`` oldest buffered answers, unless a prompt left behind would then be
    doomed. With the outstanding prompts that remain sorted by version, ``a_0 <= a_1 <= ...``, it is given only if

        ``(v + 1) + floor(r / B) <= a_r + S``    for every rank ``r``,

    that is, if taking the ``B`` oldest at every later step consumes each in time. (Looking one step ahead, at ``r = 0``
    alone, is not enough: two batches of fresh answers taken early can leave two batches of stragglers due at once.)

    *Nothing is ever too old.* Invariant: ``v + floor(r / B) <= a_r + S`` over all outstanding prompts.

    * Issuing: the new prompt has ``a = p``. The outstanding are then ``n - B v``, so any prompt from it upwards in the
      order has ``r <= n - 1 - B v`` and ``v + floor(r / B) <= floor((n - 1) / B) <= p + S <= a_r + S``.
    * Arriving can only raise a version, hence every ``a_r``.
    * Taking a batch keeps it by the rule, since ``v`` becomes ``v + 1``.

    So the prompts that ``v + 1`` would make too old (``a_r = v - S``) have ``floor(r / B) <= 0``: at most ``B``, and
    they are in the batch, because the rule at ``r = 0`` leaves none of them behind.

    *Nobody waits for ever.* If everything in flight has arrived and at least ``B`` prompts are outstanding, taking the
    ``B`` oldest leaves the old rank ``r + B`` at rank ``r``, and the invariant there is the rule: a batch is given. At
    least ``B`` are outstanding once all admissible prompts are issued, as that makes ``B (p + L + 1 - v)`` of them, if
    ``v - p <= L``; weights sent every ``m <= L + 1`` steps keep ``v - p <= m - 1 <= L``.

    **Batch**, ``too_old = "drop"``: the ``B`` oldest buffered answers with ``a >= v - S``. Older ones are dropped and
    counted, and each frees an admission. A prompt issued now has ``a >= p >= v - S``, so a batch is had at the
    latest from prompts issued at this ``v``. Since :meth:`take_batch` drops, ask it before issuing::

        while (batch := controller.take_batch(version)) is None:
            submit(controller.admissible(published_version))
            for group in backend.collect():
                controller.arrived(group)
    """

    def __init__(
        self, *, batch_size: int, max_staleness: int, lookahead: int, too_old: Literal["wait", "drop"] = "wait"
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if not 0 <= lookahead <= max_staleness:
            raise ValueError(f"needs 0 <= lookahead <= max_staleness, got {lookahead} and {max_staleness}")
        self.batch_size = batch_size
        self.max_staleness = max_staleness
        self.lookahead = lookahead
        self.too_old = too_old
        self._issued = 0
        self._consumed = 0
        self._dropped = 0
        self._dropped_responses = 0
        self._dropped_tokens = 0
        self._duplicates = 0
        self._in_flight: dict[int, int] = {}
        self._buffer: dict[int, RolloutGroup] = {}
        self._oldest: dict[int, int] = {}

    def admissible(self, published_version: int) -> int:
        """How many prompts may be issued now.

        Args:
            published_version: newest version sent to the rollout side; a schedule that sends older snapshots on
                purpose (``lag``) gives the trainer's version instead.
        """
        allowed = self.batch_size * (published_version + self.lookahead + 1)
        return max(0, allowed - self.admitted)

    def issued(self, request: RolloutRequest) -> None:
        """Record a prompt as in flight.

        Raises:
            ValueError: ``request.index`` is not the next issue number.
            StalenessError: the prompt could not be consumed within the bound (more issued than was admissible).
        """
        if request.index != self._issued:
            raise ValueError(f"prompt {request.index} issued out of order: the next issue number is {self._issued}")
        earliest_use = self.admitted // self.batch_size
        if earliest_use > request.issued_version + self.max_staleness:
            raise StalenessError(
                f"prompt {request.index} issued under version {request.issued_version} is first used at version "
                f"{earliest_use}, later than max_staleness = {self.max_staleness} allows; ask admissible() first"
            )
        self._issued += 1
        self._in_flight[request.index] = request.issued_version

    def arrived(self, group: RolloutGroup) -> None:
        """Buffer an answer; one that came before is ignored and counted.

        Raises:
            StalenessError: the prompt was never issued, or was sampled under weights older than it was issued under.
        """
        index = group.request.index
        if not 0 <= index < self._issued:
            raise StalenessError(f"an answer arrived to prompt {index}, which was never issued")
        if index not in self._in_flight:
            self._duplicates += 1
            return
        oldest, issued_version = group.oldest_version, self._in_flight[index]
        if oldest < issued_version:
            raise StalenessError(
                f"prompt {index} was issued under version {issued_version} but holds a token of version {oldest}"
            )
        del self._in_flight[index]
        self._buffer[index] = group
        self._oldest[index] = oldest

    def take_batch(self, current_version: int) -> list[RolloutGroup] | None:
        """The next batch, sorted by issue number, or None while there is none (see the class).

        Under ``drop``, answers that are too old leave the buffer in either case.

        Args:
            current_version: completed trainer steps; the batch makes the next one.

        Raises:
            StalenessError: a token breaks the bound, or ``current_version`` is not the number of batches taken.
        """
        if current_version * self.batch_size != self._consumed:
            raise StalenessError(
                f"batch asked for at version {current_version} after {self._consumed} prompts were consumed; "
                f"one batch of {self.batch_size} makes one version"
            )
        if self.too_old == "drop":
            self._drop_too_old(current_version)
        by_age = sorted(self._buffer, key=lambda index: (self._oldest[index], index))
        if len(by_age) < self.batch_size:
            return None
        if self.too_old == "wait" and not self._rest_is_in_time(by_age[self.batch_size :], current_version + 1):
            return None
        chosen = sorted(by_age[: self.batch_size])
        for index in chosen:
            self._check(self._buffer[index], current_version)
        self._consumed += len(chosen)
        return [self._remove(index) for index in chosen]

    def ledger(self) -> dict[str, int]:
        """Counts of prompts; ``issued = consumed + dropped + in_flight + buffered`` always.

        Raises:
            StalenessError: the counts do not balance.
        """
        counts = {
            "issued": self._issued,
            "consumed": self._consumed,
            "dropped": self._dropped,
            "in_flight": len(self._in_flight),
            "buffered": len(self._buffer),
        }
        if self._issued != self._consumed + self._dropped + len(self._in_flight) + len(self._buffer):
            raise StalenessError(f"the ledger of prompts does not balance: {counts}")
        return {**counts, "duplicates": self._duplicates}

    @property
    def dropped_mean_length(self) -> float | None:
        """Mean response tokens, tool output included, of the dropped responses; None before the first."""
        return self._dropped_tokens / self._dropped_responses if self._dropped_responses else None

    @property
    def admitted(self) -> int:
        """Prompts issued and not dropped: ``n`` of the newest in the admission formula."""
        return self._issued - self._dropped

    @property
    def unanswered(self) -> dict[int, int]:
        """Issue number -> version under which it was issued, of the prompts in flight, in issue order."""
        return dict(sorted(self._in_flight.items()))

    @property
    def buffered(self) -> list[RolloutGroup]:
        """Answers that wait to be consumed, in issue order."""
        return [self._buffer[index] for index in sorted(self._buffer)]

    def state_dict(self) -> dict[str, Any]:
        """Everything but the buffered answers themselves, JSON-able; the answers are :attr:`buffered`."""
        return {
            "batch_size": self.batch_size,
            "max_staleness": self.max_staleness,
            "issued": self._issued,
            "consumed": self._consumed,
            "dropped": self._dropped,
            "dropped_responses": self._dropped_responses,
            "dropped_tokens": self._dropped_tokens,
            "duplicates": self._duplicates,
            "in_flight": [[index, version] for index, version in self.unanswered.items()],
            "buffered": sorted(self._buffer),
        }

    def load_state_dict(self, state: Mapping[str, Any], buffered: Sequence[RolloutGroup]) -> None:
        """Go on from :meth:`state_dict`. The prompts of :attr:`unanswered` are to be submitted again as they were.

        Raises:
            ConfigError: batch size or bound differ from those of the checkpoint.
            StalenessError: ``buffered`` are not the answers the state speaks of, or the counts do not balance.
        """
        for name, key in (("batch_size", "rollout.prompts_per_step"), ("max_staleness", "schedule.max_staleness")):
            if state[name] != getattr(self, name):
                raise ConfigError(
                    f"{key}: the checkpoint was made with {state[name]}, this run has {getattr(self, name)}; "
                    f"resume with the same"
                )
        groups = {group.request.index: group for group in buffered}
        if sorted(groups) != list(state["buffered"]) or len(groups) != len(buffered):
            raise StalenessError(
                f"checkpoint buffers prompts {state['buffered']} but holds answers to {sorted(groups)}"
            )
        self._issued = state["issued"]
        self._consumed = state["consumed"]
        self._dropped = state["dropped"]
        self._dropped_responses = state["dropped_responses"]
        self._dropped_tokens = state["dropped_tokens"]
        self._duplicates = state["duplicates"]
        self._in_flight = dict(state["in_flight"])
        self._buffer = groups
        self._oldest = {index: group.oldest_version for index, group in groups.items()}
        self.ledger()

    def _rest_is_in_time(self, left: Sequence[int], next_version: int) -> bool:
        """Whether the prompts that stay behind can all be consumed in time from ``next_version`` on."""
        versions = sorted([*self._in_flight.values(), *(self._oldest[index] for index in left)])
        return all(
            next_version + rank // self.batch_size <= version + self.max_staleness
            for rank, version in enumerate(versions)
        )

    def _drop_too_old(self, current_version: int) -> None:
        for index in [i for i, oldest in self._oldest.items() if oldest < current_version - self.max_staleness]:
            group = self._remove(index)
            self._dropped += 1
            self._dropped_responses += len(group.trajectories)
            self._dropped_tokens += sum(len(trajectory.response_ids) for trajectory in group.trajectories)

    def _check(self, group: RolloutGroup, current_version: int) -> None:
        bound = current_version - self.max_staleness
        for trajectory in group.trajectories:
            for version in trajectory.policy_versions:
                if not bound <= version <= current_version:
                    raise StalenessError(
                        f"prompt {group.request.index} holds a token of version {version}, outside "
                        f"[{bound}, {current_version}] at version {current_version} "
                        f"with max_staleness = {self.max_staleness}"
                    )

    def _remove(self, index: int) -> RolloutGroup:
        del self._oldest[index]
        return self._buffer.pop(index)
