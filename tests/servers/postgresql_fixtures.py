"""
Real PostgreSQL servers for tests; a test module asks for them with ``pytest_plugins = ["postgresql_fixtures"]``.

A machine without the programs skips these tests and says what to install; with ``CI`` in the environment it fails.
``FENCING_TEST_POSTGRESQL`` names the folder with the programs, if they are neither in the PATH nor where Debian keeps
them.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Protocol

import pytest
from pgbouncer import PgBouncer
from postgresql_programs import USER, programs
from postgresql_proxy import PostgresqlProxy
from postgresql_replicas import Replicated
from postgresql_server import PostgresqlServer, Setting
from required_program import missing, require_program
from throwaway_certificates import Certificates, make_certificates

from fencing_sdk.backends.postgresql import schema

_numbers = itertools.count(1)


def require_postgresql() -> None:
    """Let the test run only where PostgreSQL is."""
    if programs() is None:
        missing("postgresql", "postgresql pgbouncer openssl")


class StartPostgresql(Protocol):
    def __call__(
        self, *, tls: Certificates | None = None, hba: Sequence[str] | None = None, **settings: Setting
    ) -> PostgresqlServer: ...


@pytest.fixture(scope="session")
def _shared_postgresql() -> Iterator[PostgresqlServer]:
    require_postgresql()
    with PostgresqlServer() as server:
        yield server


@pytest.fixture
def postgresql_server(_shared_postgresql: PostgresqlServer) -> Iterator[PostgresqlServer]:
    """
    The one server that all quick tests share, with a fresh database, which `url` names.

    It may be paused, and its connections may be terminated; a test that harms it more takes `start_postgresql`.
    Roles that a test creates are gone afterwards, with the database.
    """
    server = _shared_postgresql
    if not server.running:
        server.start()
    database = f"test_{next(_numbers)}"
    server.database = USER
    server.ask(f"CREATE DATABASE {database} TEMPLATE template0")
    server.database = database
    yield server
    server.resume()
    server.database = USER
    server.ask(f"DROP DATABASE {database} WITH (FORCE)")
    for (role,) in server.ask("SELECT quote_ident(rolname) FROM pg_roles WHERE oid >= 16384"):
        server.ask(f"DROP ROLE {role}")


@pytest.fixture
def start_postgresql() -> Iterator[StartPostgresql]:
    """Start servers that belong to this test alone: ``start_postgresql(max_connections=10)``."""
    require_postgresql()
    servers: list[PostgresqlServer] = []

    def start(
        *, tls: Certificates | None = None, hba: Sequence[str] | None = None, **settings: Setting
    ) -> PostgresqlServer:
        servers.append(PostgresqlServer(tls=tls, hba=hba, **settings))
        return servers[-1].start()

    yield start
    for server in servers:
        sys.stdout.write(f"--- log of the server on port {server.port}\n{server.log()}")  # shown if the test failed
        server.close()


@pytest.fixture
def patient_postgresql(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions that are created now wait for locked rows for longer than the machine stands still."""
    patient = schema._TEXT.replace("lock_timeout = '250ms'", "lock_timeout = '10s'")
    assert patient != schema._TEXT
    monkeypatch.setattr(schema, "_TEXT", patient)


@pytest.fixture(scope="session")
def postgresql_certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """For TLS: ``start_postgresql(tls=...)``, then ``server.url + "?sslmode=verify-full&sslrootcert=..."``."""
    require_program("openssl")
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
async def postgresql_proxy(postgresql_server: PostgresqlServer) -> AsyncIterator[PostgresqlProxy]:
    """A network with faults in front of the shared server; its `url` names the fresh database."""
    async with PostgresqlProxy(postgresql_server) as proxy:
        yield proxy


@pytest.fixture
async def postgresql_group() -> AsyncIterator[Replicated]:
    """A primary and an asynchronous standby that belong to this test alone."""
    require_postgresql()
    async with Replicated() as group:
        yield group


@pytest.fixture
def pgbouncer(postgresql_server: PostgresqlServer) -> Iterator[PgBouncer]:
    """A pooling proxy in transaction mode before the shared server; its `url` names the fresh database."""
    with PgBouncer(postgresql_server, binary=require_program("pgbouncer")) as bouncer:
        yield bouncer
        sys.stdout.write(f"--- log of PgBouncer\n{bouncer.log()}")
