"""A backend object serves one event loop after the other, also when the first has ended without closing it."""

from __future__ import annotations

import asyncio
import gc
import warnings

import pytest
from on_stores import OnEtcd, OnKahuna, OnMemory, OnMysql, OnPostgresql, OnRedis, OnRedisQuorum, OnSqlite, OnZooKeeper
from store_bench import WaitersBench

from fencing_sdk.abc import Busy, Claim, Place
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
    async def test_a_ticket_goes_on_in_the_next_loop(self, closes: bool, bench: WaitersBench):
        backend, first, second = from_url(bench.url), Claim("a", 60.0), Claim("a", 60.0)

        async def before() -> object:
            place = await backend.draw(first, only_if_it_holds=True)
            if closes:
                await backend.aclose()
            return place

        async def after() -> object:
            assert isinstance(await backend.draw(second, only_if_it_holds=True), Busy)
            (kept,) = await backend.keep([(first, 0)])
            assert isinstance(kept, Place)
            again = await backend.draw(first, only_if_it_holds=True)
            await backend.give_back(first)
            assert isinstance(await backend.draw(second, only_if_it_holds=True), Place)
            await backend.give_back(second)
            await backend.aclose()
            return again

        place = await asyncio.to_thread(asyncio.run, before())
        assert isinstance(place, Place)
        with warnings.catch_warnings():  # what belongs to a loop that is gone cannot be closed any more
            warnings.simplefilter("error" if closes else "ignore", ResourceWarning)
            again = await asyncio.to_thread(asyncio.run, after())
            gc.collect()
        assert isinstance(again, Place)
        assert again.token == place.token is not None


class TestMemory(OnMemory, LoopsSuite): ...


class TestSqlite(OnSqlite, LoopsSuite): ...


class TestRedis(OnRedis, LoopsSuite): ...


class TestRedisQuorum(OnRedisQuorum, LoopsSuite): ...


class TestPostgresql(OnPostgresql, LoopsSuite): ...


class TestMysql(OnMysql, LoopsSuite): ...


class TestEtcd(OnEtcd, LoopsSuite): ...


class TestZooKeeper(OnZooKeeper, LoopsSuite): ...


class TestKahuna(OnKahuna, LoopsSuite): ...
