"""
Real servers of MariaDB and MySQL for tests; a test module asks for them with ``pytest_plugins = ["mysql_fixtures"]``.

A test runs once on each of the two that this machine has. A machine without MariaDB skips these tests and says what to
install; with ``CI`` in the environment it fails. MySQL is asked for only where it is, or where ``FENCING_TEST_MYSQL``
names its program; ``FENCING_TEST_MARIADB`` names MariaDB's, if it is neither in the PATH nor where Debian keeps it.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest
from mysql_programs import PACKAGES, flavours, program
from mysql_proxy import MysqlProxy
from mysql_server import MysqlServer, Setting
from required_program import missing, require_program
from stays import PATIENCE
from throwaway_certificates import Certificates, make_certificates

from fencing_sdk._mysql import driver


def require_mysql(flavour: str = "mariadb") -> None:
    """Let the test run only where the server is."""
    if program(flavour) is None:
        missing(flavour, PACKAGES[flavour])


class StartMysql(Protocol):
    def __call__(
        self, *, tls: Certificates | None = None, folder: Path | None = None, **settings: Setting
    ) -> MysqlServer: ...


@pytest.fixture(scope="session")
def shared_mysql() -> Iterator[Callable[[str], MysqlServer]]:
    """The server of each flavour that all quick tests share, running from its first use to the end."""
    servers: dict[str, MysqlServer] = {}

    def running(flavour: str) -> MysqlServer:
        require_mysql(flavour)
        if flavour not in servers:
            servers[flavour] = MysqlServer(flavour)
        if not servers[flavour].running:
            servers[flavour].start()
        return servers[flavour]

    yield running
    for server in servers.values():
        server.close()


@pytest.fixture(params=flavours())
def mysql_flavour(request: pytest.FixtureRequest) -> str:
    """``"mariadb"``, and ``"mysql"`` where that is, too."""
    flavour: str = request.param
    require_mysql(flavour)
    return flavour


@pytest.fixture
def mysql_server(mysql_flavour: str, shared_mysql: Callable[[str], MysqlServer]) -> Iterator[MysqlServer]:
    """
    The one server that all quick tests share, with a fresh database, which `url` names.

    It may be paused, and its connections may be ended; a test that harms it more or sets global variables takes
    `start_mysql`. Users that a test creates are gone afterwards, with the database.
    """
    with shared_mysql(mysql_flavour).fresh_database() as server:
        yield server


@pytest.fixture
def mysql_url(mysql_server: MysqlServer) -> str:
    """The address of the fresh database on the shared server."""
    return mysql_server.url


@pytest.fixture
async def mysql_proxy(mysql_server: MysqlServer) -> AsyncIterator[MysqlProxy]:
    """A network with faults in front of the shared server; its `url` names the fresh database."""
    async with MysqlProxy(mysql_server) as proxy:
        yield proxy


@pytest.fixture
def start_mysql(mysql_flavour: str) -> Iterator[StartMysql]:
    """Start servers that belong to this test alone: ``start_mysql(max_connections=10)``; their database is `test`."""
    servers: list[MysqlServer] = []

    def start(*, tls: Certificates | None = None, folder: Path | None = None, **settings: Setting) -> MysqlServer:
        servers.append(MysqlServer(mysql_flavour, tls=tls, folder=folder, **settings))
        return servers[-1].start()

    yield start
    for server in servers:
        sys.stdout.write(f"--- log of the server on port {server.port}\n{server.log()}")  # shown if the test failed
        server.close()


@pytest.fixture
def patient_mysql(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections and renewals wait for locked rows for longer than the machine stands still."""
    patient = driver._SETTINGS.replace("lock_wait_timeout = 1", f"lock_wait_timeout = {PATIENCE:.0f}")
    monkeypatch.setattr(
        driver, "_SETTINGS", patient.replace("lock_wait_timeout = 4", f"lock_wait_timeout = {PATIENCE:.0f}")
    )
    monkeypatch.setattr("fencing_sdk.backends.mysql._ROW_PATIENCE", PATIENCE)


@pytest.fixture(scope="session")
def mysql_certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """For TLS: ``start_mysql(tls=...)``."""
    require_program("openssl")
    return make_certificates(tmp_path_factory.mktemp("certificates"))
