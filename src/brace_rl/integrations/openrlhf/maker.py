"""OpenRLHF's experience maker with another value target and advantage. Imports OpenRLHF."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker  # type: ignore[import-not-found]
from openrlhf.utils.logging_utils import init_logger  # type: ignore[import-not-found]
from torch import Tensor

from brace_rl.integrations.checking import entry, refuse
from brace_rl.integrations.openrlhf.checks import config_findings
from brace_rl.integrations.openrlhf.estimate import PREFIX, openrlhf_estimates
from brace_rl.integrations.openrlhf.options import ADVANTAGE, node_from_environment, options_from_settings

_log = init_logger(__name__)


class BraceExperienceMaker(RemoteExperienceMaker):  # type: ignore[misc]
    """Everything of OpenRLHF's but ``returns`` and ``advantages``.

    Raises:
        ConfigError: an option of BRACE, or a setting that keeps it from working.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings = _mapping(self.args)
        node = node_from_environment()
        refuse(config_findings(self._settings, node))
        self._brace_options = options_from_settings(node, self._settings)
        self._token_rewards: list[Tensor] = []

    @torch.no_grad()
    def compute_advantages_and_returns(self, experiences: list[Any]) -> list[Any]:
        """Let OpenRLHF do all it does here, then put BRACE's numbers in place of ``advantages`` and ``returns``."""
        self._token_rewards = []
        experiences = super().compute_advantages_and_returns(experiences)
        estimates = openrlhf_estimates(
            experiences=experiences,
            rewards=self._token_rewards,
            options=self._brace_options,
            divide_by_std=not entry(self._settings, f"{ADVANTAGE}.no_std_norm", False),
        )
        for experience, advantages, returns in zip(experiences, estimates.advantages, estimates.returns, strict=True):
            experience.advantages, experience.returns = advantages, returns
            for name, figure in estimates.metrics.items():
                experience.info[name] = torch.full((len(returns),), figure)
        self._warn_of_hidden_staleness(estimates.metrics)
        return experiences

    def get_advantages_and_returns(
        self, values: Tensor, rewards: Tensor, action_mask: Tensor, gamma: float, lambd: float
    ) -> tuple[Tensor, Tensor]:
        """Keep the rewards of tokens, which OpenRLHF makes for every experience in turn and shows to this only."""
        self._token_rewards.append(rewards)
        found: tuple[Tensor, Tensor] = super().get_advantages_and_returns(values, rewards, action_mask, gamma, lambd)
        return found

    def _warn_of_hidden_staleness(self, metrics: dict[str, float]) -> None:
        """Asynchronous rollouts whose log-probs are exactly the trainer's cannot carry the engine's."""
        if metrics.get(f"{PREFIX}ratio/all_one") == 1.0 and entry(self._settings, "train.async_enable", False):
            _log.warning(
                "every token has exactly the log-prob of today's policy, so nothing is corrected; "
                "what overwrites rollout_log_probs?"
            )


def _mapping(settings: Any) -> Any:
    """OpenRLHF's nested namespaces as nested mappings."""
    if isinstance(settings, SimpleNamespace):
        return {name: _mapping(value) for name, value in vars(settings).items()}
    return settings
