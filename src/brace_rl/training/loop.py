"""The training loop.

::

    issue prompts --> backend --> answered prompts --> staleness --> batch --> learner --> weights --> backend
         ^                                                |                       |
         |          admission: floor((n-1)/B) <= v + S    |                       v
         +------------------------------------------------+                 version v + 1

The loop talks to a :class:`~brace_rl.training.backends.base.Backend` and does not know whether rollouts run in this
process, in another or on a cluster. The three schedules differ in two numbers only:

========  ======================  ===============================================
schedule  prompts issued ahead    weights a batch is sampled from
========  ======================  ===============================================
sync      0 batches               the current version
lag       0 batches               exactly ``S`` versions ago (the first, in the first ``S`` steps)
async     ``S`` batches           whatever the rollout process holds while it samples
========  ======================  ===============================================
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from math import isnan
from pathlib import Path
from statistics import fmean, pstdev
from types import FrameType
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from brace_rl.config import Config
from brace_rl.errors import BraceError
from brace_rl.training.backends.base import Backend
from brace_rl.training.batch import collate
from brace_rl.training.checkpoint import Checkpoint, save_checkpoint
from brace_rl.training.clock import PhaseClock
from brace_rl.training.data import ProblemStream, SnapshotRing
from brace_rl.training.evaluate import Evaluator
from brace_rl.training.learner import Learner
from brace_rl.training.learner_group import LearnerGroup
from brace_rl.training.progress import Progress
from brace_rl.training.rollout_log import rollout_records
from brace_rl.training.run_files import RunWriter, sample_record
from brace_rl.training.staleness import StalenessController
from brace_rl.training.types import RolloutGroup, RolloutRequest, SamplingParams, Trajectory, derive_seed

SNAPSHOTS, ACTOR_RULE = "snapshots", "actor_rule"
"""Prefixes of a checkpoint's tensors: the ring of past weights, and what the actor's rule remembers."""


class _Stopped(KeyboardInterrupt):
    """Ctrl-C or SIGTERM while the trainer waits, when nothing is half done. Nobody else may swallow it."""


class Trainer:
    """Joins learner, backend and staleness control into a run. See the module's diagram."""

    def __init__(
        self,
        config: Config,
        *,
        learner: Learner | LearnerGroup,
        tokenizer: PreTrainedTokenizerBase,
        problems: ProblemStream,
        evaluator: Evaluator,
        backend: Backend,
        writer: RunWriter,
        progress: Progress,
    ) -> None:
        self.config = config
        self.learner = learner
        self.tokenizer = tokenizer
        self.problems = problems
        self.evaluator = evaluator
        self.backend = backend
        self.writer = writer
        self.progress = progress
        self.staleness = StalenessController(
            batch_size=config.rollout.prompts_per_step,
            max_staleness=config.schedule.max_staleness,
            lookahead=config.schedule.max_staleness if self.is_async else 0,
            too_old=config.schedule.too_old,
        )
        self.snapshots = SnapshotRing(config.schedule.max_staleness)
        self.published_version = -1
        self._saved_version = -1
        self.next_index = 0
        self.clock = PhaseClock()
        self.evaluations: dict[str, dict[str, float]] = {}
        self._stop = False
        self._waiting = False
        self._is_between_steps = True

    @property
    def is_async(self) -> bool:
        """Whether rollouts run ahead of the trainer."""
        return self.config.schedule.mode == "async"

    def run(self) -> str:
        """Train until ``optim.steps``; returns "finished", or "interrupted" after Ctrl-C or SIGTERM.

        Either way the last step is saved.

        Raises:
            KeyboardInterrupt: a second Ctrl-C, which does not wait for the step to end. Nothing is saved then: the step
                is half done, and only what was saved before it can be gone on with.
        """
        with self._stop_on_signal(), suppress(_Stopped):
            self._publish(force=True)
            try:
                while self.learner.version < self.config.optim.steps and not self._stop:
                    self._step()
            except Exception:
                self._save_what_is_whole()
                raise
        if self._saved_version != self.learner.version:
            self.save()
        return "finished" if self.learner.version >= self.config.optim.steps else "interrupted"

    def _save_what_is_whole(self) -> None:
        """After an error: keep the completed steps, unless the error left one half done."""
        if self._is_between_steps and self.learner.version > max(0, self._saved_version):
            with suppress(BraceError, OSError):  # the error being handled is the one to report
                self.save()

    def evaluate_before(self) -> None:
        """Measure the policy training starts from; kept in ``evaluations["before"]`` and written as step 0."""
        self.evaluations["before"] = self.evaluator.run(self.learner.version, self.config.eval.final_problems)
        self.writer.write_metrics(self.learner.version, self.evaluations["before"])

    def save(self) -> Path:
        """Write a checkpoint of everything a resumed run needs."""
        self.learner.gather()
        path = save_checkpoint(
            self.writer.directory,
            step=self.learner.version,
            actor=self.learner.actor,
            tokenizer=self.tokenizer,
            critic=self.learner.critic,
            optimizers=self.learner.optimizers,
            tensors=self._tensors(),
            state={
                "learner": self.learner.counters(),
                "next_index": self.next_index,
                "staleness": self.staleness.state_dict(),
                "evaluations": self.evaluations,
            },
            groups=self.staleness.buffered,
            keep=self.config.run.keep_checkpoints,
        )
        self._saved_version = self.learner.version
        return path

    def _tensors(self) -> dict[str, Tensor]:
        snapshots = self.snapshots.tensors() if self.config.schedule.mode == "lag" else {}
        parts = {SNAPSHOTS: snapshots, ACTOR_RULE: self.learner.tensors}
        return {f"{part}.{name}": x for part, tensors in parts.items() for name, x in tensors.items()}

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint whose models the learner has loaded: unanswered prompts are issued again."""
        tensors = {name: named(checkpoint.tensors, name) for name in (SNAPSHOTS, ACTOR_RULE)}
        self.learner.restore(checkpoint.state["learner"], tensors[ACTOR_RULE])
        self._saved_version = self.learner.version
        self.next_index = int(checkpoint.state["next_index"])
        self.evaluations = checkpoint.state["evaluations"]
        self.staleness.load_state_dict(checkpoint.state["staleness"], checkpoint.groups)
        self.snapshots.load_tensors(tensors[SNAPSHOTS])
        self._publish(force=True)
        self.backend.submit([self._request(index) for index in self.staleness.unanswered])

    def _step(self) -> None:
        started = time.perf_counter()
        with self.clock("wait_rollouts"):
            groups = self._next_batch()
        trajectories = [t for group in groups for t in group.trajectories]
        if all(t.excluded for t in trajectories):
            raise BraceError(
                f"step {self.learner.version + 1}: none of its {len(trajectories)} responses could be judged; see that "
                f"the judge answers, then resume the run"
            )
        with self.clock("batch"):
            batch = collate(trajectories, pad_token_id=int(self.tokenizer.pad_token_id), device=self.learner.device)
        metrics = self.learner.update(batch)
        if self.learner.critic is not None and self.learner.latest is not None:
            metrics |= value_separation(trajectories, self.learner.latest.values, batch.policy_mask)
        with self.clock("publish"):
            self._publish()
            self._issue()
        self._is_between_steps = True
        seconds = time.perf_counter() - started
        if self.learner.version == self.config.optim.steps:
            self.save()  # before the last evaluation, so that nothing that befalls it costs the training
        self._record(metrics, trajectories, seconds)
        every = self.config.run.checkpoint_every
        if every and self.learner.version % every == 0 and self.learner.version < self.config.optim.steps:
            self.save()

    def _next_batch(self) -> list[RolloutGroup]:
        while True:
            groups = self.staleness.take_batch(self.learner.version)
            if groups is not None:
                self._is_between_steps = False
                return groups
            if self._stop:
                raise _Stopped
            self._issue()
            self._waiting = True
            arrived = self.backend.collect()
            self._waiting = False
            for group in arrived:
                self.staleness.arrived(group)

    def _issue(self) -> None:
        """Submit what admission allows, in one message, and nothing beyond what the run can still consume."""
        version = self.published_version if self.is_async else self.learner.version
        needed = self.config.optim.steps * self.config.rollout.prompts_per_step - self.staleness.admitted
        count = min(self.staleness.admissible(version), needed)
        if count <= 0:
            return
        requests = [self._request(index) for index in range(self.next_index, self.next_index + count)]
        self.next_index += count
        for request in requests:
            self.staleness.issued(request)
        self.backend.submit(requests)

    def _request(self, index: int) -> RolloutRequest:
        rollout = self.config.rollout
        return RolloutRequest(
            index=index,
            problem=self.problems[index],
            samples=rollout.samples_per_prompt,
            issued_version=self.published_version,
            sampling=SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k),
            max_response_tokens=rollout.max_response_tokens,
            seed=derive_seed(self.config.run.seed, "rollout", index),
        )

    def _publish(self, *, force: bool = False) -> None:
        """Send the weights the schedule asks for at the present version."""
        version = self.learner.version
        weights: Mapping[str, Any] = self.learner.actor.state_dict()
        if self.config.schedule.mode == "lag":
            if version not in self.snapshots.snapshots:
                self.snapshots.store(weights, version)
            weights, version = self.snapshots.lagged(version)
        due = version - self.published_version >= self.config.schedule.sync_every
        if force or due:
            self.backend.publish(weights, version)
            self.published_version = version

    def _record(self, metrics: dict[str, float], trajectories: list[Trajectory], seconds: float) -> None:
        step = self.learner.version
        metrics |= response_metrics(trajectories) | self.learner.clock.pop() | self.clock.pop()
        metrics["time/step"] = seconds
        metrics["throughput/tokens_per_s"] = metrics["tokens/step"] / seconds
        metrics |= {f"ledger/{name}": float(count) for name, count in self.staleness.ledger().items()}
        if self.staleness.dropped_mean_length is not None:
            metrics["ledger/dropped_length_mean"] = self.staleness.dropped_mean_length
        metrics |= {"version": float(step), "backend/restarts": float(self.backend.restarts)}
        with self.clock("eval"):
            metrics |= self._evaluation(step)
        metrics |= self.clock.pop()
        self.writer.write_metrics(step, metrics)
        shown = trajectories[: self.config.run.samples_per_step]
        self.writer.write_samples([sample_record(t, self.tokenizer, step=step) for t in shown])
        self._log_rollouts(trajectories[: self.config.run.rollouts_per_step])
        self.progress.step(metrics | {"step": float(step)})

    def _log_rollouts(self, trajectories: list[Trajectory]) -> None:
        if trajectories and self.learner.latest is not None:
            step = self.learner.version
            records = rollout_records(trajectories, self.learner.latest, step=step, version=step - 1)
            self.writer.write_rollouts(records)

    def _evaluation(self, step: int) -> dict[str, float]:
        """``eval/*`` where this step is due one, else nothing. The last step's is ``evaluations["after"]``."""
        if step == self.config.optim.steps:
            self.evaluations["after"] = self.evaluator.run(step, self.config.eval.final_problems)
            return self.evaluations["after"]
        if self.config.eval.every and step % self.config.eval.every == 0:
            return self.evaluator.run(step, self.config.eval.problems)
        return {}

    @contextmanager
    def _stop_on_signal(self) -> Iterator[None]:
        """First SIGINT or SIGTERM: stop after this step, or at once while waiting. Second: KeyboardInterrupt."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(signum: int, frame: FrameType | None) -> None:
            second, self._stop = self._stop, True
            if second:
                raise KeyboardInterrupt
            if self._waiting:
                raise _Stopped

        previous = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def named(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with ``prefix`` and a dot, without it."""
    start = f"{prefix}."
    return {name.removeprefix(start): x for name, x in tensors.items() if name.startswith(start)}


def response_metrics(trajectories: list[Trajectory]) -> dict[str, float]:
    """Figures about the responses of one step; rewards, successes and the task's figures are of those judged."""
    judged = [t for t in trajectories if not t.excluded]
    rewards = [t.reward for t in judged]
    lengths = [len(t.response_ids) for t in trajectories]
    metrics = {
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        "success/train": fmean(t.success for t in judged),
        "response/length_mean": fmean(lengths),
        "response/length_max": float(max(lengths)),
        "response/truncated": fmean(t.truncated for t in trajectories),
        "response/excluded": fmean(t.excluded for t in trajectories),
        "response/turns": fmean(t.turns for t in trajectories),
        "tokens/step": float(sum(len(t.prompt_ids) for t in trajectories) + sum(lengths)),
        "tokens/response": float(sum(lengths)),
        "tokens/policy": float(sum(sum(t.policy_mask) for t in trajectories)),
    }
    names = sorted({name for t in judged for name in t.info})
    return metrics | {f"task/{name}": fmean(t.info.get(name, 0.0) for t in judged) for name in names}


def value_separation(trajectories: list[Trajectory], values: Tensor, policy_mask: Tensor) -> dict[str, float]:
    """Mean V over the policy tokens of successful responses less that of failed ones; nothing where either is missing.

    Args:
        values: ``[B, L-1]`` V before each token, rows as in ``trajectories``.
        policy_mask: ``[B, L-1]``.
    """
    means = []
    for success in (True, False):
        rows = [row for row, t in enumerate(trajectories) if not t.excluded and t.success == success]
        means.append(float(values[rows][policy_mask[rows]].double().mean()) if rows else float("nan"))
    separation = means[0] - means[1]
    return {} if isnan(separation) else {"value/separation": separation}
