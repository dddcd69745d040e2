"""Every store that may be away is waited for as `OpeningSuite` says."""

import contextlib
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from on_stores import OnEtcd, OnKahuna, OnMysql, OnPostgresql, OnRedis, OnRedisQuorum, OnSqlite, OnZooKeeper
from opening_suite import OpeningSuite
from store_bench import SqliteBench

pytest_plugins = [
    "etcd_fixtures",
    "kahuna_fixtures",
    "mysql_fixtures",
    "postgresql_fixtures",
    "redis_fixtures",
    "zookeeper_fixtures",
]


class TestSqlite(OnSqlite, OpeningSuite):
    @contextmanager
    def away(self, bench: SqliteBench) -> Iterator[str]:
        """Another process keeps the file to itself."""
        path = bench.url.removeprefix("sqlite:///")
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            yield bench.url


class TestRedis(OnRedis, OpeningSuite): ...


class TestRedisQuorum(OnRedisQuorum, OpeningSuite): ...


class TestPostgresql(OnPostgresql, OpeningSuite): ...


class TestMysql(OnMysql, OpeningSuite): ...


class TestEtcd(OnEtcd, OpeningSuite): ...


class TestZooKeeper(OnZooKeeper, OpeningSuite): ...


class TestKahuna(OnKahuna, OpeningSuite):
    @pytest.fixture(autouse=True)
    def a_short_start(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each try waits for a cluster that starts; for one that does not, 4.4 s would pass."""
        monkeypatch.setattr("fencing_sdk.backends.kahuna._START", 0.3)
