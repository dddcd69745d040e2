"""Redis in the long run: what operators list and revoke, and what a server and a process keep."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

import pytest
import redis_stage
from redis_cluster import Cluster
from redis_sentinels import Sentinels
from redis_server import RedisServer, version_of
from redis_stage import calls_of, key, keys, nothing_left
from stays import PATIENCE, opened

from fencing_sdk.abc import Busy, Claim
from fencing_sdk.backends import from_url
from fencing_sdk.backends.redis import from_url as redis_from_url
from fencing_sdk.errors import BackendUnavailableError, ConfigurationError

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
            assert (await made[0].draw(Claim(name, 600.0))).token is not None
        yield made


async def rest(backend: Any, names: Iterable[str], cursor: str | None, *, most: int = 1000) -> set[str]:
    """The *names* of a page, and those of the pages that follow."""
    heard = set(names)
    for _ in range(most):
        if cursor is None:
            return heard
        names, cursor = await backend.names("", cursor, PAGE)
        heard |= set(names)
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
        token = (await holder.draw(claim)).token
        for master in masters:
            await master.command("CLIENT", "PAUSE", "600000", "WRITE")
        try:
            async with asyncio.timeout(PATIENCE):
                assert [[ticket.token for ticket in line] for line in await viewer.tickets(["a"])] == [[token]]
                assert await rest(viewer, *await viewer.names("", None, 100)) == {"a"}
        finally:
            for master in masters:
                await master.command("CLIENT", "UNPAUSE")


async def test_a_server_that_lacks_scripts_that_only_read_runs_them_as_others(start_redis):
    server = start_redis(rename_command=['EVALSHA_RO ""', 'EVAL_RO ""'])
    async with aclosing(from_url(server.url)) as backend:
        place = await backend.draw(Claim("a", 60.0))
        for _ in range(2):
            assert [[ticket.token for ticket in line] for line in await backend.tickets(["a"])] == [[place.token]]
        assert await calls_of(server, "evalsha_ro", "eval_ro") == 0


def url_of(cluster: Cluster) -> str:
    return cluster.url.replace("redis://", "redis+cluster://")


async def test_a_slot_that_moves_to_a_server_that_was_listed_is_listed_again(redis_cluster: Cluster):
    """Its lines were not there when the server was listed, and are not where they were any more."""
    async with backends(url_of(redis_cluster), 2) as (_, backend):
        masters = sorted(redis_cluster.masters, key=lambda node: f"127.0.0.1:{node.port}")
        names, cursor = await backend.names("", None, PAGE)
        heard = set(names)
        while cursor is not None and cursor.split(".")[1] != "1":
            names, cursor = await backend.names("", cursor, PAGE)
            heard |= set(names)
        moved = next(name for name in NAMES if redis_cluster.node_of(redis_stage.key(name)) is masters[2])
        assert moved not in heard
        redis_cluster.move_slot(redis_cluster.slot_of(redis_stage.key(moved)), to=masters[0])
        assert await rest(backend, heard, cursor) == set(NAMES)


async def test_a_listing_goes_on_at_the_next_master(redis_sentinels: Sentinels):
    """A cursor of SCAN means nothing to another server, so its part begins again."""
    url = f"redis+sentinel://{','.join(f'{host}:{port}' for host, port in redis_sentinels.addresses)}"
    async with backends(f"{url}/{redis_sentinels.name}") as (backend,):
        names, cursor = await backend.names("", None, PAGE)
        assert cursor is not None
        redis_sentinels.master.ask_all(["SET", "last", 1], ["WAIT", 1, 0], patience=60.0)  # nothing is lost with it
        await redis_sentinels.failover()
        assert await rest(backend, names, cursor) == set(NAMES)


async def test_a_listing_goes_on_after_a_restart_of_the_server(start_redis):
    """The server has its data again, but in another order."""
    server = start_redis(appendonly=True, appendfsync="always")
    async with backends(server.url) as (backend,):
        names, cursor = await backend.names("", None, PAGE)
        server.kill()
        server.start()
        with pytest.raises(BackendUnavailableError):
            await backend.names("", cursor, PAGE)
        assert await rest(backend, names, cursor) == set(NAMES)


async def test_a_cursor_of_another_connection_begins_again(redis_server: RedisServer):
    """As after a reconnection to what may be another server: no name is left out, some are told twice."""
    async with backends(redis_server.url, 2) as (backend, other):
        await other.names("", None, PAGE)
        _, cursor = await backend.names("", None, PAGE)
        _, cursor = await backend.names("", cursor, PAGE)
        assert await rest(other, [], cursor) == set(NAMES)


@pytest.mark.parametrize("cursor", ["", "x", "1.2", "..", ".-1.0.0", ".0.0.0x", ".٣.0.0"])
async def test_a_cursor_that_no_page_had_is_refused(redis_server: RedisServer, cursor: str):
    async with aclosing(from_url(redis_server.url)) as backend:
        with pytest.raises(ConfigurationError, match="cursor"):
            await backend.names("", cursor, PAGE)


async def test_what_other_programs_write_is_left_out(redis_server: RedisServer):
    """Names that this package would not make, and keys of the right form that hold something else."""
    async with backends(redis_server.url) as (backend,):
        await redis_server.command("SET", "{fencing:%41}:s", "x")
        await redis_server.command("SET", b"{fencing:\xff}:s", "x")
        assert await rest(backend, *await backend.names("", None, PAGE)) == set(NAMES)
        await redis_server.command("RPUSH", redis_stage.key("a list"), "x")
        assert [len(seen) for seen in await backend.tickets([NAMES[0], "a list", NAMES[1]])] == [1, 0, 1]


async def test_the_server_is_asked_in_small_pieces_and_follows_no_key_for_it(redis_server: RedisServer):
    """No KEYS; and a line that was listed costs no message when it changes."""
    async with backends(redis_server.url, 2) as (_, operator):
        await redis_server.command("CONFIG", "RESETSTAT")
        names = await rest(operator, *await operator.names("", None, PAGE))
        assert [len(seen) for seen in await operator.tickets(sorted(names))] == [1] * len(NAMES)
        assert await redis_stage.calls_of(redis_server, "scan") > len(NAMES) / PAGE / 2  # some have more keys
        assert await redis_stage.calls_of(redis_server, "keys") == 0
        assert "tracking_total_keys:0" in str(await redis_server.command("INFO", "stats"))  # none has a bell


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
        assert 604_000_000 < await redis_server.command("PTTL", key("a")) <= 604_800_000
        assert await redis_server.command("DEL", key("a")) == 1
        assert await redis_server.command("DBSIZE") == 0
        async with locks.lock("a") as lease:
            assert lease.token > first
    await nothing_left(redis_server)


async def test_a_plain_counter_is_kept_for_ever(redis_server):
    async with opened(redis_server.url, tokens="counter") as (locks, _), locks.lock("a"):
        assert await redis_server.command("PTTL", key("a")) == -1
    await nothing_left(redis_server)


async def test_a_counter_ahead_of_the_clock_still_grows(redis_server):
    ahead = 2**52
    await redis_server.command("SET", key("a"), b"0" * 24 + b"\0I" + ahead.to_bytes(8, "big") + bytes(8))
    async with opened(redis_server.url) as (locks, _):
        for expected in (ahead + 1, ahead + 2):
            async with locks.lock("a") as lease:
                assert lease.token == expected
    await nothing_left(redis_server)


async def test_two_names_never_share_a_lock_or_a_key(redis_server):
    backend = redis_from_url(redis_server.url)
    claims = [Claim(name, 30.0) for name in TRICKY]
    for claim in claims:
        assert (await backend.draw(claim)).token is not None
        assert isinstance(await backend.draw(Claim(claim.name, 30.0), only_if_it_holds=True), Busy)
    assert len(await keys(redis_server)) == len(TRICKY)
    for claim in claims:
        ((seen,),) = await backend.tickets([claim.name])
        assert seen.holder == claim.holder
    for claim in claims:
        await backend.give_back(claim)
    await backend.aclose()
    await nothing_left(redis_server)


async def test_databases_are_worlds_apart(redis_server):
    async with opened(redis_server.url + "/0") as (a, _), opened(redis_server.url + "/1") as (b, _):
        async with a.lock("x"), b.lock("x"):
            assert "db1:keys=1" in await redis_server.command("INFO", "keyspace")
    await nothing_left(redis_server)
