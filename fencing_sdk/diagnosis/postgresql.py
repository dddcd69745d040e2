"""
What a PostgreSQL server reports of itself, and what of that breaks a promise.

The diagnosis asks each host on a connection of its own. It creates nothing, so the diagnosis works before the tables
are there.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from fencing_sdk._values.reports import Finding, error
from fencing_sdk._values.url import PostgresqlUrl
from fencing_sdk.backends._shared.error_translation import NoConnectionError
from fencing_sdk.backends.postgresql import PostgresqlBackend
from fencing_sdk.backends.postgresql.connection.driver import DriverConnection
from fencing_sdk.backends.postgresql.errors import translated, translating
from fencing_sdk.backends.postgresql.options import PostgresqlOptions
from fencing_sdk.backends.postgresql.schema import newest_function, quoted
from fencing_sdk.diagnosis.checks import (
    COUNTED,
    ERROR,
    NOTE,
    WARNING,
    Check,
    StoreDiagnosis,
    host_down,
    judged,
    unencrypted,
)

_LIMIT = 8.0
_OLDEST = 12
_NEARLY_FULL = 0.9
_RELOAD = "; SELECT pg_reload_conf()"
_PID = "SELECT pg_catalog.pg_backend_pid()"
_FACTS = """
SELECT jsonb_build_object(
    'version', current_setting('server_version_num'), 'standby', pg_is_in_recovery(),
    'settings', (SELECT jsonb_object_agg(name, setting) FROM pg_settings WHERE name IN (
        'fsync', 'full_page_writes', 'synchronous_commit', 'synchronous_standby_names', 'autovacuum',
        'max_connections', 'superuser_reserved_connections', 'default_transaction_read_only')),
    'connections', (SELECT sum(numbackends)::int FROM pg_stat_database),
    'standbys', (SELECT count(*) FROM pg_stat_replication),
    'local', coalesce(inet_server_addr() <<= '127.0.0.0/8' OR inet_server_addr() = '::1', true),
    'tls', coalesce((SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()), false),
    'complete', CASE WHEN has_schema_privilege(to_regnamespace($2), 'USAGE')
        THEN to_regprocedure($1) IS NOT NULL ELSE false END,
    'exists', to_regnamespace($2) IS NOT NULL,
    'usage', coalesce(has_schema_privilege(to_regnamespace($2), 'USAGE'), false),
    'create', has_database_privilege(current_database(), 'CREATE'),
    'forbidden', (SELECT coalesce(jsonb_agg(relname ORDER BY relname), '[]') FROM pg_class
        WHERE relnamespace = to_regnamespace($2) AND relkind = 'r' AND relname LIKE 'fencing%'
        AND NOT (has_table_privilege(oid, 'SELECT') AND has_table_privilege(oid, 'INSERT')
             AND has_table_privilege(oid, 'UPDATE') AND has_table_privilege(oid, 'DELETE'))),
    'user', current_user
)::text
"""


class PostgresqlFacts:
    """
    One server.

    Args:
        found: Its answer to the question above.

        options: Those of the client.

        pooled: Whether transactions of one connection run in different processes of the server.

        proxied: Whether the process of the server is not the one that it named when the connection was opened.
    """

    def __init__(
        self, found: Mapping[str, Any], options: PostgresqlOptions, *, pooled: bool = False, proxied: bool = False
    ) -> None:
        settings: dict[str, str] = found.get("settings") or {}
        exists, forbidden, user = (bool(found.get("exists")), found.get("forbidden") or (), str(found.get("user")))
        self.settings, self.standby = settings, bool(found.get("standby"))
        self.pooled, self.proxied = pooled, pooled or proxied
        self.exposed = not found.get("tls") and not found.get("local")
        self.version = int(found.get("version") or 0) // 10_000
        self.used = found.get("connections") or 0
        self.limit = int(settings.get("max_connections", 0)) - int(settings.get("superuser_reserved_connections", 0))
        self.standbys = found.get("standbys") or 0
        alone = "that standby, and hangs while it is away: add a second one"
        self.waits_for = alone if self.standbys == 1 else "one of them"
        self.forgetting = WARNING if options.hybrid else ERROR
        self.repeat = "" if options.hybrid else COUNTED
        self.schema, self.place = f"{options.schema!a}", quoted(options.schema)
        self.user, self.role = f"{user!a}", quoted(user)
        closed, complete = exists and not found.get("usage"), bool(found.get("complete"))
        self.lacking = f"schema {self.schema}" if closed else ", ".join(map(str, forbidden)) if complete else ""
        makes = options.create and (found.get("create") or exists)
        self.incomplete = not (closed or complete or makes)


# A row reads: the check, how severe, when; what, why; what to do.
# fmt: off
CHECKS: tuple[Check[PostgresqlFacts], ...] = (
    Check("postgresql.version", ERROR, lambda it: it.version < _OLDEST,
        "version {it.version}", "the functions need PostgreSQL 12", "upgrade the server"),
    Check("postgresql.fsync", ERROR, lambda it: it.settings.get("fsync") == "off",
        "fsync is off", "a power failure may destroy the database: leases are lost, and tokens may fall",
        f"ALTER SYSTEM SET fsync = on{_RELOAD}"),
    Check("postgresql.full-page-writes", WARNING, lambda it: it.settings.get("full_page_writes") == "off",
        "full_page_writes is off", "a power failure may destroy pages with tokens",
        f"ALTER SYSTEM SET full_page_writes = on{_RELOAD}"),
    Check("postgresql.synchronous-commit", NOTE, lambda it: it.settings.get("synchronous_commit") in {"off", "local"},
        "synchronous_commit is {it.settings[synchronous_commit]}",
        "grants are committed with on all the same, but the fences and data that locks protect are not",
        f"ALTER SYSTEM SET synchronous_commit = on{_RELOAD}"),
    Check("postgresql.read-only", ERROR, lambda it: it.settings.get("default_transaction_read_only") == "on",
        "default_transaction_read_only is on", "no lock can be taken",
        f"ALTER SYSTEM RESET default_transaction_read_only{_RELOAD}; look at the role and the database too"),
    Check("postgresql.standbys", lambda it: it.forgetting,
        lambda it: it.standbys and not it.settings.get("synchronous_standby_names"),
        "{it.standbys} standbys, and none is synchronous",
        "a standby that missed the latest grants grants those locks again when it is promoted{it.repeat}",
        f"ALTER SYSTEM SET synchronous_standby_names = 'ANY 1 (*)'{_RELOAD}; "
        "every commit of this server then waits for {it.waits_for}"),
    Check("postgresql.rights", ERROR, lambda it: it.lacking,
        "role {it.user} lacks rights on {it.lacking}", "locks cannot be taken, or not be released",
        "GRANT USAGE ON SCHEMA {it.place} TO {it.role}; "
        "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {it.place} TO {it.role}"),
    Check("postgresql.schema", ERROR, lambda it: it.incomplete,
        "schema {it.schema} lacks tables or functions of this version", "no lock can be taken",
        "fencing init --url ..., as its owner"),
    Check("postgresql.connections", WARNING, lambda it: it.used > _NEARLY_FULL * it.limit,
        "{it.used} of {it.limit} connections are in use", "a client that reconnects may be refused, and lose leases",
        "ALTER SYSTEM SET max_connections to more and restart, or end idle connections"),
    Check("postgresql.autovacuum", WARNING, lambda it: it.settings.get("autovacuum") == "off",
        "autovacuum is off", "each renewal leaves a dead row, and locks get slower",
        f"ALTER SYSTEM SET autovacuum = on{_RELOAD}"),
    Check("postgresql.pooler", WARNING, lambda it: it.pooled,
        "a pooler gives each transaction to another process of the server",
        "no NOTIFY arrives: waiters ask four times a second",
        "give the locks a URL that leads to the server directly, or pool sessions; else pooled=true saves an error"),
    Check("postgresql.pooler-retry", NOTE, lambda it: it.proxied,
        "a pooler stands before the server",
        "PgBouncer that could not reach the server refuses everyone for server_login_retry, 15 s by default: "
        "after a restart of the server, leases with a ttl of 15 s are lost",
        "server_login_retry = 1 in pgbouncer.ini, or a longer ttl"),
    unencrypted("postgresql.tls", lambda it: it.exposed, "ssl = on in postgresql.conf, sslmode=verify-full"),
)
# fmt: on


class PostgresqlDiagnosis(StoreDiagnosis[PostgresqlBackend]):
    """The checks of one store."""

    async def diagnose(self, ttl: float) -> Sequence[Finding]:  # noqa: ARG002  (no setting depends on it)
        """See `fencing_sdk.abc.SupportsDiagnosis.diagnose`."""
        hosts = self.backend._dialer.hosts
        answers = await asyncio.gather(*map(self._ask, hosts), return_exceptions=True)
        found = list(zip((host.place for host in hosts), answers, strict=True))
        facts = [(place, answer) for place, answer in found if isinstance(answer, PostgresqlFacts)]
        findings = [_down(place, answer, fatal=not facts) for place, answer in found if isinstance(answer, Exception)]
        primaries = [(place, each) for place, each in facts if not each.standby]
        if facts and not primaries:
            what = f"{', '.join(place for place, _ in facts)}: every host is a standby"
            reason = "a standby takes no writes, so it grants no locks"
            fix = "name the primary in the URL too, or promote a standby: SELECT pg_promote()"
            findings.append(error("postgresql.standby", what, reason, fix))
        return [*findings, *(finding for place, each in primaries for finding in judged(CHECKS, each, place))]

    async def server_time(self) -> float | None:
        """See `fencing_sdk.abc.SupportsDiagnosis.server_time`."""
        with translating("diagnose"):
            row = await self.backend._connection.ask("SELECT extract(epoch FROM clock_timestamp())::float8", ())
        return None if row is None else float(row[0])

    async def _ask(self, host: PostgresqlUrl) -> PostgresqlFacts:
        options = self.backend._options
        async with asyncio.timeout(_LIMIT):
            connection = await self.backend._dialer.open_host(host)
            try:
                # A prepared statement would be lost with a pooler, and the driver prepares each one with parameters.
                literals = (_literal(text) for text in (newest_function(options.schema), quoted(options.schema)))
                row = await connection.fetchrow(_FACTS.replace("$1", next(literals)).replace("$2", next(literals)))
                process = await _process(connection)
                pooled = await self._is_pooled(connection, host)
                proxied = process != connection.get_server_pid()
            finally:
                connection.terminate()
        assert row is not None
        return PostgresqlFacts(json.loads(row[0]), options, pooled=pooled, proxied=proxied)

    async def _is_pooled(self, connection: DriverConnection, host: PostgresqlUrl) -> bool:
        """
        Return whether transactions of one connection run in different processes of the server.

        A second connection takes the process that the first one had, and keeps it by a transaction. If there is a
        pooler of transactions, the first one then gets another.
        """
        before = await _process(connection)
        other = await self.backend._dialer.open_host(host)
        try:
            await other.execute("BEGIN")
            await _process(other)
            after = await _process(connection)
            await other.execute("ROLLBACK")
        finally:
            other.terminate()
        return before != after


async def _process(connection: DriverConnection) -> object:
    row = await connection.fetchrow(_PID)
    assert row is not None
    return row[0]


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _down(place: str, failure: Exception, *, fatal: bool) -> Finding:
    detail = translated("diagnose", failure).detail
    what = detail if isinstance(failure, NoConnectionError) else f"{place}: {detail}"
    fix = "start the server, or correct its address, its login, pg_hba.conf or the firewall"
    return host_down("postgresql.host", what, fix, fatal=fatal)
