"""PostgreSQL: every misconfiguration is planted on a real server, and found by the name of its check."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import asyncpg
import pytest
from diagnosing import ERROR, NOTE, WARNING, by_check, diagnosed, found
from postgresql_replicas import Replicated
from postgresql_server import PostgresqlServer

from fencing_sdk.backends.postgresql.options import PostgresqlOptions
from fencing_sdk.diagnosis.checks import judged
from fencing_sdk.diagnosis.postgresql import CHECKS, PostgresqlFacts

if TYPE_CHECKING:
    from postgresql_fixtures import StartPostgresql

pytest_plugins = ["postgresql_fixtures"]

SOUND = {"fsync": True, "full_page_writes": True}
ON_TEST_SERVERS = {"postgresql.fsync", "postgresql.full-page-writes"}
"""What is found on every server of the tests, which are in a hurry."""


async def test_nothing_is_found_on_a_sound_server(start_postgresql: StartPostgresql):
    server = await asyncio.to_thread(start_postgresql, **SOUND)
    diagnosis = await diagnosed(server.url)
    assert by_check(diagnosis) == {}
    assert abs(diagnosis.measurements.clock_difference) < 1
    assert diagnosis.measurements.handed_on is not None
    assert await server.value("SELECT count(*) FROM fencing.fencing_lock WHERE owner IS NOT NULL") == 0
    assert await server.value("SELECT count(*) FROM fencing.fencing_waiter") == 0


PLANTED = {
    "nothing is synced": ({"fsync": False}, "postgresql.fsync", ERROR),
    "torn pages": ({"full_page_writes": False}, "postgresql.full-page-writes", WARNING),
    "commits are not waited for": ({"synchronous_commit": False}, "postgresql.synchronous-commit", NOTE),
    "commits are waited for here only": ({"synchronous_commit": "local"}, "postgresql.synchronous-commit", NOTE),
    "dead rows stay": ({"autovacuum": False}, "postgresql.autovacuum", WARNING),
    "read-only": ({"default_transaction_read_only": True}, "postgresql.read-only", ERROR),
}


@pytest.mark.parametrize("planted", PLANTED)
async def test_a_setting_that_breaks_a_promise_is_found(start_postgresql: StartPostgresql, planted: str):
    settings, check, severity = PLANTED[planted]
    server = await asyncio.to_thread(start_postgresql, **SOUND | settings)
    findings = await found(server.url)
    assert findings[check].severity == severity
    assert set(findings) <= {check, "store.reachable"}
    assert all(finding.reason and finding.fix for finding in findings.values())


async def test_a_server_with_few_connections_left_is_found(start_postgresql: StartPostgresql):
    server = await asyncio.to_thread(start_postgresql, **SOUND, max_connections=20, superuser_reserved_connections=3)
    held = [await asyncpg.connect(server.url) for _ in range(14)]
    try:
        assert (await found(server.url))["postgresql.connections"].severity == WARNING
    finally:
        for connection in held:
            connection.terminate()


@pytest.mark.parametrize(("tokens", "severity"), [("hybrid", WARNING), ("counter", ERROR)])
async def test_standbys_that_no_commit_waits_for_are_found(postgresql_group: Replicated, tokens: str, severity):
    findings = await found(postgresql_group.primary.url, tokens=tokens)
    assert findings["postgresql.standbys"].severity == severity
    assert findings["postgresql.standbys"].fix.endswith(
        "SELECT pg_reload_conf(); every commit of this server then waits for that standby, and hangs while it is away: "
        "add a second one"
    )


async def test_a_standby_is_found(postgresql_group: Replicated):
    findings = await found(postgresql_group.standby.url)
    assert findings["postgresql.standby"].severity == findings["store.reachable"].severity == ERROR
    place = f"127.0.0.1:{postgresql_group.standby.port}"
    assert f"{place}: a standby takes no writes; name the primary" in findings["store.reachable"].what


@pytest.mark.parametrize("mode", ["session", "transaction"])
async def test_a_pooler_is_found(mode: str, postgresql_server: PostgresqlServer):
    """One of transactions, and in any mode one that may refuse for longer than a lease lives."""
    from pgbouncer import PgBouncer
    from required_program import require_program

    bouncer = PgBouncer(postgresql_server, binary=require_program("pgbouncer"), pool_mode=mode, default_pool_size=10)
    with bouncer:
        findings = await found(bouncer.url)
    finding = findings["postgresql.pooler-retry"]
    assert finding.severity == NOTE
    assert "server_login_retry" in finding.reason
    assert "server_login_retry" in finding.fix
    transactions = findings.get("postgresql.pooler")
    assert (transactions and transactions.severity) == (WARNING if mode == "transaction" else None)


async def test_missing_tables_and_rights_are_found(postgresql_server: PostgresqlServer):
    await postgresql_server.execute("CREATE ROLE app LOGIN")
    url = postgresql_server.url_as("app")
    assert (await found(url))["postgresql.schema"].severity == ERROR
    assert (await found(postgresql_server.url, create=False))["postgresql.schema"].severity == ERROR
    assert set(await found(postgresql_server.url)) == ON_TEST_SERVERS  # and this made the tables
    assert (await found(url))["postgresql.rights"].severity == ERROR
    await postgresql_server.execute("GRANT USAGE ON SCHEMA fencing TO app; GRANT SELECT ON fencing.fencing_lock TO app")
    finding = (await found(url))["postgresql.rights"]
    assert "fencing_lock" in finding.what
    await postgresql_server.execute(finding.fix)
    assert set(await found(url)) == ON_TEST_SERVERS


async def test_a_login_that_is_refused_is_found_without_its_password(start_postgresql: StartPostgresql):
    server = await asyncio.to_thread(start_postgresql, hba=["host all all 127.0.0.1/32 scram-sha-256"])
    findings = await found(server.url_as("postgres", "hunter2"))
    assert findings["postgresql.host"].severity == ERROR
    assert "hunter2" not in repr(findings)


async def test_a_server_that_is_down_or_hangs_is_found_in_bounded_time(postgresql_server: PostgresqlServer):
    await asyncio.to_thread(postgresql_server.pause)
    async with asyncio.timeout(60):
        findings = await found(postgresql_server.url)
    assert {"store.reachable", "postgresql.host"} == set(findings)
    await asyncio.to_thread(postgresql_server.resume)
    findings = await found(
        postgresql_server.url.replace(f":{postgresql_server.port}/", f":1,127.0.0.1:{postgresql_server.port}/")
    )
    assert findings["postgresql.host"].severity == WARNING


def test_an_old_version_and_an_open_network_are_found():
    options = PostgresqlOptions(schema="a", hybrid=True, create=True, pooled=False, connect_timeout=1.0)
    facts = PostgresqlFacts({"version": "110022", "complete": True, "usage": True}, options)
    assert {"postgresql.version", "postgresql.tls"} == {finding.check for finding in judged(CHECKS, facts)}
