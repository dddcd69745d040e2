"""Redis in the long run: what operators list and revoke, and what a server and a process keep."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

import pytest
import redis_stage
from redis_cluster import Cluster
from redis_sentinels import Sentinels
from redis_server import RedisServer, version_of
from redis_stage import calls_of, key, keys, nothing_left
from stays import PATIENCE, opened

from fencing_sdk.abc import Busy, Claim, Grant, Listing, Revoked
from fencing_sdk.backends import from_url
from fencing_sdk.backends.redis import from_url as redis_from_url
from fencing_sdk.errors import BackendRefusedError, BackendUnavailableError, ConfigurationError

pytest_plugins = ["redis_fixtures"]


# Listing and revoking on Redis while servers fail, slots move and other programs use the same database.


NAMES = [f"jobs/{number}" for number in range(60)]
PAGE = 5


@asynccontextmanager
async def backends(url: str, count: int = 1) -> AsyncIterator[list[Any]]:
    """Backends on one store, the first of which holds every lock of `NAMES`."""
    async with AsyncExitStack() as stack:
        made = [await stack.enter_async_context(aclosing(from_url(url))) for _ in range(count)]
        for name in NAMES:
            assert isinstance(await made[0].acquire(Claim(name, 600.0)), Grant)
        yield made


async def rest(backend: Any, page: Listing, *, most: int = 1000) -> set[str]:
    """The names on *page* and on those that follow."""
    heard = {holder.name for holder in page.holders}
    for _ in range(most):
        if page.cursor is None:
            return heard
        page = await backend.list_holders("", page.cursor, PAGE)
        heard |= {holder.name for holder in page.holders}
    pytest.fail("the listing has no end")


@pytest.mark.parametrize("topology", ["one server", "Sentinels", "cluster", "quorum"])
async def test_who_holds_and_waits_is_seen_while_the_servers_take_no_writes(
    topology, redis_binary, redis_server, redis_sentinels, redis_cluster, redis_quorum
):
    """As in a planned failover. The viewer connects during the pause; the connection of a holder waits for renewals."""
    sentinels = ",".join(f"{host}:{port}" for host, port in redis_sentinels.addresses)
    url, masters = {
        "one server": (redis_server.url, [redis_server]),
        "Sentinels": (f"redis+sentinel://{sentinels}/{redis_sentinels.name}", [redis_sentinels.master]),
        "cluster": (url_of(redis_cluster), redis_cluster.masters),
        "quorum": (redis_quorum.url, redis_quorum.nodes),
    }[topology]
    if version_of(redis_binary) < (7,):
        pytest.skip("this server has no scripts that only read")
    claim = Claim("a", 60.0)
    async with aclosing(from_url(url)) as holder, aclosing(from_url(url)) as viewer:
        token = (await holder.acquire(claim)).token
        for master in masters:
            await master.command("CLIENT", "PAUSE", "600000", "WRITE")
        try:
            async with asyncio.timeout(PATIENCE):
                assert (await viewer.inspect("a")).token == token
                assert await viewer.list_waiters("a") == []
                listed = await viewer.list_holders("", None, 100)
                assert await rest(viewer, listed) == {"a"}
        finally:
            for master in masters:
                await master.command("CLIENT", "UNPAUSE")


async def test_a_server_that_lacks_scripts_that_only_read_runs_them_as_others(start_redis):
    server = start_redis(rename_command=['EVALSHA_RO ""', 'EVAL_RO ""'])
    async with aclosing(from_url(server.url)) as backend:
        grant = await backend.acquire(Claim("a", 60.0))
        for _ in range(2):
            assert (await backend.inspect("a")).token == grant.token
        assert await calls_of(server, "evalsha_ro", "eval_ro") == 0
        assert [holder.name for holder in (await backend.list_holders("", None, 100)).holders] == ["a"]


def url_of(cluster: Cluster) -> str:
    return cluster.url.replace("redis://", "redis+cluster://")


async def test_a_slot_that_moves_to_a_server_that_was_listed_is_listed_again(redis_cluster: Cluster):
    """Its leases were not there when the server was listed, and are not where they were any more."""
    async with backends(url_of(redis_cluster), 2) as (_, backend):
        masters = sorted(redis_cluster.masters, key=lambda node: f"127.0.0.1:{node.port}")
        page = await backend.list_holders("", None, PAGE)
        heard = {holder.name for holder in page.holders}
        while page.cursor is not None and page.cursor.split(".")[1] != "1":
            page = await backend.list_holders("", page.cursor, PAGE)
            heard |= {holder.name for holder in page.holders}
        moved = next(name for name in NAMES if redis_cluster.node_of(redis_stage.key(name)) is masters[2])
        assert moved not in heard
        redis_cluster.move_slot(redis_cluster.slot_of(redis_stage.key(moved)), to=masters[0])
        assert heard | await rest(backend, page) == set(NAMES)


async def test_a_listing_goes_on_at_the_next_master(redis_sentinels: Sentinels):
    """A cursor of SCAN means nothing to another server, so its part begins again."""
    url = f"redis+sentinel://{','.join(f'{host}:{port}' for host, port in redis_sentinels.addresses)}"
    async with backends(f"{url}/{redis_sentinels.name}") as (backend,):
        page = await backend.list_holders("", None, PAGE)
        assert page.cursor is not None
        redis_sentinels.master.ask_all(["SET", "last", 1], ["WAIT", 1, 0], patience=60.0)  # nothing is lost with it
        await redis_sentinels.failover()
        assert {holder.name for holder in page.holders} | await rest(backend, page) == set(NAMES)


async def test_a_listing_goes_on_after_a_restart_of_the_server(start_redis):
    """The server has its data again, but in another order."""
    server = start_redis(appendonly=True, appendfsync="always")
    async with backends(server.url) as (backend,):
        page = await backend.list_holders("", None, PAGE)
        heard = {holder.name for holder in page.holders}
        server.kill()
        server.start()
        with pytest.raises(BackendUnavailableError):
            await backend.list_holders("", page.cursor, PAGE)
        assert heard | await rest(backend, page) == set(NAMES)


async def test_a_cursor_of_another_connection_begins_again(redis_server: RedisServer):
    """As after a reconnection to what may be another server: no name is left out, some are told twice."""
    async with backends(redis_server.url, 2) as (backend, other):
        await other.list_holders("", None, PAGE)
        page = await backend.list_holders("", None, PAGE)
        page = await backend.list_holders("", page.cursor, PAGE)
        assert await rest(other, Listing([], page.cursor)) == set(NAMES)


@pytest.mark.parametrize("cursor", ["", "x", "1.2", "..", ".-1.0.0", ".0.0.0x", ".٣.0.0"])
async def test_a_cursor_that_no_page_had_is_refused(redis_server: RedisServer, cursor: str):
    async with aclosing(from_url(redis_server.url)) as backend:
        with pytest.raises(ConfigurationError, match="cursor"):
            await backend.list_holders("", cursor, PAGE)  # type: ignore[attr-defined]


async def test_what_other_programs_write_is_left_out(redis_server: RedisServer):
    """Keys of the right form with the wrong content, and names that this package would not make."""
    async with backends(redis_server.url) as (backend,):
        await redis_server.command("RPUSH", redis_stage.key("a list"), "x")
        await redis_server.command("SET", redis_stage.key("no lease"), "x")
        await redis_server.command("SET", "{fencing:%41}:l", "x\0" + "1\0")
        await redis_server.command("ZADD", redis_stage.key(NAMES[0], "w"), "1", "x")
        assert await rest(backend, await backend.list_holders("", None, PAGE)) == set(NAMES)


async def test_the_server_is_asked_in_small_pieces_and_follows_no_key_for_it(redis_server: RedisServer):
    """No KEYS; and a lease that was listed costs no message when it changes."""
    async with backends(redis_server.url, 2) as (_, operator):
        await redis_server.command("CONFIG", "RESETSTAT")
        await rest(operator, await operator.list_holders("", None, PAGE))
        await operator.list_waiters(NAMES[0])
        assert await redis_stage.calls_of(redis_server, "scan") >= len(NAMES) / PAGE
        assert await redis_stage.calls_of(redis_server, "keys") == 0
        followed = {
            line.split(":")[0]: line.split(":")[1]
            for line in str(await redis_server.command("INFO", "stats")).split()
            if ":" in line
        }
        assert int(followed["tracking_total_keys"]) <= len(NAMES)  # those of the holder
        pushed: list[object] = []
        operator._on_push, operator_push = pushed.append, operator._on_push
        assert operator_push is not None
        for name in NAMES:
            await redis_server.command("DEL", redis_stage.key(name))
        await operator.inspect("another")
        assert not pushed


async def test_the_reason_is_kept_for_as_long_as_the_grant_would_have_lasted(redis_server: RedisServer):
    async with aclosing(from_url(redis_server.url)) as backend:
        claim = Claim("a", 30.0)
        grant = await backend.acquire(claim)
        assert isinstance(grant, Grant)
        assert await backend.revoke("a", grant.token, "é" * 200)  # type: ignore[attr-defined]
        assert 20_000 < await redis_server.command("PTTL", redis_stage.key("a", "x")) <= 31_000
        assert await backend.renew([claim]) == [Revoked("é" * 200)]
        await redis_server.command("DEL", redis_stage.key("a", "x"))
        assert [outcome.name for outcome in await backend.renew([claim])] == ["REFUSED"]  # type: ignore[union-attr]


async def test_a_key_that_holds_something_else_is_refused(redis_server: RedisServer):
    await redis_server.command("RPUSH", redis_stage.key("a"), "x")
    async with aclosing(from_url(redis_server.url)) as backend:
        with pytest.raises(BackendRefusedError, match="prefix"):
            await backend.revoke("a", 1, "enough")  # type: ignore[attr-defined]


# What a Redis server and a process keep in the long run: counters, keys, connections, descriptors, loops.


TRICKY = [
    *("a", "a:l", "a}:l", "{a}:l", "{a}", "{a", "a}", "{}", "{", "}", "}{", "{{a}}", "a{b}c", "a%7Bb%7Dc"),
    *("%", "%%", "%25", "%7B", "{%7B", "%2525", "%s", "a b", " ", "'", '"', "\\", "*", "[a]", "?", "a\u00a0b"),
    *("\u00e9", "e\u0301", "\u202e", "\U0001f512", "\u00e9" * 256, "x" * 512, "x" * 511 + "{", "x" * 511 + "}"),
]


async def test_an_idle_counter_expires_and_hybrid_tokens_grow_all_the_same(redis_server):
    async with opened(redis_server.url) as (locks, _):
        async with locks.lock("a") as lease:
            first = lease.token
        assert 604_000_000 < await redis_server.command("PTTL", key("a", "t")) <= 604_800_000
        assert await redis_server.command("DEL", key("a", "t")) == 1
        assert await redis_server.command("DBSIZE") == 0
        async with locks.lock("a") as lease:
            assert lease.token > first
    await nothing_left(redis_server)


async def test_a_plain_counter_is_kept_for_ever(redis_server):
    async with opened(redis_server.url, tokens="counter") as (locks, _), locks.lock("a"):
        assert await redis_server.command("PTTL", key("a", "t")) == -1
    await nothing_left(redis_server)


async def test_a_counter_ahead_of_the_clock_still_grows(redis_server):
    ahead = 2**52
    await redis_server.command("SET", key("a", "t"), ahead)
    async with opened(redis_server.url) as (locks, _):
        for expected in (ahead + 1, ahead + 2):
            async with locks.lock("a") as lease:
                assert lease.token == expected
    await nothing_left(redis_server)


async def test_two_names_never_share_a_lock_or_a_key(redis_server):
    backend = redis_from_url(redis_server.url)
    claims = [Claim(name, 30.0) for name in TRICKY]
    for claim in claims:
        assert isinstance(await backend.acquire(claim), Grant)
        assert isinstance(await backend.acquire(Claim(claim.name, 30.0)), Busy)
    assert len(await keys(redis_server)) == len(TRICKY)
    for claim in claims:
        holder = await backend.inspect(claim.name)
        assert (holder.name, holder.id) == (claim.name, claim.holder)
    for claim in claims:
        await backend.release(claim)
    await backend.aclose()
    await nothing_left(redis_server)


async def test_databases_are_worlds_apart(redis_server):
    async with opened(redis_server.url + "/0") as (a, _), opened(redis_server.url + "/1") as (b, _):
        async with a.lock("x"), b.lock("x"):
            assert "db1:keys=2" in await redis_server.command("INFO", "keyspace")
    await nothing_left(redis_server)
