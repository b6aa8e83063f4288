"""Tasks: problems, environments, tools, data loading."""

from __future__ import annotations

from typing import TYPE_CHECKING

from brace_rl.errors import ConfigError

if TYPE_CHECKING:
    from brace_rl.config import TaskConfig, WarmStartConfig
    from brace_rl.tasks.base import Task

__all__ = ["build_task"]


def build_task(config: TaskConfig, warm_start: WarmStartConfig, seed: int) -> Task:
    """The task a recipe names.

    Args:
        seed: of the training problems and the demonstrations; held-out problems are the same for every seed.

    Raises:
        ConfigError: the task cannot supply what the configuration asks for.
        DataError: a data file cannot be used.
    """
    # Imported here: the calculator must not wait for the data libraries that only the other task needs.
    if config.name == "calculator":
        from brace_rl.tasks.calculator import CalculatorTask

        return CalculatorTask(config, warm_start, seed, eval_split=config.eval_split)
    if config.name == "gsm8k_tool":
        from brace_rl.tasks.gsm8k import Gsm8kTask

        return Gsm8kTask(config, seed)
    raise ConfigError(f"task.name: {config.name!r} is not a task; use calculator or gsm8k_tool")
