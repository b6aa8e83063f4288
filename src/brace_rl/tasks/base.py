"""The contract between the trainer and whatever it trains on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Problem:
    """One thing to solve.

    Attributes:
        id: unique within its data set, the same in every run.
        prompt: text, or chat messages (``{"role", "content"}``) that go through the model's chat template.
        answer: gold answer as text.
        metadata: whatever the task wants to keep.
    """

    id: str
    prompt: str | tuple[Mapping[str, str], ...]
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepResult:
    """What the environment answers to one turn.

    Attributes:
        observation: text inserted after the turn as non-policy tokens; empty for none.
        reward: received on the last token of the turn.
        done: the episode is over; nothing is inserted.
        success: the problem counts as solved (read when ``done``).
        info: figures for the metrics (read when ``done``).
    """

    observation: str = ""
    reward: float = 0.0
    done: bool = False
    success: bool = False
    info: Mapping[str, float] = field(default_factory=dict)


class Environment(ABC):
    """One episode of one problem. Single use: made for a response, stepped once per turn, dropped when done."""

    @abstractmethod
    async def step(self, action: str) -> StepResult:
        """Answer the text the policy wrote in this turn (its stop text included).

        A tool that fails is an observation that says so, not an exception.
        """


@dataclass(frozen=True)
class TranscriptPiece:
    """A stretch of a demonstration: text, and whether the policy wrote it (else the environment did)."""

    text: str
    is_policy: bool


@dataclass(frozen=True)
class Transcript:
    """A demonstration for the supervised warm start: the problem and the turns after its prompt.

    The trainer appends the end-of-sequence token, as a policy token, to the last piece.
    """

    problem: Problem
    pieces: tuple[TranscriptPiece, ...]


class Task(ABC):
    """A family of problems with its environment.

    Attributes:
        stop: texts that end a turn of the policy (besides the end-of-sequence token).
    """

    stop: tuple[str, ...] = ()

    @abstractmethod
    def train_problems(self) -> Sequence[Problem]:
        """Problems to train on, in data order."""

    @abstractmethod
    def eval_problems(self) -> Sequence[Problem]:
        """Held-out problems, disjoint from the training problems."""

    @abstractmethod
    def environment(self, problem: Problem) -> Environment:
        """A fresh episode of ``problem``."""

    def demonstrations(self, seed: int) -> Iterator[Transcript]:
        """Endless transcripts for the supervised warm start, over training problems only.

        Raises:
            NotImplementedError: this task has none.
        """
        raise NotImplementedError(f"{type(self).__name__} has no demonstrations; set warm_start.steps = 0")

    def build_tokenizer(self) -> PreTrainedTokenizerBase:
        """A small tokenizer for a model started from random weights.

        Raises:
            NotImplementedError: this task needs a pretrained model.
        """
        raise NotImplementedError(f"{type(self).__name__} has no tokenizer of its own; set model.path")

    def prompt_ids(self, problem: Problem, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Tokenise the prompt, through the chat template when the prompt is a list of messages."""
        if isinstance(problem.prompt, str):
            return list(tokenizer.encode(problem.prompt, add_special_tokens=False))
        ids = tokenizer.apply_chat_template(
            [dict(message) for message in problem.prompt], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return list(ids)
