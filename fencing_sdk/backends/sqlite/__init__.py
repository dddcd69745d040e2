"""
Locks for the processes of one machine, in one SQLite file: no server, and no dependency.

    connect("sqlite:///locks.db")               # relative to the working directory
    connect("sqlite:////var/lib/app/locks.db")  # absolute

Tokens: hybrid by default, kept in the file. Clock: the machine's boot clock, read under the
file's write lock. Waiters: first come, first served, across processes, woken by a datagram.

    __init__.py          the backend
    requests.py          what is asked of the file: locks and tokens
    share_rows.py        permits and readers
    operator_rows.py     the listing, and what is taken away
    waiter_rows.py       and the waiters, in their order
    waiters.py           what wakes a waiter, and what keeps its place
    wakeup_socket.py     the datagram from another process
    losses.py            how a holder hears that its lock was revoked
    signs_of_life.py     the file beside the database, in which waiters give signs of life
    errors.py            from SQLite's errors to those of the contract
    diagnosis.py         what of a file and its file system breaks a promise
    options.py           from a URL and options to arguments
    connection/thread    the one thread that touches SQLite
    connection/file      the open file: schema, transactions, patience
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from fencing_sdk._values.claim import Claim, Grant, Held, Holder, Listing, Renewal, Revoked, Waiting
from fencing_sdk._values.clock import BootClock, boot_identity, wall_micros
from fencing_sdk._values.findings import Finding
from fencing_sdk._values.uncopied import Uncopied
from fencing_sdk.abc import LossNotice, Turn
from fencing_sdk.backends import take_options
from fencing_sdk.backends._shared.error_translation import ErrorTranslation
from fencing_sdk.backends._shared.lock_table import TokenSource, token_source
from fencing_sdk.backends.sqlite.connection.file import LockFile
from fencing_sdk.backends.sqlite.connection.thread import SqlThread
from fencing_sdk.backends.sqlite.diagnosis import judge_file
from fencing_sdk.backends.sqlite.errors import busy, translated
from fencing_sdk.backends.sqlite.losses import SqliteLossWatcher
from fencing_sdk.backends.sqlite.operator_rows import OperatorRows
from fencing_sdk.backends.sqlite.options import OPTIONS, check_path, check_synchronous, path_of
from fencing_sdk.backends.sqlite.signs_of_life import SignsOfLife
from fencing_sdk.backends.sqlite.waiters import Attend, SqliteWaiters
from fencing_sdk.backends.sqlite.wakeup_socket import network_identity
from fencing_sdk.errors import BackendError

__all__ = ["SqliteBackend", "from_url"]

T = TypeVar("T")


class SqliteBackend(Uncopied):
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
        self._path = check_path(path)
        self._durable, self._hybrid = synchronous != "normal", tokens != "counter"
        self._busy = threading.Event()
        self._sql = SqlThread(
            _RowsOpener(self._path, check_synchronous(synchronous), token_source(tokens, wall_micros), self._busy)
        )
        self._waiters: SqliteWaiters | None = None
        self._losses = SqliteLossWatcher(self._sql)
        self._our_errors = partial(ErrorTranslation, partial(translated, self._path))

    async def open(self) -> None:
        """See `fencing_sdk.abc.SupportsOpen.open`."""
        await self._ask("open", lambda _: None)

    async def acquire(self, claim: Claim) -> Grant | Held:
        """See `fencing_sdk.abc.Backend.acquire`."""
        waiter = None if self._waiters is None else self._waiters.find(claim)
        outcome = await self._ask("acquire", lambda rows: rows.acquire(claim, waiting=waiter is not None))
        if waiter is not None:
            waiter.served = isinstance(outcome, Grant)
        if isinstance(outcome, Grant):
            self._losses.granted(claim)
        return outcome

    async def renew(self, claims: Sequence[Claim]) -> Sequence[Renewal | Revoked]:
        """See `fencing_sdk.abc.Backend.renew`."""
        renewals = await self._ask("renew", lambda rows: rows.renew(claims), urgent=True)
        for claim, renewal in zip(claims, renewals, strict=True):
            if renewal is not Renewal.RENEWED:
                self._losses.ended(claim)
        return renewals

    async def release(self, claim: Claim) -> Renewal | Revoked | None:
        """See `fencing_sdk.abc.Backend.release`."""
        self._losses.ended(claim)
        return await self._ask("release", lambda rows: rows.release(claim), surely=True)

    async def inspect(self, name: str) -> Holder | None:
        """See `fencing_sdk.abc.Backend.inspect`."""
        return await self._ask("inspect", lambda rows: rows.inspect(name))

    async def holders(self, name: str) -> Sequence[Holder]:
        """See `fencing_sdk.abc.SupportsShares.holders`."""
        return await self._ask("inspect", lambda rows: rows.holders(name))

    async def list_held(self, prefix: str, cursor: str | None, limit: int) -> Listing:
        """See `fencing_sdk.abc.SupportsListing.list_held`."""
        return await self._ask("list", lambda rows: rows.list_held(prefix, cursor, limit))

    async def list_waiters(self, name: str) -> Sequence[Waiting]:
        """See `fencing_sdk.abc.SupportsListing.list_waiters`."""
        return await self._ask("list", lambda rows: rows.list_waiters(name))

    async def revoke(self, name: str, token: int, reason: str) -> bool:
        """See `fencing_sdk.abc.SupportsRevoking.revoke`."""
        return await self._ask("revoke", lambda rows: rows.revoke(name, token, reason), surely=True)

    async def diagnose(self, ttl: float) -> Sequence[Finding]:  # noqa: ARG002  (no setting depends on it)
        """See `fencing_sdk.abc.SupportsDiagnosis.diagnose`."""
        judge = partial(judge_file, Path(self._path), durable=self._durable, hybrid=self._hybrid)
        return await asyncio.to_thread(judge)  # a network file system may hang

    async def server_time(self) -> None:
        """Return None: the clock is this machine's."""

    def on_loss(self, notice: LossNotice) -> Callable[[], None]:
        """See `fencing_sdk.abc.SupportsLossNotice.on_loss`."""
        return self._losses.on_loss(notice)

    async def aclose(self) -> None:
        """Close the file after the calls that are under way. Grants stay until they are released or expire."""
        await self._losses.aclose()
        if self._waiters is not None:
            self._waiters.close()
            self._waiters = None
        closed = self._sql.close()
        if closed is not None:
            await asyncio.wrap_future(closed)

    @asynccontextmanager
    async def queue(self, claim: Claim) -> AsyncIterator[Turn]:
        """See `fencing_sdk.abc.SupportsQueue.queue`."""
        waiters = self._own_waiters()
        waiter = waiters.add(claim)
        try:
            await self._ask("queue", lambda rows: rows.join(claim, waiter.address))
            yield waiter
        finally:
            waiters.remove(waiter)
            with suppress(BackendError):  # without signs of life, the waiter loses its place anyway
                await self._ask("queue", lambda rows: rows.leave(claim), surely=True)

    def _own_waiters(self) -> SqliteWaiters:
        if self._waiters is not None and not self._waiters.usable:
            self._waiters.close()
            self._waiters = None
        if self._waiters is None:
            self._waiters = SqliteWaiters(_attending(self._sql))
        return self._waiters

    async def _ask(
        self, operation: str, do: Callable[[OperatorRows], T], *, urgent: bool = False, surely: bool = False
    ) -> T:
        with self._our_errors(operation):
            try:
                return await asyncio.wrap_future(self._sql.submit(do, urgent=urgent, surely=surely))
            except asyncio.CancelledError as error:
                if self._busy.is_set():
                    error.__cause__ = busy(self._path, operation)
                raise


def _attending(sql: SqlThread) -> Attend:
    """How waiters give signs of life. It refers to no backend, so that a backend that is dropped ends its thread."""
    return lambda group, waiters: sql.submit(lambda rows: rows.attend(group, waiters), urgent=True)


class _RowsOpener:
    """How the thread opens the file. It refers to no backend, so that a backend that is dropped ends its thread."""

    def __init__(self, path: str, synchronous: str, next_token: TokenSource, busy: threading.Event) -> None:
        self._busy = busy
        self._path = Path(path)
        self._synchronous = synchronous
        self._next_token = next_token

    def __call__(self) -> OperatorRows:
        self._path = self._path.absolute()  # once: a later change of the working directory moves nothing
        file = LockFile(self._path, synchronous=self._synchronous, clock=BootClock(), busy=self._busy)
        rows = OperatorRows(
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
    chosen = take_options(url, options, OPTIONS)
    return SqliteBackend(path_of(url), **{name: str(value) for name, value in chosen.items()})
