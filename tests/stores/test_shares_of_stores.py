"""Every store that shares grants permits, readers and writers as `SharesSuite` says."""

from typing import Any

import pytest
from etcd_stage import Transactions
from on_stores import OnEtcd, OnMysql, OnPostgresql, OnRedis, OnSqlite, OnZooKeeper
from shares_suite import SharesSuite
from store_bench import ZooKeeperBench
from zookeeper_stage import Answers

from fencing_sdk.abc import Claim
from fencing_sdk.errors import BackendUnavailableError

pytest_plugins = ["etcd_fixtures", "mysql_fixtures", "postgresql_fixtures", "redis_fixtures", "zookeeper_fixtures"]


class TestSqlite(OnSqlite, SharesSuite): ...


class TestRedis(OnRedis, SharesSuite): ...


@pytest.mark.usefixtures("patient_postgresql")
class TestPostgresql(OnPostgresql, SharesSuite): ...


@pytest.mark.usefixtures("patient_mysql")
class TestMysql(OnMysql, SharesSuite): ...


class TestEtcd(OnEtcd, SharesSuite):
    async def lose_answer(self, backend: Any, claim: Claim) -> None:
        with Transactions(backend) as requests, pytest.raises(BackendUnavailableError):
            requests.lost = lambda _: True
            await backend.acquire(claim)


class TestZooKeeper(OnZooKeeper, SharesSuite):
    @pytest.fixture(autouse=True)
    def _patient(self, bench: ZooKeeperBench) -> None:
        bench.url += "?connect_timeout=20"  # the suite asks once, and a machine may stand still

    async def lose_answer(self, backend: Any, claim: Claim) -> None:
        with Answers(backend) as answers, pytest.raises(BackendUnavailableError):
            answers.lost = 1
            await backend.acquire(claim)
