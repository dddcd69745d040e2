"""Every store that shares lets permits, readers and writers in as `SharesSuite` says."""

from on_stores import OnEtcd, OnMysql, OnPostgresql, OnRedis, OnSqlite, OnZooKeeper
from shares_suite import SharesSuite

pytest_plugins = ["etcd_fixtures", "mysql_fixtures", "postgresql_fixtures", "redis_fixtures", "zookeeper_fixtures"]


class TestSqlite(OnSqlite, SharesSuite): ...


class TestRedis(OnRedis, SharesSuite): ...


class TestPostgresql(OnPostgresql, SharesSuite): ...


class TestMysql(OnMysql, SharesSuite): ...


class TestEtcd(OnEtcd, SharesSuite): ...


class TestZooKeeper(OnZooKeeper, SharesSuite): ...
