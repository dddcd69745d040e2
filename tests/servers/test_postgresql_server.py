"""The bench of PostgreSQL: a server that is up answers, one that was harmed shows it; a standby follows."""

from __future__ import annotations

import asyncpg
import pytest
from patience import until
from postgresql_server import FORGETFUL

pytest_plugins = ["postgresql_fixtures"]


# The bench itself: a server that is up answers, and one that was harmed shows it.


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
