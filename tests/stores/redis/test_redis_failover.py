"""Servers of Redis that crash, fail over and hand on their slots while leases are held."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from event_log import ENDED_BY_TIME
from inside import state_of
from patience import until
from redis_cluster import Cluster
from redis_replicas import Replicated, info
from redis_sentinels import Sentinels
from redis_server import version_of
from redis_stage import IDLE, connections, key, nothing_left
from stays import LONG, PATIENCE, Stay, eventually, opened, staying

from fencing_sdk import BackendUnavailableError, Holder, LeaseLostError, LockClient, LossReason, connect
from fencing_sdk.abc import Claim
from fencing_sdk.backends.redis import from_url
from fencing_sdk.events import Event, Lost, RenewalFailed, Renewed

pytest_plugins = ["redis_fixtures"]


# What a failover loses, and what the SDK makes of it: replication really cut, masters really killed.


@pytest.fixture
async def group(redis_binary: str) -> AsyncIterator[Replicated]:
    async with Replicated(binary=redis_binary) as group:
        yield group


async def test_a_master_that_misses_its_replicas_is_left_because_they_may_have_a_new_one(redis_binary: str):
    """It still takes connections and commands; the next call asks the Sentinels again where the master is."""

    def connections(group: Replicated) -> set[str]:
        lines = group.master.ask("CLIENT", "LIST").splitlines()
        return {line.split()[0] for line in lines if " name=fencing-sdk " in line}

    async with Replicated(binary=redis_binary, min_replicas_to_write=1) as group:
        await group.synced()
        await until(lambda: info(group.master, "replication")["min_slaves_good_slaves"] == "1", what="a good replica")
        backend, claim = from_url(f"redis://127.0.0.1:{group.master.port}"), Claim("a", 30.0)
        place = await backend.draw(claim)
        assert place.token is not None
        (first,) = connections(group)
        group.links[0].cut()
        group.links[0].refuse()
        await until(lambda: info(group.master, "replication")["connected_slaves"] == "0", what="the master is alone")
        for _ in range(2):
            with pytest.raises(BackendUnavailableError, match=r"Not enough good replicas|connection broke"):
                await backend.keep([(claim, place.number)])
        assert first not in connections(group)
        await backend.aclose()


@pytest.mark.usefixtures("answers_may_be_late")
async def test_a_grant_that_the_replica_confirms_survives_the_failover(group: Replicated):
    async with connect(f"redis://127.0.0.1:{group.master.port}?min_replicas=1") as before:
        lease = await before.lock("a", ttl=60).acquire()
        group.master.kill()
        promoted = await group.promote()
        async with connect(f"redis://127.0.0.1:{promoted.port}") as after:
            assert await after.lock("a").try_acquire() is None
            holder = await after.inspect("a")
            assert holder is not None
            assert (holder.token, holder.id) == (lease.token, lease.holder)


async def test_a_grant_that_no_replica_confirms_is_undone_and_tried_again(group: Replicated):
    async with connect(f"redis://127.0.0.1:{group.master.port}?min_replicas=1") as locks:
        group.cut_replication()
        with pytest.raises(BackendUnavailableError, match=r"replicas|no answer"):  # a busy machine may answer too late
            await locks.lock("a", ttl=60, wait=2).acquire()
        await until(lambda: group.master.ask("GETRANGE", "{fencing:a}:s", 24, 25) == IDLE, what="the grant is undone")
        waiting = asyncio.create_task(locks.lock("a", ttl=60).acquire())
        for link in group.links:
            link.heal()
        lease = await waiting
        assert lease.held
        await lease.release()


async def test_a_renewal_that_no_replica_confirms_does_not_count(group: Replicated):
    """The replica would let the lease end earlier, so the holder must not rely on more."""
    events: list[Event] = []
    url = f"redis://127.0.0.1:{group.master.port}?min_replicas=1"
    async with connect(url, observers=[events.append]) as locks:
        with pytest.raises(LeaseLostError) as lost:
            async with locks.lock("a", ttl=4, heartbeat_interval=0.3) as lease:
                group.cut_replication()
                deadline = state_of(lease).deadline
                await asyncio.sleep(30)
        assert lost.value.reason in ENDED_BY_TIME
        assert state_of(lease).deadline == deadline
        assert "renewal_failed" in {event.kind for event in events}
        group.links[0].heal()


def by_sentinels(group: Sentinels) -> str:
    hosts = ",".join(f"{host}:{port}" for host, port in group.addresses)
    return f"redis+sentinel://{hosts}/{group.name}"


async def test_a_client_follows_a_failover_by_sentinels(redis_sentinels: Sentinels):
    """The lease that was replicated goes on with its token, over a dead master and a new one."""
    async with connect(by_sentinels(redis_sentinels) + "?min_replicas=1") as locks:
        async with locks.lock("a", ttl=40, heartbeat_interval=0.3) as lease:
            token, deadline = lease.token, state_of(lease).deadline
            new = await redis_sentinels.failover()
            assert lease.token == token
            holder = await _patiently_inspected(locks, "a")
            assert holder is not None
            assert (holder.token, holder.id) == (token, lease.holder)
            new.ask("CONFIG", "SET", "min-replicas-to-write", 0)
        assert state_of(lease).deadline >= deadline
    redis_sentinels.heal()
    async with connect(by_sentinels(redis_sentinels)) as others:
        async with others.lock("a", wait=20) as later:
            assert later.token > token


async def _patiently_inspected(locks: LockClient, name: str) -> Holder | None:
    while True:
        try:
            return await locks.inspect(name)
        except BackendUnavailableError:
            await asyncio.sleep(0.05)


async def test_a_waiter_gets_its_turn_over_a_failover(redis_sentinels: Sentinels):
    """The line, the subscription and the message are gone with the old master; the waiter is not."""
    async with connect(by_sentinels(redis_sentinels)) as locks:
        holder = await locks.lock("a", ttl=3).acquire()
        waiting = asyncio.create_task(locks.lock("a", ttl=30).acquire())
        await until(lambda: redis_sentinels.master.ask("EXISTS", "{fencing:a}:w"), what="the waiter stands in line")
        await redis_sentinels.failover()
        first = state_of(holder).number
        await holder.release()
        async with asyncio.timeout(30):
            lease = await waiting
        assert lease.token > first
        await lease.release()


async def test_a_cluster_that_fails_over_is_followed(redis_binary: str):
    with Cluster(binary=redis_binary, replicas=1) as cluster:
        url = cluster.url.replace("redis://", "redis+cluster://")
        async with connect(url) as locks:
            async with locks.lock("a") as lease:
                first = lease.token
            await cluster.failover(cluster.node_of("{fencing:a}:s"))
            async with asyncio.timeout(30), locks.lock("a", ttl=30) as lease:
                assert lease.token > first


# Locks on a cluster whose slots move and whose nodes fail, while leases are held.


def url_of(cluster: Cluster) -> str:
    return cluster.url.replace("redis://", "redis+cluster://")


def lease_of(name: str) -> str:
    return f"{{fencing:{name}}}:s"


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
        await until(
            lambda: target.ask("GETRANGE", lease_of("a"), 24, 25) == IDLE, what="it is released", within=10
        )  # not expired
        async with locks.lock("a") as later:
            assert later.token > token


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
                async with locks.lock(here, ttl=8, heartbeat_interval=0.3):
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


# What only Redis shows when it fails under a holder: crashes with and without memory.


# The server dies.


async def test_a_lease_and_its_line_live_through_a_crash_of_a_durable_server(start_redis):
    server = start_redis(appendonly=True, appendfsync="always")
    async with opened(server.url) as (locks, log), opened(server.url) as (others, _):
        async with staying(locks.lock("a", ttl=10)) as stay:
            waiting = Stay(others.lock("a", ttl=10, wait=PATIENCE))
            await eventually(lambda: server.command("EXISTS", key("a", "w")), what="somebody waits")
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            assert await server.command("EXISTS", key("a", "w"))
            renewed = len(log.of(Renewed))
            await log.seen(Renewed, renewed + 1)
            assert not waiting.entered.is_set()
            await stay.end()
        await waiting.begun()
        assert waiting.token > stay.token
        assert len(await connections(server)) == 2
        await waiting.end()
    assert log.of(Lost) == []
    await nothing_left(server)


async def test_a_server_that_forgets_everything_in_a_crash_grants_a_higher_token(start_redis):
    server = start_redis()
    async with opened(server.url) as (locks, _), opened(server.url) as (others, _):
        async with staying(locks.lock("a", **LONG)) as stay:
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            async with staying(others.lock("a", wait=PATIENCE)) as following:
                assert following.token > stay.token
                await stay.over()
                assert stay.lost in {LossReason.TAKEN_OVER, LossReason.REFUSED, LossReason.REVOKED}
                await following.end()
    await nothing_left(server)


async def test_plain_counters_begin_again_when_the_server_forgets_which_the_docs_say(start_redis, pytestconfig):
    server = start_redis()
    async with opened(server.url, tokens="counter") as (locks, _):
        for expected in (1, 2):
            async with locks.lock("a") as lease:
                assert lease.token == expected
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        async with locks.lock("a", wait=PATIENCE) as lease:
            assert lease.token == 1
    page = (pytestconfig.rootpath / "docs/backends/redis.md").read_text()
    assert "start again at 1" in page
    await nothing_left(server)


async def test_a_server_that_loads_its_data_is_waited_for(start_redis, redis_binary):
    if version_of(redis_binary) < (7,):
        pytest.skip("before Redis 7 a small file is loaded without a look at the network")
    server = start_redis(key_load_delay=2000, loading_process_events_interval_bytes=1024)
    async with opened(server.url) as (locks, log), staying(locks.lock("a", **LONG | {"ttl": 20})) as stay:
        await log.seen(Renewed)
        await server.command("EVAL", "for i = 1, 3000 do redis.call('SET', 'filler:' .. i, i) end", 0)
        await server.command("SAVE")
        await asyncio.to_thread(server.kill)
        starting = asyncio.create_task(asyncio.to_thread(server.start))
        await until(lambda: any("loading" in event.error for event in log.of(RenewalFailed)))
        await server.command("CONFIG", "SET", "key-load-delay", 0)
        await starting
        renewed = len(log.of(Renewed))
        await log.seen(Renewed, renewed + 1)
        await stay.end()
        await server.command("EVAL", "for i = 1, 3000 do redis.call('DEL', 'filler:' .. i) end", 0)
    assert log.of(Lost) == []
    await nothing_left(server)
