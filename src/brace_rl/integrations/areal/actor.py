"""AReaL's actor with another value target and advantage. Imports AReaL."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from areal.trainer.ppo.actor import PPOActor  # type: ignore[import-not-found]
from areal.utils import logging, stats_tracker  # type: ignore[import-not-found]
from torch import Tensor

from brace_rl.integrations.areal.estimate import Rollout, areal_estimates, read_rollout, rolled, without_junk
from brace_rl.integrations.areal.options import options_from_actor

_log = logging.getLogger("BracePPOActor")

SCOPE = "brace"
"""Of the metrics in AReaL's log."""


class _Held:
    """Stands where AReaL normalises advantages, and keeps what it was given beside them until ours are there."""

    def __init__(self, normalise: Any) -> None:
        self._normalise = normalise
        self._given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def __call__(self, advantages: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self._given = (args, kwargs)
        return advantages

    def now(self, advantages: Tensor) -> Tensor:
        """Normalise as AReaL was about to."""
        args, kwargs = self._given
        normalised: Tensor = self._normalise(advantages, *args, **kwargs)
        return normalised


class BracePPOActor(PPOActor):  # type: ignore[misc]
    """Everything of AReaL's actor but ``returns`` and ``advantages``."""

    adv_norm: Any

    def __init__(self, config: Any, engine: Any) -> None:
        super().__init__(config, engine)
        self._brace_options = options_from_actor(asdict(config))
        if self.adv_norm is not None:
            self.adv_norm = _Held(self.adv_norm)

    def _compute_advantages(self, data: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Let AReaL do all it does here, then put BRACE's numbers in place of its ``advantages`` and ``returns``.

        AReaL 1.0 gives the batch alone, 2.0 its groups too.
        """
        rollout = read_rollout(data)
        without_junk(data)
        data = super()._compute_advantages(data, *args, **kwargs)
        estimates = areal_estimates(
            rollout=rollout,
            rewards=data["tot_rewards"],
            values=data.get("values"),
            loss_mask=data["loss_mask"],
            options=self._brace_options,
        )
        advantages = estimates.advantages.float()
        data["advantages"] = advantages if self.adv_norm is None else self.adv_norm.now(advantages)
        data["returns"] = estimates.targets.float()
        figures = {name: float(figure) for name, figure in estimates.metrics.items()}
        with stats_tracker.scope(SCOPE):
            stats_tracker.scalar(**figures)
        self._warn_of_hidden_staleness(data, rollout, figures)
        return data

    def _warn_of_hidden_staleness(self, data: dict[str, Any], rollout: Rollout, figures: dict[str, float]) -> None:
        """Old tokens whose log-probs are exactly today's cannot carry the log-probs that they were sampled with."""
        versions = data.get("versions")
        if versions is None or figures.get("ratio/all_one") != 1.0 or not rollout.action_mask.any():
            return
        oldest, now = int(rolled(versions)[rollout.action_mask].min()), self.engine.get_version()
        if oldest < now:
            _log.warning(
                f"step {now}: tokens of version {oldest} have exactly the log-probs of today's policy, so nothing is "
                "corrected; what overwrites logprobs?"
            )


class BraceEngine:
    """Goes before one of AReaL's actor engines in the order of bases, and gives it BRACE's actor."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.actor = BracePPOActor(config, self)
