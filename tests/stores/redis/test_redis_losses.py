"""Grants in Redis that end behind their holder's back: the holder hears of it, and tokens still grow."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import Counter
from collections.abc import Sequence

import pytest
from event_log import CLOCK, Log
from patience import until
from redis_stage import connections, key, milliseconds_left, nothing_left
from shares_suite import claim_of, granted, served
from stays import PATIENCE, Stay, eventually, opened, staying

from fencing_sdk import BackendUnavailableError, LockClient, LockHeldError, LossReason
from fencing_sdk.abc import LOCK, READER, WRITER, Busy, Claim, Grant, Mode, Permit, Renewal
from fencing_sdk.backends.redis import from_url
from fencing_sdk.backends.redis.losses import RedisLossWatcher
from fencing_sdk.backends.redis.scripts import ACQUIRE, RELEASE
from fencing_sdk.events import Lost, Renewed
from fencing_sdk.testing.promises.under_test import in_line

pytest_plugins = ["redis_fixtures"]


# Somebody else changes a lease behind its holder's back: the holder is told, and tokens still grow.


FAR = {"ttl": 600.0, "heartbeat_interval": 150.0}
"""A lease whose next heartbeat is minutes away: what is noticed was pushed."""

BEATING = {"ttl": 6.0, "heartbeat_interval": 0.3}

SOON = 60.0
"""Seconds in which a push has surely come; a small part of `FAR`."""


async def kill_connections(server) -> None:
    for connection in await connections(server):
        await server.command("CLIENT", "KILL", "ID", connection["id"])


async def renewed(stay: Stay) -> bool:
    """Renew by hand; the first renewal may be what learns that the connection is broken."""
    try:
        await stay.lease.renew()
    except BackendUnavailableError:
        return False
    return True


@pytest.mark.every_loop
async def test_a_deleted_lease_ends_the_body_by_push(redis_server):
    async with opened(redis_server.url) as (locks, _):
        async with staying(locks.lock("a", **FAR)) as stay:
            await redis_server.command("DEL", key("a"))
            await stay.over(SOON)
            assert stay.lost is LossReason.REVOKED
        async with staying(locks.lock("a", **FAR)) as following:
            assert following.token > stay.token
            await following.end()
    await nothing_left(redis_server)


@pytest.mark.parametrize("tokens", ["hybrid", "counter"])
async def test_everybody_is_told_of_a_flush_and_hybrid_tokens_grow_through_it(redis_server, tokens):
    async with opened(redis_server.url, tokens=tokens) as (locks, _):
        stays = [Stay(locks.lock(f"n{number}", **FAR)) for number in range(300)]
        for stay in stays:
            await stay.begun()
        await redis_server.command("FLUSHALL")
        for stay in stays:
            await stay.over(SOON)
            assert stay.lost is LossReason.REVOKED
        async with staying(locks.lock("n7", **FAR)) as following:
            assert (following.token > stays[7].token) is (tokens == "hybrid")
            await following.end()
    await nothing_left(redis_server)


async def test_an_intruder_who_takes_the_lease_over_is_left_alone(redis_server, answers_may_be_late):
    async with opened(redis_server.url) as (locks, _):
        async with staying(locks.lock("a", **FAR)) as stay:
            for reply in redis_server.ask_all(["DEL", key("a")], ["SET", key("a"), "mine"]):
                assert reply in {1, "OK"}
            await stay.over(SOON)
            assert stay.lost is LossReason.TAKEN_OVER
        assert await redis_server.command("GET", key("a")) == "mine"
        with pytest.raises(LockHeldError):
            await locks.lock("a", wait=0).acquire()
        waiting = Stay(locks.lock("a", wait=PATIENCE))
        await eventually(lambda: redis_server.command("EXISTS", key("a", "q")), what="somebody waits")
        await redis_server.command("DEL", key("a"))
        await waiting.begun()
        assert waiting.token > stay.token
        await waiting.end()
    await nothing_left(redis_server)


async def test_a_key_of_another_type_under_one_lease_costs_no_other_lease(redis_server, caplog):
    async with opened(redis_server.url) as (locks, log):
        async with staying(locks.lock("a", **BEATING)) as stay, staying(locks.lock("b", **BEATING)) as other:
            await log.seen(Renewed, 2)
            redis_server.ask_all(["MULTI"], ["DEL", key("a")], ["RPUSH", key("a"), "mine"], ["EXEC"])
            await stay.over(SOON)
            assert stay.lost is LossReason.TAKEN_OVER
            renewed = len(log.of(Renewed))
            await log.seen(Renewed, renewed + 3)
            assert other.lease.held
            await other.end()
        assert await redis_server.command("LRANGE", key("a"), 0, -1) == ["mine"]
        assert "refused" not in caplog.text
        await redis_server.command("DEL", key("a"))
    await nothing_left(redis_server)


async def test_a_ttl_shortened_by_an_operator_is_restored_at_once(redis_server):
    async with opened(redis_server.url) as (locks, _), staying(locks.lock("a", **FAR)) as stay:
        await redis_server.command("PEXPIRE", key("a"), 90_000)

        async def restored() -> bool:
            return await milliseconds_left(redis_server, "a") > 500_000

        await eventually(restored, what="the ttl is restored", within=SOON)
        assert stay.lease.held
        await stay.end()
    await nothing_left(redis_server)


async def test_a_lease_that_expires_early_by_an_operator_is_lost_by_push(redis_server):
    async with opened(redis_server.url) as (locks, _), staying(locks.lock("a", **FAR)) as stay:
        redis_server.ask_all(["PEXPIRE", key("a"), 1], ["DEBUG", "SLEEP", "0.1"])
        await stay.over(SOON)
        assert stay.lost is LossReason.REVOKED
    await nothing_left(redis_server)


@pytest.mark.every_loop
async def test_a_loss_is_pushed_after_renewals_too(redis_server):
    """A renewal writes the lease, and a write ends the tracking of a key."""
    async with opened(redis_server.url) as (locks, _), staying(locks.lock("a", **FAR)) as stay:
        for _ in range(3):
            await stay.lease.renew()
        await redis_server.command("DEL", key("a"))
        await stay.over(SOON)
        assert stay.lost is LossReason.REVOKED
    await nothing_left(redis_server)


async def test_a_loss_is_pushed_after_a_retried_acquisition_too(redis_server, proxy):
    async with opened(proxy.url) as (locks, _):
        async with locks.lock("a", **FAR):
            pass
        lost = proxy.lose_replies(of=key("a", "t"))
        async with staying(locks.lock("a", **FAR)) as stay:
            assert lost.done()
            await redis_server.command("DEL", key("a"))
            await stay.over(SOON)
            assert stay.lost is LossReason.REVOKED
    await nothing_left(redis_server)


@pytest.mark.parametrize("fault", ["cut", "kill"])
async def test_a_loss_is_pushed_again_after_the_next_renewal_on_a_new_connection(fault, redis_server, proxy):
    async with opened(proxy.url) as (locks, _), staying(locks.lock("a", **FAR)) as stay:
        if fault == "cut":
            proxy.cut()
        else:
            await kill_connections(redis_server)
        await until(lambda: proxy.connections == 0)
        await eventually(lambda: renewed(stay), what="renewed on a new connection")
        await redis_server.command("DEL", key("a"))
        await stay.over(SOON)
        assert stay.lost is LossReason.REVOKED
    await nothing_left(redis_server)


async def test_without_permission_to_track_the_heartbeat_notices(start_redis, monkeypatch):
    # When a connection opens, all leases are looked at, which is not the heartbeat: keep the first one.
    monkeypatch.setattr("fencing_sdk.backends.redis.connection.node.SILENCE", 60.0)
    server = start_redis(user=["app on >secret ~* &* +@all -client"])
    url = server.url.replace("://", "://app:secret@")
    async with opened(url) as (locks, log), staying(locks.lock("a", **BEATING)) as stay:
        await log.seen(Renewed, 2)
        await server.command("DEL", key("a"))
        await stay.over()
        assert stay.lost is LossReason.REFUSED
    await nothing_left(server)


async def test_a_body_is_cancelled_once_although_push_and_heartbeat_tell_of_the_same_loss(redis_server):
    async with opened(redis_server.url) as (locks, log):
        for _ in range(10):
            async with staying(locks.lock("a", **BEATING | {"heartbeat_interval": 0.1})) as stay:
                await log.seen(Renewed)
                await redis_server.command("DEL", key("a"))
                await stay.over()
                assert stay.lost in {LossReason.REVOKED, LossReason.REFUSED}
                assert stay.task.cancelling() == 0
        assert len(log.of(Lost)) == 10
    await nothing_left(redis_server)


async def test_a_released_lock_deleted_by_others_is_nobodys_loss(redis_server):
    async with opened(redis_server.url) as (locks, log), opened(redis_server.url) as (others, _):
        lease = await locks.lock("a", **FAR).acquire()
        await lease.release()
        for _ in range(3):
            async with others.lock("a", **FAR):
                pass
        await redis_server.command("FLUSHALL")
        async with locks.lock("b", **FAR):
            pass
        assert isinstance(log, Log)
        assert log.of(Lost) == []
    await nothing_left(redis_server)


async def test_a_loss_while_the_connection_was_away_is_noticed_when_it_is_back(redis_server, proxy):
    """Nobody told us, so we look; the next heartbeat is minutes away."""
    async with opened(proxy.url) as (locks, _):
        async with staying(locks.lock("a", **FAR)) as stay:
            proxy.refuse()
            proxy.cut()
            await redis_server.command("DEL", key("a"))
            proxy.heal()
            await eventually(lambda: _any_call(locks), what="the connection is back")
            await stay.over(SOON)
            assert stay.lost is LossReason.REVOKED
    await nothing_left(redis_server)


async def _any_call(locks) -> bool:
    try:
        await locks.inspect("b")
    except BackendUnavailableError:
        return False
    return True


async def test_the_server_remembers_nothing_of_locks_that_are_not_held(redis_server):
    """Not even in the table of client tracking, which INFO counts and no key shows."""
    async with opened(redis_server.url) as (locks, _):
        for number in range(300):
            async with locks.lock(f"n{number}", ttl=30):
                pass
        stats = (await redis_server.command("INFO", "stats")).splitlines()
        assert "tracking_total_keys:0" in stats
        held = await locks.lock("held", ttl=30).acquire()
        stats = (await redis_server.command("INFO", "stats")).splitlines()
        assert "tracking_total_keys:1" in stats
        await held.release()


# The watcher of leases in Redis asks about what has changed, tells of what is lost, and ends with its backend.


CHANGED = ([b"invalidate", [b"{a}:h"]], [b"invalidate", None])


class Looks:
    """What is asked of a store, and its answers."""

    def __init__(self) -> None:
        self.asked: list[list[Claim]] = []
        self.answers: list[Sequence[Renewal] | Exception] = []
        self.silent = False
        self.speak = asyncio.Event()

    async def __call__(self, claims: Sequence[Claim]) -> Sequence[Renewal]:
        self.asked.append(list(claims))
        if self.silent:
            await self.speak.wait()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def watched(look: Looks) -> tuple[RedisLossWatcher, list[tuple[Claim, LossReason]]]:
    losses, lost = RedisLossWatcher(look), []
    losses.on_loss(lambda claim, reason, *_: lost.append((claim, reason)))
    return losses, lost


def changed(*keys: str) -> list[object]:
    return [b"invalidate", [key.encode() for key in keys]]


@pytest.mark.parametrize("mode", [LOCK, READER], ids=lambda mode: mode.word)
@pytest.mark.parametrize("message", CHANGED, ids=["the lease has changed", "FLUSHALL"])
async def test_a_change_is_asked_about_until_the_watcher_is_closed(mode, message):
    asked = []

    async def look(claims):
        asked.append(list(claims))
        return [Renewal.RENEWED]

    watcher, claim = RedisLossWatcher(look), Claim("a", 15.0, owner="one", mode=mode)
    watcher.granted("{a}:h", claim, 1)
    watcher.on_push(message)
    await until(lambda: asked, what="the watcher asks")
    watcher.on_push(message)
    await watcher.aclose()
    watcher.on_push(message)  # from a connection that is closed a little later: an answer would open it again
    for _ in range(10):
        await asyncio.sleep(0)
    assert asked == [[claim]]
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize(("before", "after"), [(READER, WRITER), (READER, Permit(2)), (Permit(2), READER)])
async def test_a_grant_beside_which_several_do_not_fit_shows_that_all_of_them_are_over(before: Mode, after: Mode):
    look = Looks()
    look.answers = [[Renewal.REFUSED, Renewal.REFUSED]]
    losses, lost = watched(look)
    formers = [Claim("a", 15.0, mode=before) for _ in range(2)]
    for token, claim in enumerate([*formers, Claim("a", 15.0, mode=after)], 1):
        losses.granted("{a}:h", claim, token)
    await until(lambda: len(lost) == 2, what="both losses are told")
    assert {claim.owner for claim, _ in lost} == {claim.owner for claim in formers}
    await losses.aclose()


async def test_the_answer_to_an_acquisition_that_comes_after_the_release_is_not_watched():
    watcher, claim = RedisLossWatcher(lambda _: asyncio.sleep(0, [])), Claim("a", 15.0)
    watcher.granted("a", claim, 1)
    assert not watcher.ended("a", claim)
    watcher.granted("a", claim, 1)
    assert not watcher.holds("a", claim)


@pytest.mark.every_loop
async def test_losses_are_still_told_after_a_look_that_failed_at_once():
    look = Looks()
    losses, lost = watched(look)
    claim = Claim("a", 60)
    losses.granted("a", claim, 1)
    look.answers = [RuntimeError(), [Renewal.REFUSED]]
    losses.on_push(changed("a"))
    await asyncio.sleep(0.01)
    assert lost == []
    losses.on_push(changed("a"))
    await asyncio.sleep(0.01)
    assert lost == [(claim, LossReason.REVOKED)]


async def test_a_grant_that_replaced_another_during_a_look_is_not_lost():
    """The answer is about the claim that was asked for, and not about whoever holds the lock now."""
    look = Looks()
    losses, lost = watched(look)
    old, new = Claim("a", 60), Claim("a", 60)
    losses.granted("a", old, 1)
    look.silent, look.answers = True, [[Renewal.TAKEN_OVER]]
    losses.on_push(changed("a"))
    await asyncio.sleep(0.01)
    losses.granted("a", new, 2)
    losses.ended("a", old)
    look.speak.set()
    await asyncio.sleep(0.01)
    assert look.asked == [[old]]
    assert lost == []
    look.answers = [[Renewal.REFUSED]]
    losses.on_push(changed("a"))
    await asyncio.sleep(0.01)
    assert lost == [(new, LossReason.REVOKED)]


# Permits and readers on Redis: who hears of a loss, and what the server is asked.


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
            turn = await stack.enter_async_context(in_line(client, reader))
            assert isinstance(await client.acquire(reader), Busy)
            line.append((client, reader, turn))
        for client in clients:
            client._waiters._give_signs = _no_sign  # the answer to a sign would wake those that no message has woken
        waiting = [asyncio.create_task(_served_when_woken(*place, tries)) for place in line]
        await clients[0].release(writer)
        tokens = {grant.token for grant in await asyncio.gather(*waiting)}
        assert len(tokens) == 1
        return [tries[reader.owner] for reader in readers]


async def _no_sign(waiters) -> None:
    """Give no sign of life, and plan none."""


async def _served_when_woken(client, reader, turn, tries):
    async with asyncio.timeout(SOON):
        await turn.wait()
    return await served(client, reader, turn, tries)


async def test_a_writer_that_leaves_wakes_all_readers_and_each_asks_once(redis_server):
    assert await _let_in_readers(redis_server, 40) == [1] * 40


async def test_more_readers_than_one_run_wakes_are_woken_by_those_before_them(redis_server, monkeypatch):
    """The bound is 500; it is lowered here."""
    for script in (ACQUIRE, RELEASE):
        text = script.text.replace("TOGETHER = 500", "TOGETHER = 3").replace("BOUNDARY = 16", "BOUNDARY = 1")
        assert text != script.text
        monkeypatch.setattr(script, "text", text)
        monkeypatch.setattr(script, "sha", hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
    assert await _let_in_readers(redis_server, 20) == [1] * 20


@pytest.mark.parametrize("mode", [READER, Permit(of=4)])
async def test_a_share_that_is_held_alone_needs_no_key_but_its_lease(redis_server, mode):
    backend = from_url(redis_server.url)
    alone, second = (Claim(NAME, 30.0, label=text, mode=mode) for text in (None, "m"))
    first = await backend.acquire(alone)
    assert isinstance(first, Grant)
    assert await redis_server.command("EXISTS", key(NAME, "e"), key(NAME, "h")) == 0
    assert await backend.acquire(alone) == first
    beside = await backend.acquire(second)
    assert isinstance(beside, Grant)
    assert (beside.token == first.token) is (mode == READER)
    assert await backend.renew([alone, second]) == [Renewal.RENEWED, Renewal.RENEWED]
    assert {(holder.id, holder.label) for holder in await backend.holders(NAME)} == {
        (claim.holder, claim.label) for claim in (alone, second)
    }
    await backend.release(alone)
    assert [(holder.token, holder.label) for holder in await backend.holders(NAME)] == [(beside.token, "m")]
    await backend.release(second)
    assert await redis_server.command("EXISTS", key(NAME), key(NAME, "e"), key(NAME, "h")) == 0
    await backend.aclose()
