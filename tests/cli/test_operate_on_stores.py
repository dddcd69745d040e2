"""`fencing ls`, `show`, `break` and `top` on every real store, and against one that hangs."""

import asyncio
import json

import pytest
from command_line import Fencing
from on_stores import OnEtcd, OnPostgresql, OnRedis, OnRedisQuorum, OnZooKeeper
from store_bench import StoreBench
from terminal import Open, at_a_terminal

from fencing_sdk import LeaseLostError, LossReason, connect

__all__ = ["at_a_terminal"]

pytest_plugins = ["etcd_fixtures", "postgresql_fixtures", "redis_fixtures", "zookeeper_fixtures"]

NAME = "report-1"


class OperatorSuite:
    async def test_an_operator_finds_a_lock_and_takes_it_away(self, fencing: Fencing, bench: StoreBench):
        fencing.environment["FENCING_URL"] = bench.url

        async def ask(*arguments: str) -> str:
            done = await asyncio.to_thread(fencing, *arguments)
            assert (done.returncode, done.stderr.count("\n")) == (0, 0 if "--json" in arguments else 1)
            return done.stdout

        async with connect(bench.url) as locks:
            lease = await locks.lock(NAME, ttl=15, metadata="worker 3").acquire()
            waiter = asyncio.create_task(locks.lock(NAME, ttl=15).acquire())
            await bench.waiting(NAME, 1)
            row = json.loads(await ask("ls", "report-*", "--json"))
            assert (row["name"], row["token"], row["metadata"]) == (NAME, lease.token, "worker 3")
            shown = json.loads(await ask("show", NAME, "--json"))
            assert (len(shown["holders"]), len(shown["waiting"])) == (1, 1)
            await ask("break", NAME, "--reason", "it hangs", "--yes")
            following = await asyncio.wait_for(waiter, 30)
            assert following.holder == shown["waiting"][0]["holder"]
            assert following.token > row["token"]
            await asyncio.wait_for(lease.wait_lost(), 30)
            with pytest.raises(LeaseLostError) as lost:
                lease.check()
            assert (lost.value.reason, lost.value.detail) == (LossReason.REVOKED, "it hangs")
            await following.release()

    def test_a_store_that_hangs_is_told_and_asked_again(self, at_a_terminal: Open, bench: StoreBench, fencing: Fencing):
        terminal = at_a_terminal("top", "--every", "300ms", "--url", bench.url)
        terminal.shows("0 held")
        bench.pause()
        try:
            terminal.shows("no answer")
            terminal.forget()
        finally:
            bench.resume()
        terminal.shows("0 held")
        terminal.type("q")
        assert terminal.ends() == 0


class TestRedis(OnRedis, OperatorSuite): ...


class TestRedisQuorum(OnRedisQuorum, OperatorSuite): ...


class TestPostgresql(OnPostgresql, OperatorSuite): ...


class TestEtcd(OnEtcd, OperatorSuite): ...


class TestZooKeeper(OnZooKeeper, OperatorSuite): ...
