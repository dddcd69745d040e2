"""
Leased rows for threads: the words of `fencing_sdk.rows` without ``async``.

    with row_client("postgresql://localhost/app") as db:
        for job in db.rows("jobs", where="state = 'queued'", order="priority, id"):
            with job as lease:                                  # renewed by the client's own thread
                pdf = render(lease.row["payload"])
                with pool.connection() as connection:
                    connection.execute("INSERT INTO invoices ...", [pdf])
                    lease.finish(connection, state="done")      # compares and writes; else it rolls back

The client is that for tasks, run as every client of `fencing_sdk.sync`. What differs is the loss: no thread can be
cancelled. Work that runs on after it asks ``lease.check()``, and its finish is refused.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from types import EllipsisType
from typing import Unpack, cast

from fencing_sdk._lease import Lease as TaskLease
from fencing_sdk._values.loop_owner import Uncopied
from fencing_sdk._values.observers import Observer, logger
from fencing_sdk._values.timing import Seconds
from fencing_sdk.errors import AcquireCancelledError, ConfigurationError, LeaseLostError, shown
from fencing_sdk.guards.sql._transaction import perform_sync
from fencing_sdk.rows._client import LeasedRows as TaskLeasedRows
from fencing_sdk.rows._client import LeaseOfRows, RowOptions, check_at_once, held_by, life_of, locks_of, next_of
from fencing_sdk.rows._client import RowClient as TaskRowClient
from fencing_sdk.rows._client import RowLease as TaskRowLease
from fencing_sdk.rows._client import RowTake as TaskRowTake
from fencing_sdk.rows._client import row_client as _row_client
from fencing_sdk.rows._table import admitting, schema_sql
from fencing_sdk.sync._bridge import Cancel
from fencing_sdk.sync._client import ClientForThreads
from fencing_sdk.sync._lease import Block, Bridge, Lease, begin, owned, release_leases
from fencing_sdk.sync._lock import Lock

__all__ = ["LeasedRows", "RowClient", "RowLease", "RowTake", "row_client", "schema_sql"]

_PAUSE = 0.2
"""Seconds that the end of `run` sleeps at most: a signal that came right before the sleep does not end it."""


class RowLease(LeaseOfRows, Lease):
    """A row, or a batch of rows, that a thread works on until its deadline."""

    __slots__ = ("_held",)

    def __init__(self, handle: TaskLease, bridge: Bridge) -> None:
        super().__init__(handle, bridge)
        self._held = held_by(cast("TaskRowLease", handle))

    def finish(self, transaction: object, /, **columns: object) -> None:
        """
        Write *columns* into the row and end its lease, in your *transaction*, if this claim is still its last one.

        As `fencing_sdk.rows.RowLease.finish`, whose errors it has, in this thread. *transaction* is a connection of
        sqlite3, psycopg 3, PyMySQL or mysqlclient, SQLAlchemy's Session or Connection, or Django's connection inside
        ``transaction.atomic()``.
        """
        self.check()
        perform_sync(transaction, self._held.finishing(columns))

    def admit(self, transaction: object, /) -> None:
        """Lock the row in your *transaction*, if this claim is its last one: as `fencing_sdk.rows.RowLease.admit`."""
        self.check()
        perform_sync(transaction, admitting(self._held.table, self._held.rows))

    def put_off(self, delay: Seconds) -> None:
        """Give the row back, to be claimed again in *delay* seconds: as `fencing_sdk.rows.RowLease.put_off`."""
        self._held.put_off(delay)
        self.release()

    def release(self) -> None:
        """Give the row back, unless it was finished. Idempotent and bounded: see `fencing_sdk.sync.Lease.release`."""
        super()._release(None)  # by hand: a finish may have been rolled back

    def _release(self, raised: BaseException | None) -> None:
        self._held.end_block(raised)
        super()._release(raised)


class RowTake(Lock):
    """
    The claim of a next row, for a thread: ``with jobs.take() as lease``, once. `acquire` gives a plain handle.

    The block ends as that of a `fencing_sdk.rows.RowTake`. Nothing stops its body when the lease is lost.
    """

    __slots__ = ("_claimed", "_life")

    def __init__(self, bridge: Bridge, take: TaskRowTake, cancel: threading.Event | None) -> None:
        super().__init__(bridge, take, cancel)
        self._life = life_of(take)
        self._claimed = None if self._life.lease is None else self._lease(self._life.lease)

    def acquire(self, *, wait: Seconds | EllipsisType | None = ...) -> RowLease:
        """Claim a row and return a plain handle. Errors are those of `fencing_sdk.sync.Lock.acquire`."""
        return super().acquire(wait=wait)  # type: ignore[return-value]  # no call of cast: a signal could come in it

    def try_acquire(self) -> RowLease | None:
        """Claim a row if one is free now. Errors are those of `fencing_sdk.sync.Lock.try_acquire`."""
        return super().try_acquire()  # type: ignore[return-value]

    @property
    def row_name(self) -> str:
        """Name of the row once it is claimed in a loop; that of the table before."""
        return cast("TaskRowTake", self._lock).row_name

    def __enter__(self) -> RowLease:
        self._life.check_enterable()
        claimed = self._claimed
        lease = begin(self._blocks).hold(self._take if claimed is None else lambda: claimed)
        self._life.entered = True
        return lease  # type: ignore[return-value]

    def _leave(self, block: Block, raised: BaseException | None) -> bool:
        end = raised
        try:
            block.leave(raised)
        except LeaseLostError as error:
            end = error
        return self._life.swallows(raised, end)

    __exit__ = owned(_leave)  # type: ignore[arg-type]  # it may keep what its body has raised

    def _lease(self, handle: TaskLease) -> RowLease:
        return RowLease(handle, self._bridge)


class LeasedRows(Uncopied):
    """
    Rows of one table that this client works on, in threads. Made by `RowClient.rows`.

    ``for job in jobs`` waits for the next row, rides out outages of the database, and ends when the client drains, or
    when the event ``cancel`` is set. It raises `BackendRefusedError` where the table or its SQL cannot be used.
    """

    __slots__ = ("_bridge", "_cancel", "_rows")

    def __init__(self, bridge: Bridge, rows: TaskLeasedRows, cancel: threading.Event | None) -> None:
        self._bridge = bridge
        self._rows = rows
        self._cancel = cancel

    def __repr__(self) -> str:
        return f"<sync.{repr(self._rows)[1:]}"

    def take(self, *, wait: Seconds | None = None) -> RowTake:
        """Describe the claim of one row: as `fencing_sdk.rows.LeasedRows.take`."""
        return RowTake(self._bridge, self._rows.take(wait=wait), self._cancel)

    def batch(self, most: int) -> LeasedRows:
        """Describe the same rows, of which one claim takes up to *most*: as `fencing_sdk.rows.LeasedRows.batch`."""
        return LeasedRows(self._bridge, self._rows.batch(most), self._cancel)

    def __iter__(self) -> Iterator[RowTake]:
        while (job := self._next()) is not None:
            error: Exception | None = None
            try:
                yield job
            finally:
                error = job._life.refuse_unentered("with")  # noqa: SLF001  (of this module)
                if error is not None:
                    job._claimed.release()  # type: ignore[union-attr]  # noqa: SLF001
            if error is not None:
                raise error

    def _next(self) -> RowTake | None:
        async def claimed() -> RowTake | None:
            take = await next_of(self._rows)
            return None if take is None else RowTake(self._bridge, take, self._cancel)

        async def give_back(job: RowTake | None) -> None:
            await release_leases(None if job is None else job._claimed)  # noqa: SLF001  (of this module)

        cancel = None if self._cancel is None else Cancel(self._cancel, repr(self._rows))
        try:
            return self._bridge().call(claimed, undo=give_back, cancel=cancel)
        except AcquireCancelledError:
            return None

    def run(self, handle: Callable[[RowLease], object], *, at_once: int = 1) -> None:
        """
        Work on rows until the client drains or ``cancel`` is set, in *at_once* threads, of which this is one.

        An error of *handle* is logged, and keeps its row for the ``rest`` of the table; the others go on. After an
        interrupt (`KeyboardInterrupt`), which ends the work of this thread, nothing new is claimed, and the call waits
        until the other threads have ended theirs. A second interrupt leaves them behind.

        Args:
            handle: Called with the lease of a row, or of a batch. It finishes the row.

            at_once: Number of threads.

        Raises:
            ConfigurationError: an argument cannot be used.
            BackendRefusedError: the table or its SQL cannot be used.
        """
        number = _check_handle(handle) and check_at_once(at_once)
        ended = _Ended()
        ended.other = self._cancel
        rows, errors = LeasedRows(self._bridge, self._rows, ended), list[BaseException]()

        def work() -> None:
            for job in rows:
                try:
                    with job as lease:
                        handle(lease)
                except Exception:  # noqa: BLE001  (of the user's work, whatever it is: the others go on)
                    logger.exception("rows: the work on %s failed", job.row_name)

        def work_beside() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001  (it leaves in the thread that waits)
                errors.append(error)
                ended.set()

        beside = [threading.Thread(target=work_beside, name="fencing-rows", daemon=True) for _ in range(number - 1)]
        try:
            for thread in beside:
                thread.start()
            work()
        finally:
            ended.set()
            for thread in beside:
                while thread.is_alive():
                    thread.join(_PAUSE)
        if errors:
            raise errors[0]

    def each(self, *, at_once: int = 1) -> Callable[[Callable[[RowLease], object]], Callable[[], None]]:
        """
        Decorate a plain function of a lease: a call without arguments is then `run`.

        Raises:
            ConfigurationError: *at_once* is not a number from 1 to 1000, or the function is a coroutine function.
        """
        check_at_once(at_once)

        def decorate(function: Callable[[RowLease], object]) -> Callable[[], None]:
            _check_handle(function)

            @functools.wraps(function)
            def work_on_each() -> None:
                self.run(function, at_once=at_once)

            return work_on_each

        return decorate


class _Ended(threading.Event):
    """An event that is set also when *other* is."""

    other: threading.Event | None = None

    def is_set(self) -> bool:
        return super().is_set() or (self.other is not None and self.other.is_set())


def _check_handle(handle: object) -> bool:
    if not callable(handle) or inspect.iscoroutinefunction(handle):
        msg = f"handle must be a plain function that takes a lease, not {shown(handle)}; for tasks: fencing_sdk.rows"
        raise ConfigurationError(msg)
    return True


class RowClient(ClientForThreads):
    """
    Leases rows of the tables of one database for threads, and renews all of them in one background thread.

    Make one for a process, at import if you like: it opens, closes and forks as a `fencing_sdk.sync.LockClient` does.
    Made by `row_client`.

    Args:
        client: A client for tasks that is used here alone, and that is not open.

    Raises:
        UnsupportedError: this is a subinterpreter, in which its background thread cannot run.
    """

    def __init__(self, client: TaskRowClient) -> None:
        super().__init__(locks_of(client))
        self._rows = client

    def rows(
        self, table: str | type, *, cancel: threading.Event | None = None, **options: Unpack[RowOptions]
    ) -> LeasedRows:
        """
        Describe which rows of a table are claimed, and in which order. Nothing is sent yet.

        Args:
            table: Its name, ``"jobs"`` or ``"schema.jobs"``, as the database spells it, or a model with
                ``LeasedRow``.

            cancel: An event that ends every wait for a row, within a twentieth of a second: that of a claim by an
                `AcquireCancelledError`, that of a loop without an error. It does nothing to work that goes on.

            **options: As for `fencing_sdk.rows.RowClient.rows`.

        Raises:
            ConfigurationError: an argument cannot work.
        """
        if cancel is not None:
            Cancel(cancel, str(table))  # refuses what is no event
        return LeasedRows(self._bridge, self._rows.rows(table, **options), cancel)


def row_client(
    url: str,
    *,
    observers: Sequence[Observer] = (),
    drain: Seconds | None = None,
    open_wait: Seconds | None = 0.0,
    label: str | None = None,
) -> RowClient:
    """
    Make a client for threads. No I/O happens here, so it is fine at import time, and before a fork.

    Arguments are those of `fencing_sdk.rows.row_client`.

    Raises:
        ConfigurationError: the URL or an argument cannot be used. The message never repeats the URL.
        UnsupportedError: gevent or eventlet has replaced the threads of this process, or this is a subinterpreter.
    """
    return RowClient(_row_client(url, observers=observers, drain=drain, open_wait=open_wait, label=label))
