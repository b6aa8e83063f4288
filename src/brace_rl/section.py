"""The base of every table of settings, and errors about them in one line. Torch-free."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator


class Section(BaseModel):
    """Base of every section: frozen, and a key it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic would take ``true`` for a number, and ``1e3`` for a whole one."""
        field = cls.model_fields.get(info.field_name or "")
        kinds = () if field is None else (get_args(field.annotation) or (field.annotation,))
        if isinstance(value, bool | float) and kinds == (int,):
            raise ValueError("input should be an integer such as 3")
        if isinstance(value, bool) and float in kinds:
            raise ValueError("input should be a number such as 0.5")
        return value


def first_problem(error: ValidationError, *, prefix: str = "", known: Callable[[str], Sequence[str]]) -> str:
    """The first thing wrong, as ``key: what (got ...)``.

    Args:
        prefix: of every key, such as ``task``.
        known: the keys there are where the given one was looked for.
    """
    problem = error.errors()[0]
    key = ".".join(str(part) for part in (prefix, *problem["loc"]) if part != "")
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        return f"{key}: no such setting{did_you_mean(key, known(key))}"
    if not problem["loc"]:
        return message
    return f"{key}: {message[0].lower()}{message[1:]} (got {problem['input']!r})"


def did_you_mean(key: str, known: Sequence[str]) -> str:
    """``; did you mean ...?``, or the list of what is known where nothing is close."""
    close = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known here: {', '.join(known)}"
