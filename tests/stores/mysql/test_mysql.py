"""The MySQL backend keeps the contract, on MariaDB and on MySQL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing

import pytest
from mysql_programs import flavours
from mysql_server import MysqlServer
from mysql_stage import asleep
from own_server import OwnServer

from fencing_sdk.abc import Backend
from fencing_sdk.backends.mysql import MysqlBackend, bell, from_url
from fencing_sdk.backends.mysql.store import Sweeper
from fencing_sdk.testing import BackendSuite

pytest_plugins = ["mysql_fixtures"]

TABLES = ("fencing_lock", "fencing_waiter", "fencing_sign", "fencing_revoked", "fencing_bell")


@pytest.fixture(scope="module", params=flavours())
def own_mysql(request: pytest.FixtureRequest) -> Iterator[MysqlServer]:
    """A server that the tests of this module may kill; a fresh database for each would take longer than the tests."""
    from mysql_fixtures import require_mysql

    require_mysql(request.param)
    with MysqlServer(request.param) as server:
        yield server


@pytest.mark.usefixtures("patient_mysql")
class TestMysqlBackend(OwnServer, BackendSuite):
    queues = True
    shares = True
    lists = revokes = notices = transfers = True

    @pytest.fixture(autouse=True)
    def server(self, own_mysql: MysqlServer) -> MysqlServer:
        known = {name for (name,) in own_mysql.ask("SHOW TABLES")}
        for table in known.intersection(TABLES):
            own_mysql.ask(f"DELETE FROM {table}")
        self.own_server = own_mysql
        return own_mysql

    async def revoke(self, backend: Backend, name: str) -> None:
        async with aclosing(from_url(self.own_server.url)) as operator:
            if (holder := await operator.inspect(name)) is not None:
                assert await operator.revoke(name, holder.token, "an operator")

    async def purge(self, backend: MysqlBackend) -> None:
        """Delete every row that is not held, however short ago that was."""
        await backend.inspect("anything")
        await backend._mysql._connection.run(Sweeper(backend._mysql._connection, 0.0).sweep)


async def test_no_backup_waits_for_the_bell(mysql_server: MysqlServer, monkeypatch: pytest.MonkeyPatch):
    """Every write of the server would stand behind it. On MariaDB, a sleep holds up changes of its own table alone."""
    monkeypatch.setattr(bell, "_SLEEP", 600)
    statements = ["SET lock_wait_timeout = 4", "FLUSH TABLES WITH READ LOCK", "UNLOCK TABLES"]
    statements += ["ALTER TABLE fencing_bell COMMENT = ''"] if mysql_server.flavour == "mysql" else []
    async with aclosing(from_url(mysql_server.url)) as backend:
        await backend.open()
        backend._mysql.open_box(lambda _: None)
        sleeping = await asleep(mysql_server)
        async with mysql_server.connected(user="root", unix_socket=mysql_server.socket) as operator:
            for statement in statements:
                await operator.cursor().execute(statement)
        assert await asleep(mysql_server) == sleeping
