"""What a hostile network, operator or clock does to the Redis backend: nothing is left, nothing is lost, all go on."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from redis_cluster import Cluster
from redis_replicas import Replicated
from redis_server import RedisServer
from redis_stage import key
from stays import PATIENCE, eventually, no_loose_ends

from fencing_sdk.abc import LOCK, READER, WRITER, Busy, Claim, Grant, Permit, Renewal
from fencing_sdk.backends.redis import RedisBackend, from_url
from fencing_sdk.backends.redis.errors import translating
from fencing_sdk.backends.redis.requests import WaiterSign
from fencing_sdk.errors import BackendRefusedError, BackendUnavailableError
from fencing_sdk.testing.promises.under_test import in_line

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


async def granted(backend: RedisBackend, *claims: Claim) -> list[int]:
    tokens = []
    for claim in claims:
        outcome = await backend.acquire(claim)
        assert isinstance(outcome, Grant)
        tokens.append(outcome.token)
    return tokens


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
                await confirmed(lambda: granted(backend, claim))
            except BackendRefusedError:
                assert await group.master.command("EXISTS", key("a")) == 0
            else:
                assert await confirmed(lambda: backend.renew([claim])) == [Renewal.RENEWED]
                await confirmed(lambda: backend.release(claim))


# A server that is busy.


async def test_a_server_that_is_busy_with_a_script_is_no_refusal(start_redis):
    """SELECT is refused meanwhile, as it is by a server that has no such database."""
    server = start_redis(lua_time_limit=50)
    async with using(f"{server.url}/1") as backend:
        script = asyncio.create_task(asyncio.to_thread(server.ask_all, ["EVAL", "while true do end", 0], patience=60))
        await eventually(lambda: asyncio.to_thread(is_busy, server), what="the server is busy")
        with pytest.raises(BackendUnavailableError):
            await backend.acquire(Claim("a", 10))
        await server.command("SCRIPT", "KILL")
        await script
        await granted(backend, Claim("a", 10))


def is_busy(server: RedisServer) -> bool:
    return str(server.ask_all(["PING"])[0]).startswith("BUSY")


# Slots on the move.


async def test_a_lock_is_released_although_only_its_lease_has_moved(redis_cluster: Cluster):
    slot = redis_cluster.slot_of(key("a"))
    source = redis_cluster.owner_of(slot)
    target = redis_cluster.other_than(source)
    async with using(url_of(redis_cluster)) as backend:
        claim = Claim("a", 60)
        await granted(backend, claim)
        redis_cluster.start_move(slot, to=target)
        redis_cluster.move_keys(slot, to=target)
        assert await backend.renew([claim]) == [Renewal.RENEWED]
        await backend.release(Claim("a", 60))  # somebody else's has no effect
        assert (await backend.inspect("a")).id == claim.holder
        await backend.release(claim)
        assert await backend.inspect("a") is None


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


async def release_all(backend: RedisBackend, stand: Stand) -> None:
    for claim in stand.held:
        await backend.release(claim)


async def revoke_last(backend: RedisBackend, stand: Stand) -> None:
    token = max(holder.token for holder in await backend.holders("a"))
    await backend.revoke("a", token, "test")


async def leave_line(backend: RedisBackend, stand: Stand) -> None:
    with translating("queue"):
        await backend._router.run(backend._requests.release(stand.waiting, waits=True))


async def give_sign(backend: RedisBackend, stand: Stand) -> None:
    with translating("queue"):
        await backend._router.run(backend._requests.stand([[sign_of(stand.waiting)]]))


def sign_of(claim: Claim) -> WaiterSign:
    """A sign of life of a waiter that no message reaches."""
    return WaiterSign(claim, "silent" if claim.mode == LOCK else "wake", 1, "1", "PUBLISH", "c")


STANDS = {
    "permits are released": Stand([permit(), permit()], permit(), release_all),
    "readers are released": Stand([reader(), reader()], Claim("a", 60, mode=WRITER), release_all),
    "the last permit is released": Stand([permit()], permit(), release_all),
    "the last reader is released": Stand([reader()], Claim("a", 60, mode=WRITER), release_all),
    "a permit is revoked": Stand([permit(), permit()], permit(), revoke_last),
    "readers are revoked": Stand([reader(), reader()], Claim("a", 60, mode=WRITER), revoke_last),
    "a permit is asked for": Stand([permit()], permit(), lambda backend, stand: backend.acquire(stand.waiting)),
    "a reader asks": Stand([reader()], reader(), lambda backend, stand: backend.acquire(stand.waiting)),
    "a permit is repeated": Stand([permit(), permit()], permit(), lambda backend, it: backend.acquire(it.held[0])),
    "a waiter leaves": Stand([permit(), permit()], permit(), leave_line),
    "a waiter for a lock leaves": Stand([permit(), permit()], Claim("a", 60), leave_line),
    "a waiter gives a sign": Stand([permit(), permit()], permit(), give_sign),
    "a lock is released": Stand([Claim("a", 60)], Claim("a", 60), release_all),
    "a lock is revoked": Stand([Claim("a", 60)], Claim("a", 60), revoke_last),
}


async def put_in_line(node: RedisServer, claim: Claim) -> None:
    """Let *claim* stand in line, without a client that keeps it there."""
    now = int((await node.command("TIME"))[0]) * 1000
    await node.command("ZADD", key("a", "q"), 1, claim.owner)
    await node.command("HSET", key("a", "w"), claim.owner, f"{now} {sign_of(claim).stored()}")


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


@pytest.mark.parametrize(
    "claim",
    [
        pytest.param(Claim("a", 60, mode=Permit(2)), id="permit"),
        pytest.param(Claim("a", 60, mode=READER), id="reader"),
        pytest.param(Claim("a", 60, mode=READER), id="one of two readers"),
        pytest.param(Claim("a", 60, mode=WRITER), id="writer"),
    ],
)
@pytest.mark.parametrize("there", [False, True], ids=["keys are here", "keys are there"])
async def test_a_share_is_renewed_and_released_while_its_slot_moves(
    claim: Claim, there: bool, request: pytest.FixtureRequest, redis_cluster: Cluster
):
    """Those that share a name, and are one of several, are released when the slot has moved."""
    two = "one of two" in request.node.callspec.id
    slot = redis_cluster.slot_of(key("a"))
    source = redis_cluster.owner_of(slot)
    target = redis_cluster.other_than(source)
    async with using(url_of(redis_cluster)) as backend:
        await granted(backend, claim, *([Claim("a", 60, mode=READER)] if two else []))
        redis_cluster.start_move(slot, to=target)
        if there:
            redis_cluster.move_keys(slot, to=target)
        assert await backend.renew([claim]) == [Renewal.RENEWED]
        with pytest.raises(
            BackendRefusedError, match="the slot is moving"
        ):  # so that a job keeps its lock by a renewal
            await backend.transfer(claim, replace(claim, owner="heir"))
        if two:
            with pytest.raises(BackendUnavailableError, match="the slot is moving"):
                await backend.release(claim)
        else:
            await backend.release(claim)
        redis_cluster.finish_move(slot, to=target)
        await backend.release(claim)
        assert len(await backend.holders("a")) == two


@pytest.mark.slow
@pytest.mark.parametrize("there", [False, True], ids=["keys are here", "keys are there"])
@pytest.mark.parametrize("stand", [pytest.param(stand, id=name) for name, stand in STANDS.items()])
async def test_nothing_is_half_done_while_a_slot_moves(stand: Stand, there: bool, redis_cluster: Cluster):
    """A server refuses commands for keys that a script has just emptied: so it must refuse the script as a whole."""
    slot = redis_cluster.slot_of(key("a"))
    source = redis_cluster.owner_of(slot)
    target = redis_cluster.other_than(source)
    async with using(url_of(redis_cluster)) as backend:
        await granted(backend, *stand.held)
        if len(stand.held) == 1 and stand.held[0].mode != LOCK:  # it leaves the lease, where it stands alone
            second = replace(stand.held[0], owner="second")
            await granted(backend, second)
            await backend.release(second)
        await put_in_line(source, stand.waiting)
        if stand.ask is revoke_last:
            await source.command("HSET", key("a", "x"), "another", "reason")
        redis_cluster.start_move(slot, to=target)
        if there:
            redis_cluster.move_keys(slot, to=target)
        node = target if there else source
        before = await stored(node)
        if stand.held[0].mode == LOCK and stand.ask is release_all:  # it needs the lease alone
            await stand.ask(backend, stand)
            assert await stored(node) == {each: value for each, value in before.items() if each != key("a")}
        else:
            with pytest.raises(BackendUnavailableError, match="the slot is moving"):
                await stand.ask(backend, stand)
            assert await stored(node) == before
        redis_cluster.finish_move(slot, to=target)
        await stand.ask(backend, stand)
        if stand.ask is release_all:
            assert not await backend.holders("a")


async def test_waiters_are_woken_by_messages_after_a_failover(redis_binary, monkeypatch):
    with Cluster(binary=redis_binary, replicas=1) as cluster:
        async with using(url_of(cluster)) as backend, using(url_of(cluster)) as others:
            holder, waiter = Claim("a", 60), Claim("a", 60)
            await granted(others, holder)
            async with in_line(backend, waiter) as turn:
                await cluster.failover(cluster.node_of(key("a")))
                await eventually(lambda: asked(backend, waiter), what="it is answered again")
                await eventually(lambda: asked(backend, waiter), what="it is answered by the new master")
                woken = asyncio.create_task(turn.wait())
                await eventually(lambda: gone(others, holder), what="released")
                async with asyncio.timeout(PATIENCE):
                    await woken


async def asked(backend, claim) -> bool:
    try:
        return isinstance(await backend.acquire(claim), Busy)
    except BackendUnavailableError:
        return False


async def gone(backend, claim) -> bool:
    try:
        await backend.release(claim)
    except BackendUnavailableError:
        return False
    return True


# Closing.


async def test_closing_under_a_call_leaves_no_task(redis_cluster: Cluster):
    async with using(url_of(redis_cluster)) as backend:
        await backend.open()
        node = redis_cluster.node_of(key("a"))
        await granted(backend, Claim("a", 30))
        node.pause()
        call = asyncio.create_task(backend.acquire(Claim("a", 30)))
        await asyncio.sleep(0.05)
        await backend.aclose()
        with pytest.raises(BackendUnavailableError):
            await call
        node.resume()
        assert asyncio.all_tasks() == {asyncio.current_task()}


# Odd data.


async def test_the_last_token_of_53_bits_is_granted_and_none_beyond(redis_server):
    async with using(redis_server.url) as backend:
        await redis_server.command("SET", key("a", "t"), 2**53 - 2)
        claim = Claim("a", 60)
        assert await granted(backend, claim) == [2**53 - 1]
        place = backend.stand(Claim("a", 60), lambda *_: None, hand_over=True)
        while not await backend.list_waiters("a"):  # noqa: ASYNC110  (it joins in the background)
            await asyncio.sleep(0.01)
        assert await backend.release(claim) is None, "its grant has ended, whatever becomes of the line"
        place.leave()
        with pytest.raises(BackendRefusedError, match="53 bits"):
            await backend.acquire(Claim("a", 60))
        assert await redis_server.command("EXISTS", key("a")) == 0


async def test_what_stands_in_a_line_makes_nobody_run_other_commands(redis_server):
    async with using(redis_server.url) as backend:
        holder, waiter = Claim("a", 60), Claim("a", 60)
        await granted(backend, holder)
        async with in_line(backend, waiter):
            sign = (await redis_server.command("HGET", key("a", "w"), waiter.owner)).split(" ", 1)[0]
            await redis_server.command("HSET", key("a", "w"), waiter.owner, f"{sign} SET planted 1")
            await backend.release(holder)
            assert await redis_server.command("EXISTS", "planted") == 0


@pytest.mark.parametrize("tokens", ["hybrid", "counter"])
@pytest.mark.parametrize("last", [("SET", "no number"), ("RPUSH", "no", "text"), ("SET", str(2**53 - 1))])
async def test_a_grant_whose_token_cannot_be_drawn_is_taken_back(tokens, last, redis_server):
    """The lease is written before the last token is read, in one step at the server."""
    async with using(redis_server.url, tokens=tokens) as backend:
        await redis_server.command(last[0], key("a", "t"), *last[1:])
        with pytest.raises(BackendRefusedError):
            await backend.acquire(Claim("a", 60))
        assert await redis_server.command("EXISTS", key("a")) == 0
        if last[0] == "SET":
            assert await redis_server.command("GET", key("a", "t")) == last[1]
        await redis_server.command("DEL", key("a", "t"))
        await redis_server.command("SET", key("a", "t"), 41)
        claim = Claim("a", 60)
        [token] = await granted(backend, claim)
        assert token == 42 if tokens == "counter" else token > 42
        assert int(await redis_server.command("GET", key("a", "t"))) == token
