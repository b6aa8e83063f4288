"""The contract between the trainer and whatever it trains on: problems, environments, tasks.

One environment is one episode. The policy writes a turn; the environment answers with text that is inserted as tokens
the policy did not sample, with a reward, and with whether the episode is over. Environments of one batch share one
event loop with the engine: a turn is decoded for some responses while the tools of others work, so a ``step`` must
give way (``await``) whenever it waits, and put work that blocks into a thread (``asyncio.to_thread``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from brace_rl.errors import ConfigError
from brace_rl.tasks.settings import TaskSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Problem:
    """One thing to solve.

    Attributes:
        id: unique within its data set, the same in every run.
        prompt: text, or chat messages (``{"role", "content"}``) that go through the model's chat template.
        answer: gold answer as text.
        metadata: whatever the task wants to keep; JSON values, since a checkpoint holds the problems in flight.
    """

    id: str
    prompt: str | tuple[Mapping[str, str], ...]
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


Messages = tuple[Mapping[str, str], ...]
"""Chat messages, each ``{"role", "content"}``."""


@dataclass(frozen=True)
class StepResult:
    """What the environment answers to one turn.

    Attributes:
        observation: what is inserted after the turn as non-policy tokens; empty for none. Text goes in as it is
            (markers of a chat template may be part of it); messages are put between the model's own chat markers, and
            the next turn of the assistant is opened.
        observation_end: text that follows the observation even where that is cut for its length, such as ``</result>``.
        reward: received on the last token of the turn; must be finite.
        done: the episode is over; nothing is inserted.
        success: the problem counts as solved (read when ``done``).
        info: figures for the metrics, of the episode so far; those of the last step that has any are kept.
        excluded: the episode could not be judged (read when ``done``): it is not trained on, counts in no mean and is
            itself counted.
    """

    observation: str | Messages = ""
    reward: float = 0.0
    done: bool = False
    success: bool = False
    info: Mapping[str, float] = field(default_factory=dict)
    observation_end: str = ""
    excluded: bool = False

    @property
    def text(self) -> str:
        """The whole observation, where it is text."""
        return self.observation + self.observation_end if isinstance(self.observation, str) else ""


class Environment(ABC):
    """One episode of one problem. Single use: made for a response, stepped once per turn, dropped when done.

    Picklable before its first step; those of this project whenever no step is running.
    """

    @abstractmethod
    async def step(self, action: str) -> StepResult:
        """Answer the text the policy wrote in this turn (its stop text included).

        A tool that fails or takes too long is an observation that says so, not an exception. A step must not block; it
        may be cancelled when it exceeds the trainer's patience.
        """

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Let go of what the episode holds; called once its response has ended, whatever ended it. Must not block."""


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
    """A family of problems with its environment, made as ``SomeTask(settings, seed=seed)``. Picklable.

    The order of problems, the demonstrations and all else depend on ``settings`` and ``seed`` alone; held-out problems
    are the same for every seed.

    Attributes:
        Settings: the settings class of a task that a recipe names by path.
        stop: texts that end a turn of the policy (besides the end-of-sequence token).
        max_observation_tokens: longer observations are cut at the end; 0: only the response length limits them.
    """

    Settings: ClassVar[type[TaskSettings]] = TaskSettings
    stop: tuple[str, ...] = ()
    max_observation_tokens: int = 0

    def __init__(self, settings: Any, *, seed: int) -> None:  # noqa: B027 - not abstract: tests have tasks without
        """Settings of the class the family declares; raises BraceError where they or their files cannot be used."""

    @abstractmethod
    def train_problems(self) -> Sequence[Problem]:
        """Problems to train on, in data order."""

    @abstractmethod
    def eval_problems(self) -> Sequence[Problem]:
        """Held-out problems, disjoint from the training problems."""

    @abstractmethod
    def environment(self, problem: Problem) -> Environment:
        """A fresh episode of ``problem``."""

    def length_reward(self, tokens: int, *, limit: int) -> float:
        """Added to the reward of the last token of every finished response, right or wrong, cut or not; 0 for most.

        Responses that are excluded, or whose environment failed, are left as they are.

        Args:
            tokens: of the response, observations included.
            limit: the length at which it would have been cut.
        """
        return 0.0

    def demonstrations(self, seed: int, *, mistakes: float = 0.0) -> Iterator[Transcript]:
        """Endless transcripts for the supervised warm start, over training problems only.

        Args:
            mistakes: share of transcripts with a planted mistake, for tasks that generate them.

        Raises:
            ConfigError: this task has none.
        """
        raise ConfigError(f"warm_start.steps: {type(self).__name__} has no demonstrations; set it to 0")

    def build_tokenizer(self) -> PreTrainedTokenizerBase:
        """A small tokenizer for a model started from random weights.

        Raises:
            ConfigError: this task needs a pretrained model.
        """
        raise ConfigError(f"model.path: {type(self).__name__} has no tokenizer of its own; name a pretrained model")

    def prompt_ids(self, problem: Problem, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Tokenise the prompt, through the chat template when the prompt is a list of messages.

        Raises:
            ModelError: the model has no chat template, or its template refuses the messages.
        """
        if isinstance(problem.prompt, str):
            return list(tokenizer.encode(problem.prompt, add_special_tokens=False))
        from brace_rl.tasks.chat import chat_ids

        return chat_ids(problem.prompt, tokenizer)
