"""What a hostile network, operator or clock does to the Redis backend: nothing is left, nothing is lost, all go on."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from redis_cluster import Cluster
from redis_replicas import Replicated
from redis_server import RedisServer
from redis_stage import IDLE, key
from stays import PATIENCE, eventually, no_loose_ends

from fencing_sdk.abc import LOCK, READER, WRITER, Claim, Gone, Permit, Place
from fencing_sdk.backends.redis import RedisBackend, from_url
from fencing_sdk.errors import BackendRefusedError, BackendUnavailableError

pytest_plugins = ["redis_fixtures"]


def url_of(cluster: Cluster) -> str:
    return cluster.url.replace("redis://", "redis+cluster://")


@asynccontextmanager
async def using(url: str, **options: Any) -> AsyncIterator[RedisBackend]:
    """A backend, and afterwards the proof that the loop was told of nothing."""
    with no_loose_ends():
        backend = from_url(url, **options)
        try:
            yield backend
        finally:
            await backend.aclose()
            gc.collect()


async def drawn(backend: RedisBackend, *claims: Claim) -> list[int | None]:
    """Draw tickets; return their tokens."""
    return [(await backend.draw(claim)).token for claim in claims]


async def kept(backend: RedisBackend, claim: Claim) -> bool:
    (answer,) = await backend.keep([(claim, 0)])
    return isinstance(answer, Place)


async def confirmed(call: Callable[[], Awaitable[Any]]) -> Any:
    """The outcome of a call that is made again if the replica did not confirm it in time: it counts as not done."""
    async with asyncio.timeout(PATIENCE):
        while True:
            with contextlib.suppress(BackendUnavailableError):
                return await call()


# Permissions.


@pytest.mark.parametrize("missing", ["wait", "get"])
async def test_a_grant_that_cannot_be_used_for_want_of_a_permission_is_released(missing, redis_binary):
    async with Replicated(binary=redis_binary) as group:
        await group.master.command("ACL", "SETUSER", "app", "on", ">s", "~*", "&*", "+@all", f"-{missing}")
        url = group.master.url.replace("://", "://app:s@")
        async with using(url, min_replicas=1) as backend:
            claim = Claim("a", 60)
            try:
                await confirmed(lambda: drawn(backend, claim))
            except BackendRefusedError:
                assert await group.master.command("GETRANGE", key("a"), 24, 25) in {"", IDLE}
            else:
                assert await confirmed(lambda: kept(backend, claim))
                await confirmed(lambda: backend.give_back(claim))


# A server that is busy.


async def test_a_server_that_is_busy_with_a_script_is_no_refusal(start_redis):
    """SELECT is refused meanwhile, as it is by a server that has no such database."""
    server = start_redis(lua_time_limit=50)
    async with using(f"{server.url}/1") as backend:
        script = asyncio.create_task(asyncio.to_thread(server.ask_all, ["EVAL", "while true do end", 0], patience=60))
        await eventually(lambda: asyncio.to_thread(is_busy, server), what="the server is busy")
        with pytest.raises(BackendUnavailableError):
            await backend.draw(Claim("a", 10))
        await server.command("SCRIPT", "KILL")
        await script
        await drawn(backend, Claim("a", 10))


def is_busy(server: RedisServer) -> bool:
    return str(server.ask_all(["PING"])[0]).startswith("BUSY")


# Slots on the move.


async def test_a_lock_is_drawn_kept_and_given_back_while_its_slot_moves(redis_cluster: Cluster):
    """By its first key alone: a server refuses a call for keys that it has in part."""
    slot = redis_cluster.slot_of(key("a"))
    source = redis_cluster.owner_of(slot)
    target = redis_cluster.other_than(source)
    async with using(url_of(redis_cluster)) as backend:
        claim, waiter = Claim("a", 60), Claim("a", 60)
        [token] = await drawn(backend, claim)
        redis_cluster.start_move(slot, to=target)
        for _ in range(2):
            assert await kept(backend, claim)
            with pytest.raises(BackendUnavailableError, match="the slot is moving"):
                await backend.draw(waiter)
            redis_cluster.move_keys(slot, to=target)
        assert [seen.token for seen in (await backend.tickets(["a"]))[0]] == [token]
        assert await backend.give_back(claim) is None
        assert (await drawn(backend, waiter))[0] > token
        assert await backend.give_back(waiter) is None
        redis_cluster.finish_move(slot, to=target)
        assert isinstance(await backend.give_back(waiter), Gone)


@dataclass(frozen=True)
class Stand:
    """Who holds and who waits for the name ``a``, so that no key of the scripts is missing; and what is asked then."""

    held: Sequence[Claim]
    waiting: Claim
    ask: Callable[[RedisBackend, Stand], Awaitable[object]]


def permit() -> Claim:
    return Claim("a", 60, label="m", mode=Permit(2))


def reader() -> Claim:
    return Claim("a", 60, label="m", mode=READER)


def writer() -> Claim:
    return Claim("a", 60, mode=WRITER)


async def give_back(backend: RedisBackend, stand: Stand) -> None:
    for claim in stand.held:
        await backend.give_back(claim)


async def end_last(backend: RedisBackend, stand: Stand) -> None:
    if stand.held[0].mode == LOCK:
        await backend.end("a", 1, "test")
    else:
        await backend.end("a", 2, "test")


async def leave(backend: RedisBackend, stand: Stand) -> None:
    await backend.give_back(stand.waiting)


async def wait_on(backend: RedisBackend, stand: Stand) -> None:
    await backend.keep([(stand.waiting, 0)])


async def keep(backend: RedisBackend, stand: Stand) -> None:
    await backend.keep([(claim, 0) for claim in stand.held])


STANDS = {
    "permits are given back": Stand([permit(), permit()], permit(), give_back),
    "readers are given back": Stand([reader(), reader()], writer(), give_back),
    "the last permit is given back": Stand([permit()], writer(), give_back),
    "permits are kept": Stand([permit(), permit()], permit(), keep),
    "a permit is ended": Stand([permit(), permit()], permit(), end_last),
    "readers are ended": Stand([reader(), reader()], writer(), end_last),
    "a permit is drawn": Stand([permit()], writer(), lambda backend, stand: backend.draw(permit())),
    "a waiter leaves": Stand([permit(), permit()], permit(), leave),
    "a waiter for a lock leaves": Stand([permit(), permit()], Claim("a", 60), leave),
    "a waiter is kept": Stand([permit(), permit()], permit(), wait_on),
    "a lock is ended": Stand([Claim("a", 60)], Claim("a", 60), end_last),
}


async def stored(node: RedisServer) -> dict[str, object]:
    """Every key of ``a``: sets and hashes as they are."""
    kinds = {"string": ["GET"], "zset": ["ZRANGE", 0, -1, "WITHSCORES"], "hash": ["HGETALL"]}
    found: dict[str, object] = {}
    for each in await node.command("KEYS", "{fencing:a}:*"):
        command, *rest = kinds[str(await asked_for(node, "TYPE", each))]
        found[each] = await asked_for(node, command, each, *rest)
    return found


async def asked_for(node: RedisServer, *command: Any) -> object:
    """Ask a server that may have the key, although the slot is not its own yet."""
    return (await asyncio.to_thread(node.ask_all, ["ASKING"], command))[1]


@pytest.mark.slow
@pytest.mark.parametrize("there", [False, True], ids=["keys are here", "keys are there"])
@pytest.mark.parametrize("stand", [pytest.param(stand, id=name) for name, stand in STANDS.items()])
async def test_nothing_is_half_done_while_a_slot_moves(stand: Stand, there: bool, redis_cluster: Cluster):
    """A server refuses commands for keys that a script has just emptied: so it must refuse the script as a whole."""
    slot = redis_cluster.slot_of(key("a"))
    source = redis_cluster.owner_of(slot)
    target = redis_cluster.other_than(source)
    async with using(url_of(redis_cluster), tokens="counter") as backend:
        await drawn(backend, *stand.held, stand.waiting)
        redis_cluster.start_move(slot, to=target)
        if there:
            redis_cluster.move_keys(slot, to=target)
        node = target if there else source
        before = await stored(node)
        with pytest.raises(BackendUnavailableError, match="the slot is moving"):
            await stand.ask(backend, stand)
        assert await stored(node) == before
        redis_cluster.finish_move(slot, to=target)
        await stand.ask(backend, stand)
        if stand.ask is give_back:
            (seen,) = await backend.tickets(["a"])
            assert [ticket.holder for ticket in seen] == [stand.waiting.holder]


# Closing.


async def test_closing_under_a_call_leaves_no_task(redis_cluster: Cluster):
    async with using(url_of(redis_cluster)) as backend:
        await backend.open()
        node = redis_cluster.node_of(key("a"))
        await drawn(backend, Claim("a", 30))
        node.pause()
        call = backend.draw(Claim("a", 30))
        await asyncio.sleep(0.05)
        await backend.aclose()
        with pytest.raises(BackendUnavailableError):
            await call
        node.resume()
        assert asyncio.all_tasks() == {asyncio.current_task()}


# Odd data.


async def test_no_token_beyond_53_bits_is_granted(redis_server):
    async with using(redis_server.url) as backend:
        last = (2**53 - 5).to_bytes(8, "big")
        await redis_server.command("SET", key("a"), b"0" * 24 + b"\0I" + last + bytes(8))
        with pytest.raises(BackendRefusedError, match="53 bits"):
            await backend.draw(Claim("a", 60))
        assert await redis_server.command("GETRANGE", key("a"), 24, 25) == IDLE


@pytest.mark.parametrize("stored", ["mine", "0" * 24 + "\0?", "x" * 40, ""])
async def test_what_is_no_line_is_refused_and_left_alone(stored, redis_server):
    async with using(redis_server.url) as backend:
        await redis_server.command("SET", key("a"), stored)
        for verb in (backend.draw(Claim("a", 60)), backend.tickets(["a"]), backend.end("a", 1, "why")):
            with pytest.raises(BackendRefusedError, match="prefix"):
                await verb
        assert await redis_server.command("GET", key("a")) == stored


@pytest.mark.parametrize("gone", [["w", "e"], ["w"], ["e"], ["s"], ["s", "w"]], ids="-".join)
async def test_a_line_that_the_server_has_dropped_forms_again(gone, redis_server):
    """By a flush, or by an eviction, which takes one key: who is not found draws again."""
    async with using(redis_server.url) as backend:
        held, waits = [Claim("a", 0.5, mode=READER) for _ in range(2)], [Claim("a", 0.5, mode=WRITER) for _ in range(3)]
        await drawn(backend, *held, *waits)
        await redis_server.command("DEL", *(key("a", part) for part in gone))
        last = 0
        for claim in waits:
            async with asyncio.timeout(PATIENCE):
                while (token := (await drawn(backend, claim))[0]) is None:  # noqa: ASYNC110  (a server is asked)
                    await asyncio.sleep(0.02)
            assert token > last
            last = token
            assert await backend.give_back(claim) is None


async def test_who_holds_for_a_week_without_another_draw_is_not_forgotten(redis_server):
    async with using(redis_server.url) as backend:
        for mode in (READER, LOCK):
            claim = Claim(mode.word, 60, mode=mode)
            place = await backend.draw(claim)
            await redis_server.command("PEXPIRE", key(mode.word), 60_000)
            await backend.keep([(claim, place.number)])
            assert await redis_server.command("PTTL", key(mode.word)) > 600_000_000
