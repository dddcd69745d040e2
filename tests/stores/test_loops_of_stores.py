"""A backend object serves one event loop after the other, also when the first has ended without closing it."""

from __future__ import annotations

import asyncio
import gc
import warnings

import pytest
from on_stores import OnEtcd, OnKahuna, OnMemory, OnMysql, OnPostgresql, OnRedis, OnRedisQuorum, OnSqlite, OnZooKeeper
from store_bench import WaitersBench

from fencing_sdk.abc import Busy, Claim, Grant, Renewal
from fencing_sdk.backends import from_url

pytest_plugins = [
    "etcd_fixtures",
    "kahuna_fixtures",
    "mysql_fixtures",
    "postgresql_fixtures",
    "redis_fixtures",
    "zookeeper_fixtures",
]


class LoopsSuite:
    @pytest.mark.parametrize("closes", [True, False], ids=["closed", "left open"])
    async def test_a_grant_goes_on_in_the_next_loop(self, closes: bool, bench: WaitersBench):
        backend, first, second = from_url(bench.url), Claim("a", 60.0), Claim("a", 60.0)

        async def before() -> object:
            grant = await backend.acquire(first)
            if closes:
                await backend.aclose()
            return grant

        async def after() -> object:
            assert isinstance(await backend.acquire(second), Busy)
            assert list(await backend.renew([first])) == [Renewal.RENEWED]
            again = await backend.acquire(first)
            await backend.release(first)
            assert isinstance(await backend.acquire(second), Grant)
            await backend.release(second)
            await backend.aclose()
            return again

        grant = await asyncio.to_thread(asyncio.run, before())
        assert isinstance(grant, Grant)
        with warnings.catch_warnings():  # what belongs to a loop that is gone cannot be closed any more
            warnings.simplefilter("error" if closes else "ignore", ResourceWarning)
            again = await asyncio.to_thread(asyncio.run, after())
            gc.collect()
        assert isinstance(again, Grant)
        assert again.token == grant.token


class TestMemory(OnMemory, LoopsSuite): ...


class TestSqlite(OnSqlite, LoopsSuite): ...


class TestRedis(OnRedis, LoopsSuite): ...


class TestRedisQuorum(OnRedisQuorum, LoopsSuite): ...


class TestPostgresql(OnPostgresql, LoopsSuite): ...


class TestMysql(OnMysql, LoopsSuite): ...


class TestEtcd(OnEtcd, LoopsSuite): ...


class TestZooKeeper(OnZooKeeper, LoopsSuite): ...


class TestKahuna(OnKahuna, LoopsSuite): ...
