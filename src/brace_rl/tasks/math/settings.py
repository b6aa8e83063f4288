"""Settings of the mathematics family. Torch-free."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from brace_rl.tasks.math.extract import AnswerFormat
from brace_rl.tasks.settings import DataSettings, GeneratedSettings, TaskSettings


class OverlongSettings(TaskSettings):
    """How a response near or at the length limit is rewarded."""

    overlong_cache_tokens: int = Field(
        0, ge=0, description="last tokens before the length limit over which a penalty grows (DAPO: 4096); 0: none"
    )
    overlong_penalty: float = Field(1.0, gt=0, description="penalty of a response at the length limit")


class MathSettings(DataSettings, OverlongSettings):
    """Mathematics problems with short answers: DAPO-Math, AIME, MATH and the like."""

    name: str = "math"
    bad_rows: Literal["error", "skip"] = Field(
        "error", description="rows that are malformed or lack a gold answer: stop, or leave out and count"
    )
    instructions: Literal["auto", "boxed", "answer_line", "none"] = Field(
        "auto",
        description="what is added to a problem about the form of its answer; auto: boxed, unless it says already",
    )
    answer_format: AnswerFormat = Field(
        "any", description="where the answer is looked for: a box, a line 'Answer: ...', or whichever comes last"
    )
    answer_time_limit_s: float = Field(
        2.0, gt=0, le=60, description="processor time math-verify may spend on one answer; beyond it counts as wrong"
    )
    answer_memory_mb: int = Field(1024, ge=256, description="memory math-verify may use for one answer")
    scoring_workers: int = Field(2, ge=1, le=256, description="processes that run math-verify; started when needed")


class ArithmeticStepsSettings(GeneratedSettings, OverlongSettings):
    """Generated sums of many terms, solved by writing out every step."""

    name: str = "arithmetic_steps"
    terms: tuple[int, int] = Field((18, 18), description="fewest and most terms of a sum")
    max_term: int = Field(9, ge=1, description="largest term")
    digits: int = Field(2, ge=1, le=9, description="digits every value in between is written with")

    @model_validator(mode="after")
    def _possible(self) -> ArithmeticStepsSettings:
        if not 2 <= self.terms[0] <= self.terms[1]:
            raise ValueError("task.terms: needs 2 <= fewest <= most")
        if self.max_term >= 10**self.digits:
            raise ValueError(f"task.max_term: {self.max_term} has more than task.digits = {self.digits} digits")
        return self
