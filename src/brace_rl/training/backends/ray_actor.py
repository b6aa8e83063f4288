"""The worker's side of :mod:`~brace_rl.training.backends.ray_workers`, which needs Ray only to fetch weights.

Three threads meet in one actor: Ray calls ``give_weights`` and ``give_prompts`` on one, ``collect`` on another, and a
third of the actor's own generates. The first two only leave things for the third, so neither a large transfer nor a
trainer that does not listen ever holds generation up.
"""

from __future__ import annotations

import logging
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from brace_rl.errors import BraceError
from brace_rl.training.backends.state_layout import StateLayout
from brace_rl.training.backends.worker import Failure
from brace_rl.training.driver_spec import DriverFactory
from brace_rl.training.rollout import RolloutDriver
from brace_rl.training.types import RolloutGroup, RolloutRequest

logger = logging.getLogger(__name__)

NO_WEIGHTS = -1
"""Version before the first weights; those of the model folder."""


@dataclass(frozen=True)
class PackedWeights:
    """A state dict as one array, which Ray's object store shares between the processes of a machine uncopied.

    Attributes:
        data: ``[layout.size]`` uint8; read-only where it came out of the object store.
    """

    layout: StateLayout
    data: np.ndarray[Any, np.dtype[np.uint8]]

    @staticmethod
    def of(weights: Mapping[str, torch.Tensor]) -> PackedWeights:
        """A copy of ``weights``."""
        layout = StateLayout.of(weights)
        data = np.zeros(layout.size, np.uint8)
        layout.write(weights, torch.from_numpy(data))
        return PackedWeights(layout, data)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors, as views of ``data``; not to be written to."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return self.layout.tensors(torch.from_numpy(self.data))


@dataclass(frozen=True)
class Report:
    """What a worker says of itself.

    Attributes:
        groups: answers not reported before.
        received: newest weights that reached it.
        failure: what its driver raised; nothing comes after it.
    """

    groups: list[RolloutGroup]
    received: int
    failure: Failure | None


class RolloutActor:
    """Builds a driver and generates until its process ends. What the driver raises is reported.

    Orders need not arrive in the order given: prompts say which weights they need at least, and wait for those; weights
    older than the present ones are ignored. So an order that is lost, late or repeated does no harm that is not seen.

    Args:
        factory: of the driver, which is built on the thread that uses it.
        threads: torch threads of that thread.
        fetch_timeout_s: longest the object store may take to give weights.
    """

    def __init__(self, factory: DriverFactory, threads: int, fetch_timeout_s: float) -> None:
        self._fetch_timeout_s = fetch_timeout_s
        self._changed = threading.Condition()
        self._arrived: tuple[PackedWeights, int] | None = None
        self._received = NO_WEIGHTS
        self._prompts: deque[tuple[list[RolloutRequest], int]] = deque()
        self._lacking = NO_WEIGHTS
        self._answered: list[RolloutGroup] = []
        self._failure: Failure | None = None
        threading.Thread(target=self._run, args=(factory, threads), name="generation", daemon=True).start()

    def give_weights(self, box: Sequence[Any], version: int) -> int:
        """Take over weights unless they are old; returns the newest version received, which says if it worked.

        Args:
            box: holds the reference to :class:`PackedWeights`.
        """
        import ray.exceptions

        if version > self._received:
            try:
                weights: PackedWeights = ray.get(box[0], timeout=self._fetch_timeout_s)
            except ray.exceptions.RayError as error:  # late, or lost with the machine that held them
                logger.warning("weights %d could not be fetched: %s", version, error)
                return self._received
            with self._changed:
                self._arrived, self._received = (weights, version), version
                self._changed.notify_all()
        return self._received

    def give_prompts(self, requests: list[RolloutRequest], version: int) -> None:
        """Queue prompts, none of which is sampled under weights older than ``version``."""
        with self._changed:
            self._prompts.append((requests, version))
            self._changed.notify_all()

    def collect(self, wait_s: float) -> Report:
        """Wait, ``wait_s`` at most, for something to tell: answers, a failure, or weights that prompts here lack."""
        with self._changed:
            self._changed.wait_for(lambda: self._answered or self._failure or self._lacks_weights(), wait_s)
            if self._lacks_weights():
                self._lacking = self._prompts[0][1]
            groups, self._answered = self._answered, []
            return Report(groups, self._received, self._failure)

    def _lacks_weights(self) -> bool:
        """Whether prompts need weights that are not here, and nobody has been told yet."""
        return bool(self._prompts) and self._prompts[0][1] > max(self._received, self._lacking)

    def _run(self, factory: DriverFactory, threads: int) -> None:
        torch.set_num_threads(threads)
        try:
            driver = factory.build()
            version = NO_WEIGHTS
            while True:
                version = self._obey(driver, version)
                if groups := driver.advance():
                    with self._changed:
                        self._answered += groups
                        self._changed.notify_all()
        except Exception as error:
            name = type(error).__name__ if isinstance(error, BraceError) else ""
            failure = Failure(name, str(error), traceback.format_exc())
            with self._changed:
                self._failure = failure
                self._changed.notify_all()

    def _obey(self, driver: RolloutDriver, version: int) -> int:
        """Give the driver the weights and prompts that came; the version of its weights. Waits if it has no work."""
        with self._changed:
            self._changed.wait_for(lambda: driver.unfinished or self._arrived or self._startable(version))
            arrived, self._arrived = self._arrived, None
        if arrived is not None:
            weights, version = arrived
            driver.update_weights(weights.tensors(), version)
        while True:
            with self._changed:
                if not self._startable(version):
                    return version
                requests, _ = self._prompts.popleft()
            driver.submit(requests)

    def _startable(self, version: int) -> bool:
        return bool(self._prompts) and self._prompts[0][1] <= version
