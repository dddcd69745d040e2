"""PostgreSQL: each misconfiguration is planted on a real server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from diagnosing import ERROR, WARNING, found
from postgresql_replicas import Replicated
from postgresql_server import PostgresqlServer

if TYPE_CHECKING:
    from postgresql_fixtures import StartPostgresql

pytest_plugins = ["postgresql_fixtures"]

SOUND = {"fsync": True, "full_page_writes": True}


async def test_nothing_is_found_on_a_sound_server(start_postgresql: StartPostgresql):
    server = await asyncio.to_thread(start_postgresql, **SOUND)
    assert await found(server.url) == {}
    assert await server.value("SELECT count(*) FROM fencing.fencing_ticket WHERE ended IS NULL") == 0


PLANTED = {
    "nothing is synced": ({"fsync": False}, "postgresql.fsync", ERROR),
    "torn pages": ({"full_page_writes": False}, "postgresql.full-page-writes", WARNING),
    "read-only": ({"default_transaction_read_only": True}, "store.reachable", ERROR),
}


@pytest.mark.parametrize("planted", PLANTED)
async def test_a_setting_that_breaks_a_promise_is_found(start_postgresql: StartPostgresql, planted: str):
    settings, check, severity = PLANTED[planted]
    server = await asyncio.to_thread(start_postgresql, **SOUND | settings)
    findings = await found(server.url)
    assert findings[check].severity == severity
    assert set(findings) <= {check, "store.reachable"}
    assert all(finding.reason and finding.fix for finding in findings.values())


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
    assert findings["store.reachable"].severity == ERROR
    place = f"127.0.0.1:{postgresql_group.standby.port}"
    assert f"{place}: a standby takes no writes; name the primary" in findings["store.reachable"].what


async def test_a_pooler_of_transactions_is_found_by_its_silence(postgresql_server: PostgresqlServer):
    from pgbouncer import PgBouncer
    from required_program import require_program

    options = {"pool_mode": "transaction", "default_pool_size": 10}
    with PgBouncer(postgresql_server, binary=require_program("pgbouncer"), **options) as bouncer:
        assert (await found(bouncer.url))["self-test.wake"].severity == WARNING


async def test_a_role_with_one_connection_has_its_settings_read_and_cannot_hand_on(start_postgresql: StartPostgresql):
    server = await asyncio.to_thread(start_postgresql, **SOUND | {"fsync": False})
    server.ask("CREATE ROLE alone LOGIN CONNECTION LIMIT 1")
    server.ask("GRANT CREATE ON DATABASE postgres TO alone")
    findings = await found(server.url_as("alone"))
    assert set(findings) == {"postgresql.fsync", "self-test.open a second connection"}
    assert "no connection left (53300)" in findings["self-test.open a second connection"].what


async def test_missing_tables_are_found(postgresql_server: PostgresqlServer):
    assert "store.reachable" in await found(postgresql_server.url, create=False)


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
