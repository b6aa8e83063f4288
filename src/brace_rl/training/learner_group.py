"""The learner on several ranks: what the training loop holds in place of a :class:`~.learner.Learner`.

::

    rank 0, in the trainer's process                     ranks 1, 2, ...
    update(batch)  -- order: pipe, or call of actor  -->  wait for orders
                   -- batch: torch.distributed       -->  the same batch
    own rows       <- sums of log-probs, gradients   ->   own rows
    wait           <-- done, or what went wrong      --

Every rank takes the same optimiser step on the same weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from brace_rl.config import Config
from brace_rl.errors import BraceError
from brace_rl.training.batch import Batch
from brace_rl.training.clock import PhaseClock
from brace_rl.training.estimates import Evaluation
from brace_rl.training.learner import Learner, make_optimizers
from brace_rl.training.learner_state import WholeModels, description, gather, send_state
from brace_rl.training.meeting import LOOPBACK, Meeting
from brace_rl.training.models import Critic
from brace_rl.training.rank_worker import Order, join
from brace_rl.training.wire import batch_tensors, describe, send

_LOST_CONNECTION = ("/gloo/", "torch.distributed.Dist")
"""In the text of such an error: gloo's are bare ones that name its source, the others have types of their own."""


class Peer(Protocol):
    """A rank other than 0, wherever it runs: in a process of this machine, or as an actor on a cluster."""

    def order(self, order: Order) -> None:
        """Have :meth:`.rank_worker.RankWorker.answer` called, without waiting for it."""

    def report(self) -> None:
        """Wait until it has carried out the oldest order not yet reported on.

        Raises:
            BraceError, RuntimeError: what it raised; it died, or did not answer in time.
        """

    def failure(self) -> Exception | None:
        """What it has reported to have raised, or that it died, hardly waiting; None where neither is so."""

    def close(self) -> None:
        """End it. Idempotent."""


class LearnerGroup:
    """As :class:`~.learner.Learner`, on all ranks at once.

    Args:
        actor, critic: with FSDP2 they are copied, and the copies cut.
        peers: the other ranks, in their order. They belong to the group from here on.
        meeting: how the ranks find each other.

    Attributes:
        actor, critic, optimizers: whole, on rank 0. With FSDP2 the actor is that of the last update, critic and
            optimisers are those of the last :meth:`gather`.

    Raises:
        BraceError: a peer cannot be built, or does not come.
    """

    def __init__(
        self, actor: PreTrainedModel, critic: Critic | None, config: Config, *, peers: Sequence[Peer], meeting: Meeting
    ) -> None:
        self.config = config
        self._peers = peers
        self._others_are_equal = False
        self._is_cut = config.model.sharding == "fsdp2"
        with self._or_close():
            self._tell({"do": "build"})
            self._reports()
            self._tell({"do": "join", "place": meeting.place})
            host = meeting.place.get("host", LOOPBACK)
            self._ranks = join(0, config, meeting, device=torch.device(actor.device), address=host)
            if self._is_cut:
                self._learner = Learner(copy.deepcopy(actor), copy.deepcopy(critic), config, self._ranks)
            else:
                self._learner = Learner(actor, critic, config, self._ranks)
            self._reports()
        self._whole = self._whole_models(actor, critic)

    @property
    def actor(self) -> PreTrainedModel:
        """See the class."""
        return self._whole.actor

    @property
    def critic(self) -> Critic | None:
        """See the class."""
        return self._whole.critic

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """See the class."""
        return self._whole.optimizers

    @property
    def version(self) -> int:
        """As :attr:`.Learner.version`."""
        return self._learner.version

    @property
    def moved_version(self) -> int:
        """As :attr:`.Learner.moved_version`."""
        return self._learner.moved_version

    @property
    def warming_up(self) -> bool:
        """As :attr:`.Learner.warming_up`."""
        return self._learner.warming_up

    @property
    def clock(self) -> PhaseClock:
        """Of rank 0; waiting for the others is part of what is timed."""
        return self._learner.clock

    @property
    def latest(self) -> Evaluation | None:
        """As :attr:`.Learner.latest`."""
        return self._learner.latest

    @property
    def device(self) -> torch.device:
        """Of rank 0, where batches go."""
        return self._learner.device

    @property
    def tensors(self) -> dict[str, Tensor]:
        """As :attr:`.Learner.tensors`."""
        return self._learner.tensors

    def counters(self) -> dict[str, Any]:
        """As :meth:`.Learner.counters`."""
        return self._learner.counters()

    def restore(self, counters: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """As :meth:`.Learner.restore`, once models and optimisers have been loaded on rank 0."""
        self._learner.restore(counters, tensors)
        self._others_are_equal = False

    def update(self, batch: Batch) -> dict[str, float]:
        """As :meth:`.Learner.update`.

        Raises:
            BraceError: as there; a rank died or did not answer in time. The group can do nothing more then.
        """
        figures = self._together("update", batch)
        if self._is_cut:
            self._gather(optimizers=False)
        assert isinstance(figures, dict)
        return figures

    def evaluate(self, batch: Batch) -> Evaluation:
        """As :meth:`.Learner.evaluate`."""
        evaluation = self._together("evaluate", batch)
        assert isinstance(evaluation, Evaluation)
        return evaluation

    def gather(self) -> None:
        """Have critic and optimisers whole here, for a checkpoint."""
        if self._is_cut and self._others_are_equal:
            self._gather(optimizers=True)

    def close(self) -> None:
        """End the other ranks. Idempotent."""
        for peer in self._peers:
            peer.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _whole_models(self, actor: PreTrainedModel, critic: Critic | None) -> WholeModels:
        if not self._is_cut:
            return WholeModels(actor, critic, self._learner.optimizers)
        if critic is not None and self._learner.critic is not None:
            for parameter, part in zip(critic.parameters(), self._learner.critic.parameters(), strict=True):
                parameter.requires_grad_(part.requires_grad)
        return WholeModels(actor, critic, make_optimizers(actor, critic, self.config.optim))

    def _together(self, what: str, batch: Batch) -> dict[str, float] | Evaluation:
        self._make_others_equal()
        tensors = batch_tensors(batch)
        with self._or_close():
            self._tell({"do": what, "batch": describe(tensors)})
            send(tensors, self._ranks, self.device)
            result = self._learner.update(batch) if what == "update" else self._learner.evaluate(batch)
            self._reports()
        return result

    def _gather(self, *, optimizers: bool) -> None:
        with self._or_close():
            self._tell({"do": "gather", "optimizers": optimizers})
            gather(self._learner, self._whole, optimizers=optimizers)
            self._reports()

    def _make_others_equal(self) -> None:
        """Give the other ranks the state of rank 0, once it is clear which: that of a checkpoint, or a new one."""
        if self._others_are_equal:
            return
        with self._or_close():
            self._tell({"do": "restore", **description(self._whole, self._learner)})
            send_state(self._whole, self._learner, self._ranks)
            self._reports()
        self._others_are_equal = True

    def _tell(self, order: Order) -> None:
        for peer in self._peers:
            peer.order(order)

    def _reports(self) -> None:
        for peer in self._peers:
            peer.report()

    @contextmanager
    def _or_close(self) -> Iterator[None]:
        """After any error the ranks may wait for different things, so the group ends. The first cause is raised."""
        try:
            yield
        except BaseException as error:
            reported = [peer.failure() for peer in self._peers]
            self.close()
            if isinstance(error, BraceError):
                raise
            # That a rank has lost the others is no cause: where one is gone or raises, all others report that.
            for failure in reported:
                if failure is not None and not _is_lost_connection(failure):
                    raise failure from error
            if _is_lost_connection(error):
                raise self._lost(error, reported) from error
            raise

    def _lost(self, error: BaseException, reported: Sequence[Exception | None]) -> BraceError:
        silent = ", ".join(str(rank) for rank, failure in enumerate(reported, start=1) if failure is None)
        return BraceError(
            f"rank 0 of the learner lost the other ranks, or waited {self.config.schedule.timeout_s:.0f} s for them"
            f"{f' (no word from rank {silent})' if silent else ''}; resume the run from its last checkpoint, with a "
            f"larger schedule.timeout_s if a rank may take as long as that: {str(error).strip().splitlines()[-1]}"
        )


def _is_lost_connection(error: BaseException) -> bool:
    """Whether a rank waited in vain for another one, or the trace that it reported says so."""
    return isinstance(error, dist.DistError) or any(mark in str(error) for mark in _LOST_CONNECTION)
