"""The PostgreSQL backend keeps the contract."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager

import pytest
from postgresql_server import PostgresqlServer

from fencing_sdk.abc import Backend
from fencing_sdk.backends.postgresql import PostgresqlBackend, from_url, schema_sql
from fencing_sdk.testing import BackendSuite
from fencing_sdk.testing.backend_promises.backend_under_test import Reopen

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


class TestPostgresqlBackend(BackendSuite):
    queues = True
    shares = True
    lists = revokes = notices = True

    @pytest.fixture(autouse=True)
    def server(self, own_postgresql: PostgresqlServer) -> PostgresqlServer:
        if own_postgresql.ask("SELECT 1 FROM pg_namespace WHERE nspname = 'fencing'"):
            own_postgresql.ask("TRUNCATE fencing.fencing_lock, fencing.fencing_waiter")
        self.own_server = own_postgresql
        return own_postgresql

    @pytest.fixture
    def url(self, server: PostgresqlServer) -> str:
        return server.url

    @pytest.fixture
    def reopen(self, url: str) -> Callable[[], PostgresqlBackend]:
        return lambda: from_url(url)

    @pytest.fixture
    async def backend(self, reopen: Callable[[], PostgresqlBackend]) -> AsyncIterator[PostgresqlBackend]:
        made = reopen()
        yield made
        await made.aclose()

    @asynccontextmanager
    async def break_store(self, backend: Backend) -> AsyncIterator[None]:
        """Kill the server."""
        await asyncio.to_thread(self.own_server.kill)
        try:
            yield
        finally:
            await asyncio.to_thread(self.own_server.start)

    async def restart(self, backend: Backend, reopen: Reopen) -> Backend:
        """Restart the server too, by force."""
        await asyncio.to_thread(self.own_server.kill)
        await asyncio.to_thread(self.own_server.start)
        return await super().restart(backend, reopen)

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
