"""What the trainer asks of anything that generates text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from brace_rl.training.types import Generation, GenerationRequest

if TYPE_CHECKING:
    import torch


class Engine(ABC):
    """Generates turns, many at once, under weights that may change while it does.

    The contract, which the loop relies on and every engine is tested against:

    * ``submit`` only queues; ``step`` does the work and returns the turns it finished, in any order.
    * A token's log-prob is that of the distribution it was really drawn from, and its version names the weights that
      distribution came from.
    * ``update_weights`` may come between any two steps. Turns in flight go on under the new weights with everything
      cached from the old ones recomputed; tokens already sampled keep their log-probs and versions.
    * With the same requests submitted in the same order before the same steps, results are the same.
    """

    version: int
    """Version of the weights in use; -1 before the first ``update_weights``."""

    max_context_tokens: int | None = None
    """Most tokens a turn's context and output may have together; None: no limit."""

    @abstractmethod
    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue turns. Raises ValueError for a request that can never be served (empty context, no new tokens)."""

    @abstractmethod
    def step(self) -> list[Generation]:
        """Advance everything in flight by at least one token; return the turns that finished, possibly none."""

    @abstractmethod
    def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Replace the model's weights, a ``state_dict``; copies, never keeps a reference."""

    @abstractmethod
    def release(self, session: str) -> None:
        """Forget what is cached for a session that will not be continued; unknown sessions are ignored."""

    @property
    @abstractmethod
    def unfinished(self) -> int:
        """Turns queued or in flight."""
