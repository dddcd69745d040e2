"""The MySQL backend keeps the contract, on MariaDB and on MySQL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing

import pytest
from mysql_programs import flavours
from mysql_server import MysqlServer
from own_server import OwnServer

from fencing_sdk.abc.line import Line
from fencing_sdk.backends.mysql import MysqlBackend, lines
from fencing_sdk.backends.mysql.connection import NOW, SECOND, MysqlSession
from fencing_sdk.backends.mysql.sweep import Sweeper
from fencing_sdk.testing import BackendSuite, Comparison

pytest_plugins = ["mysql_fixtures"]

HISTORIES = 60


@pytest.fixture(scope="module", params=flavours())
def own_mysql(request: pytest.FixtureRequest) -> Iterator[MysqlServer]:
    """A server for the tests of this module; a fresh database for each would take longer than the tests."""
    from mysql_fixtures import require_mysql

    require_mysql(request.param)
    with MysqlServer(request.param) as server:
        yield server


@pytest.fixture
def empty(own_mysql: MysqlServer) -> MysqlServer:
    """The same server, with no tickets."""
    for (table,) in own_mysql.ask("SHOW TABLES"):
        own_mysql.ask(f"DELETE FROM {table}")
    return own_mysql


@pytest.mark.usefixtures("patient_mysql")
class TestMysqlBackend(OwnServer, BackendSuite):
    ttl = 0.5
    bell_lag = 0.5
    passes_on = True

    @pytest.fixture(autouse=True)
    def server(self, empty: MysqlServer) -> MysqlServer:
        self.own_server = empty
        return empty

    async def purge(self, backend: MysqlBackend) -> None:
        """Delete every row without tickets, however short ago that was."""
        self.own_server.ask("UPDATE fencing_line SET last = last - 8 * 86400 * 100000")
        await backend._mysql.connection.run(Sweeper(backend._mysql).sweep)
        assert self.own_server.ask("SELECT name FROM fencing_line") == []


class Looking(MysqlBackend):
    """Settles a line before a look, as the rules do."""

    async def tickets(self, names):
        await self.settle(names, Line.seen)
        return await super().tickets(names)

    async def settle(self, names, rule):
        for name in names:
            await self._mysql.run("inspect", name, rule)


class Settling(Looking):
    """Writes in each verb that the clock was set back, as the rules do: a keep of what holds does not."""

    async def keep(self, tickets):
        await self.settle([claim.name for claim, _ in tickets], Line.settle)
        return await super().keep(tickets)


@pytest.mark.parametrize(
    ("kind", "first"), [(Looking, 8), (Looking, 2), (Settling, 8)], ids=["", "read in parts", "the clock is set back"]
)
async def test_it_answers_as_the_rules(kind, first, empty, monkeypatch):
    """On a clock that is set by hand: each text has the time in it."""
    read, time = MysqlSession._read, [500_000.0]

    async def at_that_time(session, statements):
        micros = round(time[0] * SECOND)
        return await read(session, [statement.replace(NOW, f"{micros:d}") for statement in statements])

    monkeypatch.setattr(MysqlSession, "_read", at_that_time)
    monkeypatch.setattr(lines, "FIRST", first)
    async with aclosing(kind(empty.url)) as one, aclosing(kind(empty.url)) as other:
        for seed in range(HISTORIES):
            time[0] = 500_000.0
            await Comparison(
                [one, other], seed, lambda now: time.__setitem__(0, now), sets_back=kind is Settling
            ).play()
