"""In every store a lease is held by a ticket, and changes hands, as the suites say; or the store refuses."""

import pytest
from hand_over_suite import HandOverInLineSuite, HandOverSuite, NoHandOverSuite, TicketsSuite
from on_stores import OnEtcd, OnKahuna, OnMemory, OnMysql, OnPostgresql, OnRedis, OnRedisQuorum, OnSqlite, OnZooKeeper

from fencing_sdk import LeaseTicket, connect
from fencing_sdk.errors import UnsupportedError

pytest_plugins = [
    "etcd_fixtures",
    "kahuna_fixtures",
    "mysql_fixtures",
    "postgresql_fixtures",
    "redis_fixtures",
    "zookeeper_fixtures",
]


class TestMemory(OnMemory, TicketsSuite, HandOverSuite): ...


class TestSqlite(OnSqlite, TicketsSuite, HandOverSuite, HandOverInLineSuite): ...


class TestRedis(OnRedis, TicketsSuite, HandOverSuite, HandOverInLineSuite): ...


class TestPostgresql(OnPostgresql, TicketsSuite, HandOverSuite, HandOverInLineSuite): ...


class TestMysql(OnMysql, TicketsSuite, HandOverSuite, HandOverInLineSuite): ...


class TestRedisQuorum(OnRedisQuorum, TicketsSuite, NoHandOverSuite): ...


class TestEtcd(OnEtcd, TicketsSuite, NoHandOverSuite):
    short_ttl = 1.0


class TestKahuna(OnKahuna, TicketsSuite, NoHandOverSuite): ...


class TestZooKeeper(OnZooKeeper, NoHandOverSuite):
    async def test_no_ticket_outlives_a_session(self, bench):
        async with connect(bench.url) as locks:
            ticket = LeaseTicket("a", 60.0, "0" * 32)
            with pytest.raises(UnsupportedError, match="session of the process"):
                locks.detached("a")
            with pytest.raises(UnsupportedError, match="session of the process"):
                locks.resume(ticket)
            for use in (locks.take, locks.renew, locks.release):
                with pytest.raises(UnsupportedError, match="session of the process"):
                    await use(ticket)
