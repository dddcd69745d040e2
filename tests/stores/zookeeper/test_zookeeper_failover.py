"""Ensembles and processes of ZooKeeper that die, stand still, fork, are cut off, or whose clock jumps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence

import pytest
from event_log import CLOCK, ENDED_BY_TIME
from inside import BootClock, state_of
from required_program import require_program
from stays import PATIENCE, SHORT, eventually, opened, staying
from worker_processes import WORKERS, worker_processes
from zookeeper_clock import WallClock
from zookeeper_network import MemberNetwork
from zookeeper_server import ZooKeeperEnsemble, fresh_root, require_zookeeper
from zookeeper_stage import Operator, granted, in_place, operating

from fencing_sdk import LossReason
from fencing_sdk.abc import Claim, Grant, Renewal
from fencing_sdk.backends.zookeeper import from_url
from fencing_sdk.backends.zookeeper.driver import ALL_CLIENTS, create_persistent, delete, get
from fencing_sdk.errors import BackendUnavailableError

pytest_plugins = ["zookeeper_fixtures"]


# An ensemble of three: leaders and followers that die, stand still, or are cut off from each other.


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


async def test_a_leader_that_stands_still_is_replaced_and_leases_go_on(zookeeper_ensemble, url):
    """The others elect a new one; what the old one says when it wakes counts no more."""
    async with opened(url) as (locks, log):
        async with staying(locks.lock("a", ttl=20, heartbeat_interval=0.3)) as stay:
            leader = await asyncio.to_thread(lambda: zookeeper_ensemble.leader)
            leader.pause()
            await _renewed_again(log)
            leader.resume()
            await stay.end()
        async with staying(locks.lock("a", ttl=20)) as again:
            assert again.token > stay.token


async def test_a_follower_that_is_cut_off_from_the_leader_renews_nothing(zookeeper_ensemble, url):
    """It still answers reads and would show every node: only what the leader has answered counts as a renewal."""
    leader = await asyncio.to_thread(lambda: zookeeper_ensemble.leader)
    follower, third = (member for member in zookeeper_ensemble.members if member is not leader)
    backend = from_url(f"{follower.url}/{url.rsplit('/', 1)[1]}")
    claim = Claim("a", 20.0)
    assert isinstance(await backend.acquire(claim), Grant)
    leader.pause()
    third.pause()
    try:
        outcomes = []
        for _ in range(3):
            try:
                async with asyncio.timeout(0.3):
                    outcomes += await backend.renew([claim])
            except (TimeoutError, BackendUnavailableError):
                outcomes.append(Renewal.UNKNOWN)
        assert outcomes == [Renewal.UNKNOWN] * 3
    finally:
        leader.resume()
        third.resume()
    await eventually(lambda: _renews(backend, claim), what="the renewal")
    await backend.release(claim)
    await backend.aclose()


async def _renews(backend, claim) -> bool:
    try:
        return await backend.renew([claim]) == [Renewal.RENEWED]
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


async def test_members_die_one_after_the_other_and_fifty_waiters_are_served_in_order(zookeeper_ensemble, url):
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
    assert [number for _, number in served] == list(range(50))


# An ensemble whose members cannot reach each other: a leader on its own, and a follower on its own.


LIMIT = 3 * PATIENCE


@pytest.fixture(scope="module")
def member_network() -> Iterator[MemberNetwork]:
    network = MemberNetwork([1, 2, 3])
    yield network
    network.close()


@pytest.fixture(scope="module")
def _split_ensemble(member_network: MemberNetwork) -> Iterator[ZooKeeperEnsemble]:
    require_zookeeper()
    with ZooKeeperEnsemble(network=member_network) as ensemble:
        yield ensemble


@pytest.fixture
def split_ensemble(_split_ensemble: ZooKeeperEnsemble, member_network: MemberNetwork) -> Iterator[ZooKeeperEnsemble]:
    """Three members that reach each other by way of `member_network`."""
    _split_ensemble.heal()
    yield _split_ensemble
    member_network.heal()


async def test_a_leader_on_its_own_keeps_no_lease_alive_until_the_majority_grants_another_one(
    split_ensemble, member_network
):
    """The client on the leader's side hears nothing of the new leader. Its work ends before that grants the lock."""
    root = fresh_root()
    old = await asyncio.to_thread(lambda: split_ensemble.leader)
    rest = ",".join(member.address for member in split_ensemble.members if member is not old)
    async with opened(f"{old.url}{root}") as (locks, _), opened(f"zk://{rest}{root}") as (others, _):
        async with staying(locks.lock("a", **SHORT)) as stay:
            member_network.split(old.member)
            second = await asyncio.wait_for(others.lock("a", ttl=LIMIT).acquire(), LIMIT)
            granted_at = CLOCK.now()
            await stay.over()
            assert stay.lost in ENDED_BY_TIME
            assert stay.body_ended_at < granted_at
            assert second.token >> 32 > stay.token >> 32, "another leader granted it"
        member_network.heal()
        await eventually(lambda: _follows(old), what="the old leader follows")
        await second.release()
        third = await asyncio.wait_for(locks.lock("a", ttl=LIMIT).acquire(), LIMIT)
        assert third.token > state_of(second).number
        await third.release()


async def _follows(member) -> bool:
    return await asyncio.to_thread(member.role) == "follower"


async def test_who_may_ask_all_members_keeps_its_lease_although_its_follower_is_cut_off(split_ensemble, member_network):
    """The follower closes its connections when it has lost the leader; the session goes on with another member."""
    root = fresh_root()
    lone = (await asyncio.to_thread(lambda: split_ensemble.followers))[0]
    rest = [member for member in split_ensemble.members if member is not lone]
    away, everywhere = from_url(f"{lone.url}{root}"), from_url(f"zk://{lone.address}{root}")
    claim, other = Claim("a", 60.0), Claim("b", 60.0)
    grant = await everywhere.acquire(claim)
    session = everywhere._sessions.of(60.0)
    assert isinstance(grant, Grant)
    assert isinstance(await away.acquire(other), Grant)
    addresses = [member.address.rpartition(":") for member in split_ensemble.members]
    hosts = [(host, int(port)) for host, _, port in addresses]
    session._driver._client.set_hosts(hosts)  # it may ask all of them, and is connected to this one
    member_network.split(lone.member)
    await eventually(lambda: _silent(lone), what="the follower has noticed")
    with pytest.raises(BackendUnavailableError):
        await away.renew([other])
    await eventually(lambda: _renews(everywhere, claim), what="a renewal by way of another member")
    assert session.id == everywhere._sessions.of(60.0).id
    assert await everywhere.acquire(claim) == grant
    assert all(member.role(patience=PATIENCE) in {"leader", "follower"} for member in rest)
    member_network.heal()
    await eventually(lambda: _renews(away, other), what="a renewal, when the follower is back")
    for backend, held in ((away, other), (everywhere, claim)):
        await backend.release(held)
        await backend.aclose()


async def _silent(member) -> bool:
    return not await asyncio.to_thread(member.role)


# Processes that share a ZooKeeper, and are killed, stopped or forked.


async def test_a_holder_that_was_stopped_for_longer_than_its_session_finds_its_lease_gone(zookeeper_url, tmp_path):
    """Before it was waked, somebody else held the lock; its first look at the token tells it."""
    sink = tmp_path / "sink"
    sent: list[tuple[float, int]] = []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            at, token = line.split()
            sent.append((float(at), int(token)))
            writer.write(b"\n")
        writer.close()

    server = await asyncio.start_unix_server(take, sink)
    async with worker_processes() as start, opened(zookeeper_url) as (locks, _):
        worker = await start(WORKERS / "pause_worker.py", zookeeper_url, sink, "a", "1.5", "2", "calls")
        await eventually(lambda: _some(sent), what="the worker holds the lock")
        worker.stop()
        lease = await asyncio.wait_for(locks.lock("a", ttl=20).acquire(), LIMIT)
        before, waked = len(sent), BootClock.now()
        worker.cont()
        while (b := await worker.process.stdout.readline()) and b'"left"' not in b:
            pass
        assert any(f'"reason": "{reason}"'.encode() in b for reason in LossReason)

        def since() -> list[int]:
            """Without a call that was begun before, and was on its way."""
            return [token for at, token in sent[before:] if at >= waked]

        assert since() == [], "it worked on after it was waked"
        assert max(token for _, token in sent) < lease.token
        await lease.release()
        await eventually(lambda: _some(since()), what="the worker holds the lock again")
        assert since()[0] > state_of(lease).number
    server.close()


async def _some(sent: Sequence[object]) -> bool:
    return bool(sent)


# A leader whose wall clock jumps: ZooKeeper counts sessions by another clock, and tokens by transactions.


HOURS = 6 * 3600


@pytest.fixture(scope="module")
def member_clocks(tmp_path_factory: pytest.TempPathFactory) -> list[WallClock]:
    require_program("cc", "gcc libc6-dev")
    return [WallClock(tmp_path_factory.mktemp("clock")) for _ in range(3)]


@pytest.fixture(scope="module")
def clocked_ensemble(member_clocks: list[WallClock]) -> Iterator[ZooKeeperEnsemble]:
    """Three members with clocks of their own."""
    require_zookeeper()
    ensemble = ZooKeeperEnsemble()
    for member, clock in zip(ensemble.members, member_clocks, strict=True):
        member.prefix = clock.prefix
    with ensemble:
        yield ensemble


@pytest.mark.parametrize("hours", [HOURS, -HOURS], ids=["ahead", "behind"])
async def test_a_wall_clock_that_jumps_ends_no_session_and_keeps_none_alive(hours, clocked_ensemble, member_clocks):
    """Neither that of a holder who lives, nor that of one who has gone; and tokens grow, also under the next leader."""
    await asyncio.to_thread(clocked_ensemble.heal)
    leader = await asyncio.to_thread(lambda: clocked_ensemble.leader)
    url, clock = f"{clocked_ensemble.url}{fresh_root()}", member_clocks[leader.member - 1]
    async with opened(url) as (locks, log), operating(url) as operator:
        async with staying(locks.lock("living", ttl=10, heartbeat_interval=0.5)) as stay:
            gone = from_url(url)
            left_at = CLOCK.now()
            before = await granted(gone, Claim("gone", 2.0))
            await gone.aclose()  # without its session, which nobody keeps alive from now on
            clock.shift(hours)
            assert abs(await _wall_clock(operator) - time.time() - hours) < HOURS / 2
            after = await asyncio.wait_for(locks.lock("gone", ttl=2).acquire(), LIMIT)
            assert left_at + 2 < CLOCK.now() < left_at + LIMIT
            assert after.token > before.token
            since = len(log.events)
            await eventually(lambda: _renewed(log, since), what="a renewal")
            await stay.end()
        await after.release()
        await asyncio.to_thread(leader.kill)
        async with asyncio.timeout(LIMIT), locks.lock("gone", ttl=LIMIT) as last:
            assert last.token > state_of(after).number
    clock.shift(0)


async def _wall_clock(operator: Operator) -> float:
    """The time that the leader writes into a node."""
    session = await operator.session()
    path = f"{operator._paths.root}/clock"
    await session.call(create_persistent(path, ALL_CLIENTS))
    _, stat = await session.call(get(path))
    await session.call(delete(path))
    return stat.ctime / 1000


async def _renewed(log, since: int) -> bool:
    return any(event.kind == "renewed" for event in log.events[since:])
