"""Every store with a line serves waiters as `WaitersSuite` says."""

from on_stores import OnEtcd, OnMysql, OnPostgresql, OnRedis, OnSqlite, OnZooKeeper
from waiters_suite import WaitersSuite

pytest_plugins = ["etcd_fixtures", "mysql_fixtures", "postgresql_fixtures", "redis_fixtures", "zookeeper_fixtures"]


class TestSqlite(OnSqlite, WaitersSuite): ...


class TestRedis(OnRedis, WaitersSuite): ...


class TestPostgresql(OnPostgresql, WaitersSuite): ...


class TestMysql(OnMysql, WaitersSuite): ...


class TestEtcd(OnEtcd, WaitersSuite): ...


class TestZooKeeper(OnZooKeeper, WaitersSuite): ...
