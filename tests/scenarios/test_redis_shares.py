"""Permits and readers on Redis: who hears of a loss, and what the server is asked."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import Counter

import pytest
from event_log import CLOCK
from redis_stage import key, milliseconds_left, nothing_left
from shares_suite import claim_of, granted, served
from stays import PATIENCE, Stay, opened, staying

from fencing_sdk import LockClient, LossReason
from fencing_sdk._values.claim import READER, WRITER, Claim, Grant, Held, Permit, Renewal, Revoked
from fencing_sdk.backends.redis import from_url
from fencing_sdk.backends.redis.scripts import ACQUIRE_SHARE, LEAVE_SHARE_LINE, RELEASE_SHARE

pytest_plugins = ["redis_fixtures"]

FAR = {"ttl": 600.0, "heartbeat_interval": 150.0}
"""A lease whose next heartbeat is minutes away: what is noticed was pushed."""

SOON = 60.0
NAME = "pool"


def shares_of(locks: LockClient, kind: str, **options: float):
    return locks.rwlock(NAME, **options).reader if kind == "reader" else locks.semaphore(NAME, permits=3, **options)


async def scripts_run(server) -> int:
    """How often the server has run a script, by its own account."""
    stats = await server.command("INFO", "commandstats")
    lines = [line for line in stats.splitlines() if line.startswith(("cmdstat_evalsha:", "cmdstat_eval:"))]
    return sum(int(line.partition("calls=")[2].partition(",")[0]) for line in lines)


# Losses


@pytest.mark.parametrize("kind", ["reader", "permit"])
@pytest.mark.parametrize("holders", [1, 3])
async def test_every_holder_hears_that_a_shared_name_was_deleted(redis_server, kind, holders):
    async with contextlib.AsyncExitStack() as clients:
        stays = []
        for _ in range(holders):
            locks, _ = await clients.enter_async_context(opened(redis_server.url))
            stays.append(Stay(shares_of(locks, kind, **FAR)))
            await stays[-1].begun()
        await redis_server.command("DEL", key(NAME))
        for stay in stays:
            await stay.over(SOON)
            assert stay.lost is LossReason.REVOKED


@pytest.mark.parametrize("kind", ["reader", "permit"])
async def test_a_share_is_still_watched_after_its_client_has_released_another(redis_server, kind):
    async with opened(redis_server.url) as (locks, _):
        share = shares_of(locks, kind, **FAR)
        async with staying(share) as stay:
            async with staying(share) as other:
                await other.end()
            await redis_server.command("DEL", key(NAME))
            await stay.over(SOON)
            assert stay.lost is LossReason.REVOKED


@pytest.mark.parametrize("kind", ["reader", "permit"])
async def test_a_share_is_still_watched_after_a_renewal(redis_server, kind):
    async with opened(redis_server.url) as (locks, _), staying(shares_of(locks, kind, **FAR)) as stay:
        await stay.lease.renew()
        await redis_server.command("DEL", key(NAME))
        await stay.over(SOON)
        assert stay.lost is LossReason.REVOKED


async def test_readers_that_renew_do_not_make_each_other_ask_without_end(redis_server):
    """Each renewal changes the lease that the others follow: a look at it must not change it in turn."""
    async with contextlib.AsyncExitStack() as clients:
        stays = []
        for _ in range(5):
            locks, _ = await clients.enter_async_context(opened(redis_server.url))
            stays.append(await clients.enter_async_context(staying(shares_of(locks, "reader", **FAR))))
        await stays[0].lease.renew()
        before = -1
        async with asyncio.timeout(PATIENCE):
            while (runs := await scripts_run(redis_server)) != before:
                before = runs
                await asyncio.sleep(1.2)  # a client that has a reason to look does so once a second
        for stay in stays:
            await stay.end()


async def test_however_often_a_shared_name_changes_a_client_looks_once_a_second(redis_server):
    renewals = 40
    async with opened(redis_server.url) as (locks, _), opened(redis_server.url) as (others, _):
        async with (
            staying(shares_of(locks, "reader", **FAR)) as stay,
            staying(shares_of(others, "reader", **FAR)) as far,
        ):
            before, began = await scripts_run(redis_server), CLOCK.now()
            for _ in range(renewals):
                await far.lease.renew()
                await asyncio.sleep(0.01)
            looks = await scripts_run(redis_server) - before - renewals
            assert 1 <= looks <= 2 + CLOCK.now() - began
            await stay.end()
            await far.end()


# What the server is asked


@pytest.mark.parametrize("permits", [1, 4, 16])
async def test_a_contended_permit_takes_five_scripts_however_many_there_are(redis_server, permits):
    """Asked, joined, asked again; then woken to ask once, and released."""
    waiters = 3 * permits
    async with opened(redis_server.url) as (locks, _):
        pool = locks.semaphore(NAME, permits=permits, ttl=30.0)
        held = [Stay(pool) for _ in range(permits)]
        for stay in held:
            await stay.begun()
        before, began = await scripts_run(redis_server), CLOCK.now()
        waiting = [Stay(pool, work=0.0) for _ in range(waiters)]
        waiting_cost = 0
        while (cost := await scripts_run(redis_server) - before) < 3 * waiters or cost != waiting_cost:
            waiting_cost = cost
            await asyncio.sleep(0.1)
        for stay in held:
            await stay.end()
        for stay in waiting:
            await stay.over(SOON)
        polls = waiters * int(CLOCK.now() - began)  # a waiter asks once a second, which a slow machine needs
        assert waiting_cost <= 4 * waiters + polls  # one more if it takes longer to join than the first pause lasts
        entered = await scripts_run(redis_server) - before - waiting_cost - permits
        assert entered <= 2 * waiters + polls, f"{entered / waiters:.1f} scripts for each that is let in"
    await nothing_left(redis_server)


async def _let_in_readers(server, count: int) -> list[int]:
    """How often each of so many readers asks until it holds, of four clients that wait behind a writer."""
    tries: Counter[str] = Counter()
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(contextlib.aclosing(from_url(server.url))) for _ in range(4)]
        for client in clients:
            await client.open()  # a new connection wakes its waiters
        writer, readers = claim_of(WRITER), [claim_of(READER) for _ in range(count)]
        await granted(clients[0], writer)
        line = []
        for number, reader in enumerate(readers):
            client = clients[number % len(clients)]
            turn = await stack.enter_async_context(client.queue(reader))
            assert isinstance(await client.acquire(reader), Held)
            line.append((client, reader, turn))
        # A waiter leaves the line 3 s after its last sign of life, so all of them give one more.
        signs = await asyncio.gather(*(client.acquire(reader) for client, reader, _ in line))
        assert all(isinstance(sign, Held) for sign in signs)
        waiting = [asyncio.create_task(_served_when_woken(*place, tries)) for place in line]
        await clients[0].release(writer)
        tokens = {grant.token for grant in await asyncio.gather(*waiting)}
        assert len(tokens) == 1
        return [tries[reader.owner] for reader in readers]


async def _served_when_woken(client, reader, turn, tries):
    async with asyncio.timeout(SOON):
        await turn.wait()
    return await served(client, reader, turn, tries)


async def test_a_writer_that_leaves_wakes_all_readers_and_each_asks_once(redis_server):
    assert await _let_in_readers(redis_server, 40) == [1] * 40


async def test_more_readers_than_one_run_wakes_are_woken_by_those_before_them(redis_server, monkeypatch):
    """The bound is 500; it is lowered here."""
    for script in (ACQUIRE_SHARE, RELEASE_SHARE, LEAVE_SHARE_LINE):
        text = script.text.replace("TOGETHER = 500", "TOGETHER = 3").replace("BOUNDARY = 16", "BOUNDARY = 1")
        assert text != script.text
        monkeypatch.setattr(script, "text", text)
        monkeypatch.setattr(script, "sha", hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
    assert await _let_in_readers(redis_server, 20) == [1] * 20


async def test_readers_that_a_writer_came_before_are_all_woken_once_more(redis_server):
    """Without fairness, it may take the lock while they are on their way."""
    async with contextlib.AsyncExitStack() as stack:
        backend = await stack.enter_async_context(contextlib.aclosing(from_url(redis_server.url, fair=False)))
        first, second, readers = claim_of(WRITER), claim_of(WRITER), [claim_of(READER) for _ in range(20)]
        await granted(backend, first)
        turns = [await stack.enter_async_context(backend.queue(reader)) for reader in readers]
        await backend.release(first)
        await granted(backend, second)
        tries: Counter[str] = Counter()
        pairs = list(zip(readers, turns, strict=True))
        for reader, turn in pairs:
            await turn.wait()
            assert isinstance(await backend.acquire(reader), Held)
        waiting = [asyncio.create_task(_served_when_woken(backend, *pair, tries)) for pair in pairs]
        await backend.release(second)
        await asyncio.gather(*waiting)
        assert set(tries.values()) == {1}


@pytest.mark.parametrize("mode", [READER, Permit(of=4)])
async def test_a_share_that_is_held_alone_needs_no_key_but_its_lease(redis_server, mode):
    backend = from_url(redis_server.url)
    alone, second = (Claim(NAME, 30.0, metadata=text, mode=mode) for text in (None, "m"))
    first = await backend.acquire(alone)
    assert isinstance(first, Grant)
    assert await redis_server.command("EXISTS", key(NAME, "e"), key(NAME, "h")) == 0
    assert await backend.acquire(alone) == first
    beside = await backend.acquire(second)
    assert isinstance(beside, Grant)
    assert (beside.token == first.token) is (mode == READER)
    assert await backend.renew([alone, second]) == [Renewal.RENEWED, Renewal.RENEWED]
    assert {(holder.holder, holder.metadata) for holder in await backend.holders(NAME)} == {
        (claim.holder, claim.metadata) for claim in (alone, second)
    }
    await backend.release(alone)
    assert [(holder.token, holder.metadata) for holder in await backend.holders(NAME)] == [(beside.token, "m")]
    await backend.release(second)
    assert await redis_server.command("EXISTS", key(NAME), key(NAME, "e"), key(NAME, "h")) == 0
    await backend.aclose()


@pytest.mark.parametrize("mode", [READER, Permit(of=4)])
async def test_a_share_that_is_held_alone_is_listed_and_revoked_by_its_token(redis_server, mode):
    backend = from_url(redis_server.url)
    claim = Claim(NAME, 30.0, metadata="m", mode=mode)
    grant = await backend.acquire(claim)
    assert isinstance(grant, Grant)
    (listed,) = (await backend.list_held("", None, 100)).holders
    assert (listed.name, listed.holder, listed.token, listed.metadata) == (NAME, claim.holder, grant.token, "m")
    assert (listed.mode, listed.permit) == (mode, grant.permit)
    assert not await backend.revoke(NAME, grant.token - 1, "wrong token")
    assert 0 < await milliseconds_left(redis_server, NAME) <= 30_000
    assert await backend.revoke(NAME, grant.token, "stuck")
    assert await backend.renew([claim]) == [Revoked("stuck")]
    assert await redis_server.command("EXISTS", key(NAME), key(NAME, "e"), key(NAME, "h")) == 0
    await backend.aclose()
