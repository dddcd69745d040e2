"""A cluster of three etcd members whose network falls apart, while all of them run and take requests."""

from __future__ import annotations

import asyncio

import pytest
from campaigns import amount
from etcd_network import PeerNetwork
from etcd_server import EtcdCluster, EtcdMember, b64, gone
from etcd_stage import SHORT_IN_LINE, backend_on, count_of_keys, granted, held_for, in_order, six_in_line
from event_log import ENDED_BY_TIME
from stays import SHORT, Stay, answered, opened, staying

from fencing_sdk import StaleTokenError
from fencing_sdk.abc import Claim
from fencing_sdk.errors import BackendUnavailableError
from fencing_sdk.guards.etcd import EtcdGuard, put

pytest_plugins = ["etcd_fixtures"]

KEPT = amount({"ttl": 6.0}, short={"ttl": 20.0, "heartbeat_interval": 0.5})
BEYOND = amount(7.5, short=2.0)
"""Seconds for which a lease is kept: in a campaign longer than the ttl, so that no grant from before is left."""

LEADER_OR_FOLLOWER = pytest.mark.parametrize("leads", [True, False], ids=["leader", "follower"])


async def sides(cluster: EtcdCluster, *, leads: bool = True) -> tuple[EtcdMember, list[EtcdMember]]:
    """One member, which leads or follows, and the two others."""
    leader = await cluster.await_leader()
    one = leader if leads else next(member for member in cluster.members if member is not leader)
    return one, [member for member in cluster.members if member is not one]


def network_of(cluster: EtcdCluster) -> PeerNetwork:
    assert cluster.network is not None
    return cluster.network


def url_of(*members: EtcdMember) -> str:
    return "etcd://" + ",".join(f"127.0.0.1:{member.port}" for member in members)


@LEADER_OR_FOLLOWER
async def test_a_holder_at_the_cut_off_member_is_out_before_the_majority_hands_on(
    partitioned_etcd: EtcdCluster, leads: bool
):
    """It knows no other member. Its keep-alives may still be answered there; they prove nothing by themselves."""
    alone, rest = await sides(partitioned_etcd, leads=leads)
    async with opened(url_of(alone)) as (locks, _), opened(url_of(*rest)) as (others, _):
        async with staying(locks.lock("a", **SHORT_IN_LINE)) as stay:
            waiting = Stay(others.lock("a", ttl=20))
            await count_of_keys(partitioned_etcd, "a", 2)
            with network_of(partitioned_etcd).isolated(alone.address):
                await stay.over()
                assert stay.lost in ENDED_BY_TIME
                await waiting.begun()
                assert stay.body_ended_at < waiting.granted_at
                assert waiting.token > stay.token
        await waiting.end()
    await gone(partitioned_etcd, "fencing/")


@pytest.mark.campaign
@LEADER_OR_FOLLOWER
async def test_a_holder_that_knows_all_members_goes_on_at_the_majority(partitioned_etcd: EtcdCluster, leads: bool):
    """The member that it asks first is cut off, for longer than the ttl and the lease."""
    alone, rest = await sides(partitioned_etcd, leads=leads)
    async with opened(url_of(alone, *rest)) as (locks, log), opened(url_of(*rest)) as (others, _):
        async with staying(locks.lock("a", **KEPT)) as stay:
            with network_of(partitioned_etcd).isolated(alone.address):
                await held_for(BEYOND, log, others, "a")
            await stay.end()
        async with others.lock("a", wait=20) as lease:
            assert lease.token > stay.token
    await gone(partitioned_etcd, "fencing/")


@LEADER_OR_FOLLOWER
async def test_those_who_wait_on_both_sides_keep_their_order(partitioned_etcd: EtcdCluster, leads: bool):
    """Half of them watch at the member that is cut off, which hears of no release."""
    alone, rest = await sides(partitioned_etcd, leads=leads)
    clients = opened(url_of(alone, *rest)), opened(url_of(*rest, alone))
    async with clients[0] as (here, _), clients[1] as (there, _):
        async with staying(there.lock("a", ttl=20)) as first:
            stays = await six_in_line(partitioned_etcd, "a", here, there)
            with network_of(partitioned_etcd).isolated(alone.address):
                await first.end()
                await in_order(stays)
    await gone(partitioned_etcd, "fencing/")


async def test_those_who_wait_while_a_partition_comes_and_goes_are_all_served(partitioned_etcd: EtcdCluster):
    """Each member is cut off once, and the lock handed on meanwhile."""
    async with opened(partitioned_etcd.url) as (here, _), opened(partitioned_etcd.url) as (there, _):
        async with staying(here.lock("a", ttl=20)) as first:
            stays = await six_in_line(partitioned_etcd, "a", here, there)
            line = [first, *stays]
            for member, holder, following in zip(partitioned_etcd.members, line[:3], line[1:4], strict=True):
                with network_of(partitioned_etcd).isolated(member.address):
                    await holder.end()
                    await following.begun()
            await in_order(stays[2:])
    await gone(partitioned_etcd, "fencing/")


async def test_when_no_member_reaches_another_the_work_ends_and_nobody_begins(partitioned_etcd: EtcdCluster):
    """Every member takes requests, the old leader for a while even keep-alives."""
    url = partitioned_etcd.url
    async with opened(url) as (locks, _), opened(url) as (others, _):
        async with staying(locks.lock("a", **SHORT)) as stay:
            for member in partitioned_etcd.members:
                network_of(partitioned_etcd).isolate(member.address)
            waiting = Stay(others.lock("a", ttl=20))
            await stay.over()
            assert stay.lost in ENDED_BY_TIME
            assert not waiting.entered.is_set()
            network_of(partitioned_etcd).heal()
            if waiting.task.done():  # the store was silent for as long as it waits for an answer
                waiting = Stay(others.lock("a", ttl=20))
            await waiting.begun()
            assert waiting.granted_at > stay.body_ended_at
            assert waiting.token > stay.token
            await waiting.end()
    await gone(partitioned_etcd, "fencing/")


@pytest.mark.campaign
async def test_two_members_that_only_a_third_reaches_both_cost_no_lease(partitioned_etcd: EtcdCluster):
    """The follower that lost sight of the leader stands for election in vain; healed, its higher term deposes it."""
    leader, (blind, _) = await sides(partitioned_etcd)
    network = network_of(partitioned_etcd)
    url = url_of(blind, *(member for member in partitioned_etcd.members if member is not blind))
    async with opened(url) as (locks, log), opened(partitioned_etcd.url) as (others, _):
        async with staying(locks.lock("a", **KEPT)) as stay:
            network.cut(leader.address, blind.address)
            await held_for(BEYOND, log, others, "a")
            network.heal()
            await held_for(1, log, others, "a")
            await stay.end()
    await gone(partitioned_etcd, "fencing/")


@LEADER_OR_FOLLOWER
async def test_what_a_stale_holder_writes_at_the_cut_off_member_never_counts(
    partitioned_etcd: EtcdCluster, leads: bool
):
    """Not while it is cut off, and not when its log meets that of the majority."""
    alone, rest = await sides(partitioned_etcd, leads=leads)
    async with backend_on(url_of(*rest)) as backend, EtcdGuard(url_of(*rest)) as fresh, EtcdGuard(url_of(alone)) as old:
        claim = Claim("a", 30.0)
        token = await granted(backend, claim)
        await old.execute("a", token, put("data/a", "old"))
        with network_of(partitioned_etcd).isolated(alone.address):
            writing = asyncio.ensure_future(old.execute("a", token, put("data/a", "late")))
            await answered(lambda: backend.release(claim))
            following = Claim("a", 30.0)
            higher = await answered(lambda: granted(backend, following))
            await answered(lambda: fresh.execute("a", higher, put("data/a", "new")))
        with pytest.raises((BackendUnavailableError, StaleTokenError)):
            await writing
        await partitioned_etcd.command("kv/put", {"key": b64("x"), "value": b64("x")})
        (found,) = (await asyncio.to_thread(partitioned_etcd.keys, "data/")).values()
        assert found["value"] == b64("new")
        with pytest.raises(StaleTokenError):
            await old.execute("a", token, put("data/a", "later"))
