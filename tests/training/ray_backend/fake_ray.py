"""A cluster that looks like Ray to the trainer, so that its logic is tested where Ray is not installed.

As in Ray, arguments and results are copied, a concurrency group with one thread runs its calls in order, calls to a
killed actor fail, and so do those that are under way when it is. Actors with concurrency groups are threads of this
process, the others are processes of their own. What asks for more than the cluster has waits for ever.
"""

from __future__ import annotations

import multiprocessing
import pickle
import sys
import time
import types
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from multiprocessing.connection import Connection
from typing import Any

CPUS = 32
"""Of the cluster."""


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
        self.start(cls, pickle.dumps(arguments))
        self.is_dead = False
        self.under_way: list[Future[Any]] = []
        self.threads = {name: ThreadPoolExecutor(size) for name, size in groups.items()}

    def start(self, cls: type, arguments: bytes) -> None:
        self.instance = cls(*pickle.loads(arguments))

    def invoke(self, name: str, arguments: bytes) -> bytes:
        return pickle.dumps(getattr(self.instance, name)(*pickle.loads(arguments)))

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
            result = self.invoke(name, arguments)
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


class ProcessActor(Actor):
    """An actor in a process of its own."""

    def start(self, cls: type, arguments: bytes) -> None:
        context = multiprocessing.get_context("forkserver")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, cls, arguments), daemon=True)
        self.process.start()
        theirs.close()

    def invoke(self, name: str, arguments: bytes) -> bytes:
        try:
            self.pipe.send_bytes(pickle.dumps((name, arguments)))
            return self.pipe.recv_bytes()
        except (EOFError, OSError):
            self.is_dead = True
            raise RayActorError("The actor died unexpectedly") from None

    def kill(self) -> None:
        super().kill()
        self.process.kill()
        self.process.join()


def _serve(pipe: Connection, cls: type, arguments: bytes) -> None:
    """Body of the process; it ends with the pipe."""
    with fake_cluster():
        instance = cls(*pickle.loads(arguments))
        while True:
            name, its = pickle.loads(pipe.recv_bytes())
            pipe.send_bytes(pickle.dumps(getattr(instance, name)(*pickle.loads(its))))


class WaitingActor(Actor):
    """An actor that finds no place: its calls do not return."""

    def start(self, cls: type, arguments: bytes) -> None:
        pass

    def run(self, name: str, arguments: bytes, outcome: Future[Any]) -> None:
        pass


def _remote(*, num_cpus: int = 1, concurrency_groups: dict[str, int] | None = None, **_: Any) -> Any:
    kind = WaitingActor if num_cpus > CPUS else Actor if concurrency_groups else ProcessActor
    groups = concurrency_groups or {"": 1}
    return lambda cls: types.SimpleNamespace(remote=lambda *arguments: kind(cls, groups, arguments))


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
        shutdown=lambda: None,
        remote=_remote,
        util=types.SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"),
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
