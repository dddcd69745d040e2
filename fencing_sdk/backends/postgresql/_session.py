"""One open connection to the server that takes writes, and the statements that were prepared on it."""

from __future__ import annotations

import os
import uuid
import weakref
from collections.abc import Awaitable, Callable
from typing import TypeVar

from fencing_sdk.backends.postgresql._driver import Connection, Row, Statement

T = TypeVar("T")

_CLOSE_PATIENCE = 0.5
"""Seconds that a server has to take leave."""


class Session:
    """
    One connection. One statement at a time, and never one that is cancelled half way: see `_link`.

    Args:
        connection: An open one.

        pooled: Whether a proxy may give every statement to another server process, which does not
            know what was prepared on this one.
    """

    __slots__ = ("__weakref__", "_connection", "_prepared", "pooled", "wrapped")

    def __init__(self, connection: Connection, *, pooled: bool) -> None:
        self._connection = connection
        self._prepared: dict[str, Statement] = {}
        self.pooled = pooled
        self.wrapped = False
        """Whether every statement needs a transaction of its own, because the default isolation is not ours."""
        _sessions.add(self)

    @property
    def closed(self) -> bool:
        """Whether the connection is gone, as far as anybody knows."""
        return self._connection.is_closed()

    async def ask(self, statement: str, arguments: tuple[object, ...]) -> Row | None:
        """
        Run one statement; return its first row.

        Raises:
            Exception: whatever the driver raises.
        """
        if self.wrapped:
            return await self._ask_wrapped(statement, arguments)
        if self.pooled:
            return await self._connection.fetchrow(statement, *arguments)
        prepared = self._prepared.get(statement)
        if prepared is None:
            # A name that nobody else has: behind a proxy that was not noticed yet, it is unknown and never another's.
            name = f"fencing_{uuid.uuid4().hex}"
            prepared = self._prepared[statement] = await self._connection.prepare(statement, name=name)
        return await prepared.fetchrow(*arguments)

    async def _ask_wrapped(self, statement: str, arguments: tuple[object, ...]) -> Row | None:
        return await self.transact(lambda connection: connection.fetchrow(statement, *arguments))

    async def transact(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        """
        Run *work* in a transaction of its own, which is committed unless it raises.

        Raises:
            Exception: whatever the driver or *work* raises.
        """
        await self._connection.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
        try:
            result = await work(self._connection)
        except BaseException:
            if not self.closed:
                await self._connection.execute("ROLLBACK")
            raise
        await self._connection.execute("COMMIT")
        return result

    def forget(self) -> None:
        """Prepare every statement anew: what they were prepared for has changed."""
        self._prepared.clear()

    async def listen(self, channel: str, hear: Callable[[str], None]) -> None:
        """Call *hear* with the payload of every message on *channel*."""
        await self._connection.add_listener(channel, lambda _, __, ___, payload: hear(payload))

    def on_end(self, call: Callable[[], None]) -> None:
        """Call back when the connection is gone."""
        self._connection.add_termination_listener(lambda _: call())

    def drop(self) -> None:
        """Close at once, whatever is under way."""
        self._connection.terminate()

    async def aclose(self) -> None:
        """Take leave of the server, if it is there; bounded."""
        try:
            await self._connection.close(timeout=_CLOSE_PATIENCE)
        except Exception:  # noqa: BLE001  (it is closed then, in whatever state)
            self.drop()


_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
_inherited: list[Session] = []


def _after_fork() -> None:
    """
    Keep what a child inherits for ever: its finalizer would take the connection out of the parent's epoll.

    The file that an epoll is about is shared by both processes.
    """
    _inherited.extend(_sessions)
    _sessions.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
