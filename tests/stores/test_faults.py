"""Every store that is a server rides out, or ends in time, what `FaultsSuite` does to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from etcd_server import EtcdCluster
from fault_proxy import FaultProxy
from faults_suite import FaultsSuite
from kazoo.client import KazooClient
from postgresql_proxy import PostgresqlProxy
from postgresql_server import PostgresqlServer
from redis_server import RedisServer
from store_bench import EtcdBench, PostgresqlBench, RedisBench, ZooKeeperBench
from zookeeper_server import ZooKeeperServer

pytest_plugins = ["etcd_fixtures", "postgresql_fixtures", "redis_fixtures", "zookeeper_fixtures"]


class TestRedis(FaultsSuite):
    @pytest.fixture
    def bench(self, redis_server: RedisServer, proxy: FaultProxy) -> RedisBench:
        return RedisBench(redis_server, proxy)


class TestPostgresql(FaultsSuite):
    @pytest.fixture
    def bench(self, postgresql_server: PostgresqlServer, postgresql_proxy: PostgresqlProxy) -> PostgresqlBench:
        return PostgresqlBench(postgresql_server, postgresql_proxy)


class TestEtcd(FaultsSuite):
    @pytest.fixture
    def bench(self, etcd_server: EtcdCluster, etcd_proxy: FaultProxy) -> EtcdBench:
        return EtcdBench(etcd_server, etcd_proxy)


class TestZooKeeper(FaultsSuite):
    @pytest.fixture
    def bench(
        self, zookeeper_server: ZooKeeperServer, zookeeper_url: str, zookeeper_proxy: FaultProxy
    ) -> Iterator[ZooKeeperBench]:
        operator = KazooClient(zookeeper_server.address)
        operator.start()
        yield ZooKeeperBench(zookeeper_server, zookeeper_url, zookeeper_proxy, operator)
        operator.stop()
        operator.close()
