"""How a rollout driver is built where it is going to run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from brace_rl.config import Config
from brace_rl.training.engines.base import Engine
from brace_rl.training.rollout import RolloutDriver

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class DriverFactory(Protocol):
    """Whatever builds a driver. A backend that runs it elsewhere needs a factory it can pickle."""

    def build(self) -> RolloutDriver:
        """A new driver."""
        ...


@dataclass(frozen=True)
class DriverSpec:
    """A :class:`DriverFactory` for the engine the recipe names; small and picklable.

    Attributes:
        model_dir: model folder or hub name of architecture, tokenizer and first weights.
        slots: sequences decoded together.
    """

    config: Config
    model_dir: str
    slots: int

    def build(self) -> RolloutDriver:
        """Load task, tokenizer and model, and put the engine behind the driver.

        Raises:
            BraceError: the task's data or the model cannot be used.
        """
        from brace_rl.tasks import build_task
        from brace_rl.training.models import load_tokenizer

        config = self.config
        tokenizer = load_tokenizer(self.model_dir)
        return RolloutDriver(
            self._engine(tokenizer),
            build_task(config.task, config.warm_start, config.run.seed),
            tokenizer,
            max_prompt_tokens=config.rollout.max_prompt_tokens,
            # Half the trainer's patience: a stuck environment is then one failed response, not a failed run.
            environment_timeout_s=config.schedule.timeout_s / 2,
        )

    def _engine(self, tokenizer: PreTrainedTokenizerBase) -> Engine:
        model = self.config.model
        if self.config.backend.engine == "vllm":
            from brace_rl.training.engines.vllm import VLLMEngine

            return VLLMEngine(self.model_dir, tokenizer, dtype=model.dtype, slots=self.slots)
        from brace_rl.training.engines.embedded import EmbeddedEngine
        from brace_rl.training.models import load_actor, resolve_device

        actor = load_actor(self.model_dir, dtype=model.dtype, device=resolve_device(model.device))
        return EmbeddedEngine(actor, tokenizer, slots=self.slots)
