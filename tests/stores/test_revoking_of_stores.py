"""In every store an operator ends a ticket as `RevokingSuite` says."""

import pytest
from on_stores import OnEtcd, OnKahuna, OnMysql, OnPostgresql, OnRedis, OnRedisQuorum, OnSqlite, OnZooKeeper
from revoking_suite import BellSuite, RevokingSuite, compared_before, race

pytest_plugins = [
    "etcd_fixtures",
    "kahuna_fixtures",
    "mysql_fixtures",
    "postgresql_fixtures",
    "redis_fixtures",
    "zookeeper_fixtures",
]


class TestSqlite(OnSqlite, RevokingSuite, BellSuite):
    async def test_a_comparison_that_is_not_part_of_the_step_is_caught(self, bench):
        """The control: a race in which nothing can go wrong would prove nothing."""
        with pytest.raises(ExceptionGroup) as caught:
            await race(bench.url, compared_before, ["give_back"], rounds=1000)
        assert caught.group_contains(AssertionError, match="was hit|heard that they|had ended")


@pytest.mark.usefixtures("patient_postgresql")
class TestPostgresql(OnPostgresql, RevokingSuite, BellSuite): ...


class TestRedis(OnRedis, RevokingSuite, BellSuite): ...


class TestRedisQuorum(OnRedisQuorum, RevokingSuite): ...


@pytest.mark.usefixtures("patient_mysql")
class TestMysql(OnMysql, RevokingSuite, BellSuite): ...


class TestEtcd(OnEtcd, RevokingSuite, BellSuite):
    short_ttl = 1.0


class TestKahuna(OnKahuna, RevokingSuite): ...


class TestZooKeeper(OnZooKeeper, RevokingSuite, BellSuite):
    short_ttl = 4.0

    @pytest.fixture(autouse=True)
    def _patient(self, bench):
        bench.url += "?connect_timeout=20"  # the suite asks once, and a machine may stand still
