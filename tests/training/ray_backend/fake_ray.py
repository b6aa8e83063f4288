"""A cluster of threads that looks like Ray to the backend, so that its logic is tested where Ray is not installed.

As in Ray, arguments and results are copied, a concurrency group with one thread runs its calls in order, calls to a
killed actor fail, and so do those that are under way when it is.
"""

from __future__ import annotations

import pickle
import sys
import time
import types
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from typing import Any


class RayError(Exception):
    """Base of Ray's errors."""


class RayActorError(RayError):
    """The actor is dead."""


class Reference:
    """What a call or ``put`` returns. Copied as itself."""

    known: dict[int, Reference] = {}  # noqa: RUF012 - one store for the whole cluster

    def __init__(self, future: Future[Any]) -> None:
        self.future = future
        self.known[id(self)] = self

    def __reduce__(self) -> Any:
        return _reference, (id(self),)


def _reference(key: int) -> Reference:
    return Reference.known[key]


class Method:
    def __init__(self, actor: Actor, name: str, group: str) -> None:
        self.actor, self.name, self.group = actor, name, group

    def options(self, *, concurrency_group: str) -> Method:
        return Method(self.actor, self.name, concurrency_group)

    def remote(self, *arguments: Any) -> Reference:
        return self.actor.call(self, pickle.dumps(arguments))


class Actor:
    """A handle and the actor behind it."""

    def __init__(self, cls: type, groups: dict[str, int], arguments: Sequence[Any]) -> None:
        self.instance = cls(*pickle.loads(pickle.dumps(arguments)))
        self.is_dead = False
        self.under_way: list[Future[Any]] = []
        self.threads = {name: ThreadPoolExecutor(size) for name, size in groups.items()}

    def __getattr__(self, name: str) -> Method:
        return Method(self, name, "")

    def call(self, method: Method, arguments: bytes) -> Reference:
        outcome: Future[Any] = Future()
        self.under_way.append(outcome)
        if self.is_dead:
            outcome.set_exception(RayActorError("The actor is dead"))
        else:
            self.threads[method.group].submit(self.run, method.name, arguments, outcome)
        return Reference(outcome)

    def run(self, name: str, arguments: bytes, outcome: Future[Any]) -> None:
        try:
            result = pickle.dumps(getattr(self.instance, name)(*pickle.loads(arguments)))
        except Exception as error:
            if not outcome.done():
                outcome.set_exception(error)
        else:
            if not outcome.done():
                outcome.set_result(pickle.loads(result))

    def kill(self) -> None:
        self.is_dead = True
        for outcome in self.under_way:
            if not outcome.done():
                outcome.set_exception(RayActorError("The actor died because it was killed"))
        for threads in self.threads.values():
            threads.shutdown(wait=False, cancel_futures=True)


def _remote(*, concurrency_groups: dict[str, int], **_: Any) -> Any:
    return lambda cls: types.SimpleNamespace(remote=lambda *arguments: Actor(cls, concurrency_groups, arguments))


def _put(value: Any) -> Reference:
    stored: Future[Any] = Future()
    stored.set_result(pickle.loads(pickle.dumps(value)))
    return Reference(stored)


def _wait(references: Sequence[Reference], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
    until = time.monotonic() + timeout
    while True:
        ready = [reference for reference in references if reference.future.done()]
        left = until - time.monotonic()
        if len(ready) >= num_returns or left <= 0:
            return ready, [reference for reference in references if reference not in ready]
        wait([r.future for r in references if r not in ready], left, return_when="FIRST_COMPLETED")


@contextmanager
def fake_cluster() -> Iterator[None]:
    """``import ray`` finds the fake in the body."""
    module = types.ModuleType("ray")
    module.__spec__ = ModuleSpec("ray", None)
    module.__dict__.update(
        is_initialized=lambda: True,
        put=_put,
        get=lambda reference, timeout=None: reference.future.result(timeout),
        wait=_wait,
        kill=lambda actor: actor.kill(),
        remote=_remote,
        exceptions=types.SimpleNamespace(RayError=RayError, RayActorError=RayActorError),
    )
    exceptions = types.ModuleType("ray.exceptions")
    exceptions.__dict__.update(RayError=RayError, RayActorError=RayActorError)
    names = {name: module for name, module in sys.modules.items() if name == "ray" or name.startswith("ray.")}
    for name in names:
        del sys.modules[name]
    sys.modules |= {"ray": module, "ray.exceptions": exceptions}
    try:
        yield
    finally:
        del sys.modules["ray"], sys.modules["ray.exceptions"]
        sys.modules.update(names)
        Reference.known.clear()
