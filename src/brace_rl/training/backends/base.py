"""Where responses are made, and how weights get there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from brace_rl.training.types import RolloutGroup, RolloutRequest

if TYPE_CHECKING:
    import torch


class Backend(ABC):
    """Runs rollouts: in this process, in one of its own, or on a cluster. The loop does not know which.

    Orders are carried out in the order given: a prompt submitted after ``publish(version=v)`` is never sampled, not
    even its first token, under weights older than ``v``.
    """

    restarts: int = 0
    """Rollout processes that died and were replaced."""

    @abstractmethod
    def publish(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Send weights; responses in flight go on under them. Returns once the tensors may be written to again."""

    @abstractmethod
    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Queue prompts. Does not block."""

    @abstractmethod
    def collect(self) -> list[RolloutGroup]:
        """Wait until at least one prompt is answered in full and return all that are.

        Raises:
            WaitTimeoutError: nothing arrived in the configured time; the message says who waited for whom.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop. Idempotent; prompts in flight are abandoned."""
