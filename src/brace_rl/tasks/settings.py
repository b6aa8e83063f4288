"""Settings every task family builds on. Torch-free: a recipe is checked before anything heavy is loaded.

A family's own settings are one class that extends the bases it needs, with the name it has in the registry as default::

    class SearchSettings(DataSettings, ToolSettings):
        \"\"\"Questions answered with a search tool.\"\"\"     # the first line is what `brace train --help` says

        name: str = "search_qa"
        corpus: str = Field("", description="...")
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from brace_rl.section import Section


class TaskSettings(Section):
    """What every family has.

    Attributes:
        needs_model: the family cannot start from random weights (its task builds no tokenizer).
    """

    needs_model: ClassVar[bool] = False

    name: str = Field("", description="task family, or path/to/file.py:ClassName of your own")
    train_problems: int = Field(20_000, ge=1, description="problems generated, or at most read, for training")
    eval_problems: int = Field(512, ge=1, description="held-out problems; none of them is trained on")

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """A family gives ``name`` another default; what it means stays said here."""
        cls.model_fields["name"].description = TaskSettings.model_fields["name"].description

    def check_training(self, *, model_path: str) -> None:
        """Raise ValueError where training lacks something; evaluation does not ask for it."""
        if self.needs_model and not model_path:
            raise ValueError(f"model.path: {self.name} needs a pretrained model; pass --model DIR_OR_NAME")

    def __reduce__(self) -> str | tuple[Any, ...]:
        # The class of a task named by path lives in a module another process has not imported yet.
        if ":" in self.name:
            from brace_rl.tasks.registry import parse_settings

            return parse_settings, (self.model_dump(),)
        return super().__reduce__()


class GeneratedSettings(TaskSettings):
    """Of a family that generates its problems, and can start from random weights."""

    eval_split: Literal["dev", "test"] = Field(
        "test", description="where held-out problems come from; dev while tuning a recipe"
    )

    @model_validator(mode="before")
    @classmethod
    def _no_file(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        for key in ("data", "eval_data"):
            if values.get(key):
                name = values.get("name", cls.model_fields["name"].default)
                raise ValueError(f"task.{key}: the {name} generates its problems; leave it out, or name another task")
        return {key: value for key, value in values.items() if key not in ("data", "eval_data")}


class DataSettings(TaskSettings):
    """Of a family that reads its problems from files, for pretrained models.

    Training needs ``data``. Evaluation alone (``brace eval``) gives ``eval_data`` and leaves ``data`` empty: the task
    must then be built, and answer ``eval_problems()``.
    """

    needs_model: ClassVar[bool] = True

    data: str = Field("", description="training file")
    eval_data: str = Field("", description="evaluation file; empty: the last rows of data are held out")

    def check_training(self, *, model_path: str) -> None:
        """As the base, and a training file is needed."""
        if not self.data:
            raise ValueError(f"task.data: {self.name} needs a file; pass --data FILE")
        super().check_training(model_path=model_path)


class ToolSettings(TaskSettings):
    """Of a family with several turns and tools that may be slow or long-winded."""

    max_turns: int = Field(6, ge=1, description="model turns per episode; the episode ends unrewarded after the last")
    tool_timeout_s: float = Field(30.0, gt=0, description="longest one tool call may take; then the model is told so")
    max_observation_tokens: int = Field(
        0, ge=0, description="longer tool output is cut at the end; 0: only the response length limits it"
    )


class PythonToolSettings(TaskSettings):
    """Of a family whose policy may run Python it writes, see docs/tasks.md for what is enforced."""

    python_tool: bool = Field(False, description="let the policy run Python in isolated processes (Linux)")
    python_isolation: bool = Field(
        True,
        description="false: run it with your own rights, network and files included, where isolation is impossible",
    )
    python_wall_s: float = Field(10.0, gt=0, le=600, description="seconds a Python call may take")
    python_cpu_s: int = Field(5, ge=1, le=600, description="CPU seconds of each of its processes")
    python_memory_mb: int = Field(512, ge=64, le=65_536, description="address space of each of its processes")
    python_output_bytes: int = Field(10_000, ge=1, le=10**7, description="what it may print before it is stopped")
