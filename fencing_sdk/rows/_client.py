"""The client of leased rows: one heartbeat for all tables of one database."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import EllipsisType, TracebackType
from typing import Any, Self, TypedDict, cast

from fencing_sdk._arguments import check_fences
from fencing_sdk._client import LockClient, engine_of_client
from fencing_sdk._engine.acquisition import NO_FENCES, Terms
from fencing_sdk._engine.engine import Engine, Fences
from fencing_sdk._lease import Lease, state_of
from fencing_sdk._lease_state import LeaseState
from fencing_sdk._lock import Lock, enter_with
from fencing_sdk._values.clock import JITTER
from fencing_sdk._values.loop_owner import Uncopied
from fencing_sdk._values.observers import Observer, logger
from fencing_sdk._values.reports import Status
from fencing_sdk._values.timing import Seconds, Timing, patience, seconds
from fencing_sdk.abc import Guard
from fencing_sdk.errors import (
    BackendUnavailableError,
    ConfigurationError,
    DrainingError,
    LeaseLostError,
    StaleTokenError,
    UsageError,
    shown,
)
from fencing_sdk.guards.sql._transaction import perform
from fencing_sdk.rows._store import LONGEST_REST, Held, RowDatabase, RowStore
from fencing_sdk.rows._table import Table, admitting, parts_of_model, refuse_notify_elsewhere
from fencing_sdk.rows._url import database_at

_LONGEST_POLL = 5.0
_MOST_ROWS = 1000
_MOST_TASKS = 1000


class LeaseOfRows:
    """Rows of a lease, of a task or a thread, as its user reads them."""

    __slots__ = ()
    _held: Held

    @property
    def row(self) -> Mapping[str, Any]:
        """The row as the claim has left it, by the names of its columns; of a batch the first one."""
        return self._held.rows[0].row

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """The rows of the batch, or the one row."""
        return [claimed.row for claimed in self._held.rows]


class RowLease(LeaseOfRows, Lease):
    """A row, or a batch of rows, that this process works on until its deadline."""

    __slots__ = ("_held",)

    def __init__(self, store: RowStore, state: LeaseState) -> None:
        super().__init__(state)
        self._held = store.held[state.owner]

    async def finish(self, transaction: object, /, **columns: object) -> None:
        """
        Write *columns* into the row and end its lease, in your *transaction*, if this claim is still its last one.

        Of a batch, every row gets the same values. Until your transaction ends, its lock on the row is the lease: no
        other process can claim the row, and a slow commit is not cancelled. If the transaction is rolled back, leave
        the block by an exception: the row is then given back.

        Args:
            transaction: A connection of asyncpg, psycopg 3, aiosqlite, asyncmy or aiomysql, or SQLAlchemy's
                AsyncSession or AsyncConnection, with an open transaction.

            **columns: New values, which the driver has to understand.

        Raises:
            StaleTokenError: another claim came later. Roll back.
            LeaseLostError: the lease is over.
            UsageError: the row was finished before or deleted, or *transaction* commits every statement by itself.
            UnsupportedError: the database or its driver is not supported.
            ConfigurationError: a column cannot be written.
        """
        self.check()
        await perform(transaction, self._held.finishing(columns))

    async def admit(self, transaction: object, /) -> None:
        """
        Lock the row in your *transaction*, if this claim is still its last one: then any writes may follow.

        The lease goes on: this is for progress that is written during the work. While the transaction is open the row
        cannot be renewed, so it has to end within the ttl.

        Raises:
            StaleTokenError, LeaseLostError, UsageError, UnsupportedError: as `finish`.
        """
        self.check()
        await perform(transaction, admitting(self._held.table, self._held.rows))

    async def put_off(self, delay: Seconds) -> None:
        """
        Give the row back, to be claimed again in *delay* seconds at the earliest, and end the lease.

        Raises:
            ConfigurationError: *delay* is not a time up to a day.
            UsageError: the row was finished.
        """
        self._held.put_off(delay)
        await self.release()

    async def __aexit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._held.end_block(raised)
        await super().__aexit__(kind, raised, traceback)


class TakeLife:
    """The life of a claim of a task or a thread: it is entered once, and in a loop at once."""

    __slots__ = ("_name", "entered", "lease", "looped")

    def __init__(self, name: str) -> None:
        self._name = name
        self.lease: RowLease | None = None
        """The lease of the claim, once it is made by its block or its loop."""
        self.looped = False
        self.entered = False

    def check_enterable(self) -> None:
        """Refuse a second block."""
        if self.entered:
            msg = f"a claim of {shown(self._name)} is entered once; make another one: take()"
            raise UsageError(msg)

    def refuse_unentered(self, statement: str) -> UsageError | None:
        """Return the error if the block has not begun when its loop goes on. Then the caller gives the row back."""
        if self.entered:
            return None
        return UsageError(f"write '{statement} job as lease:' as the first line of the loop; the row was given back")

    def swallows(self, raised: BaseException | None, end: BaseException | None) -> bool:
        """
        Return whether the block keeps what its body *raised*: in a loop, nothing but the end of this lease.

        *end* is what is on its way out when the row was given back.

        Raises:
            BaseException: *end*, if it is neither that nor what the body raised.
        """
        if self.looped and end is not None and self._is_the_end(end):
            logger.warning("rows: %s", end)
            return not isinstance(raised, GeneratorExit)  # a generator that is closed ends: its loop must not go on
        if end is not None and end is not raised:
            raise end
        return False

    def _is_the_end(self, error: BaseException) -> bool:
        """Return whether *error* says nothing but that this claim is no longer the last one."""
        assert self.lease is not None  # its block ends
        if isinstance(error, BaseExceptionGroup):
            return all(map(self._is_the_end, error.exceptions))
        if isinstance(error, StaleTokenError):
            return (error.resource, error.token) in self.lease._held.claims()  # noqa: SLF001  (of this module)
        own = state_of(self.lease)
        return isinstance(error, LeaseLostError) and (error.name, error.token) == (own.name, own.number)


class RowTake(Lock):
    """
    The claim of a next row: ``async with jobs.take() as lease``, once. `acquire` gives a plain handle.

    Leaving the block without `RowLease.finish` gives the row back at once; an error keeps it for the ``rest`` of its
    table. If the lease of a row is lost in a loop, its block writes a line to the log, and the loop goes on.
    """

    __slots__ = ("_life",)

    def __init__(self, engine: Callable[[], Engine], terms: Terms, fences: Fences) -> None:
        super().__init__(engine, terms, fences)
        self._life = TakeLife(self.name)

    def _acquire(self, terms: Terms) -> Coroutine[Any, Any, Lease]:
        return self._engine().hold(terms, self._fences)  # a task may hold several rows

    async def acquire(self, *, wait: Seconds | EllipsisType | None = ...) -> RowLease:
        """Claim a row and return a plain handle. Errors are those of `fencing_sdk.Lock.acquire`."""
        return cast("RowLease", await super().acquire(wait=wait))

    async def try_acquire(self) -> RowLease | None:
        """Claim a row if one is free now. Errors are those of `fencing_sdk.Lock.try_acquire`."""
        return cast("RowLease | None", await super().try_acquire())

    async def __aenter__(self) -> RowLease:
        life = self._life
        life.check_enterable()
        life.entered = True
        lease = life.lease = life.lease or await self.acquire()
        try:
            enter_with(self, lease)
        except BaseException:
            await lease.release()
            raise
        return lease

    async def __aexit__(  # type: ignore[override]
        self, kind: type[BaseException] | None, raised: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        life, end = self._life, raised
        assert life.lease is not None  # __aenter__ has it
        life.lease._held.end_block(raised)  # noqa: SLF001  (of this module)
        try:
            await super().__aexit__(kind, raised, traceback)
        except (LeaseLostError, StaleTokenError) as error:
            end = error
        return life.swallows(raised, end)

    @property
    def row_name(self) -> str:
        """Name of the row once it is claimed; that of the table before."""
        return self.name if self._life.lease is None else self._life.lease.name


class LeasedRows(Uncopied):
    """
    Rows of one table that this client works on. Made by `RowClient.rows`.

    ``async for job in jobs`` waits for the next row, rides out outages of the database, and ends when the client
    drains. It raises `BackendRefusedError` where the table or its SQL cannot be used.
    """

    __slots__ = ("_client", "_fences", "_store", "_table", "_terms")

    def __init__(self, client: LockClient, store: RowStore, table: Table, terms: Terms, fences: Fences) -> None:
        self._client = client
        self._store = store
        self._table = table
        self._terms = terms
        self._fences = fences
        store.tables[terms.store_name] = table

    def __repr__(self) -> str:
        return f"<LeasedRows of {self._table.name}>"

    def take(self, *, wait: Seconds | None = None) -> RowTake:
        """
        Describe the claim of one row; nothing is sent until it is entered or acquired.

        Args:
            wait: Seconds to wait for a row. 0 asks once, None waits for ever.

        Raises:
            ConfigurationError: *wait* is not a valid time.
        """
        terms = self._terms._replace(wait=None if wait is None else patience(wait))
        return RowTake(partial(engine_of_client, self._client), terms, self._fences)

    def batch(self, most: int) -> LeasedRows:
        """
        Describe the same rows, of which one claim takes up to *most*, with one lease and one finish for all of them.

        Raises:
            ConfigurationError: *most* is not a number from 1 to 1000.
        """
        most = _whole(most, "most", _MOST_ROWS)
        name = f"{self._terms.store_name.partition('*')[0]}*{most}"
        self._store.counts[name] = most
        return LeasedRows(self._client, self._store, self._table, self._terms._replace(store_name=name), self._fences)

    async def __aiter__(self) -> AsyncIterator[RowTake]:
        while (job := await self._next()) is not None:
            yield job
            life = life_of(job)
            if life.lease is not None and (error := life.refuse_unentered("async with")) is not None:
                await life.lease.release()
                raise error

    async def _next(self) -> RowTake | None:
        """Wait for a row and return its claim, to be entered at once; None when the client drains."""
        while True:
            job = self.take()
            life = life_of(job)
            try:
                life.lease = await job.acquire()
            except DrainingError:
                return None
            except BackendUnavailableError as error:
                logger.warning("rows: the next row of %s is waited for, although %s", self._table.name, error)
                continue
            life.looped = True
            return job

    async def run(self, handle: Callable[[RowLease], Awaitable[object]], *, at_once: int = 1) -> None:
        """
        Work on rows until the client drains, in *at_once* tasks.

        An error of *handle* is logged, and keeps its row for the ``rest`` of the table; the others go on.

        Args:
            handle: Called with the lease of a row, or of a batch. It finishes the row.

            at_once: Number of tasks.

        Raises:
            ConfigurationError: an argument cannot be used.
            BackendRefusedError: the table or its SQL cannot be used.
        """
        if not callable(handle):
            msg = f"handle must be a coroutine function that takes a lease, not {shown(handle)}"  # type: ignore[unreachable]
            raise ConfigurationError(msg)

        async def work() -> None:
            async for job in self:
                try:
                    async with job as lease:
                        await handle(lease)
                except Exception:  # noqa: BLE001  (of the user's work, whatever it is: the others go on)
                    logger.exception("rows: the work on %s failed", job.row_name)

        number = check_at_once(at_once)
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(number):
                    tasks.create_task(work(), name="fencing-rows")
        except BaseExceptionGroup as refused:  # once for each task
            raise refused.exceptions[0] from None

    def each(
        self, *, at_once: int = 1
    ) -> Callable[[Callable[[RowLease], Coroutine[Any, Any, object]]], Callable[[], Coroutine[Any, Any, None]]]:
        """
        Decorate a coroutine function of a lease: a call without arguments is then `run`.

        Raises:
            ConfigurationError: *at_once* is not a number from 1 to 1000.
        """
        check_at_once(at_once)

        def decorate(
            function: Callable[[RowLease], Coroutine[Any, Any, object]],
        ) -> Callable[[], Coroutine[Any, Any, None]]:
            @functools.wraps(function)
            async def work_on_each() -> None:
                await self.run(function, at_once=at_once)

            return work_on_each

        return decorate


def _whole(number: object, parameter: str, most: int) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= most:
        msg = f"{parameter} must be a whole number from 1 to {most}, got {shown(number)}"
        raise ConfigurationError(msg)
    return number


def check_at_once(number: object) -> int:
    return _whole(number, "at_once", _MOST_TASKS)


def life_of(take: RowTake) -> TakeLife:
    """Return the life of *take*, which a thread leads too. For this package alone."""
    return take._life  # noqa: SLF001  (the one door to it)


def held_by(lease: RowLease) -> Held:
    """Return what the store knows of the rows of *lease*. For this package alone."""
    return lease._held  # noqa: SLF001


async def next_of(rows: LeasedRows) -> RowTake | None:
    """Do what a loop over *rows* does for its next round. For this package alone."""
    return await rows._next()  # noqa: SLF001


class RowOptions(TypedDict, total=False):
    """The parameters of `RowClient.rows` besides the table."""

    key: str | None
    where: object
    order: object
    on_claim: object
    values: Mapping[str, object] | None
    ttl: Seconds
    rest: Seconds
    poll: Seconds
    notify: str | None
    safety_buffer: Seconds | None
    heartbeat_interval: Seconds | None
    max_hold: Seconds | None
    fences: Sequence[Guard]


class RowClient(Uncopied):
    """
    Leases rows of the tables of one database, and renews all of them with one heartbeat.

    Enter it once with ``async with``. It has connections of its own. Made by `row_client`.
    """

    def __init__(
        self,
        database: RowDatabase,
        *,
        observers: Sequence[Observer] = (),
        drain: Seconds | None = None,
        open_wait: Seconds | None = 0.0,
        label: str | None = None,
    ) -> None:
        self._store = RowStore(database)
        self._client = LockClient(self._store, observers=observers, drain=drain, open_wait=open_wait, label=label)
        self._store.ring = lambda name: engine_of_client(self._client).look_again(name)
        self._label = label
        self._numbers = itertools.count(1)

    def __repr__(self) -> str:
        return repr(self._client).replace("LockClient", "RowClient", 1)

    def rows(
        self,
        table: str | type,
        *,
        key: str | None = None,
        where: object = "true",
        order: object = None,
        on_claim: object = "",
        values: Mapping[str, object] | None = None,
        ttl: Seconds = 30.0,
        rest: Seconds = 10.0,
        poll: Seconds = 0.5,
        notify: str | None = None,
        safety_buffer: Seconds | None = None,
        heartbeat_interval: Seconds | None = None,
        max_hold: Seconds | None = None,
        fences: Sequence[Guard] = NO_FENCES,
    ) -> LeasedRows:
        """
        Describe which rows of a table are claimed, and in which order. Nothing is sent yet.

        *where*, *order* and *on_claim* are parts of your own SQL statements. Never put what users wrote into them:
        write ``:name``, and give it a value in *values*. With a model, they may be expressions of its framework:
        ``where=Job.state == "queued", order=[Job.priority], on_claim={Job.attempts: Job.attempts + 1}`` with
        SQLAlchemy, ``where=Q(state="queued"), order=["priority"], on_claim={"attempts": F("attempts") + 1}`` with
        Django.

        Args:
            table: Its name, ``"jobs"`` or ``"schema.jobs"``, as the database spells it, or a model with
                `fencing_sdk.rows.sqlalchemy.LeasedRow` or `fencing_sdk.rows.django.LeasedRow`.

            key: Name of the column that identifies a row, which has a unique index. ``id`` by default, and of a model
                its primary key.

            where: Condition of the rows that may be claimed, besides that no lease on them runs.

            order: Order in which rows are claimed. The key by default.

            on_claim: Assignments that the claim makes, such as ``"attempts = attempts + 1"``: also a row whose work
                kills its worker is counted.

            values: Values for each ``:name`` in these texts.

            ttl: Seconds for which a row stays leased after the last renewal.

            rest: Seconds for which a row stays leased after its work has failed, so that it does not fail in a tight
                loop.

            poll: Seconds between two looks of a client that waits for rows, at most 5.

            notify: Channel on which PostgreSQL notifies of new rows, by the trigger that `schema_sql` returns, so that
                they are claimed at once. Behind a proxy that pools transactions, the client polls all the same.

            safety_buffer: As for `fencing_sdk.LockClient.lock`.

            heartbeat_interval: As for `fencing_sdk.LockClient.lock`.

            max_hold: As for `fencing_sdk.LockClient.lock`.

            fences: As for `fencing_sdk.LockClient.lock`. The resource of a fence is named like the row: ``"jobs/42"``.

        Raises:
            ConfigurationError: an argument cannot work.
        """
        timing = Timing.build(
            ttl=ttl, safety_buffer=safety_buffer, heartbeat_interval=heartbeat_interval, max_hold=max_hold
        )
        pause = seconds(poll, "poll", high=_LONGEST_POLL)
        name: Any = table
        parts: dict[str, Any] = {"where": where, "order": order, "on_claim": on_claim}
        values = dict(values or {})
        if isinstance(table, type):
            name, key, parts, own = parts_of_model(table, self._store.database.dialect, key, parts)
            values |= own
        key = "id" if key is None else key
        described = Table(
            name,
            key,
            **parts | ({} if parts["order"] is not None else {"order": key}),
            values=values,
            timing=timing,
            rest=seconds(rest, "rest", high=LONGEST_REST),
            notify=notify,
        )
        if notify is not None:
            refuse_notify_elsewhere(self._store.database.dialect)
        terms = Terms(
            name=described.lease_name(),
            store_name=f"{next(self._numbers)}",
            timing=timing,
            wait=None,
            backoff=lambda _: pause * JITTER.uniform(0.6, 1.0),
            label=self._label,
            handle=partial(RowLease, self._store),
        )
        return LeasedRows(
            self._client, self._store, described, terms, fences if fences is NO_FENCES else check_fences(fences)
        )

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the client: see `fencing_sdk.LockClient.aclose`. Rows that are leased are given back."""
        await self._client.aclose()

    async def drain(self, *, within: Seconds) -> bool:
        """Let work end, and claim nothing new: see `fencing_sdk.LockClient.drain`."""
        return await self._client.drain(within=within)

    def draining_on(self, *signals: int, within: Seconds) -> AbstractAsyncContextManager[None]:
        """Drain when one of the *signals* comes: see `fencing_sdk.LockClient.draining_on`."""
        return self._client.draining_on(*signals, within=within)

    @property
    def draining(self) -> bool:
        """True if the client drains."""
        return self._client.draining

    def status(self) -> Status:
        """Return the state of the client, without asking the database: see `fencing_sdk.LockClient.status`."""
        return self._client.status()


def locks_of(client: RowClient) -> LockClient:
    """Return the client below *client*, whose locks are claims of rows. For this package alone."""
    return client._client  # noqa: SLF001


def row_client(
    url: str,
    *,
    observers: Sequence[Observer] = (),
    drain: Seconds | None = None,
    open_wait: Seconds | None = 0.0,
    label: str | None = None,
) -> RowClient:
    """
    Make a client for the tables of the database at *url*. Nothing is sent yet.

    Args:
        url: ``postgresql://user@host/database``, ``mysql://``, ``mariadb://``, or ``sqlite:///app.db``.

        observers: As for `fencing_sdk.connect`.

        drain: As for `fencing_sdk.connect`.

        open_wait: As for `fencing_sdk.connect`.

        label: The text that the claim writes into the column ``leased_by``, if there is one: host, process id and
            program by default.

    Raises:
        ConfigurationError: the URL or an argument cannot be used. The message never repeats the URL.
    """
    return RowClient(database_at(url), observers=observers, drain=drain, open_wait=open_wait, label=label)
