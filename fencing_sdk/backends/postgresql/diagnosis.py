"""
What a PostgreSQL server tells of itself, and what of that breaks a promise.

Each host is asked on a connection of its own. Nothing is created, so the diagnosis works before the tables are there.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from fencing_sdk._values.findings import Finding, error, note, warning
from fencing_sdk._values.postgresql_url import PostgresqlUrl
from fencing_sdk.backends._shared.error_translation import NoConnectionError
from fencing_sdk.backends.postgresql.connection.dial import PostgresqlDialer
from fencing_sdk.backends.postgresql.connection.driver import DriverConnection, DriverRow
from fencing_sdk.backends.postgresql.errors import translated
from fencing_sdk.backends.postgresql.options import PostgresqlOptions
from fencing_sdk.backends.postgresql.schema import newest_function, quoted

_LIMIT = 8.0
_OLDEST = 120_000
_NEARLY_FULL = 0.9
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


@dataclass(frozen=True, slots=True)
class PostgresqlFacts:
    """One server."""

    host: str
    told: Mapping[str, object]
    pooled: bool
    """Whether transactions of one connection run in different processes of the server."""
    proxied: bool
    """Whether the process of the server is not the one that was told when the connection was opened."""

    def setting(self, name: str) -> str:
        """A setting of the server; empty where it is not known."""
        settings = self.told.get("settings")
        return str(settings.get(name, "")) if isinstance(settings, dict) else ""

    def number(self, name: str) -> int:
        """A number that was told."""
        return int(str(self.told.get(name) or 0))

    def is_true(self, name: str) -> bool:
        """Whether something was told to be so."""
        return self.told.get(name) is True


class PostgresqlDiagnosis:
    """The checks of one store."""

    def __init__(self, dialer: PostgresqlDialer, options: PostgresqlOptions) -> None:
        self._dialer = dialer
        self._options = options

    async def run(self) -> list[Finding]:
        """Ask every host, and judge what they tell."""
        hosts = self._dialer.hosts
        answers = await asyncio.gather(*map(self._ask, hosts), return_exceptions=True)
        facts = [answer for answer in answers if isinstance(answer, PostgresqlFacts)]
        findings: list[Finding] = []
        for host, answer in zip(hosts, answers, strict=True):
            if isinstance(answer, Exception):
                findings.append(_unreachable(host.place, answer, is_fatal=not facts))
        primaries = [each for each in facts if not each.is_true("standby")]
        if facts and not primaries:
            findings.append(_only_standbys(facts))
        return [*findings, *(finding for each in primaries for finding in self._judge(each))]

    async def _ask(self, host: PostgresqlUrl) -> PostgresqlFacts:
        async with asyncio.timeout(_LIMIT):
            connection = await self._dialer.open_host(host)
            try:
                # A prepared statement would be lost with a pooler, and the driver prepares each one with parameters.
                schema = self._options.schema
                text = _FACTS.replace("$1", _literal(newest_function(schema))).replace("$2", _literal(quoted(schema)))
                row = await connection.fetchrow(text)
                process, told = await connection.fetchrow(_PID), connection.get_server_pid()
                pooled = await self._is_pooled(connection, host)
            finally:
                connection.terminate()
        assert row is not None
        assert process is not None
        return PostgresqlFacts(host.place, _told(row), pooled, process[0] != told)

    async def _is_pooled(self, connection: DriverConnection, host: PostgresqlUrl) -> bool:
        """
        Whether transactions of one connection run in different processes of the server.

        A second connection takes the process that the first one had, and keeps it by a transaction. If there is a
        pooler of transactions, the first one then gets another.
        """
        before = await connection.fetchrow(_PID)
        other = await self._dialer.open_host(host)
        try:
            await other.execute("BEGIN")
            await other.fetchrow(_PID)
            after = await connection.fetchrow(_PID)
            await other.execute("ROLLBACK")
        finally:
            other.terminate()
        assert before is not None
        assert after is not None
        return bool(before[0] != after[0])

    def _judge(self, facts: PostgresqlFacts) -> list[Finding]:
        checks: tuple[Callable[[PostgresqlFacts], Iterator[Finding]], ...] = (
            _version,
            _durability,
            self._standbys,
            self._schema,
            _load,
            _proxy,
            _encryption,
        )
        return [finding for check in checks for finding in check(facts)]

    def _standbys(self, facts: PostgresqlFacts) -> Iterator[Finding]:
        if facts.number("standbys") and not facts.setting("synchronous_standby_names"):
            what = f"{facts.host}: {facts.number('standbys')} standbys, and none is synchronous"
            reason = "a standby that missed the latest grants grants those locks again when it is promoted"
            reason += "" if self._options.hybrid else "; with tokens=counter, tokens repeat"
            mend = "ALTER SYSTEM SET synchronous_standby_names = 'ANY 1 (*)'; SELECT pg_reload_conf()"
            alone = facts.number("standbys") == 1
            waits = "that standby, and hangs while it is away: add a second one" if alone else "one of them"
            mend += f"; every commit of this server then waits for {waits}"
            yield (warning if self._options.hybrid else error)("postgresql.standbys", what, reason, mend)

    def _schema(self, facts: PostgresqlFacts) -> Iterator[Finding]:
        schema, user, forbidden = self._options.schema, str(facts.told.get("user")), facts.told.get("forbidden")
        if facts.is_true("exists") and not facts.is_true("usage"):
            yield _lacking(schema, user, f"schema {schema!a}")
        elif not facts.is_true("complete"):
            if self._options.create and (facts.is_true("create") or facts.is_true("exists")):
                return
            what = f"schema {schema!a} lacks tables or functions of this version"
            yield error("postgresql.schema", what, "no lock can be taken", "fencing init --url ..., as its owner")
        elif isinstance(forbidden, list) and forbidden:
            yield _lacking(schema, user, ", ".join(map(str, forbidden)))


def _lacking(schema: str, user: str, what: str) -> Finding:
    place, role = quoted(schema), quoted(user)
    mend = f"GRANT USAGE ON SCHEMA {place} TO {role}; "
    mend += f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {place} TO {role}"
    reason = "locks cannot be taken, or not be given back"
    return error("postgresql.rights", f"role {user!a} lacks rights on {what}", reason, mend)


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _told(row: DriverRow) -> Mapping[str, object]:
    told = json.loads(row[0])
    return told if isinstance(told, dict) else {}


def _unreachable(host: str, failure: Exception, *, is_fatal: bool) -> Finding:
    detail = translated("diagnose", failure).detail
    what = detail if isinstance(failure, NoConnectionError) else f"{host}: {detail}"
    reason = "no lock can be taken" if is_fatal else "one more loss, and no lock can be taken"
    mend = "start the server, or correct its address, its login, pg_hba.conf or the firewall"
    return (error if is_fatal else warning)("postgresql.host", what, reason, mend)


def _only_standbys(facts: list[PostgresqlFacts]) -> Finding:
    what = f"{', '.join(each.host for each in facts)}: every host is a standby"
    mend = "name the primary in the URL too, or promote a standby: SELECT pg_promote()"
    return error("postgresql.standby", what, "a standby takes no writes, so it grants no locks", mend)


def _version(facts: PostgresqlFacts) -> Iterator[Finding]:
    if facts.number("version") < _OLDEST:
        what = f"{facts.host}: version {facts.number('version') // 10_000}"
        yield error("postgresql.version", what, "the functions need PostgreSQL 12", "upgrade the server")


def _durability(facts: PostgresqlFacts) -> Iterator[Finding]:
    reload = "; SELECT pg_reload_conf()"
    if facts.setting("fsync") == "off":
        what, mend = f"{facts.host}: fsync is off", f"ALTER SYSTEM SET fsync = on{reload}"
        reason = "a power failure may destroy the database: leases are lost, and tokens may fall"
        yield error("postgresql.fsync", what, reason, mend)
    if facts.setting("full_page_writes") == "off":
        what, mend = f"{facts.host}: full_page_writes is off", f"ALTER SYSTEM SET full_page_writes = on{reload}"
        yield warning("postgresql.full-page-writes", what, "a power failure may destroy pages with tokens", mend)
    if (commit := facts.setting("synchronous_commit")) in {"off", "local"}:
        what, mend = (
            f"{facts.host}: synchronous_commit is {commit}",
            f"ALTER SYSTEM SET synchronous_commit = on{reload}",
        )
        reason = "grants are committed with on all the same, but the fences and data that locks protect are not"
        yield note("postgresql.synchronous-commit", what, reason, mend)
    if facts.setting("default_transaction_read_only") == "on":
        what = f"{facts.host}: default_transaction_read_only is on"
        mend = f"ALTER SYSTEM RESET default_transaction_read_only{reload}; look at the role and the database too"
        yield error("postgresql.read-only", what, "no lock can be taken", mend)


def _load(facts: PostgresqlFacts) -> Iterator[Finding]:
    reserved = int(facts.setting("superuser_reserved_connections") or 0)
    used, limit = facts.number("connections"), int(facts.setting("max_connections") or 0) - reserved
    if used > _NEARLY_FULL * limit:
        what = f"{facts.host}: {used} of {limit} connections are in use"
        mend = "ALTER SYSTEM SET max_connections to more and restart, or end idle connections"
        yield warning("postgresql.connections", what, "a client that reconnects may be refused, and lose leases", mend)
    if facts.setting("autovacuum") == "off":
        what, mend = f"{facts.host}: autovacuum is off", "ALTER SYSTEM SET autovacuum = on; SELECT pg_reload_conf()"
        yield warning("postgresql.autovacuum", what, "each renewal leaves a dead row, and locks get slower", mend)


def _proxy(facts: PostgresqlFacts) -> Iterator[Finding]:
    if facts.pooled:
        what = f"{facts.host}: a pooler gives each transaction to another process of the server"
        mend = (
            "give the locks a URL that leads to the server directly, or pool sessions; else pooled=true saves an error"
        )
        yield warning("postgresql.pooler", what, "no NOTIFY arrives: waiters ask four times a second", mend)
    if facts.pooled or facts.proxied:
        what = f"{facts.host}: a pooler stands before the server"
        reason = (
            "PgBouncer that could not reach the server refuses everyone for server_login_retry, 15 s by default: after "
            "a restart of the server, leases with a ttl of 15 s are lost"
        )
        yield note("postgresql.pooler-retry", what, reason, "server_login_retry = 1 in pgbouncer.ini, or a longer ttl")


def _encryption(facts: PostgresqlFacts) -> Iterator[Finding]:
    if not facts.is_true("tls") and not facts.is_true("local"):
        what, mend = (
            f"{facts.host}: the connection is not encrypted",
            "ssl = on in postgresql.conf, sslmode=verify-full",
        )
        yield note("postgresql.tls", what, "the network sees owner ids, which can release locks", mend)
