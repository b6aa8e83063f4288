"""The two names that an AReaL training script takes. Imports AReaL."""

# No postponed annotations: AReaL reads the types of the fields below.

from dataclasses import asdict, dataclass, field, make_dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from brace_rl.errors import ConfigError
from brace_rl.integrations.areal.checks import config_findings
from brace_rl.integrations.areal.versions import DISTRIBUTION, INSTALL, check_areal
from brace_rl.integrations.checking import refuse

try:
    check_areal(version(DISTRIBUTION))
except PackageNotFoundError:
    raise ConfigError(f"AReaL is not installed; {INSTALL}") from None

from areal.api.cli_args import PPOActorConfig  # type: ignore[import-not-found]
from areal.trainer.rl_trainer import PPOTrainer  # type: ignore[import-not-found]
from areal.utils.environ import is_single_controller  # type: ignore[import-not-found]

ENGINES = {"fsdp": "BraceFSDPPPOActor", "megatron": "BraceMegatronPPOActor", "archon": "BraceArchonPPOActor"}
"""AReaL's backend -> class in the module of that name here."""


@dataclass
class BraceActorConfig(PPOActorConfig):  # type: ignore[misc]
    """AReaL's ``actor`` with a node of options; see :mod:`brace_rl.integrations.areal.options`."""

    brace: dict[str, Any] = field(default_factory=dict)


def with_brace(config_class: type) -> type:
    """A class of configuration like the given one, whose ``actor`` takes the node ``brace``.

    Args:
        config_class: AReaL's ``PPOConfig`` or ``GRPOConfig``, or one that inherits from them.
    """
    actor: tuple[str, type, Any] = ("actor", BraceActorConfig, field(default_factory=BraceActorConfig))
    return make_dataclass(f"Brace{config_class.__name__}", [actor], bases=(config_class,))


class BracePPOTrainer(PPOTrainer):  # type: ignore[misc]
    """AReaL's trainer with BRACE's actor; a configuration without the node gets the paper's options.

    Raises:
        ConfigError: an option of BRACE, or a setting that keeps it from working.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        refuse(config_findings(asdict(config)))
        super().__init__(config, *args, **kwargs)

    def _create_train_engine(self, actor_config: Any, alloc: Any) -> Any:
        """As AReaL's, with another class, for the actor; reference and teacher are AReaL's own."""
        if actor_config is not self.config.actor:
            return super()._create_train_engine(actor_config, alloc)
        engine_class = getattr(import_module(f"brace_rl.integrations.areal.{alloc.backend}"), ENGINES[alloc.backend])
        if is_single_controller():
            engine = engine_class.as_controller(actor_config, self.scheduler)
        else:
            engine = engine_class(config=actor_config)
        engine.create_process_group(parallel_strategy=alloc.parallel)
        return engine
