"""
A promise to tasks and threads alike is one scenario, written as ``async def``.

Tasks run it in an event loop. A thread runs it without one: each call waits where it stands, so nothing is suspended.
The functions that a decorator takes, and what runs `beside` the scenario, are ``async def`` in both worlds, too.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from stays import PATIENCE

import fencing_sdk
import fencing_sdk.rows.sync
import fencing_sdk.sync
from fencing_sdk.abc import Backend
from fencing_sdk.backends.memory import MemoryBackend

_MAKERS = (fencing_sdk.sync.LockClient, fencing_sdk.rows.sync.RowClient, fencing_sdk.rows.sync.LeasedRows)
_DESCRIBE = {"batch", "detached", "draining_on", "election", "lock", "multilock", "resume", "rows", "rwlock"}
_DESCRIBE |= {"semaphore", "status", "take"}
_DECORATE = {"each", "elected", "job", "locking"}
_AT_ONCE = {"check", "headers", "resign"}
"""What needs no ``await`` in either world."""


class Waiting:
    """A thing for threads, with the words of that for tasks."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.thing, name)
        return self._call(found) if inspect.ismethod(found) else shown(found)

    def _call(self, method: Callable[..., Any]) -> Callable[..., Any]:
        of_maker, of_rows = isinstance(self.thing, _MAKERS), isinstance(self.thing, fencing_sdk.rows.sync.LeasedRows)
        if of_maker and method.__name__ in _DECORATE:
            return lambda *args, **kwargs: _decorating(method(*args, **kwargs))
        describes = of_rows if method.__name__ == "take" else of_maker and method.__name__ in _DESCRIBE
        if describes or method.__name__ in _AT_ONCE:
            return lambda *args, **kwargs: shown(method(*args, **kwargs))

        runs_rows = of_rows and method.__name__ == "run"

        async def waited(*args: Any, **kwargs: Any) -> Any:
            return shown(method(*(map(_plain, args) if runs_rows else args), **kwargs))

        return waited

    async def __aenter__(self) -> Any:
        return shown(self.thing.__enter__())

    async def __aexit__(self, *error: object) -> Any:
        return self.thing.__exit__(*error)

    async def __aiter__(self) -> Any:
        for term in self.thing:
            yield shown(term)


def _plain(function: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
    @functools.wraps(function)
    def plain(*args: Any, **kwargs: Any) -> Any:
        return at_once(function(*map(shown, args), **kwargs))

    return plain


def _decorating(decorate: Callable[..., Any]) -> Callable[..., Any]:
    def of(function: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
        decorated = decorate(_plain(function))

        @functools.wraps(decorated)
        async def called(*args: Any, **kwargs: Any) -> Any:
            return decorated(*args, **kwargs)

        return called

    return of


def shown(thing: Any) -> Any:
    """The thing with the words of that for tasks, in either world."""
    return Waiting(thing) if type(thing).__module__.startswith(("fencing_sdk.sync", "fencing_sdk.rows.sync")) else thing


def bare(thing: Any) -> Any:
    """The thing itself, in either world."""
    return thing.thing if isinstance(thing, Waiting) else thing


def at_once(running: Coroutine[Any, Any, Any]) -> Any:
    """Run what waits where it stands."""
    try:
        running.send(None)
    except StopIteration as end:
        return end.value
    running.close()
    raise AssertionError("a thread waits where it stands")


def _has_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def beside(run: Callable[[], Coroutine[Any, Any, Any]]) -> Callable[[], Awaitable[Any]]:
    """Run beside the scenario: another task, or another thread. Return what waits for its value."""
    if _has_loop():
        task = asyncio.get_running_loop().create_task(run(), context=contextvars.Context())
        return lambda: asyncio.wait_for(task, PATIENCE)
    pool = ThreadPoolExecutor(1)
    future = pool.submit(lambda: at_once(run()))
    pool.shutdown(wait=False)

    async def ended() -> Any:
        return future.result(PATIENCE)

    return ended


async def in_the_loop(locks: Any, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Make a call that belongs to the event loop of the client."""
    return await (locks.run(call) if isinstance(locks, Waiting) else call())


async def comes(ask: Callable[[], Awaitable[Any]]) -> Any:
    """Ask again and again until the answer is true; return it."""
    limit = time.monotonic() + PATIENCE
    while not (answer := await ask()):
        assert time.monotonic() < limit, f"not within {PATIENCE} s"
        if _has_loop():
            await asyncio.sleep(0.02)
        else:
            time.sleep(0.02)  # noqa: ASYNC251  (a thread waits where it stands)
    return answer


_MEMORY = partial(MemoryBackend, tokens="counter")

Scenario = Callable[[Any], Coroutine[Any, Any, None]]


def in_both_worlds(
    scenario: Scenario | None = None,
    /,
    *,
    on: Callable[[], Backend] = _MEMORY,
    **options: Any,
) -> Any:
    """Make a test of a *scenario* that takes an open client, on a store and with options of the client."""
    if scenario is None:
        return partial(in_both_worlds, on=on, **options)

    async def with_tasks() -> None:
        async with fencing_sdk.connect(on(), **options) as locks:
            await scenario(locks)

    def with_threads() -> None:
        with fencing_sdk.sync.connect(on(), **options) as locks:
            at_once(scenario(Waiting(locks)))

    def test(world: str) -> None:
        if world == "tasks":
            asyncio.run(with_tasks())
        else:
            with_threads()

    test.__doc__ = scenario.__doc__
    return pytest.mark.parametrize("world", ["tasks", "threads"])(test)
