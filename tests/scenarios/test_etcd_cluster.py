"""A cluster of three etcd members that loses its leader, its majority and single members."""

from __future__ import annotations

import asyncio

import pytest
from campaigns import amount
from etcd_server import EtcdCluster, gone
from etcd_stage import (
    SHORT_IN_LINE,
    ask_first,
    backend_on,
    count_of_keys,
    granted,
    held_for,
    in_order,
    six_in_line,
)
from event_log import ENDED_BY_TIME
from stays import Stay, eventually, opened, staying

from fencing_sdk import Renewed
from fencing_sdk.abc import Claim

pytest_plugins = ["etcd_fixtures"]


KEPT = amount({"ttl": 8.0}, short={"ttl": 20.0, "heartbeat_interval": 0.5})
BEYOND = amount(9.0, short=2.0)
"""Seconds for which a lease is kept: in a campaign longer than the ttl, so that no grant from before is left."""


@pytest.mark.campaign
async def test_a_leader_that_is_killed_costs_no_lease_and_no_exclusion(etcd_cluster: EtcdCluster):
    async with opened(etcd_cluster.url) as (locks, log), staying(locks.lock("a", **KEPT)) as stay:
        leader = await etcd_cluster.await_leader()
        leader.kill()
        await held_for(BEYOND, log, locks, "a")
        await stay.end()
        async with locks.lock("a", wait=20) as lease:
            assert lease.token > stay.token
    await gone(etcd_cluster, "fencing/")


async def test_a_leader_that_is_killed_while_some_wait_loses_no_wake_up_and_no_order(etcd_cluster: EtcdCluster):
    async with opened(etcd_cluster.url) as (locks, _), opened(etcd_cluster.url) as (others, _):
        async with staying(locks.lock("a", ttl=20)) as first:
            stays = await six_in_line(etcd_cluster, "a", locks, others)
            (await etcd_cluster.await_leader()).kill()
            await first.end()
            await in_order(stays)


async def test_without_a_majority_the_work_ends_in_time_and_nobody_else_begins(etcd_cluster: EtcdCluster):
    """Two of three stand still. When they go on, the lock is free for a higher token."""
    async with opened(etcd_cluster.url) as (locks, _), opened(etcd_cluster.url) as (others, _):
        async with staying(locks.lock("a", **SHORT_IN_LINE)) as stay:
            waiting = Stay(others.lock("a", ttl=20))
            await count_of_keys(etcd_cluster, "a", 2)
            for member in etcd_cluster.members[:2]:
                member.pause()
            await stay.over()
            assert stay.lost in ENDED_BY_TIME
            assert not waiting.entered.is_set()
            for member in etcd_cluster.members[:2]:
                member.resume()
            if waiting.task.done():  # the store was silent for as long as it waits for an answer
                waiting = Stay(others.lock("a", ttl=20))
            await waiting.begun()
            assert waiting.granted_at > stay.body_ended_at
            assert waiting.token > stay.token
            await waiting.end()


async def test_a_member_that_hangs_is_left_for_another_long_before_an_interval_is_over(etcd_cluster: EtcdCluster):
    """The first that is asked takes connections and never answers; it follows, so the others have a majority."""
    leader = await etcd_cluster.await_leader()
    hanging = next(member for member in etcd_cluster.members if member is not leader)
    lock = {"ttl": 12, "heartbeat_interval": 3}
    async with opened(etcd_cluster.url) as (locks, log), staying(locks.lock("a", **lock)) as stay:
        ask_first(locks._backend._gateway, hanging.port)
        hanging.pause()
        first = await log.seen(Renewed)
        assert first.spare > 3.8, "a call that hung for its whole interval would leave 3.5 s at most"
        await log.seen(Renewed, 2)
        async with locks.lock("b", ttl=10, wait=20) as lease:
            assert lease.held
        await stay.end()


async def test_dead_members_in_the_url_are_passed_over(etcd_cluster: EtcdCluster):
    dead = etcd_cluster.members[0]
    dead.kill()
    await etcd_cluster.await_leader()  # it may have been the killed one
    url = f"etcd://127.0.0.1:1,no-such-host.invalid:2379,127.0.0.1:{dead.port},{etcd_cluster.hosts}"
    async with opened(url) as (locks, _):
        async with locks.lock("a", wait=20) as lease:
            await lease.renew()


async def test_a_lease_outlives_a_restart_of_every_member_one_after_the_other(etcd_cluster: EtcdCluster):
    async with opened(etcd_cluster.url) as (locks, log), staying(locks.lock("a", ttl=20, heartbeat_interval=1)) as stay:
        for member in etcd_cluster.members:
            await asyncio.to_thread(member.kill)
            await asyncio.to_thread(etcd_cluster.start)
            renewed = len(log.of(Renewed))
            await log.seen(Renewed, renewed + 1)
        await stay.end()


async def _watched(cluster: EtcdCluster) -> float:
    return await asyncio.to_thread(cluster.metric, "etcd_debugging_mvcc_watcher_total")


async def test_a_watch_at_a_member_that_lost_its_leader_ends(etcd_cluster: EtcdCluster):
    """It would hear of nothing; so it is told to end, and the waiter asks others."""
    async with backend_on(etcd_cluster.url) as backend, backend_on(etcd_cluster.url) as other:
        holder, waiter = Claim("a", 60.0), Claim("a", 60.0)
        await granted(other, holder)
        place = backend.queue(waiter)
        async with place as turn:
            first = backend._gateway._endpoints.in_turn()[0].origin
            others = [member for member in etcd_cluster.members if member.origin != first]
            await eventually(lambda: _watched(etcd_cluster), what="the watch is opened")
            for member in others:
                member.pause()
            async with asyncio.timeout(90):
                while backend._gateway._endpoints.in_turn()[0].origin == first:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                for member in others:
                    member.resume()
                while True:
                    try:
                        await other.release(holder)
                        break
                    except Exception:
                        await asyncio.sleep(0.1)
                await turn.wait()
