"""What SkyRL's entry points do, with BRACE's trainers. Imports SkyRL and Ray."""

# No postponed annotations: SkyRL reads the types of the fields below.

from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from brace_rl.errors import ConfigError
from brace_rl.integrations.skyrl.checks import refuse_errors
from brace_rl.integrations.skyrl.versions import DISTRIBUTION, INSTALL, check_skyrl

try:
    check_skyrl(version(DISTRIBUTION))
except PackageNotFoundError:
    raise ConfigError(f"SkyRL is not installed; {INSTALL}") from None

import ray
from skyrl.train.config import AlgorithmConfig, SkyRLTrainConfig, TrainerConfig  # type: ignore[import-not-found]
from skyrl.train.entrypoints.main_base import BasePPOExp  # type: ignore[import-not-found]
from skyrl.train.utils import initialize_ray, validate_cfg  # type: ignore[import-not-found]

from brace_rl.integrations.skyrl.trainers import BraceFullyAsyncRayPPOTrainer, BraceRayPPOTrainer

OVERRIDE = "trainer.override_entrypoint="
"""How SkyRL's own entry point is told to call this one; no part of the configuration."""


@dataclass
class BraceAlgorithmConfig(AlgorithmConfig):  # type: ignore[misc]
    """SkyRL's ``trainer.algorithm`` with a node of options; see :mod:`brace_rl.integrations.skyrl.options`."""

    brace: dict[str, Any] = field(default_factory=dict)


@dataclass
class BraceTrainerConfig(TrainerConfig):  # type: ignore[misc]
    """SkyRL's ``trainer`` with that section."""

    algorithm: BraceAlgorithmConfig = field(default_factory=BraceAlgorithmConfig)


@dataclass
class BraceConfig(SkyRLTrainConfig):  # type: ignore[misc]
    """SkyRL's configuration with that ``trainer``."""

    trainer: BraceTrainerConfig = field(default_factory=BraceTrainerConfig)


class BraceExp:
    """Goes before SkyRL's ``BasePPOExp``, or a subclass of it that has its own generator or data."""

    def get_trainer(self, *, cfg: Any, **parts: Any) -> Any:
        """One of BRACE's trainers: the fully asynchronous one where ``trainer.fully_async.enabled`` says so."""
        asynchronous = cfg.trainer.fully_async.enabled
        return (BraceFullyAsyncRayPPOTrainer if asynchronous else BraceRayPPOTrainer)(cfg=cfg, **parts)


class BracePPOExp(BraceExp, BasePPOExp):  # type: ignore[misc]
    """SkyRL's experiment with BRACE's trainer."""


def config_from_arguments(arguments: list[str]) -> BraceConfig:
    """SkyRL's configuration with the node ``trainer.algorithm.brace``, from ``key=value`` arguments."""
    given = [argument for argument in arguments if not argument.startswith(OVERRIDE)]
    config: BraceConfig = BraceConfig.from_cli_overrides(given)
    return config


def run(config: BraceConfig) -> None:
    """Train; runs in a Ray task, as in SkyRL, to keep the loop off the head node."""
    BracePPOExp(config).run()


def launch(arguments: list[str]) -> None:
    """Check the configuration, start Ray, train.

    Raises:
        ConfigError: an option of BRACE, or a setting that keeps it from working.
    """
    config = config_from_arguments(arguments)
    refuse_errors(asdict(config))
    validate_cfg(config)
    initialize_ray(config)
    ray.get(ray.remote(num_cpus=1)(run).remote(config))
