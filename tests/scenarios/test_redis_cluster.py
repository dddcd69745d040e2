"""Locks on a cluster whose slots move and whose nodes fail, while leases are held."""

from __future__ import annotations

import asyncio

import pytest
from patience import until
from redis_cluster import Cluster
from redis_server import RedisServer, version_of

from fencing_sdk import Event, LeaseLostError, connect

pytest_plugins = ["redis_fixtures"]


def url_of(cluster: Cluster) -> str:
    return cluster.url.replace("redis://", "redis+cluster://")


def lease_of(name: str) -> str:
    return f"{{fencing:{name}}}:l"


class Renewals:
    """Counts renewals by name, and wakes whoever waits for one."""

    def __init__(self) -> None:
        self.of: dict[str, int] = {}

    def __call__(self, event: Event) -> None:
        if event.kind == "renewed":
            self.of[event.name] = self.of.get(event.name, 0) + 1

    async def more(self, name: str, count: int = 2) -> None:
        goal = self.of.get(name, 0) + count
        await until(lambda: self.of.get(name, 0) >= goal, what=f"{name} is renewed")


def sharded(node: RedisServer) -> bool:
    """Whether a lock has a channel of its own; before Redis 7 each client has one, and nodes pass messages on."""
    return version_of(node.binary) >= (7,)


def channels(node: RedisServer) -> list[str]:
    return node.ask("PUBSUB", "SHARDCHANNELS" if sharded(node) else "CHANNELS")


def connections(node: RedisServer) -> int:
    return sum("name=fencing-sdk" in line for line in node.ask("CLIENT", "LIST").splitlines())


async def test_a_lease_moves_with_its_slot(redis_cluster: Cluster):
    """Renewed before, while (ASK) and after (MOVED) its slot moves, with one token, and released at the new place."""
    renewals = Renewals()
    slot = redis_cluster.slot_of(lease_of("a"))
    source = redis_cluster.owner_of(slot)
    target = redis_cluster.other_than(source)
    async with connect(url_of(redis_cluster), observers=[renewals]) as locks:
        async with locks.lock("a", ttl=20, heartbeat_interval=0.05) as lease:
            token = lease.token
            await renewals.more("a")
            redis_cluster.start_move(slot, to=target)
            await renewals.more("a")
            redis_cluster.move_keys(slot, to=target)
            await renewals.more("a")
            redis_cluster.finish_move(slot, to=target)
            await renewals.more("a")
            assert lease.token == token
            assert target.ask("EXISTS", lease_of("a")) == 1
        await until(lambda: not target.ask("EXISTS", lease_of("a")), what="it is released", within=10)  # not expired
        async with locks.lock("a") as later:
            assert later.token > token


async def test_a_waiter_is_woken_where_its_slot_has_gone(redis_cluster: Cluster):
    slot = redis_cluster.slot_of(lease_of("a"))
    source = redis_cluster.owner_of(slot)
    target = redis_cluster.other_than(source)
    async with connect(url_of(redis_cluster)) as locks:
        holder = await locks.lock("a", ttl=60).acquire()
        waiting = asyncio.create_task(locks.lock("a", ttl=60).acquire())
        await until(lambda: source.ask("ZCARD", "{fencing:a}:q") == 1, what="the waiter stands in line")
        redis_cluster.move_slot(slot, to=target)
        await until(
            lambda: channels(target if sharded(target) else source) and target.ask("ZCARD", "{fencing:a}:q") == 1,
            what="the waiter listens at the new place",
        )
        await holder.release()
        async with asyncio.timeout(20):
            lease = await waiting
        await lease.release()


async def test_a_node_that_stands_still_stops_no_other(redis_cluster: Cluster):
    """Leases on two nodes, one frozen: its lease is lost in time, the other is renewed meanwhile."""
    names = [f"n{number}" for number in range(50)]
    here = names[0]
    frozen = redis_cluster.node_of(lease_of(here))
    there = next(name for name in names if redis_cluster.node_of(lease_of(name)) is not frozen)
    renewals = Renewals()
    async with connect(url_of(redis_cluster), observers=[renewals]) as locks:
        async with locks.lock(there, ttl=20, heartbeat_interval=0.3) as other:
            with pytest.raises(LeaseLostError):
                async with locks.lock(here, ttl=4, heartbeat_interval=0.3):
                    await renewals.more(here)
                    frozen.pause()
                    before = renewals.of.get(there, 0)
                    await asyncio.sleep(30)
            assert renewals.of[there] >= before + 3  # it went on all the time
            assert other.held
        frozen.resume()
        await asyncio.to_thread(redis_cluster.heal)
        async with asyncio.timeout(20), locks.lock(here):
            pass


async def test_one_connection_for_each_node_whatever_happens(redis_cluster: Cluster):
    async with connect(url_of(redis_cluster)) as locks:

        async def work(number: int) -> None:
            async with locks.lock(f"name/{number % 40}", ttl=30):
                pass

        async def one_each() -> None:
            await until(lambda: [connections(node) for node in redis_cluster.nodes] == [1, 1, 1], what="one for each")

        await asyncio.gather(*(work(number) for number in range(200)))
        await one_each()
        for node in redis_cluster.nodes:
            node.ask("CLIENT", "KILL", "TYPE", "normal")
        await asyncio.gather(*(work(number) for number in range(200)))
        await one_each()
    await until(lambda: sum(map(connections, redis_cluster.nodes)) == 0, what="every connection is closed")


async def test_the_line_leaves_no_channel_behind(redis_cluster: Cluster):
    async with connect(url_of(redis_cluster)) as locks:
        holder = await locks.lock("a", ttl=60).acquire()
        node = redis_cluster.node_of(lease_of("a"))
        waiting = [asyncio.create_task(locks.lock("a", ttl=60).acquire()) for _ in range(3)]
        await until(lambda: node.ask("ZCARD", "{fencing:a}:q") == 3, what="all stand in line")
        assert len(channels(node)) == 1
        await holder.release()
        for task in waiting:
            await (await task).release()
        if sharded(node):
            await until(lambda: not channels(node), what="nobody listens any more")
        await until(lambda: node.ask("KEYS", "*") == ["{fencing:a}:t"], what="only the last token is left")
    await until(lambda: not channels(node), what="nobody listens any more")
