"""Threads and processes hold locks of every store as `SyncSuite` says."""

from on_stores import OnEtcd, OnKahuna, OnMemory, OnMysql, OnPostgresql, OnRedis, OnRedisQuorum, OnSqlite, OnZooKeeper
from sync_suite import SyncProcessesSuite, SyncRevokingSuite, SyncSuite

pytest_plugins = [
    "etcd_fixtures",
    "kahuna_fixtures",
    "mysql_fixtures",
    "postgresql_fixtures",
    "redis_fixtures",
    "zookeeper_fixtures",
]


class TestMemory(OnMemory, SyncSuite, SyncRevokingSuite): ...


class TestSqlite(OnSqlite, SyncSuite, SyncRevokingSuite, SyncProcessesSuite): ...


class TestRedis(OnRedis, SyncSuite, SyncRevokingSuite, SyncProcessesSuite): ...


class TestRedisQuorum(OnRedisQuorum, SyncSuite, SyncRevokingSuite, SyncProcessesSuite): ...


class TestPostgresql(OnPostgresql, SyncSuite, SyncRevokingSuite, SyncProcessesSuite): ...


class TestMysql(OnMysql, SyncSuite, SyncRevokingSuite, SyncProcessesSuite): ...


class TestEtcd(OnEtcd, SyncSuite, SyncRevokingSuite, SyncProcessesSuite): ...


class TestZooKeeper(OnZooKeeper, SyncSuite, SyncRevokingSuite, SyncProcessesSuite): ...


class TestKahuna(OnKahuna, SyncSuite, SyncRevokingSuite, SyncProcessesSuite): ...
