"""Waiters of one client: who leaves leaves nothing, and who stays is woken."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable

import pytest
from patience import until
from redis_cluster import Cluster
from redis_server import RedisServer, version_of

from fencing_sdk.abc import LOCK, READER, WRITER, Busy, Claim, Grant, Mode, Permit, Renewal
from fencing_sdk.abc._powers import PostOutcome
from fencing_sdk.backends.redis import RedisBackend, from_url
from fencing_sdk.testing.promises.under_test import in_line

pytest_plugins = ["redis_fixtures"]


PATIENCE = 60.0
LINE = "{fencing:a}:q"
WAKES = "{fencing:a}:w"
LEASE = "{fencing:a}:l"


@pytest.fixture(params=["single", "cluster"])
def store(request: pytest.FixtureRequest, redis_server: RedisServer, redis_cluster: Cluster) -> tuple[str, RedisServer]:
    """The URL of a store, and the server that has the lock ``a``."""
    if request.param == "single":
        return redis_server.url, redis_server
    return redis_cluster.url.replace("redis://", "redis+cluster://"), redis_cluster.node_of(LINE)


@pytest.fixture
async def backend(store: tuple[str, RedisServer]) -> AsyncIterator[RedisBackend]:
    backend = from_url(store[0])
    await backend.open()
    yield backend
    await backend.aclose()


@pytest.fixture
def server(store: tuple[str, RedisServer]) -> RedisServer:
    return store[1]


async def hold(backend: RedisBackend, name: str = "a") -> Claim:
    claim = Claim(name, 60)
    assert isinstance(await backend.acquire(claim), Grant)
    return claim


async def within(work: Awaitable[None]) -> None:
    async with asyncio.timeout(PATIENCE):
        await work


def shard_channels(server: RedisServer) -> list[str]:
    reply = server.ask_all(["PUBSUB", "SHARDCHANNELS"])[0]
    return reply if isinstance(reply, list) else []


def assert_no_waiters(backend: RedisBackend) -> None:
    table = backend._waiters._table
    assert table._by_claim == table._by_ticket == {}


def nobody_is_left(backend: RedisBackend, server: RedisServer) -> None:
    assert_no_waiters(backend)
    assert server.ask("EXISTS", LINE) == 0


async def sign_again(backend: RedisBackend) -> None:
    """Let every waiter give a sign of life now, and be answered."""
    waiters = list(backend._waiters._table)
    begun = asyncio.get_running_loop().time()
    backend._waiters._sign_now(waiters)
    await until(
        lambda: all(waiter.due > begun + 0.1 and not waiter.asking for waiter in waiters), what="all are answered"
    )


# Leaving at any moment.


async def test_whoever_gives_up_while_it_joins_leaves_nothing_at_whatever_step(backend, server):
    holder = await hold(backend)
    for steps in range(12):
        joined = asyncio.Event()

        async def wait(joined: asyncio.Event = joined) -> None:
            async with in_line(backend, Claim("a", 60)):
                joined.set()
                await asyncio.Event().wait()

        waiter = asyncio.create_task(wait())
        for _ in range(steps):
            await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.wait((waiter,))
        assert waiter.cancelled()
        nobody_is_left(backend, server)
    await until(lambda: not shard_channels(server), what="nobody listens")
    await backend.release(holder)


async def test_a_place_that_is_left_before_the_server_could_take_it_stays_left(backend, server):
    """The server knows the script no more with which it is taken, so that it runs after the one that leaves."""
    holder = await hold(backend)
    server.ask("SCRIPT", "FLUSH")
    heard = []
    place = backend.stand(Claim("a", 60), lambda grant=None, age=0.0: heard.append(grant), hand_over=True)
    while not place.asking:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    place.leave()
    await backend.release(place.claim)
    await until(lambda: not place.asking, what="the sign of life is answered")
    await until(lambda: server.ask("EXISTS", LINE) == 0, what="the line is left once more")
    assert heard == []
    await backend.release(holder)


# Those who stay.


async def test_who_comes_while_another_leaves_is_woken(backend, server):
    holder = await hold(backend)
    for _ in range(5):
        coming = Claim("a", 60)
        first = in_line(backend, Claim("a", 60))
        await first.__aenter__()
        leaves = asyncio.create_task(first.__aexit__(None, None, None))
        async with in_line(backend, coming) as turn:
            await leaves
            await backend.release(holder)
            await within(turn.wait())
            assert isinstance(await backend.acquire(coming), Grant)
        holder = coming
    await backend.release(holder)


async def test_a_waiter_that_was_passed_over_stands_at_the_end_again(backend, server):
    holder = await hold(backend)
    passed, next_one = Claim("a", 60), Claim("a", 60)
    async with in_line(backend, passed), in_line(backend, next_one):
        server.ask("ZREM", LINE, passed.owner)
        server.ask("HDEL", LINE[:-1] + "w", passed.owner)
        await sign_again(backend)
        assert server.ask("ZRANGE", LINE, 0, -1) == [next_one.owner, passed.owner]
        await backend.release(holder)
        assert isinstance(await backend.acquire(passed), Busy)
        assert isinstance(await backend.acquire(next_one), Grant)
    await backend.release(next_one)


@pytest.mark.parametrize("mode", [LOCK, WRITER, READER, Permit(2)], ids=lambda mode: mode.word)
@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
async def test_a_holder_does_not_wait_for_itself(backend, server, mode, together):
    """A sign of life may arrive behind the grant, before the client knows of it."""
    holders = [Claim("a", 60, mode=mode) for _ in range(2 if together and mode.shared else 1)]
    for holder in holders:
        assert isinstance(await backend.acquire(holder), Grant)
    for holder in holders:
        async with in_line(backend, holder) as turn:
            assert server.ask("EXISTS", LINE) == 0
            await within(turn.wait())  # it asks, and learns that it holds
    for holder in holders:
        assert await backend.release(holder) is None


async def test_a_waiter_whose_slot_moves_listens_at_the_next_server(redis_cluster: Cluster):
    """The old server ends the subscription, and says so."""
    slot, source = redis_cluster.slot_of(LINE), redis_cluster.node_of(LINE)
    if version_of(source.binary) < (7,):
        pytest.skip("no channels of their own before Redis 7")
    target = redis_cluster.other_than(source)
    backend = from_url(redis_cluster.url.replace("redis://", "redis+cluster://"))
    holder, waiter = await hold(backend), Claim("a", 60)
    async with in_line(backend, waiter) as turn:
        for there, here in ((target, source), (source, target)):  # and back again
            await asyncio.to_thread(redis_cluster.move_slot, slot, to=there)
            await until(lambda there=there: len(shard_channels(there)) == 1, what="it listens there")
            assert shard_channels(here) == []
        await sign_again(backend)
        await backend.release(holder)
        await within(turn.wait())
        assert isinstance(await backend.acquire(waiter), Grant)
    await backend.release(waiter)
    await backend.aclose()


# What a release hands over, and to whom.


class News:
    """What a waiter in the line was told."""

    def __init__(self, backend: RedisBackend, claim: Claim) -> None:
        self.heard: list[tuple[Grant | None, float]] = []
        self.place = backend.stand(claim, self, hand_over=True)

    def __call__(self, grant: Grant | None = None, age: float = 0.0) -> None:
        self.heard.append((grant, age))

    async def joined(self) -> None:
        await until(lambda: self.place.joined, what="it stands in line")

    def age_by(self, server: RedisServer, milliseconds: int) -> None:
        """Let the server believe that its last sign of life came earlier."""
        at, _, rest = server.ask("HGET", WAKES, self.place.claim.owner).partition(" ")
        server.ask("HSET", WAKES, self.place.claim.owner, f"{int(at) - milliseconds} {rest}")


async def test_a_handed_grant_counts_from_the_sign_of_life_that_its_message_names(backend, server):
    for _ in range(10):
        holder, began = await hold(backend), time.monotonic()
        waiter = News(backend, Claim("a", 60))
        await waiter.joined()
        await asyncio.sleep(0.2)
        await backend.release(holder)
        await until(lambda waiter=waiter: waiter.heard, what="it is told")
        heard, took = list(waiter.heard), time.monotonic() - began
        present = await backend.inspect("a")
        waiter.place.leave()
        await backend.release(waiter.place.claim)
        if took < 0.9:  # else it may have given another sign of life meanwhile
            break
    [(grant, age)] = heard
    assert present.token == grant.token
    assert 0.2 <= age < 1.0


@pytest.mark.parametrize("posted", [False, True])
async def test_what_a_waiter_that_has_left_releases_is_no_loss_for_the_holder(backend, server, posted):
    """Its message came twice. The holder's release comes late: the server did not know the script at first."""
    holder = await hold(backend)
    waiter = News(backend, Claim("a", 60))
    await waiter.joined()
    await backend.release(holder)
    await until(lambda: waiter.heard, what="it is handed the lock")
    claim, answers = waiter.place.claim, []
    waiter.place.leave()
    server.ask("SCRIPT", "FLUSH")
    backend.post_release(claim, answers.append)
    await until(lambda: answers == [PostOutcome.NOT_EXECUTED], what="the release was not carried out")
    backend._waiters._release(waiter.place)
    await until(lambda: server.ask("EXISTS", LEASE) == 0, what="the waiter has released it")
    other = await hold(backend)
    if posted:
        backend.post_release(claim, answers.append)
        await until(lambda: answers[1:] == [PostOutcome.RELEASED], what="the release is answered")
    else:
        assert await backend.release(claim) is None
    assert await backend.release(other) is None
    assert await backend.release(other) is Renewal.REFUSED  # what no waiter has released


async def test_a_waiter_that_has_missed_a_sign_of_life_is_woken_and_not_handed_the_lock(backend, server):
    """It may be frozen, and would keep the lock for its ttl."""
    holder = await hold(backend)
    waiter = News(backend, Claim("a", 60))
    await waiter.joined()
    waiter.age_by(server, 1500)
    await backend.release(holder)
    await until(lambda: waiter.heard, what="it is told")
    assert waiter.heard[0] == (None, 0.0)
    assert isinstance(await backend.acquire(waiter.place.claim), Grant)
    waiter.place.leave()
    await backend.release(waiter.place.claim)


async def test_a_waiter_that_no_client_listens_for_is_passed_over_and_keeps_its_place(backend, server):
    holder = await hold(backend)
    dead, waiter = News(backend, Claim("a", 60)), News(backend, Claim("a", 60))
    await dead.joined()
    await waiter.joined()
    sign = server.ask("HGET", WAKES, dead.place.claim.owner)
    server.ask("HSET", WAKES, dead.place.claim.owner, sign.replace(":wake:", ":nobody:"))
    await backend.release(holder)
    await until(lambda: waiter.heard, what="it is told")
    assert waiter.heard[0][0] is not None
    assert dead.heard == []
    assert server.ask("ZRANGE", LINE, 0, -1) == [dead.place.claim.owner]
    for left in (dead, waiter):
        left.place.leave()
        await backend.release(left.place.claim)


async def test_a_waiter_that_hears_no_message_does_not_hold_up_those_behind_it(backend, server, monkeypatch):
    """It is handed the lock in the answer to its sign of life."""
    holder = await hold(backend)
    seconds, micros = map(int, server.ask("TIME"))
    server.ask("ZADD", LINE, 0, "deaf")
    sign = f"{seconds * 1000 + micros // 1000 + 1000} silent lock 0 1 60000 1 PUBLISH nowhere\0"
    server.ask("HSET", WAKES, "deaf", sign)
    waiter = News(backend, Claim("a", 60))
    await waiter.joined()
    monkeypatch.setattr(backend._waiters, "_give_signs", no_sign)
    await backend.release(holder)
    await until(lambda: waiter.heard, what="it is told")
    assert waiter.heard[0][0] is not None
    waiter.place.leave()
    for claim in (waiter.place.claim, Claim("a", 60, owner="deaf")):
        await backend.release(claim)
    nobody_is_left(backend, server)


async def test_readers_behind_a_lock_that_cannot_be_reached_are_not_noted_as_the_first(backend, server):
    """Its client may listen again, and then no reader but the one that was woken may come before it."""
    writer, first, second = (Claim("a", 60, mode=mode) for mode in (WRITER, READER, READER))
    assert isinstance(await backend.acquire(writer), Grant)
    seconds, micros = map(int, server.ask("TIME"))
    soon = seconds * 1000 + micros // 1000 + 1000  # its sign stays fresh for longer
    server.ask("ZADD", LINE, 0, "far")
    server.ask("HSET", WAKES, "far", f"{soon} direct lock 0 1 60000 1 PUBLISH nowhere\0")
    async with in_line(backend, first) as turn, in_line(backend, second):
        await backend.release(writer)
        await within(turn.wait())
        assert isinstance(await backend.acquire(second), Busy)
        assert isinstance(await backend.acquire(first), Grant)
    await backend.release(first)
    await backend.release(Claim("a", 60, owner="far"))
    nobody_is_left(backend, server)


async def test_a_message_that_comes_after_its_waiter_has_left_gives_the_lock_back(backend, server):
    holder = await hold(backend)
    waiter = News(backend, Claim("a", 60))
    await waiter.joined()
    waiter.place.leave()  # and its release is still on its way
    await backend.release(holder)
    await until(lambda: server.ask("EXISTS", "{fencing:a}:l") == 0, what="the lock is released")
    assert waiter.heard == []


async def test_a_grant_whose_message_was_lost_is_found_by_the_next_sign_of_life(backend, server, monkeypatch):
    holder = await hold(backend)
    waiter = News(backend, Claim("a", 60))
    await waiter.joined()
    monkeypatch.setattr(backend._waiters, "_on_message", lambda _words: None)
    await backend.release(holder)
    await until(lambda: waiter.heard, what="it is told")
    assert waiter.heard[0][0].token == (await backend.inspect("a")).token
    waiter.place.leave()
    await backend.release(waiter.place.claim)


async def test_readers_whose_messages_were_lost_are_all_woken_by_the_next_sign_of_life(backend, server, monkeypatch):
    writer, *readers = (Claim("a", 60, mode=mode) for mode in (WRITER, READER, READER, READER))
    assert isinstance(await backend.acquire(writer), Grant)
    async with contextlib.AsyncExitStack() as line:
        turns = [await line.enter_async_context(in_line(backend, reader)) for reader in readers]
        monkeypatch.setattr(backend._waiters, "_on_message", lambda _text: None)
        await backend.release(writer)
        await sign_again(backend)
        for turn in turns:
            await within(turn.wait())
        for reader in reversed(readers):
            assert isinstance(await backend.acquire(reader), Grant)
    for reader in readers:
        await backend.release(reader)
    nobody_is_left(backend, server)


@pytest.mark.parametrize("leaves", [False, True], ids=["by its sign of life", "from who leaves"])
async def test_a_waiter_hears_of_a_permit_that_has_ended_while_another_is_held(backend, server, monkeypatch, leaves):
    stays, ends = (Claim("a", ttl, mode=Permit(2)) for ttl in (60, 1.5))
    ahead, waiter = Claim("a", 60, mode=WRITER), Claim("a", 60, mode=Permit(2))
    for holder in (stays, ends):
        assert isinstance(await backend.acquire(holder), Grant)
    async with contextlib.AsyncExitStack() as line:
        place = await line.enter_async_context(contextlib.AsyncExitStack())
        if leaves:
            await place.enter_async_context(in_line(backend, ahead))
        turn = await line.enter_async_context(in_line(backend, waiter))
        if leaves:
            monkeypatch.setattr(backend._waiters, "_give_signs", no_sign)
        await asyncio.sleep(1.6)
        await place.aclose()
        await within(turn.wait())
        assert isinstance(await backend.acquire(waiter), Grant)
    for holder in (stays, waiter):
        await backend.release(holder)
    nobody_is_left(backend, server)


async def no_sign(waiters: object) -> None:
    """Give no sign of life, and plan none."""


async def test_a_message_for_nobody_wakes_nobody(backend):
    holder = await hold(backend)
    async with in_line(backend, Claim("a", 60)) as turn:
        waits = asyncio.create_task(turn.wait())
        channel = turn.place.channel.encode()
        for message in (
            [b"message", channel, b"999"],
            [b"message", channel, b"\xff"],
            [b"message", channel, None],
            [b"pong", b""],
        ):
            backend._waiters.on_push(message)
        await asyncio.sleep(0.01)
        assert not waits.done()
        waits.cancel()
    await backend.release(holder)


@pytest.mark.parametrize("mode", [LOCK, WRITER, READER, Permit(2)], ids=lambda mode: mode.word)
async def test_a_waiter_that_is_to_be_woken_leaves_the_line_and_no_grant_of_its_owner(
    store: tuple[str, RedisServer], backend: RedisBackend, mode: Mode
):
    """Its own call may be on its way: a release behind it would end the grant that it gets."""
    claim = Claim("a", 60, mode=mode)
    other = from_url(store[0])
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(other.aclose)
        async with in_line(backend, claim):
            assert isinstance(await other.acquire(claim), Grant)
        assert [holder.id for holder in await other.holders("a")] == [claim.holder]
        assert await other.renew([claim]) == [Renewal.RENEWED]
        await other.release(claim)
