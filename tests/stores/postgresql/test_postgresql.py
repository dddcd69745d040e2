"""The PostgreSQL backend keeps the contract."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing

import pytest
from own_server import OwnServer
from postgresql_server import PostgresqlServer

from fencing_sdk.abc import Backend, Claim, Grant
from fencing_sdk.backends.postgresql import PostgresqlBackend, from_url, schema_sql
from fencing_sdk.testing import BackendSuite

pytest_plugins = ["postgresql_fixtures"]


@pytest.fixture(scope="module")
def own_postgresql() -> Iterator[PostgresqlServer]:
    """
    A server that the tests of this module may kill; a fresh database for each would take longer than the tests.

    Calls wait for the row of a lock for longer than usual: rivals stand behind each other there, and no client repeats
    a try that has failed.
    """
    from postgresql_fixtures import require_postgresql

    require_postgresql()
    schema, patient = schema_sql(), schema_sql().replace("lock_timeout = '250ms'", "lock_timeout = '10s'")
    assert patient != schema
    with PostgresqlServer() as server:
        server.ask(patient)
        yield server


class TestPostgresqlBackend(OwnServer, BackendSuite):
    queues = True
    shares = True
    lists = revokes = notices = transfers = True

    @pytest.fixture(autouse=True)
    def server(self, own_postgresql: PostgresqlServer) -> PostgresqlServer:
        if own_postgresql.ask("SELECT 1 FROM pg_namespace WHERE nspname = 'fencing'"):
            own_postgresql.ask("TRUNCATE fencing.fencing_lock, fencing.fencing_waiter")
        self.own_server = own_postgresql
        return own_postgresql

    async def revoke(self, backend: Backend, name: str) -> None:
        async with aclosing(from_url(self.own_server.url)) as operator:
            if (holder := await operator.inspect(name)) is not None:
                assert await operator.revoke(name, holder.token, "an operator")

    async def purge(self, backend: Backend) -> None:
        """Delete every row that is not held, however short ago that was."""
        await backend.inspect("anything")
        deleted = self.own_server.ask("UPDATE fencing.fencing_floor SET swept_at = '-infinity', swept_to = ''")
        ((deleted,),) = self.own_server.ask("SELECT fencing.fencing_sweep(0)")
        assert deleted

    async def test_the_clean_up_forgets_why_a_grant_passed_on(self, backend: PostgresqlBackend):
        """Each job that keeps its lock leaves such a row, and no holder may ever ask for it."""
        of, ended = Claim("a", 60.0), Claim("b", 60.0)
        await self.granted(backend, of)
        assert isinstance(await backend.transfer(of, Claim("a", 60.0)), Grant)
        await self.granted(backend, ended)
        await backend.release(ended)
        self.own_server.ask("UPDATE fencing.fencing_revoked SET until = '-infinity'")
        await self.purge(backend)
        assert self.own_server.ask("SELECT count(*) FROM fencing.fencing_revoked") == [(0,)]
