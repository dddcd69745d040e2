"""Stores that also keep the fences of a guard raise them with the grant, as `FencesSuite` says."""

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

    async def end_grant(self, bench):
        await bench.server.execute("UPDATE fencing.fencing_lock SET expires_at = now() WHERE name = 'seats/42'")

    async def drop_schema(self, bench):
        await bench.server.execute("DROP SCHEMA fencing CASCADE")

    async def waits_for_a_row(self, bench):
        return bool(await bench.server.value("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"))

    async def end_connections(self, bench):
        await bench.server.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE pid <> pg_backend_pid() AND datname = current_database()"
        )


class TestMysql(OnMysql, FencesSuite):
    @asynccontextmanager
    async def writing(self, bench, guard, token):
        async with bench.server.connected() as connection:
            await connection.begin()
            await guard.admit(connection, SEAT, token)
            yield
            await connection.rollback()

    async def end_grant(self, bench):
        await bench.server.execute("UPDATE fencing_lock SET held_until = 0, grants = '[]' WHERE name = 'seats/42'")

    async def drop_schema(self, bench):
        names = ("lock", "waiter", "sign", "revoked", "bell")
        await bench.server.execute(f"DROP TABLE {', '.join(f'fencing_{name}' for name in names)}")

    async def waits_for_a_row(self, bench):
        waiting = "SELECT COUNT(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'"
        return bool(await bench.server.value(waiting))

    async def end_connections(self, bench):
        bench.server.end_connections()
