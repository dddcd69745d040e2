"""A fixture ``bench`` for each store, to be inherited beside a suite: ``class TestRedis(OnRedis, FaultsSuite)``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from etcd_server import EtcdCluster
from fault_proxy import FaultProxy
from kahuna_server import KahunaServer
from kazoo.client import KazooClient
from mysql_proxy import MysqlProxy
from mysql_server import MysqlServer
from postgresql_proxy import PostgresqlProxy
from postgresql_server import PostgresqlServer
from redis_quorum import Quorum, QuorumNetwork
from redis_server import RedisServer
from store_bench import (
    EtcdBench,
    KahunaBench,
    MemoryBench,
    MysqlBench,
    PostgresqlBench,
    QuorumBench,
    RedisBench,
    SqliteBench,
    ZooKeeperBench,
)
from zookeeper_server import ZooKeeperServer


class OnMemory:
    @pytest.fixture
    def bench(self) -> MemoryBench:
        return MemoryBench()


class OnSqlite:
    @pytest.fixture
    def bench(self, tmp_path: Path) -> SqliteBench:
        return SqliteBench(tmp_path / "locks.db")


class OnRedis:
    @pytest.fixture
    def bench(self, redis_server: RedisServer, proxy: FaultProxy) -> RedisBench:
        return RedisBench(redis_server, proxy)


class OnRedisQuorum:
    @pytest.fixture
    async def bench(self, redis_quorum: Quorum) -> AsyncIterator[QuorumBench]:
        async with QuorumNetwork(redis_quorum) as network:
            yield QuorumBench(redis_quorum, network)


class OnPostgresql:
    @pytest.fixture
    def bench(self, postgresql_server: PostgresqlServer, postgresql_proxy: PostgresqlProxy) -> PostgresqlBench:
        return PostgresqlBench(postgresql_server, postgresql_proxy)


class OnMysql:
    @pytest.fixture
    def bench(self, mysql_server: MysqlServer, mysql_proxy: MysqlProxy) -> MysqlBench:
        return MysqlBench(mysql_server, mysql_proxy)


class OnEtcd:
    @pytest.fixture
    def bench(self, etcd_server: EtcdCluster, etcd_proxy: FaultProxy) -> EtcdBench:
        return EtcdBench(etcd_server, etcd_proxy)


class OnZooKeeper:
    @pytest.fixture
    def bench(
        self, zookeeper_server: ZooKeeperServer, zookeeper_url: str, zookeeper_proxy: FaultProxy
    ) -> Iterator[ZooKeeperBench]:
        operator = KazooClient(zookeeper_server.address)
        operator.start()
        yield ZooKeeperBench(zookeeper_server, zookeeper_url, zookeeper_proxy, operator)
        operator.stop()
        operator.close()


class OnKahuna:
    @pytest.fixture
    async def bench(self, kahuna_server: KahunaServer) -> AsyncIterator[KahunaBench]:
        async with FaultProxy(kahuna_server.ports[0]) as proxy:
            yield KahunaBench(kahuna_server, proxy)
