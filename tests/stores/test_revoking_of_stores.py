"""Every store that can take a lock away does it as `RevokingSuite` says."""

import pytest
from on_stores import OnEtcd, OnMysql, OnPostgresql, OnRedis, OnRedisQuorum, OnSqlite, OnZooKeeper
from revoking_suite import RevokingSuite, compared_before, race

pytest_plugins = ["etcd_fixtures", "mysql_fixtures", "postgresql_fixtures", "redis_fixtures", "zookeeper_fixtures"]


class TestSqlite(OnSqlite, RevokingSuite):
    async def test_a_comparison_that_is_not_part_of_the_step_is_caught(self, bench):
        """The control: a race in which nothing can go wrong would prove nothing."""
        with pytest.raises(ExceptionGroup) as caught:
            await race(bench.url, compared_before, ["release"], rounds=1000)
        assert caught.group_contains(AssertionError, match="was hit|told that they|has ended")


@pytest.mark.usefixtures("patient_postgresql")
class TestPostgresql(OnPostgresql, RevokingSuite): ...


class TestRedis(OnRedis, RevokingSuite): ...


class TestRedisQuorum(OnRedisQuorum, RevokingSuite): ...


@pytest.mark.usefixtures("patient_mysql")
class TestMysql(OnMysql, RevokingSuite): ...


class TestEtcd(OnEtcd, RevokingSuite):
    short_ttl = 1.0


class TestZooKeeper(OnZooKeeper, RevokingSuite):
    short_ttl = 4.0

    @pytest.fixture(autouse=True)
    def _patient(self, bench):
        bench.url += "?connect_timeout=20"  # the suite asks once, and a machine may stand still
