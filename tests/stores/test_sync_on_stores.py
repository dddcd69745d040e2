"""Threads and processes hold locks of every store as `SyncSuite` says."""

from on_stores import OnEtcd, OnKahuna, OnMemory, OnPostgresql, OnRedis, OnRedisQuorum, OnSqlite, OnZooKeeper
from sync_suite import SyncProcessesSuite, SyncSuite

pytest_plugins = ["etcd_fixtures", "kahuna_fixtures", "postgresql_fixtures", "redis_fixtures", "zookeeper_fixtures"]


class TestMemory(OnMemory, SyncSuite): ...


class TestSqlite(OnSqlite, SyncSuite, SyncProcessesSuite): ...


class TestRedis(OnRedis, SyncSuite, SyncProcessesSuite): ...


class TestRedisQuorum(OnRedisQuorum, SyncSuite, SyncProcessesSuite): ...


class TestPostgresql(OnPostgresql, SyncSuite, SyncProcessesSuite): ...


class TestEtcd(OnEtcd, SyncSuite, SyncProcessesSuite): ...


class TestZooKeeper(OnZooKeeper, SyncSuite, SyncProcessesSuite): ...


class TestKahuna(OnKahuna, SyncSuite, SyncProcessesSuite): ...
