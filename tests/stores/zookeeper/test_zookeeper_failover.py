"""Ensembles and processes of ZooKeeper that die, fork or are cut off."""

from __future__ import annotations

import asyncio

import pytest
from event_log import CLOCK, ENDED_BY_TIME
from stays import PATIENCE, eventually, opened, staying
from zookeeper_server import fresh_root
from zookeeper_stage import in_place, kept

from fencing_sdk.abc import Claim, Place
from fencing_sdk.backends.zookeeper import from_url
from fencing_sdk.errors import BackendUnavailableError

pytest_plugins = ["zookeeper_fixtures"]


@pytest.fixture
def url(zookeeper_ensemble):
    """An empty store on all members."""
    return f"{zookeeper_ensemble.url}{fresh_root()}"


async def _renewed_again(log) -> None:
    since = len(log.events)

    async def look() -> bool:
        return any(event.kind == "renewed" for event in log.events[since:])

    await eventually(look, what="a renewal")


async def test_a_killed_leader_costs_neither_the_lease_nor_the_place_in_the_line(zookeeper_ensemble, url):
    """Sessions and nodes are the ensemble's; the next token is higher, because the next leader has a higher epoch."""
    async with opened(url) as (locks, log), opened(url) as (others, _):
        async with staying(locks.lock("a", ttl=15, heartbeat_interval=0.3)) as stay:
            first = asyncio.ensure_future(others.lock("a", ttl=15).acquire())
            await in_place(others, 1)
            second = asyncio.ensure_future(others.lock("a", ttl=14).acquire())
            await in_place(others, 2)
            leader = await asyncio.to_thread(lambda: zookeeper_ensemble.leader)
            await asyncio.to_thread(leader.kill)
            await _renewed_again(log)
            await stay.end()
        lease = await asyncio.wait_for(first, PATIENCE)
        assert not second.done()
        assert lease.token > stay.token
        await lease.release()
        await (await asyncio.wait_for(second, PATIENCE)).release()
        async with staying(locks.lock("b", ttl=15)) as later:
            assert later.token >> 32 > stay.token >> 32


async def test_a_follower_that_is_cut_off_from_the_leader_keeps_nothing(zookeeper_ensemble, url):
    """It still answers reads and would show every node: only what the leader has answered counts as a renewal."""
    leader = await asyncio.to_thread(lambda: zookeeper_ensemble.leader)
    follower, third = (member for member in zookeeper_ensemble.members if member is not leader)
    backend = from_url(f"{follower.url}/{url.rsplit('/', 1)[1]}")
    claim = Claim("a", 20.0)
    place = await backend.draw(claim)
    leader.pause()
    third.pause()
    try:
        outcomes = []
        for _ in range(3):
            try:
                async with asyncio.timeout(0.3):
                    outcomes += await kept(backend, claim)
            except (TimeoutError, BackendUnavailableError):
                outcomes.append(None)
        assert outcomes == [None] * 3
    finally:
        leader.resume()
        third.resume()
    await eventually(lambda: _keeps(backend, claim, place), what="the keep")
    await backend.give_back(claim)
    await backend.aclose()


async def _keeps(backend, claim, place: Place) -> bool:
    try:
        return await kept(backend, claim) == [place]
    except BackendUnavailableError:
        return False


async def test_without_a_majority_the_lease_ends_on_time_and_locks_come_back_with_it(zookeeper_ensemble, url):
    async with opened(url) as (locks, _):
        lock = {"ttl": 8.0, "safety_buffer": 6.0, "heartbeat_interval": 0.4}  # valid for 1.9 s
        async with staying(locks.lock("a", **lock)) as stay:
            followers = await asyncio.to_thread(lambda: zookeeper_ensemble.followers)
            for member in followers:
                await asyncio.to_thread(member.kill)
            killed_at = CLOCK.now()
            await stay.over()
            assert stay.lost in ENDED_BY_TIME
            assert stay.body_ended_at < killed_at + lock["ttl"]
        await asyncio.to_thread(zookeeper_ensemble.heal)
        lease = await asyncio.wait_for(locks.lock("a", ttl=10, wait=PATIENCE).acquire(), PATIENCE)
        assert lease.token > stay.token
        await lease.release()


async def test_members_die_one_after_the_other_and_fifty_waiters_are_served(zookeeper_ensemble, url):
    """In the order of their tokens; of their arrival, unless the ensemble is away for longer than a waiter lives."""
    served: list[tuple[int, int]] = []

    async def wait(number: int) -> None:
        async with clients[number % 2].lock("a", ttl=20) as lease:
            served.append((lease.token, number))
            await asyncio.sleep(0.05)

    async with opened(url) as (first, _), opened(url) as (second, _):
        clients = (first, second)
        async with staying(first.lock("a", ttl=20, heartbeat_interval=0.5)) as stay:
            waiters = []
            for number in range(50):
                waiters.append(asyncio.ensure_future(wait(number)))
                await in_place(clients[number % 2], number // 2 + 1)
            await stay.end()
        for member in zookeeper_ensemble.members:
            await asyncio.to_thread(member.kill)
            await asyncio.sleep(0.3)
            await asyncio.to_thread(zookeeper_ensemble.heal)
        async with asyncio.timeout(6 * PATIENCE):
            await asyncio.gather(*waiters)
    assert sorted(served) == served
    assert sorted(number for _, number in served) == list(range(50))
