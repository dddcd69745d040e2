"""Where a database keeps both locks and fences, they get along as `FencesSuite` says."""

from contextlib import asynccontextmanager

from fences_suite import SEAT, FencesSuite
from on_stores import OnMysql, OnPostgresql

pytest_plugins = ["mysql_fixtures", "postgresql_fixtures"]


class TestPostgresql(OnPostgresql, FencesSuite):
    @asynccontextmanager
    async def writing(self, bench, guard, token):
        async with bench.server.connected() as connection, connection.transaction():
            await guard.admit(connection, SEAT, token)
            yield

    async def drop_schema(self, bench):
        await bench.server.execute("DROP SCHEMA fencing CASCADE")

    async def waits_for_a_row(self, bench):
        return bool(await bench.server.value("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"))


class TestMysql(OnMysql, FencesSuite):
    @asynccontextmanager
    async def writing(self, bench, guard, token):
        async with bench.server.connected() as connection:
            await connection.begin()
            await guard.admit(connection, SEAT, token)
            yield
            await connection.rollback()

    async def drop_schema(self, bench):
        for (table,) in await bench.server.fetch("SHOW TABLES LIKE 'fencing_%%'"):
            if table != "fencing_fence":
                await bench.server.execute(f"DROP TABLE {table}")

    async def waits_for_a_row(self, bench):
        waiting = "SELECT COUNT(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'"
        return bool(await bench.server.value(waiting))
