"""Tasks: problems, environments, tools, data loading."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from brace_rl.tasks.base import Task
    from brace_rl.tasks.settings import TaskSettings

__all__ = ["build_task"]


class WarmStart(Protocol):
    """What a task is told of the supervised start."""

    @property
    def steps(self) -> int: ...

    @property
    def mistakes(self) -> float: ...


def build_task(settings: TaskSettings, warm_start: WarmStart, seed: int) -> Task:
    """The task a recipe names.

    Args:
        warm_start: with steps above 0 the task must have demonstrations, and its first one is made here.
        seed: of the training problems and the demonstrations; held-out problems are the same for every seed.

    Raises:
        ConfigError: the task cannot supply what the configuration asks for.
        DataError: a data file cannot be used.
    """
    # Imported here: a configuration is read without the data libraries that some tasks need.
    from brace_rl.tasks.registry import task_class

    task = task_class(settings.name)(settings, seed=seed)
    if warm_start.steps:
        next(task.demonstrations(seed, mistakes=warm_start.mistakes))
    return task
