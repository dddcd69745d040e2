"""In every store a lease is held by a ticket, and changes hands, as the suites say; or the store refuses."""

import pytest
from hand_over_processes import Campaign
from hand_over_suite import HandOverInLineSuite, HandOverProcessesSuite, HandOverSuite, NoHandOverSuite, TicketsSuite
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


class TestSqlite(OnSqlite, TicketsSuite, HandOverSuite, HandOverInLineSuite, HandOverProcessesSuite):
    @pytest.mark.slow
    async def test_processes_that_adopt_the_owner_of_a_ticket_are_caught(self, bench, tmp_path):
        """The control: a campaign in which nothing can go wrong would prove nothing."""
        campaign = Campaign(bench.url, tmp_path, seed=1, broken=True)
        await campaign.play(200)
        assert campaign.is_caught


class TestRedis(OnRedis, TicketsSuite, HandOverSuite, HandOverInLineSuite, HandOverProcessesSuite): ...


class TestPostgresql(OnPostgresql, TicketsSuite, HandOverSuite, HandOverInLineSuite, HandOverProcessesSuite): ...


class TestMysql(OnMysql, TicketsSuite, HandOverSuite, HandOverInLineSuite, HandOverProcessesSuite): ...


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
