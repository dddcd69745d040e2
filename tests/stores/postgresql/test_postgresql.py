"""The PostgreSQL backend keeps the contract."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from own_server import OwnServer
from postgresql_server import PostgresqlServer

from fencing_sdk.abc import Backend
from fencing_sdk.backends.postgresql import schema_sql
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
    passes_on = True
    bell_lag = 0.5

    @pytest.fixture(autouse=True)
    def server(self, own_postgresql: PostgresqlServer) -> PostgresqlServer:
        if own_postgresql.ask("SELECT 1 FROM pg_namespace WHERE nspname = 'fencing'"):
            own_postgresql.ask("TRUNCATE fencing.fencing_line, fencing.fencing_ticket")
        self.own_server = own_postgresql
        return own_postgresql

    async def purge(self, backend: Backend) -> None:
        """Delete every row without tickets, however short ago it had some."""
        await backend.tickets(["anything"])
        ((deleted,),) = self.own_server.ask("SELECT fencing.fencing_sweep(9223372036854775807)")
        assert deleted
