"""What an engine does to the weights it was given: the distribution it samples from, and the one it records."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Engine:
    """Differences between the trainer's softmax and the engine's, all absent by default.

    Attributes:
        temperature: of sampling; the trainer evaluates its policy at 1.
        noise: standard deviation of logit noise, drawn anew for every batch, in what is sampled from. Recorded as
            sampled, it widens the ratios and leaves E_mu[w] = 1.
        recorded_temperature: of the recorded log-probs, on top of the sampled ones; above 1, E_mu[w] > 1.
        recorded_noise: standard deviation of logit noise in the recorded log-probs alone; E_mu[w] > 1 on average.
    """

    temperature: float = 1.0
    noise: float = 0.0
    recorded_temperature: float = 1.0
    recorded_noise: float = 0.0

    def logits(self, weights: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Sampled and recorded logits ``[tables, C, A]`` for the weights of the same shape."""
        sampled = self._disturb(weights / self.temperature, self.noise, generator)
        return sampled, self._disturb(sampled / self.recorded_temperature, self.recorded_noise, generator)

    @staticmethod
    def _disturb(logits: Tensor, scale: float, generator: torch.Generator) -> Tensor:
        if scale == 0:
            return logits
        return logits + scale * torch.randn(logits.shape, generator=generator, dtype=logits.dtype)
