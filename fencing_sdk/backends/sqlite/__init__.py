"""
Locks for the processes of one machine, in one SQLite file: no server, and no dependency.

    connect("sqlite:///locks.db")               # relative to the working directory
    connect("sqlite:////var/lib/app/locks.db")  # absolute

Tokens: hybrid by default, kept in the file. Clock: the machine's boot clock, read under the
file's write lock. Waiters: first come, first served, across processes, woken by a datagram.

    __init__.py   the face in the event loop
    _thread.py    the one thread that touches SQLite
    _rows.py      what the rows mean: the locks
    _queue.py     and the waiters, in their order
    _file.py      the open file: schema, transactions, patience
    _signs.py     the file beside it, in which waiters show that they live
    _waiters.py   the waiters of this backend
    _bell.py      how a waiter in another process is woken
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from fencing_sdk._values.claim import Claim, Grant, Held, Holder, Renewal
from fencing_sdk._values.clock import BootClock, boot_identity, wall_micros
from fencing_sdk.abc import Turn
from fencing_sdk.backends import take_options
from fencing_sdk.backends._shared.lock_table import TokenSource, token_source
from fencing_sdk.backends.sqlite._bell import network_identity
from fencing_sdk.backends.sqlite._file import SYNCHRONOUS, LockFile
from fencing_sdk.backends.sqlite._rows import LockRows
from fencing_sdk.backends.sqlite._signs import SignsOfLife
from fencing_sdk.backends.sqlite._thread import SqlThread
from fencing_sdk.backends.sqlite._translation import translated
from fencing_sdk.backends.sqlite._waiters import Attend, Waiters
from fencing_sdk.errors import BackendError, ConfigurationError, shown

__all__ = ["SqliteBackend", "from_url"]

T = TypeVar("T")


class SqliteBackend:
    """
    A lock service in a file, shared by every process that names the same one.

    Not for network file systems, and not across machines. Processes must see the same boot clock:
    containers with a time namespace of their own do not exclude each other, only their tokens do.

    Args:
        path: The file, created when missing; its folder is not, and ``~`` is not expanded. A relative
            path counts from the working directory at the first call.

        tokens: ``"hybrid"``, or ``"counter"`` for 1, 2, 3, which start again with a new file.

        synchronous: ``"full"``, or ``"normal"``, which saves an fsync per grant and may forget the
            last grants in a power failure (not in a crash of the process).

    Raises:
        ConfigurationError: an argument cannot work. No I/O happens before the first call.
    """

    def __init__(self, path: str | os.PathLike[str], *, tokens: str = "hybrid", synchronous: str = "full") -> None:
        self._path = _check_path(path)
        self._sql = SqlThread(_Opening(self._path, _check_synchronous(synchronous), token_source(tokens, wall_micros)))
        self._waiters: Waiters | None = None

    async def open(self) -> None:
        """See `fencing_sdk.abc.SupportsOpen.open`."""
        await self._ask("open", lambda _: None)

    async def acquire(self, claim: Claim) -> Grant | Held:
        """See `fencing_sdk.abc.Backend.acquire`."""
        waiter = None if self._waiters is None else self._waiters.find(claim)
        outcome = await self._ask("acquire", lambda rows: rows.acquire(claim, waiting=waiter is not None))
        if waiter is not None:
            waiter.served = isinstance(outcome, Grant)
        return outcome

    async def renew(self, claims: Sequence[Claim]) -> Sequence[Renewal]:
        """See `fencing_sdk.abc.Backend.renew`."""
        return await self._ask("renew", lambda rows: rows.renew(claims), urgent=True)

    async def release(self, claim: Claim) -> None:
        """See `fencing_sdk.abc.Backend.release`."""
        await self._ask("release", lambda rows: rows.release(claim), surely=True)

    async def inspect(self, name: str) -> Holder | None:
        """See `fencing_sdk.abc.Backend.inspect`."""
        return await self._ask("inspect", lambda rows: rows.inspect(name))

    async def aclose(self) -> None:
        """Close the file after the calls that are under way. Grants stay until they are released or expire."""
        if self._waiters is not None:
            self._waiters.close()
            self._waiters = None
        closed = self._sql.close()
        if closed is not None:
            await asyncio.wrap_future(closed)

    def queue(self, claim: Claim) -> AbstractAsyncContextManager[Turn]:
        """See `fencing_sdk.abc.SupportsQueue.queue`."""
        return self._stand(claim)

    @asynccontextmanager
    async def _stand(self, claim: Claim) -> AsyncIterator[Turn]:
        waiters = self._own_waiters()
        waiter = waiters.add(claim)
        try:
            await self._ask("queue", lambda rows: rows.join(claim, waiter.place))
            yield waiter
        finally:
            waiters.remove(waiter)
            with suppress(BackendError):  # the line drops those who show no sign of life
                await self._ask("queue", lambda rows: rows.leave(claim), surely=True)

    def _own_waiters(self) -> Waiters:
        if self._waiters is not None and not self._waiters.usable:
            self._waiters.close()
            self._waiters = None
        if self._waiters is None:
            self._waiters = Waiters(_attending(self._sql))
        return self._waiters

    async def _ask(
        self, operation: str, do: Callable[[LockRows], T], *, urgent: bool = False, surely: bool = False
    ) -> T:
        try:
            return await asyncio.wrap_future(self._sql.submit(do, urgent=urgent, surely=surely))
        except (sqlite3.Error, OSError, UnicodeError, OverflowError) as error:
            raise translated(operation, self._path, error) from error


def _attending(sql: SqlThread) -> Attend:
    """How waiters show that they live. Knows no backend, so that one that is dropped can end its thread."""
    return lambda station, waiters: sql.submit(lambda rows: rows.attend(station, waiters), urgent=True)


class _Opening:
    """How the thread opens the file. Knows no backend, so that one that is dropped can end its thread."""

    def __init__(self, path: str, synchronous: str, next_token: TokenSource) -> None:
        self._path = Path(path)
        self._synchronous = synchronous
        self._next_token = next_token

    def __call__(self) -> LockRows:
        self._path = self._path.absolute()  # once: a later change of the working directory moves nothing
        file = LockFile(self._path, synchronous=self._synchronous, clock=BootClock())
        rows = LockRows(
            file,
            SignsOfLife(self._path),
            next_token=self._next_token,
            boot=boot_identity(),
            network=network_identity(),
        )
        rows.sweep()
        return rows


def from_url(url: str, **options: object) -> SqliteBackend:
    """
    Make a backend for ``sqlite:///relative.db`` or ``sqlite:////absolute.db``. Options: ``tokens``, ``synchronous``.

    The path is percent-decoded: ``%3F`` is a question mark and ``%23`` a hash.

    Raises:
        ConfigurationError: the URL names no file, or an option is unknown.
    """
    chosen = take_options(url, options, ("tokens", "synchronous"))
    parts = urlsplit(url)
    if parts.netloc:
        msg = (
            "write sqlite:///relative.db or sqlite:////absolute.db; the third slash ends the host, which a file has not"
        )
        raise ConfigurationError(msg)
    path = unquote(parts.path.removeprefix("/"), errors="surrogateescape")
    return SqliteBackend(path, **{name: str(value) for name, value in chosen.items()})


def _check_path(path: object) -> str:
    if isinstance(path, os.PathLike):
        path = os.fspath(path)
    if not isinstance(path, str):
        msg = f"path must be a str or a pathlib.Path, not {type(path).__name__}"
        raise ConfigurationError(msg)
    if path in {"", ":memory:"}:
        msg = "locks in SQLite need a file, such as sqlite:///locks.db; within one process use memory://"
        raise ConfigurationError(msg)
    if "\0" in path:
        msg = f"path {shown(path)} has a NUL character"
        raise ConfigurationError(msg)
    return path


def _check_synchronous(synchronous: object) -> str:
    if not isinstance(synchronous, str) or synchronous not in SYNCHRONOUS:
        msg = f"synchronous must be 'full' or 'normal', got {shown(synchronous)}"
        raise ConfigurationError(msg)
    return synchronous
