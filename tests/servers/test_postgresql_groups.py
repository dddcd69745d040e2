"""The bench itself: a standby that follows, falls behind and takes over, and a pooling proxy that is one."""

import asyncpg
import pytest

pytest_plugins = ["postgresql_fixtures"]


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
