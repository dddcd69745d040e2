"""
Leased rows in PostgreSQL: the statements, on connections of their own, which no pool of the application can starve.

The connections may forget what they committed last when the server crashes (``synchronous_commit = off``): a claim that
was forgotten costs a repetition of its work, and tokens go on growing, because they follow the server's clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from fencing_sdk._values.claim import Seen
from fencing_sdk._values.clock import JITTER
from fencing_sdk._values.url import read_postgresql_url
from fencing_sdk.backends._shared.background_task import BackgroundTask
from fencing_sdk.backends._shared.error_translation import ErrorTranslation, one_line
from fencing_sdk.backends.postgresql import DRIVER_OPTIONS
from fencing_sdk.backends.postgresql.dial import PostgresqlConnection, PostgresqlDialer
from fencing_sdk.backends.postgresql.driver import DriverRow, PostgresqlSession, code_of
from fencing_sdk.backends.postgresql.errors import translated
from fencing_sdk.backends.postgresql.schema import DEFAULT_SCHEMA
from fencing_sdk.errors import BackendError, BackendRefusedError
from fencing_sdk.guards.sql._fence_table import quoted
from fencing_sdk.guards.sql._transaction import POSTGRESQL
from fencing_sdk.rows._store import Renewal
from fencing_sdk.rows._table import (
    BY,
    STORE,
    TOKEN,
    UNTIL,
    Column,
    RowFacts,
    Table,
    names_of_values,
    seen_lease,
    take_shape,
    warn_of_triggers,
    with_values,
)

_PATIENCE = 4.0
_RETRY_AFTER = 1.0
_RETRY_BEHIND_A_PROXY = 60.0
_SETTINGS = (
    "SELECT pg_catalog.set_config('synchronous_commit', 'off', false), "
    "pg_catalog.set_config('default_transaction_isolation', 'read committed', false)"
)
_NEXT = "greatest({name}.lease_token + 1, (extract(epoch FROM clock_timestamp()) * 100000)::bigint)"
_SHAPE = """
SELECT a.attname, pg_catalog.format_type(a.atttypid, -1), a.attnotnull,
       EXISTS (SELECT FROM pg_catalog.pg_index i WHERE i.indrelid = a.attrelid AND a.attnum = ANY (i.indkey)),
       EXISTS (SELECT FROM pg_catalog.pg_index i
               WHERE i.indrelid = a.attrelid AND i.indisunique AND i.indpred IS NULL
                     AND i.indkey::text = a.attnum::text)
FROM pg_catalog.pg_attribute a
WHERE a.attrelid = pg_catalog.to_regclass($1) AND a.attnum > 0 AND NOT a.attisdropped
"""
_TRIGGERS = """
SELECT tgname FROM pg_catalog.pg_trigger
WHERE tgrelid = pg_catalog.to_regclass($1) AND NOT tgisinternal AND tgenabled <> 'D' AND tgtype & 16 <> 0
      AND tgattr::text = ''
"""
_FACTS = """
SELECT extract(epoch FROM clock_timestamp())::float8, array_agg((name, reset_val::float8 / 1000) ORDER BY name)
FROM pg_catalog.pg_settings WHERE name IN ('idle_in_transaction_session_timeout', 'transaction_timeout')
"""
_KINDS = {UNTIL: ("timestamp with time zone",), TOKEN: ("bigint",)}
_OF_THE_APPLICATION = {"42601", "42703", "42883", "42P01", "42804", "42702", "42P02", "22P02", "22007", "42P18"}
"""Codes of a mistake in the SQL, the values or the columns of the application."""


class PostgresqlRows:
    """Statements for leased rows on PostgreSQL, from version 12 on."""

    dialect = POSTGRESQL

    def __init__(self, url: str) -> None:
        parts = read_postgresql_url(url, known=DRIVER_OPTIONS)
        self._dialer = _RowDialer(
            parts.each_host(),
            schema=DEFAULT_SCHEMA,
            create=False,
            pooled=False,
            patience=_PATIENCE,
            arguments={"server_settings": {"application_name": "fencing-rows"}},
        )
        self._renewals = PostgresqlConnection(self._dialer)
        self._claims = PostgresqlConnection(self._dialer)
        self._listening: dict[str, BackgroundTask] = {}
        self._statements: dict[Table, tuple[str, Sequence[object]]] = {}

    async def open(self) -> None:
        await self._ask("open", "SELECT 1")

    async def check(self, table: Table) -> None:
        name, _ = table.names()
        columns = {row[0]: Column(*row[1:]) for row in await self._ask("open", _SHAPE, name)}
        take_shape(table, columns, _KINDS)
        triggers = await self._ask("open", _TRIGGERS, name)
        warn_of_triggers(table, triggers, "declare it UPDATE OF the columns that it is for")

    async def claim(self, table: Table, count: int, label: str | None) -> Sequence[Mapping[str, Any]]:
        statement, values = self._claim_of(table)
        own = (count, table.timing.ttl, label) if table.by else (count, table.timing.ttl)
        return [dict(row) for row in await self._ask("acquire", statement, *own, *values, on=self._claims)]

    def _claim_of(self, table: Table) -> tuple[str, Sequence[object]]:
        if (known := self._statements.get(table)) is not None:
            return known
        name, key = table.names()
        short = quoted(table.name.rpartition(".")[2])
        texts = (table.where, table.order, table.on_claim)
        own = 3 if table.by else 2
        names = list(dict.fromkeys(value for text in texts for value in names_of_values(text)))
        where, order, on_claim = (with_values(text, lambda value: f"${own + 1 + names.index(value)}") for text in texts)
        more = (f", {BY} = $3" if table.by else "") + (f", {on_claim}" if on_claim else "")
        # No claim waits for a row (SKIP LOCKED). The time of the statement costs less for each row than the clock, and
        # is never late: a row that was renewed meanwhile is looked at again, as it is then.
        statement = f"""
            WITH next AS MATERIALIZED (
                SELECT {key} AS fencing_key FROM {name} WHERE ({where}) AND leased_until < statement_timestamp()
                ORDER BY {order} LIMIT $1 FOR NO KEY UPDATE SKIP LOCKED)
            UPDATE {name} SET leased_until = clock_timestamp() + make_interval(secs => $2),
                lease_token = {_NEXT.format(name=short)}{more}
            FROM next WHERE {short}.{key} = next.fencing_key RETURNING {short}.*"""  # noqa: S608
        self._statements[table] = statement, [table.values[value] for value in names]
        return self._statements[table]

    async def lease_for(self, table: Table, rows: Sequence[Renewal], *, running: bool) -> set[tuple[Any, int]]:
        name, key = table.names()
        keys, tokens, seconds = (list(column) for column in zip(*rows, strict=True))
        above = "clock_timestamp()" if running else "'epoch'"
        # One row that a transaction has locked delays no other (SKIP LOCKED).
        done = await self._ask(
            "renew" if running else "release",
            f"""
            WITH mine AS MATERIALIZED (
                SELECT r.{key} AS fencing_key, mine.seconds FROM {name} AS r
                JOIN unnest($1::{table.key_type}[], $2::bigint[], $3::float8[]) AS mine(key, token, seconds)
                    ON r.{key} = mine.key AND r.lease_token = mine.token
                WHERE r.leased_until > {above} FOR NO KEY UPDATE OF r SKIP LOCKED)
            UPDATE {name} AS r
            SET leased_until = CASE WHEN mine.seconds > 0 THEN clock_timestamp() + make_interval(secs => mine.seconds)
                                    ELSE 'epoch' END
            FROM mine WHERE r.{key} = mine.fencing_key RETURNING r.{key}, r.lease_token""",  # noqa: S608
            keys,
            tokens,
            seconds,
        )
        return {(row[0], row[1]) for row in done}

    async def last_claims(self, table: Table, keys: Sequence[Any]) -> Mapping[Any, tuple[int, bool]]:
        name, key = table.names()
        look = f"SELECT {key}, lease_token, leased_until > clock_timestamp() FROM {name} WHERE {key} = ANY"  # noqa: S608
        seen = await self._ask("renew", f"{look}($1::{table.key_type}[])", keys)
        return {row[0]: (row[1], row[2]) for row in seen}

    async def leased(
        self, table: Table, keys: Sequence[str] | None, after: str | None, limit: int
    ) -> Mapping[str, Seen]:
        name, key = table.names()
        those = f"r.{key} = ANY($1::text[]::{table.key_type}[])"
        if keys is None:
            those = "$1::text IS NULL" if after is None else f"r.{key} > $1::text::{table.key_type}"
        found = await self._ask(
            "list" if keys is None else "inspect",
            f"SELECT r.{key}::text, r.lease_token, extract(epoch FROM r.leased_until - clock_timestamp())::float8, "  # noqa: S608
            f"extract(epoch FROM clock_timestamp())::float8, {BY if table.by else 'NULL'} FROM {name} AS r "
            f"WHERE r.leased_until > clock_timestamp() AND {those} ORDER BY r.{key} LIMIT {limit:d}",
            after if keys is None else keys,
        )
        return {row[0]: seen_lease(*row[1:]) for row in found}

    async def end(self, table: Table, key: str, token: int) -> bool:
        """Take a row away. Wait for a transaction that has it locked, but not long."""
        name, own = table.names()
        ended = await self._ask(
            "revoke",
            f"""
            UPDATE {name} AS r SET leased_until = clock_timestamp(), lease_token = {_NEXT.format(name="r")}
            FROM (SELECT pg_catalog.set_config('lock_timeout', '2s', true) OFFSET 0) AS patience
            WHERE r.{own} = $1::text::{table.key_type} AND r.lease_token = $2 AND r.leased_until > clock_timestamp()
            RETURNING r.lease_token""",  # noqa: S608
            key,
            token,
        )
        return bool(ended)

    async def facts(self) -> RowFacts:
        ((now, limits),) = await self._ask("diagnose", _FACTS)
        with ErrorTranslation(_translated, "diagnose"):
            return RowFacts(now, dict(limits), not await self._renewals.run(lambda session: session.talks_to_server()))

    def listen(self, channel: str, ring: Callable[[], None]) -> None:
        """Start to listen, unless listening already. A notification that is lost costs one poll."""
        if channel not in self._listening:
            self._listening[channel] = BackgroundTask()
        self._listening[channel].start(partial(self._listen, channel, ring), "fencing-listen")

    async def _listen(self, channel: str, ring: Callable[[], None]) -> None:
        while True:
            pause = _RETRY_AFTER
            with suppress(Exception):  # without a connection, clients poll
                session = await PostgresqlDialer.dial(self._dialer, missing="")  # settings are for statements
                try:
                    ended = asyncio.Event()
                    session.on_end(ended.set)
                    if await session.talks_to_server():
                        await session.listen(channel, lambda _: ring())
                        ring()  # for what was committed before
                        await ended.wait()
                    else:  # LISTEN would stay behind in the session of another program
                        pause = _RETRY_BEHIND_A_PROXY
                finally:
                    await session.aclose()
            await asyncio.sleep(pause * JITTER.uniform(0.5, 1.0))

    async def aclose(self) -> None:
        for listening in self._listening.values():
            await listening.aclose(limit=_PATIENCE)
        for connection in (self._claims, self._renewals):
            await connection.aclose()

    async def _ask(
        self, operation: str, statement: str, *values: object, on: PostgresqlConnection | None = None
    ) -> Sequence[DriverRow]:
        connection = self._renewals if on is None else on
        with ErrorTranslation(_translated, operation):
            return await connection.run(lambda session: session.fetch(statement, values), urgent=operation == "renew")


class _RowDialer(PostgresqlDialer):
    """Opens sessions that wait for no disk. Behind a proxy that pools, settings would stay with another client."""

    async def dial(self, *, missing: str = "") -> PostgresqlSession:
        """Connect to the server that takes writes."""
        del missing  # nothing is created here
        session = await super().dial(missing="")
        if await session.talks_to_server():
            await session.ask(_SETTINGS, ())
        return session


def _translated(operation: str, error: Exception) -> BackendError:
    code = code_of(error)
    if code in _OF_THE_APPLICATION:
        return BackendRefusedError(STORE, operation, f"the database refuses: {one_line(*error.args[:1])} ({code})")
    if type(error).__name__ == "DataError" and not code:
        detail = "a value of values= has another type than the column that it is compared with"
        return BackendRefusedError(STORE, operation, detail)
    translation = translated(operation, error)
    return type(translation)(STORE, operation, translation.detail)
