"""Task families by name. Torch-free: classes are imported when they are asked for.

A family is one line of :data:`FAMILIES`. A task of your own needs none: ``task.name = "path/to/file.py:ClassName"``
imports the class from the file; it is a :class:`~brace_rl.tasks.base.Task` whose attribute ``Settings`` is its settings
class (docs/tasks.md shows one).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from brace_rl.errors import ConfigError
from brace_rl.section import did_you_mean, first_problem
from brace_rl.tasks.own_code import own_module
from brace_rl.tasks.settings import TaskSettings

if TYPE_CHECKING:
    from brace_rl.tasks.base import Task

DEFAULT_TASK = "calculator"
"""The family of a recipe that names none."""


@dataclass(frozen=True)
class Family:
    """Where a family is found, each as ``module:Class``. The settings' module must not import torch."""

    settings: str
    task: str


FAMILIES: Mapping[str, Family] = {
    "calculator": Family("brace_rl.tasks.calculator:CalculatorSettings", "brace_rl.tasks.calculator:CalculatorTask"),
    "gsm8k_tool": Family("brace_rl.tasks.gsm8k:Gsm8kSettings", "brace_rl.tasks.gsm8k:Gsm8kTask"),
    "math": Family("brace_rl.tasks.math.settings:MathSettings", "brace_rl.tasks.math.task:MathTask"),
    "arithmetic_steps": Family(
        "brace_rl.tasks.math.settings:ArithmeticStepsSettings",
        "brace_rl.tasks.math.arithmetic_steps:ArithmeticStepsTask",
    ),
    "search_qa": Family(
        "brace_rl.tasks.search.settings:SearchQaSettings", "brace_rl.tasks.search.search_qa:SearchQaTask"
    ),
    "search_facts": Family(
        "brace_rl.tasks.search.settings:SearchFactsSettings", "brace_rl.tasks.search.search_facts:SearchFactsTask"
    ),
    "web_research": Family(
        "brace_rl.tasks.search.settings:WebResearchSettings", "brace_rl.tasks.search.web_research:WebResearchTask"
    ),
    "web_facts": Family(
        "brace_rl.tasks.search.settings:WebFactsSettings", "brace_rl.tasks.search.web_facts:WebFactsTask"
    ),
    "reasoning_gym": Family(
        "brace_rl.tasks.adapters.settings:ReasoningGymSettings",
        "brace_rl.tasks.adapters.reasoning_gym:ReasoningGymTask",
    ),
    "verifiers": Family(
        "brace_rl.tasks.adapters.settings:VerifiersSettings", "brace_rl.tasks.adapters.verifiers:VerifiersTask"
    ),
}


def settings_class(name: str) -> type[TaskSettings]:
    """The settings class of a family, or of the task a path names.

    Raises:
        ConfigError: there is no such family; or the file or class cannot be used.
    """
    if ":" in name:
        settings = getattr(_own_class(name), "Settings", None)
        if not (isinstance(settings, type) and issubclass(settings, TaskSettings)):
            raise ConfigError(f"task.name: {name} has no attribute Settings that is a class derived from TaskSettings")
        return settings
    cls: type[TaskSettings] = _load(_family(name).settings)
    return cls


def task_class(name: str) -> type[Task]:
    """The task class of a family, or the one a path names. Raises ConfigError as :func:`settings_class`."""
    cls: type[Task] = _own_class(name) if ":" in name else _load(_family(name).task)
    return cls


def parse_settings(values: Mapping[str, Any]) -> TaskSettings:
    """The ``[task]`` table of a recipe, checked by the settings class its ``name`` chooses.

    Raises:
        ConfigError: no such family, an unknown key, a wrong type or an impossible combination; names the key.
    """
    name = values.get("name", DEFAULT_TASK)
    if not isinstance(name, str):
        raise ConfigError(f"task.name: must be text (got {name!r})")
    cls = settings_class(name)
    try:
        return cls.model_validate({**values, "name": name})
    except ValidationError as error:
        keys = [f"task.{field}" for field in cls.model_fields]
        raise ConfigError(first_problem(error, prefix="task", known=lambda key: keys)) from None


def _family(name: str) -> Family:
    if name not in FAMILIES:
        raise ConfigError(f"task.name: {name!r} is not a task{did_you_mean(name, list(FAMILIES))}")
    return FAMILIES[name]


def _load(place: str) -> Any:
    module, _, cls = place.partition(":")
    return getattr(importlib.import_module(module), cls)


def _own_class(name: str) -> Any:
    """The task class that ``path:Class`` names. The file is the user's own code and runs once per process."""
    from brace_rl.tasks.base import Task

    path, _, cls_name = name.rpartition(":")
    module = own_module(Path(path), setting="task.name", form="path/to/file.py:ClassName")
    cls = getattr(module, cls_name, None)
    if not (isinstance(cls, type) and issubclass(cls, Task)):
        raise ConfigError(f"task.name: {path} has no class {cls_name!r} derived from brace_rl.tasks.base.Task")
    return cls
