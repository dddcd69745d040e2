"""
A promise to tasks and threads alike is one scenario, written as ``async def``.

Tasks run it in an event loop. A thread runs it without one: each call waits where it stands, so nothing is suspended.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest

import fencing_sdk
import fencing_sdk.sync
from fencing_sdk.abc import Backend
from fencing_sdk.backends.memory import MemoryBackend

_DESCRIBE = {"draining_on", "election", "job", "lock", "locked", "multilock", "rwlock", "semaphore", "status"}
_AT_ONCE = {"check", "headers", "resign"}
"""What needs no ``await`` in either world."""


class Waiting:
    """A thing for threads, with the words of that for tasks."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.thing, name)
        return self._call(found) if inspect.ismethod(found) else _shown(found)

    def _call(self, method: Callable[..., Any]) -> Callable[..., Any]:
        described = isinstance(self.thing, fencing_sdk.sync.SyncLockClient) and method.__name__ in _DESCRIBE
        if described or method.__name__ in _AT_ONCE:
            return lambda *args, **kwargs: _shown(method(*args, **kwargs))

        async def waited(*args: Any, **kwargs: Any) -> Any:
            return _shown(method(*args, **kwargs))

        return waited

    async def __aenter__(self) -> Any:
        return _shown(self.thing.__enter__())

    async def __aexit__(self, *error: object) -> Any:
        return self.thing.__exit__(*error)

    async def __aiter__(self) -> Any:
        for term in self.thing:
            yield _shown(term)


def _shown(thing: Any) -> Any:
    return Waiting(thing) if type(thing).__module__.startswith("fencing_sdk.sync") else thing


def bare(thing: Any) -> Any:
    """The thing itself, in either world."""
    return thing.thing if isinstance(thing, Waiting) else thing


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
            running = scenario(Waiting(locks))
            try:
                running.send(None)
            except StopIteration:
                return
            running.close()
            raise AssertionError("a thread waits where it stands")

    def test(world: str) -> None:
        if world == "tasks":
            asyncio.run(with_tasks())
        else:
            with_threads()

    test.__doc__ = scenario.__doc__
    return pytest.mark.parametrize("world", ["tasks", "threads"])(test)
