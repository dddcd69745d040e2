"""
Locks in PostgreSQL, beside the data that they protect.

    connect("postgresql://user:password@localhost:5432/app")
    connect("postgresql://db1,db2,db3/app?sslmode=verify-full")   # the host that takes writes

Tokens: hybrid by default, kept in the lock's row. Clock: the server's, read while the row is locked. Waiters: first
come, first served, woken by NOTIFY. One connection for the requests, and one that listens while a request waits.

    __init__.py    the backend, its options and its URL; deletes rows that are no longer needed
    requests.py    the requests to the server, and how its answers are read
    waiters.py     the messages that wake waiters and tell of revocations; readers that try in one statement
    dial.py        opens a session with the server that takes writes; the connection for the requests
    driver.py      the part of asyncpg that is used, with types, and one open connection
    schema.sql     the tables, and the functions that decide
    schema.py      creates them
    errors.py      translates errors of the driver to those of the contract
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, cast
from urllib.parse import parse_qsl, quote, urlencode

from fencing_sdk._values.claim import READER, Busy, Claim, Grant, Holder, Listing, Renewal, Revoked, Waiting
from fencing_sdk._values.clock import JITTER, BootClock
from fencing_sdk._values.loop_owner import Uncopied
from fencing_sdk._values.token import Token
from fencing_sdk._values.url import (
    LIBPQ_OPTIONS,
    option_names,
    read_hybrid,
    read_postgresql_url,
    read_seconds,
    read_switch,
)
from fencing_sdk.abc import Guard, LossNotice, WaiterNotice
from fencing_sdk.abc._powers import TransactionalGuard
from fencing_sdk.backends import take_options
from fencing_sdk.backends._shared.background_task import BackgroundTask
from fencing_sdk.backends._shared.error_translation import Fences, blaming_the_guard, fence_refused
from fencing_sdk.backends._shared.losses import why_not, with_reasons
from fencing_sdk.backends._shared.waiters import KeptPlace, KeptPlaces, Turn
from fencing_sdk.backends.postgresql.dial import PostgresqlConnection, PostgresqlDialer
from fencing_sdk.backends.postgresql.driver import DriverRow, PostgresqlSession, ServerError, code_of
from fencing_sdk.backends.postgresql.errors import BACKEND, translating
from fencing_sdk.backends.postgresql.requests import (
    ROW_PATIENCE_MS,
    Arguments,
    PostgresqlRequests,
    read_fence,
    read_flag,
    read_holders,
    read_line,
    read_listing,
    read_outcome,
    read_release,
    read_renewals,
    read_transfer,
    storable,
)
from fencing_sdk.backends.postgresql.schema import DEFAULT_SCHEMA, check_schema, schema_sql
from fencing_sdk.backends.postgresql.waiters import PostgresqlLossWatcher, PostgresqlWaiters, WaitingReaders
from fencing_sdk.errors import ConfigurationError

__all__ = ["PostgresqlBackend", "from_url", "schema_sql"]

_OF_LIBPQ = """
    host port dbname user password passfile sslmode sslcert sslkey sslrootcert sslcrl sslpassword
    ssl_min_protocol_version ssl_max_protocol_version target_session_attrs application_name options
"""
DRIVER_OPTIONS = tuple(_OF_LIBPQ.split())
"""
The options of a URL's query, or of `connect`, that belong to libpq and not to the backend.

Any other option is an error: asyncpg would take it for a setting of the server, and a typing error must not turn TLS
off.
"""
_EVERY = 600.0
"""Seconds between two sweeps of one client. The server runs at most one a minute for all clients together."""

_RETENTION = 7 * 86400.0
"""Seconds for which a lock must have been free before its row is deleted."""
_CLOCK = BootClock()
_MISSING = {"3F000", "42501", "42703", "42804", "42P01"}
"""A schema, table or column that is missing, has another type, or is not permitted."""
_NOT_RAISED, _HIGHER = "FS003", "FS004"
"""SQLSTATEs that ``fencing_acquire_fenced`` raises."""
_BATCH = 1000
"""Leases that one statement renews."""


class PostgresqlBackend(Uncopied):
    """
    A lock service in PostgreSQL, from version 12 on.

    Args:
        url: ``postgresql://user:password@host:port/database``; separate several hosts by commas, and the
            backend uses the one that takes writes. Its query has options of libpq, such as ``sslmode``.

        schema: The schema of the tables and functions.

        tokens: ``"hybrid"``, or ``"counter"`` for 1, 2, 3, which repeat when the server loses the last grants.

        create: Whether the first call that misses the tables and functions creates them.

        pooled: Whether a proxy gives every transaction to another server process. The backend notices this
            by itself; with ``pooled=True`` it saves the first error in the server's log.

        connect_timeout: Seconds that the opening of a connection may take.

        driver: More arguments of ``asyncpg.connect``, such as ``ssl`` or a callable ``password``.

    Raises:
        ConfigurationError: an argument cannot work. No I/O happens before the first call.
    """

    def __init__(
        self,
        url: str,
        *,
        schema: str = DEFAULT_SCHEMA,
        tokens: str = "hybrid",
        create: bool = True,
        pooled: bool = False,
        connect_timeout: float = 4.0,
        driver: Mapping[str, object] | None = None,
    ) -> None:
        given: object = url
        if not isinstance(given, str):
            msg = f"url must be a str, such as 'postgresql://localhost/app', not {type(url).__name__}"
            raise ConfigurationError(msg)
        parts = read_postgresql_url(url, known=DRIVER_OPTIONS)
        self._requests = PostgresqlRequests(check_schema(schema), hybrid=read_hybrid(tokens))
        self._dialer = PostgresqlDialer(
            parts.each_host(),
            schema=schema,
            create=read_switch("create", create),
            pooled=read_switch("pooled", pooled),
            patience=read_seconds("connect_timeout", connect_timeout),
            arguments=driver or {},
        )
        self._connection = PostgresqlConnection(self._dialer)
        self._fenced_connection = PostgresqlConnection(self._dialer)
        self._places = KeptPlaces()
        self._waiters = PostgresqlWaiters(self._connection, self._dialer, self._requests)
        self._readers = WaitingReaders(self._connection, self._requests, self._waiters)
        self._losses = PostgresqlLossWatcher(self._connection, self._requests, schema)
        self._sweep = BackgroundTask()
        self._sweep_due = _CLOCK.now() + _EVERY * JITTER.uniform(0.05, 1.0)
        # An argument of the driver may lead to another database than the URL says.
        self._database_identity = None if driver else parts.identity()

    async def open(self) -> None:
        """See `fencing_sdk.abc.SupportsOpen.open`."""
        with translating("open"):
            await self._connection.ask("SELECT 1", ())

    async def acquire(self, claim: Claim) -> Grant | Busy:
        """See `fencing_sdk.abc.Backend.acquire`."""
        return await self._acquire(claim, self._connection.ask)

    def keeps(self, guard: Guard) -> bool:
        """See ``abc._powers.SupportsFence.keeps``."""
        known = self._database_identity
        return known is not None and isinstance(guard, TransactionalGuard) and guard.database == known

    async def acquire_fenced(self, claim: Claim, fences: Fences) -> Grant | Busy:
        """
        See ``abc._powers.SupportsFence.acquire_fenced``.

        One statement acquires and raises, so the server does both or neither, and a client that freezes locks no row.
        It runs on another connection than the renewals: a transaction that writes under a fence locks it until it ends,
        and only acquisitions with fences may have to wait for that.
        """

        async def ask(_: str, arguments: Arguments) -> DriverRow | None:
            return await self._fenced_connection.run(
                lambda session: self._ask_fenced(session, claim, arguments, fences)
            )

        return await self._acquire(claim, ask)

    async def _ask_fenced(
        self, session: PostgresqlSession, claim: Claim, arguments: Arguments, fences: Fences
    ) -> DriverRow | None:
        raisings = []
        for guard, resource in fences:
            with blaming_the_guard(resource, backend=BACKEND, code_of=code_of, missing=_MISSING):
                raisings.append(await cast("TransactionalGuard", guard).raising(session.for_guards()))
        asked = self._requests.fenced_arguments(claim, arguments, fences, raisings)
        try:
            row = await session.ask(self._requests.acquire_fenced, asked)
        except ServerError as error:
            if code_of(error) not in {_NOT_RAISED, _HIGHER}:
                raise
            number, why = read_fence(error)
            resource, raising = fences[number][1], raisings[number]
            if code_of(error) == _HIGHER:
                raising.report(resource, Token(why[0], claim.holder), why[1])
            session.drop()  # the guard looks for its table once for each connection
            raise fence_refused(BACKEND, resource, raising.needs, why[0]) from error
        if row is not None and row[0] is not None:
            for (_, resource), raising in zip(fences, raisings, strict=True):
                raising.report(resource, Token(row[0], claim.holder), None)
        return row

    async def _acquire(
        self, claim: Claim, ask: Callable[[str, Arguments], Awaitable[DriverRow | None]]
    ) -> Grant | Busy:
        waiter = self._waiters.table.find(claim)
        channel, ticket = (None, None) if waiter is None else (waiter.channel, waiter.ticket)
        asked = self._requests.acquisition(claim, channel, ticket)
        with translating("acquire"):
            outcome = None
            if waiter is not None and claim.mode == READER:
                outcome = await self._readers.acquire(claim)
            if outcome is None:
                outcome = read_outcome(await ask(*asked), None if waiter is None else self._waiters.poll)
        if _CLOCK.now() >= self._sweep_due:
            self._sweep_due = _CLOCK.now() + _EVERY * JITTER.uniform(0.5, 1.0)
            self._sweep.start(self._delete_old_rows)
        granted = isinstance(outcome, Grant)
        if waiter is not None:
            waiter.served = granted
        if granted:
            self._losses.granted(claim)
        return outcome

    async def _delete_old_rows(self) -> None:
        with suppress(Exception):  # a later sweep deletes the same rows
            await self._connection.ask(self._requests.sweep, (_RETENTION,))

    async def renew(self, claims: Sequence[Claim]) -> Sequence[Renewal | Revoked]:
        """
        See `fencing_sdk.abc.Backend.renew`.

        One statement renews a batch of claims. If the statement of a batch fails, its claims are UNKNOWN, and the
        other batches keep their outcomes. If all fail, so does the call.
        """
        outcomes: list[Renewal | Revoked] = [Renewal.REFUSED] * len(claims)
        asked = [index for index, claim in enumerate(claims) if storable(claim.name)]
        batches = [asked[start : start + _BATCH] for start in range(0, len(asked), _BATCH)]
        failures: list[Exception] = []
        for batch in batches:
            try:
                renewed = await self._renew_batch([claims[index] for index in batch])
            except Exception as error:  # noqa: BLE001  (it is raised below, unless another batch has answers)
                failures.append(error)
                renewed = [Renewal.UNKNOWN] * len(batch)
            for index, renewal in zip(batch, renewed, strict=True):
                outcomes[index] = renewal
                if renewal is not Renewal.RENEWED and renewal is not Renewal.UNKNOWN:
                    self._losses.ended(claims[index])
        if failures and len(failures) == len(batches):
            with translating("renew"):
                raise failures[0]
        return outcomes

    async def _renew_batch(self, claims: Sequence[Claim]) -> Sequence[Renewal | Revoked]:
        """Renew without waiting. Then ask once more, and wait briefly, for rows that another transaction has locked."""
        outcomes = [Renewal.UNKNOWN] * len(claims)
        left = list(range(len(claims)))
        for patience_ms in (0, ROW_PATIENCE_MS):
            asked = [claims[index] for index in left]
            arguments = self._requests.renew_arguments(asked, patience_ms)
            row = await self._connection.ask(self._requests.renew, arguments, urgent=True)
            for index, renewal in zip(left, read_renewals(row, asked), strict=True):
                outcomes[index] = renewal
            left = [index for index in left if outcomes[index] is Renewal.UNKNOWN]
            if not left:
                break
        return await with_reasons(claims, outcomes, self._losses.written)

    async def release(self, claim: Claim) -> Renewal | Revoked | None:
        """See `fencing_sdk.abc.Backend.release`."""
        self._losses.ended(claim)
        with translating("release"):
            statement = self._requests.give_back if claim.mode.shared else self._requests.release
            row = await self._connection.ask(statement, (claim.name, claim.owner), urgent=True, must_run=True)
            refusal = read_release(row, claim)
        return None if refusal is None else (await with_reasons([claim], [refusal], self._losses.written))[0]

    async def transfer(self, of: Claim, to: Claim) -> Grant | Renewal | Revoked:
        """See `fencing_sdk.abc.SupportsTransfer.transfer`."""
        self._losses.ended(of)
        with translating("transfer"):
            arguments = self._requests.transfer_arguments(of, to)
            outcome = read_transfer(await self._connection.ask(self._requests.transfer, arguments), of)
        return outcome if isinstance(outcome, Grant) else await why_not(of, to, outcome, self._losses.written)

    async def inspect(self, name: str) -> Holder | None:
        """See `fencing_sdk.abc.Backend.inspect`."""
        return max(await self.holders(name), key=lambda holder: holder.remaining, default=None)

    async def holders(self, name: str) -> Sequence[Holder]:
        """See `fencing_sdk.abc.SupportsShares.holders`."""
        with translating("inspect"):
            return read_holders(await self._connection.ask(self._requests.held, ([name],)))

    async def list_holders(self, prefix: str, cursor: str | None, limit: int) -> Listing:
        """See `fencing_sdk.abc.SupportsListing.list_holders`."""
        if not storable(prefix):
            return Listing((), None)
        with translating("list"):
            return read_listing(await self._connection.ask(self._requests.list, (prefix, cursor, limit)))

    async def list_waiters(self, name: str) -> Sequence[Waiting]:
        """See `fencing_sdk.abc.SupportsListing.list_waiters`."""
        with translating("list"):
            return read_line(await self._connection.ask(self._requests.line, (name,)))

    async def revoke(self, name: str, token: int, reason: str) -> bool:
        """See `fencing_sdk.abc.SupportsRevoking.revoke`."""
        with translating("revoke"):
            return read_flag(await self._connection.ask(self._requests.revoke, (name, token, reason)))

    def on_loss(self, notice: LossNotice) -> Callable[[], None]:
        """See `fencing_sdk.abc.SupportsLossNotice.on_loss`."""
        return self._losses.on_loss(notice)

    async def aclose(self) -> None:
        """Close the connections. Grants stay until they are released or expire."""
        await self._losses.aclose()
        await self._sweep.aclose()
        await self._waiters.listener.aclose()
        await self._fenced_connection.aclose()
        await self._connection.aclose()

    def schema_sql(self) -> str:
        """See ``abc._powers.SupportsSchema.schema_sql``."""
        return schema_sql(self._dialer.schema)

    async def create_schema(self) -> None:
        """See ``abc._powers.SupportsSchema.create_schema``."""
        with translating("create_schema"):
            await (await self._dialer.dial(missing="create_schema")).aclose()

    def stand(self, claim: Claim, notify: WaiterNotice, *, hand_over: bool) -> KeptPlace:  # noqa: ARG002  (it only wakes)
        """See `fencing_sdk.abc.SupportsLine.stand`."""
        return self._places.stand(self._in_line, claim, notify)

    @asynccontextmanager
    async def _in_line(self, claim: Claim) -> AsyncIterator[Turn]:
        with translating("queue"):
            waiter = await self._waiters.join(claim)
        try:
            yield waiter
        finally:
            await self._waiters.leave(waiter)


def from_url(url: str, **options: object) -> PostgresqlBackend:
    """
    Make a backend for a ``postgresql://`` URL. `PostgresqlBackend` explains the options, which the query may contain.

    Raises:
        ConfigurationError: the URL or an option cannot be used.
    """
    ours = option_names(PostgresqlBackend, besides={"driver"})
    chosen = take_options(url, options, (*ours, *DRIVER_OPTIONS), public=LIBPQ_OPTIONS)
    own: dict[str, Any] = {name: chosen.pop(name) for name in ours if name in chosen}
    for name, value in chosen.items():  # what remains are the driver's
        if not isinstance(value, str) or not value:
            msg = f"{name} must be a non-empty str"
            raise ConfigurationError(msg)
    rest, _, query = url.partition("?")
    pairs = [pair for pair in parse_qsl(query, keep_blank_values=True) if pair[0] not in {*ours, *chosen}]
    query = urlencode([*pairs, *chosen.items()], quote_via=quote, errors="surrogatepass")
    return PostgresqlBackend(f"{rest}?{query}" if query else rest, **own)
