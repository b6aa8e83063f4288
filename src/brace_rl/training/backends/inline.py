"""Rollouts in the trainer's own process and thread: the deterministic reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from brace_rl.errors import WaitTimeoutError
from brace_rl.training.backends.base import Backend
from brace_rl.training.rollout import RolloutDriver
from brace_rl.training.types import RolloutGroup, RolloutRequest

if TYPE_CHECKING:
    import torch


class InlineBackend(Backend):
    """Runs the driver inside :meth:`collect`, and nowhere else: the same calls give the same answers."""

    def __init__(self, driver: RolloutDriver) -> None:
        self._driver = driver

    def publish(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Give the weights to the engine, which copies them."""
        self._driver.update_weights(weights, version)

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Queue prompts.

        Raises:
            DataError: a prompt cannot be used.
        """
        self._driver.submit(requests)

    def collect(self) -> list[RolloutGroup]:
        """Generate until every prompt is answered.

        Nobody else works in the meantime, so returning earlier would gain nothing; and as it is, a call that is
        interrupted leaves a whole batch unanswered, which a resumed run repeats token for token.

        Raises:
            WaitTimeoutError: no prompt is unanswered, so none could ever arrive.
        """
        if not self._driver.unfinished:
            raise WaitTimeoutError("trainer waits for rollouts, but every prompt it submitted is answered")
        groups: list[RolloutGroup] = []
        while self._driver.unfinished:
            groups += self._driver.advance()
        return groups

    def close(self) -> None:
        """Abandon what is in flight."""
        self._driver.abandon()
