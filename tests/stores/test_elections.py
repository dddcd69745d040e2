"""On every store that processes share, one of them leads, and another one after it: see the suites."""

from election_suite import ElectionSuite, FaultyElectionSuite
from on_stores import OnEtcd, OnMysql, OnPostgresql, OnRedis, OnRedisQuorum, OnSqlite, OnZooKeeper

pytest_plugins = ["etcd_fixtures", "mysql_fixtures", "postgresql_fixtures", "redis_fixtures", "zookeeper_fixtures"]


class TestSqlite(OnSqlite, ElectionSuite): ...


class TestRedis(OnRedis, ElectionSuite, FaultyElectionSuite): ...


class TestRedisQuorum(OnRedisQuorum, ElectionSuite, FaultyElectionSuite): ...


class TestPostgresql(OnPostgresql, ElectionSuite, FaultyElectionSuite): ...


class TestMysql(OnMysql, ElectionSuite, FaultyElectionSuite): ...


class TestEtcd(OnEtcd, ElectionSuite, FaultyElectionSuite): ...


class TestZooKeeper(OnZooKeeper, ElectionSuite, FaultyElectionSuite): ...
