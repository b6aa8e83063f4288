"""Environments written for the package verifiers, 0.1: single turn, several turns, tools.

The package's own ``rollout`` runs in every episode, with a client that hands each request for a response to the policy
and waits for its turn. So whatever an environment overrides is in force; its rubric gives the reward.

::

    step(turn) --> client --> verifiers' rollout --> next request: its new messages are the observation
                                                 --> ended: rubric --> reward

Not supported, with an error that says so: rubrics that score the responses of a prompt together, prompts that change
when an episode starts, conversations that rewrite their past, content that is not text.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brace_rl.errors import ConfigError
from brace_rl.tasks.adapters.settings import VerifiersSettings
from brace_rl.tasks.base import Environment, Messages, Problem, StepResult, Task
from brace_rl.tasks.chat import chat_ids
from brace_rl.tasks.data import split_rows
from brace_rl.tasks.own_code import own_module

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_MODEL = "policy"


class VerifiersTask(Task):
    """See the module's docstring.

    Raises:
        ConfigError: the package or the environment is missing, cannot be loaded or is of an unsupported kind.
    """

    Settings = VerifiersSettings

    def __init__(self, settings: VerifiersSettings, *, seed: int) -> None:
        self._settings = settings
        self.max_observation_tokens = settings.max_observation_tokens
        self._arguments = json.dumps(settings.arguments, sort_keys=True)
        environment = load(settings.environment, self._arguments)
        if environment.requires_group_rollouts:
            raise ConfigError(
                f"task.environment: {settings.environment} scores the responses to a prompt together, which this "
                f"trainer does not do"
            )
        rows = [dict(row) for row in environment.get_dataset()]
        environment.build_eval_dataset()
        held = None
        if environment.eval_dataset is not None:
            held = [dict(row) for row in environment.get_eval_dataset()]
        train, evaluation = split_rows(
            rows,
            held,
            most_train=settings.train_problems,
            held_out=settings.eval_problems,
            question=lambda row: json.dumps(row["prompt"], default=str),
            place=f"task.environment: {settings.environment}",
        )
        self._tools = [_described(tool) for tool in environment.tool_defs or ()]
        self._train = [self._problem(row, "train") for row in train]
        self._eval = [self._problem(row, "train" if held is None else "eval") for row in evaluation]

    def train_problems(self) -> Sequence[Problem]:
        return self._train

    def eval_problems(self) -> Sequence[Problem]:
        return self._eval

    def environment(self, problem: Problem) -> Environment:
        return VerifiersEnvironment(
            self._settings.environment,
            self._arguments,
            row=problem.metadata["row"],
            success_reward=self._settings.success_reward,
        )

    def prompt_ids(self, problem: Problem, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Through the chat template, with the environment's tools described to it."""
        if isinstance(problem.prompt, str):
            return super().prompt_ids(problem, tokenizer)
        return chat_ids(problem.prompt, tokenizer, tools=self._tools or None)

    def _problem(self, row: Mapping[str, Any], split: str) -> Problem:
        plain = json.loads(json.dumps(row, default=str))
        return Problem(
            id=f"{self._settings.environment}/{split}/{plain['example_id']}",
            prompt=_as_messages(plain["prompt"]),
            answer=str(plain.get("answer", "")),
            metadata={"row": plain},
        )


class VerifiersEnvironment(Environment):
    """One episode. Reported figures: the rubric's metrics.

    Args:
        environment, arguments: what is loaded, once per process; the arguments as JSON.
        row: of the environment's data set.
    """

    def __init__(self, environment: str, arguments: str, *, row: Mapping[str, Any], success_reward: float) -> None:
        self._environment = environment
        self._arguments = arguments
        self._row = dict(row)
        self._success_reward = success_reward
        self._rollout: asyncio.Task[None] | None = None
        self._turns: asyncio.Queue[str] | None = None
        self._events: asyncio.Queue[Any] | None = None
        self._seen: list[dict[str, str]] = []

    async def step(self, action: str) -> StepResult:
        if self._rollout is None:
            self._turns, self._events = asyncio.Queue(), asyncio.Queue()
            self._rollout = asyncio.get_running_loop().create_task(self._run())
            first = await self._event()
            if not isinstance(first, list):
                raise RuntimeError("the episode ended before its first turn")
            if first != _merged(self._row["prompt"]):
                raise RuntimeError("the environment changes its prompt when an episode starts, which is not supported")
            self._seen = first
        assert self._turns is not None
        self._turns.put_nowait(action)
        event = await self._event()
        return self._observation(event) if isinstance(event, list) else self._ended(event)

    def close(self) -> None:
        if self._rollout is not None:
            self._rollout.cancel()

    async def _event(self) -> Any:
        """The next request's messages, or the final state."""
        assert self._events is not None
        event = await self._events.get()
        if isinstance(event, Exception):
            raise event
        return event

    def _observation(self, messages: list[dict[str, str]]) -> StepResult:
        known = len(self._seen)
        if messages[:known] != self._seen or messages[known]["role"] != "assistant":
            raise RuntimeError("the environment rewrites earlier messages, which is not supported")
        self._seen = messages
        return StepResult(observation=tuple(messages[known + 1 :]))

    def _ended(self, state: Mapping[str, Any]) -> StepResult:
        if state["error"] is not None:
            raise RuntimeError(f"the environment failed: {state['error']!r}")
        reward = float(state["reward"])
        info = {str(name): float(value) for name, value in (state["metrics"] or {}).items()}
        return StepResult(reward=reward, done=True, success=reward >= self._success_reward, info=info)

    async def _run(self) -> None:
        """verifiers' own rollout and scoring; its end, or what it raised, is the last event."""
        assert self._events is not None
        environment = load(self._environment, self._arguments)
        try:
            state = await environment.rollout(self._row, _client_class()(self._exchange), _MODEL, {})
            await environment.rubric.score_rollout(state)
            await environment.rubric.cleanup(state)
            self._events.put_nowait(state)
        except Exception as error:
            self._events.put_nowait(error)

    async def _exchange(self, prompt: Sequence[Any]) -> str:
        """Called by the client: pass the request on, and wait for the policy's turn."""
        assert self._events is not None
        assert self._turns is not None
        self._events.put_nowait(_merged(prompt))
        return await self._turns.get()


@functools.cache
def load(environment: str, arguments: str) -> Any:
    """The environment, loaded once per process.

    Raises:
        ConfigError: the package, the environment or its arguments cannot be used.
    """
    try:
        verifiers = importlib.import_module("verifiers")
    except ImportError:
        raise ConfigError("task.name: verifiers needs its package; pip install 'verifiers>=0.1.10,<0.2'") from None
    if not hasattr(verifiers, "MultiTurnEnv"):
        raise ConfigError(
            f"task.name: verifiers {getattr(verifiers, '__version__', '')} has other environments than this adapter "
            f"runs; pip install 'verifiers>=0.1.10,<0.2'"
        )
    with _own_signal_handlers():
        try:
            if environment.endswith(".py"):
                module = own_module(Path(environment), setting="task.environment", form="path/to/file.py")
                loaded = module.load_environment(**json.loads(arguments))
            else:
                loaded = verifiers.load_environment(environment, **json.loads(arguments))
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"task.environment: {environment}: {' '.join(str(error).split())}") from error
    if not isinstance(loaded, verifiers.MultiTurnEnv):
        raise ConfigError(f"task.environment: {environment} is a {type(loaded).__name__}, not a MultiTurnEnv")
    return loaded


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Keep the trainer's answers to Ctrl-C and SIGTERM: every environment of verifiers installs its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@functools.cache
def _client_class() -> Any:
    """A client of verifiers whose model is somebody who waits elsewhere; made here since its base may be absent."""
    verifiers = importlib.import_module("verifiers")
    types = importlib.import_module("verifiers.types")

    class PolicyClient(verifiers.Client):  # type: ignore[misc, name-defined]
        def setup_client(self, config: Any) -> Any:
            return config

        async def to_native_tool(self, tool: Any) -> Any:
            return tool

        async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
            return messages, {}

        async def get_native_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **kwargs: Any
        ) -> Any:
            content, calls = parse_tool_calls(await self.client(prompt))
            message = types.ResponseMessage(
                content=content,
                tool_calls=[types.ToolCall(**call) for call in calls] or None,
                finish_reason="tool_calls" if calls else "stop",
                is_truncated=False,
            )
            return types.Response(id=_MODEL, created=int(time.time()), model=model, message=message)

        async def raise_from_native_response(self, response: Any) -> None:
            return None

        async def from_native_response(self, response: Any) -> Any:
            return response

        async def close(self) -> None:
            return None

    return PolicyClient


def parse_tool_calls(turn: str) -> tuple[str, list[dict[str, str]]]:
    """A turn's text without its tool calls, and the calls: ``<tool_call>{"name", "arguments"}</tool_call>``.

    This is how Qwen, Hermes, SmolLM and others are trained to call. A call that is no such object has the empty name
    and its text as arguments, which the environment answers with an error.
    """
    calls: list[dict[str, str]] = []
    for number, match in enumerate(_TOOL_CALL.finditer(turn)):
        try:
            call = json.loads(match[1])
            name, arguments = str(call["name"]), json.dumps(call["arguments"])
        except (ValueError, KeyError, TypeError, RecursionError):
            name, arguments = "", match[1]
        calls.append({"id": f"call_{number}", "name": name, "arguments": arguments})
    return _TOOL_CALL.sub("", turn).strip(), calls


def _described(tool: Any) -> dict[str, Any]:
    """A tool in the form chat templates take."""
    definition = tool.model_dump()
    function = {key: definition[key] for key in ("name", "description", "parameters")}
    return {"type": "function", "function": function}


def _as_messages(prompt: Any) -> str | Messages:
    return prompt if isinstance(prompt, str) else tuple(_merged(prompt))


def _merged(prompt: Any) -> list[dict[str, str]]:
    """Messages of either form, as role and text. Raises ConfigError for content that is not text."""
    if isinstance(prompt, str):
        return [{"role": "text", "content": prompt}]
    found = []
    for message in prompt:
        plain = dict(message) if isinstance(message, Mapping) else message.model_dump()
        content = plain.get("content") or ""
        if isinstance(content, list):
            if any(part.get("type") != "text" for part in content):
                raise ConfigError("task.environment: its messages hold more than text, which is not supported")
            content = "".join(part["text"] for part in content)
        found.append({"role": str(plain["role"]), "content": str(content)})
    return found
