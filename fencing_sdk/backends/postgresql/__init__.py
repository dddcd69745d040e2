"""
Locks in PostgreSQL, beside the data that they protect.

    connect("postgresql://user:password@localhost:5432/app")
    connect("postgresql://db1,db2,db3/app?sslmode=verify-full")   # the one that takes writes

Tokens: hybrid by default, kept in the lock's row. Clock: the server's, read under the row's lock. Waiters: first
come, first served, woken by NOTIFY. One connection for the calls, and one that listens while somebody waits.

    __init__.py       the face in the event loop
    schema.sql        the tables, and the functions that decide
    _schema.py        how they are created
    _calls.py         what the functions are asked, and what they answer
    _line.py          who waits, and how it is woken
    _ears.py          the connection that listens
    _joint.py         a grant and the fences of the same database, in one transaction
    _link.py          the connection for the calls, and a new one when it breaks
    _session.py       one open connection
    _dial.py          from an address to a session with the server that takes writes
    _settings.py      from a URL to an address and options
    _translation.py   from the driver's errors to those of the contract
    _driver.py        asyncpg, with types
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from fencing_sdk._values.claim import Claim, Grant, Held, Holder, Renewal
from fencing_sdk._values.database_identity import database_identity
from fencing_sdk.abc import Guard, TransactionalGuard, Turn
from fencing_sdk.backends import take_options
from fencing_sdk.backends.postgresql._calls import (
    PATIENCE_MS,
    Arguments,
    Calls,
    holder,
    outcome,
    poll,
    renewable,
    renewals,
)
from fencing_sdk.backends.postgresql._dial import Dialer
from fencing_sdk.backends.postgresql._driver import Row
from fencing_sdk.backends.postgresql._joint import JointGrant
from fencing_sdk.backends.postgresql._line import Line
from fencing_sdk.backends.postgresql._link import Link
from fencing_sdk.backends.postgresql._schema import DEFAULT_SCHEMA, schema_sql
from fencing_sdk.backends.postgresql._settings import DRIVER_OPTIONS, address_from_url, read_choices, with_options
from fencing_sdk.backends.postgresql._sweep import Sweep
from fencing_sdk.backends.postgresql._translation import our_errors

__all__ = ["PostgresqlBackend", "from_url", "schema_sql"]

OPTIONS = ("schema", "tokens", "create", "pooled", "retention", "connect_timeout")
_BATCH = 1000
"""Leases that one statement renews."""


class PostgresqlBackend:
    """
    A lock service in PostgreSQL, from version 12 on.

    Args:
        url: ``postgresql://user:password@host:port/database``; several hosts are separated by commas, and the one
            that takes writes is used. Its query has options of libpq, such as ``sslmode``.

        schema: Where the tables and functions are.

        tokens: ``"hybrid"``, or ``"counter"`` for 1, 2, 3, which repeat when the server loses the last grants.

        create: Whether the tables and functions are created by the first call that misses them.

        pooled: Whether a proxy gives every transaction to another server process. Noticed without this too;
            stating it saves the first error in the server's log.

        retention: Seconds after which the row of a free lock may be deleted. Tokens keep growing.

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
        retention: float = 7 * 86400.0,
        connect_timeout: float = 5.0,
        driver: Mapping[str, object] | None = None,
    ) -> None:
        self._choices = choices = read_choices(
            {
                "schema": schema,
                "tokens": tokens,
                "create": create,
                "pooled": pooled,
                "retention": retention,
                "connect_timeout": connect_timeout,
            }
        )
        self._dialer = Dialer(address_from_url(url), choices, driver or {})
        self._calls = Calls(choices.schema, hybrid=choices.hybrid)
        self._link = Link(self._dialer)
        self._joint = Link(self._dialer)
        self._where = None if driver else database_identity(url)  # what else the driver is told may lead elsewhere
        self._line = Line(self._link, self._dialer, self._calls)
        self._sweep = Sweep(self._link, self._calls.sweep, choices.retention)

    async def open(self) -> None:
        """See `fencing_sdk.abc.SupportsOpen.open`."""
        with our_errors("open"):
            await self._link.open()

    async def acquire(self, claim: Claim) -> Grant | Held:
        """See `fencing_sdk.abc.Backend.acquire`."""
        return await self._acquire(claim, lambda arguments: self._link.ask(self._calls.acquire, arguments))

    def keeps(self, guard: Guard) -> bool:
        """See `fencing_sdk.abc.SupportsFence.keeps`."""
        return self._where is not None and isinstance(guard, TransactionalGuard) and guard.database == self._where

    async def acquire_fenced(self, claim: Claim, fences: Sequence[tuple[Guard, str]]) -> Grant | Held:
        """See `fencing_sdk.abc.SupportsFence.acquire_fenced`. On another connection, because fences are waited for."""
        joint = JointGrant(self._calls.acquire, claim, fences)
        return await self._acquire(claim, lambda arguments: self._joint.run(joint.with_arguments(arguments)))

    async def _acquire(self, claim: Claim, ask: Callable[[Arguments], Awaitable[Row | None]]) -> Grant | Held:
        place = self._line.place(claim)
        channel, word = (None, None) if place is None else (place.channel, place.word)
        arguments = self._calls.acquisition(claim, channel, word)
        with our_errors("acquire"):
            row = await ask(arguments)
            answer = outcome(row, None if place is None else poll(deaf=self._line.deaf))
        self._sweep.now_and_then()
        if place is not None:
            place.served = isinstance(answer, Grant)
        return answer

    async def renew(self, claims: Sequence[Claim]) -> Sequence[Renewal]:
        """See `fencing_sdk.abc.Backend.renew`."""
        outcomes = [Renewal.REFUSED] * len(claims)
        asked = renewable(claims)
        batches = [asked[start : start + _BATCH] for start in range(0, len(asked), _BATCH)]
        failures: list[Exception] = []
        for batch in batches:
            try:
                found = await self._renew([claims[place] for place in batch])
            except Exception as error:  # noqa: BLE001  (it is raised below, unless another batch has answers)
                failures.append(error)
                found = [Renewal.UNKNOWN] * len(batch)
            for place, renewal in zip(batch, found, strict=True):
                outcomes[place] = renewal
        if failures and len(failures) == len(batches):
            with our_errors("renew"):
                raise failures[0]
        return outcomes

    async def _renew(self, claims: Sequence[Claim]) -> list[Renewal]:
        """Renew in one statement; what somebody keeps locked is asked about once more, alone, with some patience."""
        found = await self._renewed(claims, 0)
        locked = [place for place, renewal in enumerate(found) if renewal is Renewal.UNKNOWN]
        if locked:
            again = await self._renewed([claims[place] for place in locked], PATIENCE_MS)
            for place, renewal in zip(locked, again, strict=True):
                found[place] = renewal
        return found

    async def _renewed(self, claims: Sequence[Claim], patience: int) -> list[Renewal]:
        row = await self._link.ask(self._calls.renew, self._calls.renewal(claims, patience), urgent=True)
        return renewals(row, len(claims))

    async def release(self, claim: Claim) -> None:
        """See `fencing_sdk.abc.Backend.release`."""
        with our_errors("release"):
            await self._link.ask(self._calls.release, (claim.name, claim.owner), urgent=True, surely=True)

    async def inspect(self, name: str) -> Holder | None:
        """See `fencing_sdk.abc.Backend.inspect`."""
        with our_errors("inspect"):
            return holder(name, await self._link.ask(self._calls.inspect, (name,)))

    async def aclose(self) -> None:
        """Close the connections. Grants stay until they are released or expire."""
        await self._sweep.aclose()
        await self._line.aclose()
        await self._joint.aclose()
        await self._link.aclose()

    def schema_sql(self) -> str:
        """See `fencing_sdk.abc.SupportsSchema.schema_sql`."""
        return schema_sql(self._choices.schema)

    async def create_schema(self) -> None:
        """See `fencing_sdk.abc.SupportsSchema.create_schema`."""
        with our_errors("create_schema"):
            await self._dialer.create()

    def queue(self, claim: Claim) -> AbstractAsyncContextManager[Turn]:
        """See `fencing_sdk.abc.SupportsQueue.queue`."""
        return self._stand(claim)

    @asynccontextmanager
    async def _stand(self, claim: Claim) -> AsyncIterator[Turn]:
        with our_errors("queue"):
            place = await self._line.stand(claim)
        try:
            yield place
        finally:
            await self._line.leave(place)


def from_url(url: str, **options: object) -> PostgresqlBackend:
    """
    Make a backend for a ``postgresql://`` URL; `PostgresqlBackend` explains the options, which may stand in its query.

    Raises:
        ConfigurationError: the URL or an option cannot be used.
    """
    chosen: dict[str, Any] = take_options(url, options, (*OPTIONS, *DRIVER_OPTIONS))
    ours = {name: chosen.pop(name) for name in OPTIONS if name in chosen}
    return PostgresqlBackend(with_options(url, chosen, OPTIONS), **ours)
