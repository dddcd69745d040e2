"""The bench of PostgreSQL: a server that is up answers, one that was harmed shows it; a standby follows."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import asyncpg
import pytest
from child_processes import state
from local_ports import free_port
from patience import until
from postgresql_server import FORGETFUL

pytest_plugins = ["postgresql_fixtures"]


# The bench itself: a server that is up answers, and one that was harmed shows it.


async def ping(url: str, **options) -> int:
    connection = await asyncpg.connect(url, **options)
    try:
        return await connection.fetchval("SELECT 1")
    finally:
        await connection.close()


async def test_the_shared_server_answers_and_its_database_is_empty(postgresql_server):
    assert await ping(postgresql_server.url) == 1
    assert postgresql_server.ask("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'") == [(0,)]
    assert postgresql_server.ask("SELECT count(*) FROM pg_roles WHERE rolname = $1", "left") == [(0,)]
    await postgresql_server.execute("CREATE TABLE behind (); CREATE ROLE left LOGIN; GRANT ALL ON behind TO left")
    assert await postgresql_server.value("SELECT count(*) FROM behind") == 0
    postgresql_server.pause()


test_what_a_test_leaves_behind_is_gone = test_the_shared_server_answers_and_its_database_is_empty


async def test_settings_reach_postgresql(start_postgresql):
    server = start_postgresql(max_connections=11, statement_timeout="7s", enable_seqscan=False, search_path="it's, x")
    found = await server.fetch("SELECT name, setting FROM pg_settings")
    settings = {record["name"]: record["setting"] for record in found}
    assert settings["max_connections"] == "11"
    assert settings["statement_timeout"] == "7000"
    assert settings["enable_seqscan"] == "off"
    assert settings["search_path"] == "it's, x"


async def test_passwords_are_asked_for_and_the_bench_needs_none(start_postgresql):
    server = start_postgresql(hba=["host all all 127.0.0.1/32 scram-sha-256"])
    server.ask("CREATE ROLE app LOGIN PASSWORD 'se:cr@et'")
    assert await ping(server.url_as("app", "se:cr@et")) == 1
    with pytest.raises(asyncpg.InvalidPasswordError):
        await ping(server.url_as("app", "wrong"))


async def test_postgresql_speaks_tls_with_a_certificate_of_the_authority(start_postgresql, postgresql_certificates):
    server = start_postgresql(tls=postgresql_certificates, hba=["hostssl all all 127.0.0.1/32 trust"])
    trust = {"sslmode": "verify-full", "sslrootcert": postgresql_certificates.authority}
    assert await ping(server.url_as("postgres", **trust)) == 1
    with pytest.raises(asyncpg.InvalidAuthorizationSpecificationError):
        await ping(server.url_as("postgres", sslmode="disable"))


async def test_a_restart_keeps_the_port_and_what_was_committed(start_postgresql):
    server = start_postgresql()
    port, pid = server.port, server.pid
    server.ask("CREATE TABLE kept AS SELECT 1 AS n")
    server.restart(immediate=True)
    assert (server.port, server.ask("SELECT n FROM kept")) == (port, [(1,)])
    server.ask("UPDATE kept SET n = 2")
    server.kill()
    assert not server.running
    with pytest.raises(OSError):
        await ping(server.url)
    server.start()
    assert (server.port, server.ask("SELECT n FROM kept")) == (port, [(2,)])
    assert server.pid != pid


async def test_kill_loses_what_was_not_flushed(start_postgresql):
    """Or tests of durability would prove nothing."""
    server = start_postgresql(**FORGETFUL)
    await server.execute("SET synchronous_commit = on; CREATE TABLE kept AS SELECT 1 AS n")
    asleep = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'WalWriterMain'"
    await until(lambda: server.ask(asleep) == [(1,)], what="the first round of the writer is over")
    await server.execute("UPDATE kept SET n = 2")
    assert server.ask("SELECT n FROM kept") == [(2,)]
    server.kill()
    server.start()
    assert server.ask("SELECT n FROM kept") == [(1,)]


async def test_a_paused_postgresql_takes_connections_and_does_not_answer(postgresql_server):
    connection = await asyncpg.connect(postgresql_server.url)
    postgresql_server.pause()
    with pytest.raises(TimeoutError):
        await ping(postgresql_server.url, timeout=0.3)
    asking = asyncio.create_task(connection.fetchval("SELECT 2"))
    await asyncio.wait((asking,), timeout=0.3)
    assert not asking.done()
    postgresql_server.resume()
    assert await asking == 2
    await connection.close()


def test_two_servers_of_postgresql_never_share_a_port(start_postgresql, monkeypatch):
    first = start_postgresql()
    ports = [first.port]
    monkeypatch.setattr("postgresql_server.free_port", lambda: ports.pop() if ports else free_port())
    second = start_postgresql()
    assert second.port != first.port
    assert second.ask("SELECT 1") == [(1,)]


DYING = """
import os, signal, sys
sys.path.insert(0, {folder!r})
from postgresql_programs import template
from postgresql_server import PostgresqlServer
server = PostgresqlServer().start()
print(server.pid, server.folder, template().parent, flush=True)
{end}
"""


@pytest.mark.parametrize(
    "end",
    ["sys.exit()", "raise KeyboardInterrupt", "os.kill(os.getpid(), signal.SIGKILL)"],
    ids=["exit", "interrupt", "kill"],
)
def test_no_postgresql_outlives_the_tests(postgresql_server, end):
    script = DYING.format(folder=str(Path(__file__).parent), end=end)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=dict(os.environ))
    pid, *folders = done.stdout.split()
    limit = time.monotonic() + 20
    while state(int(pid)) not in {"", "Z"} and time.monotonic() < limit:
        time.sleep(0.01)
    assert state(int(pid)) in {"", "Z"}
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


# The network with faults


async def test_the_proxy_passes_on_and_sees_what_is_executed(postgresql_proxy):
    connection = await asyncpg.connect(postgresql_proxy.url)
    seen = postgresql_proxy.saw("upper")
    assert await connection.fetchval("SELECT upper($1::text)", "argument") == "ARGUMENT"
    assert await connection.fetchval("SELECT upper($1::text)", "again") == "AGAIN"
    assert seen.done()
    texts = [request[1:3] for request in postgresql_proxy.requests if b"upper" in request[1]]
    assert [(text, b"argument" in last, b"again" in last) for text, last in texts] == [
        (b"SELECT upper($1::text)", True, False),
        (b"SELECT upper($1::text)", False, True),
    ]
    await connection.close()


@pytest.mark.parametrize(("fault", "applied"), [("lose_replies", 1), ("lose_requests", 0)])
@pytest.mark.parametrize("cached", [100, 0])
async def test_a_reply_is_lost_after_the_statement_was_executed(
    fault, applied, cached, postgresql_server, postgresql_proxy
):
    postgresql_server.ask("CREATE TABLE done (n int)")
    connection = await asyncpg.connect(postgresql_proxy.url, statement_cache_size=cached)
    lost = getattr(postgresql_proxy, fault)(of="INSERT INTO done")
    assert await connection.fetchval("SELECT $1::int", 7) == 7
    with pytest.raises(asyncpg.ConnectionDoesNotExistError):
        await connection.fetchval("INSERT INTO done VALUES ($1) RETURNING n", 7)
    assert lost.done()
    assert postgresql_server.ask("SELECT count(*) FROM done") == [(applied,)]
    assert connection.is_closed()


async def test_what_the_server_says_unasked_goes_through_the_proxy(postgresql_server, postgresql_proxy):
    connection = await asyncpg.connect(postgresql_proxy.url)
    heard: asyncio.Queue = asyncio.Queue()
    await connection.add_listener("bell", lambda *said: heard.put_nowait(said[2:]))
    await postgresql_server.execute("NOTIFY bell, 'ring'")
    async with asyncio.timeout(20):
        assert await heard.get() == ("bell", "ring")
    await connection.close()


async def test_the_proxy_holds_back_and_delivers_late(postgresql_proxy):
    connection = await asyncpg.connect(postgresql_proxy.url)
    postgresql_proxy.half_open()
    asking = asyncio.create_task(connection.fetchval("SELECT 3"))
    await asyncio.wait((asking,), timeout=0.2)
    assert not asking.done()
    postgresql_proxy.heal()
    assert await asking == 3
    postgresql_proxy.cut()
    with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, OSError)):
        await connection.fetchval("SELECT 4")


async def test_tls_goes_through_the_proxy_unseen(start_postgresql, postgresql_certificates):
    from postgresql_proxy import PostgresqlProxy

    server = start_postgresql(tls=postgresql_certificates)
    async with PostgresqlProxy(server) as proxy:
        trust = {"sslmode": "verify-full", "sslrootcert": postgresql_certificates.authority}
        assert await ping(proxy.url_as("postgres", **trust)) == 1
        assert proxy.requests == []


# The bench itself: a standby that follows, falls behind and takes over, and a pooling proxy that is one.


async def test_a_standby_follows_falls_behind_and_takes_over(postgresql_group):
    group = postgresql_group
    await group.primary.execute("CREATE TABLE t AS SELECT 1 AS n")
    await group.synced()
    assert await group.standby.value("SELECT n FROM t") == 1
    with pytest.raises(asyncpg.ReadOnlySQLTransactionError):
        await group.standby.execute("UPDATE t SET n = 9")
    group.cut_replication()
    await group.primary.execute("UPDATE t SET n = 2")
    new = await group.promote()
    assert await new.value("SELECT n FROM t") == 1
    await new.execute("UPDATE t SET n = 3")
    assert await group.primary.value("SELECT n FROM t") == 2


async def test_a_pooling_proxy_shares_connections_between_transactions(pgbouncer):
    clients = [await asyncpg.connect(pgbouncer.url, statement_cache_size=0) for _ in range(4)]
    pids = {await client.fetchval("SELECT pg_backend_pid()") for _ in range(3) for client in clients}
    assert len(pids) <= 2
    for client in clients:
        await client.close()
