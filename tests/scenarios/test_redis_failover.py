"""What a failover loses, and what the SDK makes of it: replication really cut, masters really killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from event_log import ENDED_BY_TIME
from patience import until
from redis_cluster import Cluster
from redis_replicas import Replicated, info
from redis_sentinels import Sentinels

from fencing_sdk import (
    BackendUnavailableError,
    Event,
    LeaseLostError,
    LockClient,
    StaleTokenError,
    connect,
)
from fencing_sdk._lease import state_of
from fencing_sdk.abc import Claim, Grant, Holder
from fencing_sdk.backends.redis import from_url
from fencing_sdk.guards.memory import MemoryGuard

pytest_plugins = ["redis_fixtures"]


@pytest.fixture
async def group(redis_binary: str) -> AsyncIterator[Replicated]:
    async with Replicated(binary=redis_binary) as group:
        yield group


async def grants_around_a_failover(group: Replicated, tokens: str) -> tuple[int, int]:
    """The token of a grant that the replica never received, and the next one, by that replica."""
    url = f"redis://127.0.0.1:{group.master.port}?tokens={tokens}"
    async with connect(url) as before:
        for _ in range(3):
            async with before.lock("a"):
                pass
        await group.synced()
        group.cut_replication()
        first = await before.lock("a", ttl=60).acquire()
        promoted = await group.promote()
        async with connect(f"redis://127.0.0.1:{promoted.port}?tokens={tokens}") as after:
            second = await after.lock("a", wait=0).acquire()  # the lease is lost: the new master knows nothing of it
            return first.token, second.token


async def test_a_master_that_misses_its_replicas_is_left_because_they_may_have_a_new_one(redis_binary: str):
    """It still takes connections and commands; the next call asks the Sentinels again where the master is."""

    def connections(group: Replicated) -> set[str]:
        lines = group.master.ask("CLIENT", "LIST", "TYPE", "normal").splitlines()
        return {line.split()[0] for line in lines if " addr=127.0.0.1:" in line}

    async with Replicated(binary=redis_binary, min_replicas_to_write=1) as group:
        await group.synced()
        await until(lambda: info(group.master, "replication")["min_slaves_good_slaves"] == "1", what="a good replica")
        backend, claim = from_url(f"redis://127.0.0.1:{group.master.port}"), Claim("a", 30.0)
        assert isinstance(await backend.acquire(claim), Grant)
        (first,) = connections(group)
        group.links[0].cut()
        group.links[0].refuse()
        await until(lambda: info(group.master, "replication")["connected_slaves"] == "0", what="the master is alone")
        for _ in range(2):
            with pytest.raises(BackendUnavailableError, match=r"too few replicas|connection broke"):
                await backend.renew([claim])
        assert first not in connections(group)
        await backend.aclose()


@pytest.mark.usefixtures("answers_may_be_late")
async def test_a_failover_that_loses_a_grant_does_not_lose_its_token(group: Replicated):
    first, second = await grants_around_a_failover(group, "hybrid")
    guard = MemoryGuard()
    await guard.raise_to("a", second)
    with pytest.raises(StaleTokenError):
        guard.admit("a", first)


@pytest.mark.usefixtures("answers_may_be_late")
async def test_a_plain_counter_repeats_a_token_after_such_a_failover(group: Replicated):
    """The stated risk of ``tokens="counter"``, and why a guard compares holders too."""
    first, second = await grants_around_a_failover(group, "counter")
    assert first == second
    guard = MemoryGuard()
    await guard.raise_to("a", first)
    with pytest.raises(StaleTokenError) as refused:
        guard.admit("a", second)
    assert refused.value.conflict


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
            assert (holder.token, holder.holder) == (lease.token, lease.holder)


async def test_a_grant_that_no_replica_confirms_is_undone_and_tried_again(group: Replicated):
    async with connect(f"redis://127.0.0.1:{group.master.port}?min_replicas=1") as locks:
        group.cut_replication()
        with pytest.raises(BackendUnavailableError, match=r"replicas|no answer"):  # a busy machine may answer too late
            await locks.lock("a", ttl=60, wait=2).acquire()
        await until(lambda: not group.master.ask("EXISTS", "{fencing:a}:l"), what="the grant is undone")
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
            assert (holder.token, holder.holder) == (token, lease.holder)
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
        await until(lambda: redis_sentinels.master.ask("EXISTS", "{fencing:a}:q"), what="the waiter stands in line")
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
            await cluster.failover(cluster.node_of("{fencing:a}:l"))
            async with asyncio.timeout(30), locks.lock("a", ttl=30) as lease:
                assert lease.token > first
