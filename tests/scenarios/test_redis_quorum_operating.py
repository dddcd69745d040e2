"""Operators on a quorum, while nodes go, come back and hang: what is told is true, and what is taken away stays so."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from patience import until
from redis_quorum import Quorum, QuorumNetwork
from redis_stage import held_by_all, key
from stays import PATIENCE, eventually

from fencing_sdk import BackendRefusedError, BackendUnavailableError, LeaseLostError, LossReason, connect
from fencing_sdk._values.claim import Claim, Grant, Holder, Renewal, Revoked, holder_of
from fencing_sdk.backends.redis.keys import RedisKeys
from fencing_sdk.backends.redis.quorum import RedisQuorumBackend, from_url, revoking
from fencing_sdk.backends.redis.quorum.renewal_tally import QuorumHold
from fencing_sdk.backends.redis.quorum.requests import QuorumRequests

pytest_plugins = ["redis_fixtures"]

REQUESTS = QuorumRequests(RedisKeys("fencing"))
PAGE = Path(__file__).parents[2] / "docs" / "backends" / "redis-quorum.md"


@pytest.fixture
async def backend(redis_quorum: Quorum) -> AsyncIterator[RedisQuorumBackend]:
    async with contextlib.aclosing(from_url(redis_quorum.url)) as made:
        await made.open()
        await until(lambda: _voting(made) == len(redis_quorum.nodes), what="all nodes vote")
        yield made


def _voting(backend: RedisQuorumBackend) -> int:
    voters = backend._nodes.voters()
    return 0 if voters is None else len(voters.nodes)


async def granted(backend: RedisQuorumBackend, claim: Claim) -> int:
    outcome = await backend.acquire(claim)
    assert isinstance(outcome, Grant)
    return outcome.token


async def listed(backend: RedisQuorumBackend) -> list[Holder]:
    found: list[Holder] = []
    cursor: str | None = None
    while True:
        page = await backend.list_held("", cursor, 10)
        found += page.holders
        if (cursor := page.cursor) is None:
            return found


# Listing


async def test_a_lock_is_told_once_although_several_nodes_have_it(redis_quorum: Quorum, backend: RedisQuorumBackend):
    names = {f"job/{number}" for number in range(30)}
    for name in names:
        await granted(backend, Claim(name, 60.0, metadata="host 7"))
    told = [holder.name for holder in await listed(backend)]
    assert set(told) == names
    assert len(told) < 1.5 * len(names)  # SCAN itself may find a key twice


async def test_what_the_first_nodes_lack_is_told_all_the_same(redis_quorum: Quorum, backend: RedisQuorumBackend):
    """Each lock is missing on another node; two others have it, which is a majority."""
    names = [f"job/{number}" for number in range(9)]
    for number, name in enumerate(names):
        await granted(backend, Claim(name, 60.0))
        await held_by_all(redis_quorum, name)
        await redis_quorum.nodes[number % 3].command("DEL", key(name, "h"))
    assert {holder.name for holder in await listed(backend)} == set(names)


async def test_what_a_minority_has_is_not_told(redis_quorum: Quorum, backend: RedisQuorumBackend):
    await granted(backend, Claim("a", 60.0))
    await held_by_all(redis_quorum, "a")
    for node in redis_quorum.nodes[1:]:
        await node.command("DEL", key("a", "h"))
    assert await listed(backend) == []


async def test_a_node_that_was_healed_behind_the_listing_hides_no_lock(
    redis_quorum: Quorum, backend: RedisQuorumBackend
):
    """The listing has walked over the first node when that gets the hold, and comes to the second one afterwards."""
    claim = Claim("a", 60.0)
    await granted(backend, claim)
    await held_by_all(redis_quorum, "a")
    await redis_quorum.nodes[0].command("DEL", key("a", "h"))
    page = await backend.list_held("", None, 10)
    while page.cursor is not None and page.cursor.split(".")[1] == "0":  # on the first node
        assert page.holders == []
        page = await backend.list_held("", page.cursor, 10)
    await asyncio.sleep(0.01)  # by the clock, the hold is younger than the listing
    assert await backend.renew([claim]) == [Renewal.RENEWED]
    await held_by_all(redis_quorum, "a")
    found: list[Holder] = []
    while page.cursor is not None:
        page = await backend.list_held("", page.cursor, 10)
        found += page.holders
    assert {holder.name for holder in found} == {"a"}


async def test_a_listing_goes_on_when_a_node_is_killed(redis_quorum: Quorum, backend: RedisQuorumBackend):
    names = {f"job/{number}" for number in range(60)}
    for name in names:
        await granted(backend, Claim(name, 60.0))
        await held_by_all(redis_quorum, name)
    page = await backend.list_held("", None, 5)
    found = {holder.name for holder in page.holders}
    assert page.cursor is not None
    redis_quorum.nodes[0].kill()
    while page.cursor is not None:
        page = await backend.list_held("", page.cursor, 5)
        found |= {holder.name for holder in page.holders}
    assert found == names


async def test_a_long_line_is_told_in_its_order(backend: RedisQuorumBackend):
    await granted(backend, Claim("a", 60.0))
    waiters = [Claim("a", 60.0) for _ in range(230)]  # more than one run of a script tells
    async with contextlib.AsyncExitStack() as lines:
        # All at once, in this order: a waiter leaves the line 3 s after its last sign of life, and these give only one.
        await asyncio.gather(*(lines.enter_async_context(backend.queue(waiter)) for waiter in waiters))
        told = await backend.list_waiters("a")
    assert [waiting.holder for waiting in told] == [holder_of(waiter.owner) for waiter in waiters]


# Taking a lock away


@pytest.mark.parametrize("down", [0, 1, 2])
async def test_the_holder_is_told_while_a_node_is_down(redis_quorum: Quorum, down: int):
    redis_quorum.nodes[down].kill()
    async with connect(redis_quorum.url) as locks, connect(redis_quorum.url) as operator:
        lease = await locks.lock("a", ttl=60).acquire()
        token = lease.token
        assert await operator.revoke("a", token=token, reason="it hangs")
        await asyncio.wait_for(lease.wait_lost(), PATIENCE)
        with pytest.raises(LeaseLostError) as lost:
            lease.check()
        assert (lost.value.reason, lost.value.detail) == (LossReason.REVOKED, "it hangs")
        following = await operator.lock("a", ttl=60, wait=PATIENCE).acquire()
        assert following.token > token
        await following.release()


async def test_a_holder_is_told_of_what_its_own_client_takes_away(redis_quorum: Quorum):
    """A server does not tell a connection of its own changes."""
    async with connect(redis_quorum.url) as locks:
        lease = await locks.lock("a", ttl=3600).acquire()
        assert await locks.revoke("a", token=lease.token, reason="it hangs")
        assert await asyncio.wait_for(lease.wait_lost(), PATIENCE) is LossReason.REVOKED


async def test_the_head_of_the_line_is_woken(backend: RedisQuorumBackend):
    token, waiter = await granted(backend, Claim("a", 60.0)), Claim("a", 60.0)
    async with backend.queue(waiter) as turn:
        assert not isinstance(await backend.acquire(waiter), Grant)
        assert await backend.revoke("a", token, "it hangs")
        await asyncio.wait_for(turn.wait(), PATIENCE)
        assert await granted(backend, waiter) > token


async def test_a_later_grant_of_the_same_owner_is_not_hit(redis_quorum: Quorum, backend: RedisQuorumBackend):
    """The request of a slow operator comes when the owner has released the lock, and acquired it again."""
    claim = Claim("a", 60.0)
    await granted(backend, claim)
    seen, _ = await revoking.find_hold(backend._nodes, REQUESTS, "a")
    assert seen is not None
    await backend.release(claim)
    await granted(backend, claim)
    await held_by_all(redis_quorum, "a")
    for node in redis_quorum.nodes:
        assert await node.command(*REQUESTS.revoke("a", seen, "one", "it hangs", 5.0).by_text()) == ""
    assert await backend.renew([claim]) == [Renewal.RENEWED]


async def test_a_node_that_hangs_does_not_hold_up_an_operator(redis_quorum: Quorum, backend: RedisQuorumBackend):
    token = await granted(backend, Claim("a", 60.0))
    redis_quorum.nodes[2].pause()
    async with asyncio.timeout(PATIENCE):
        (holder,) = await listed(backend)
        assert holder.token == token
        assert await backend.revoke("a", token, "it hangs")


async def test_a_revocation_that_reaches_a_minority_is_an_error_and_may_be_repeated(
    redis_quorum: Quorum, backend: RedisQuorumBackend, monkeypatch: pytest.MonkeyPatch
):
    claim = Claim("a", 60.0)
    token = await granted(backend, claim)
    await held_by_all(redis_quorum, "a")
    async with QuorumNetwork(redis_quorum) as network, contextlib.aclosing(from_url(network.url)) as operator:
        look = revoking.find_hold

        async def look_and_lose_two(*arguments):
            found = await look(*arguments)
            for proxy in network.proxies[1:]:
                proxy.refuse()
                proxy.cut()
            return found

        monkeypatch.setattr(revoking, "find_hold", look_and_lose_two)
        with pytest.raises(BackendUnavailableError):
            async with asyncio.timeout(PATIENCE):
                await operator.revoke("a", token, "it hangs")
        monkeypatch.undo()
        assert await backend.renew([claim]) == [Renewal.RENEWED]
        network.heal()
        async with asyncio.timeout(PATIENCE):
            while True:
                with contextlib.suppress(BackendUnavailableError):
                    await operator.revoke("a", token, "it hangs")
                    break
                await asyncio.sleep(0.05)
    assert await backend.renew([claim]) == [Revoked("it hangs")]
    assert await backend.inspect("a") is None


async def test_a_hold_that_was_revoked_on_a_node_is_not_healed_there(redis_quorum: Quorum, backend: RedisQuorumBackend):
    """Else a holder that renews between two steps of an operator would have a majority again."""
    claim = Claim("a", 60.0)
    token = await granted(backend, claim)
    await held_by_all(redis_quorum, "a")
    (seen, _) = await revoking.find_hold(backend._nodes, REQUESTS, "a")
    assert seen is not None
    first = redis_quorum.nodes[0]
    assert await first.command(*REQUESTS.revoke("a", seen, "one", "it hangs", 5.0).by_text()) == "one"
    assert await first.command(*REQUESTS.revoke("a", seen, "two", "it hangs", 5.0).by_text()) == "one"
    for _ in range(3):
        assert await backend.renew([claim]) == [Renewal.RENEWED]
    voters = backend._nodes.voters()
    assert voters is not None
    heal = REQUESTS.heal([(QuorumHold(claim, token), claim)], voters.epoch, token + 1)
    assert await first.command(*heal.by_text()) == ["0"]
    assert await first.command("EXISTS", key("a", "h")) == 0
    for node in redis_quorum.nodes[1:]:
        assert await node.command(*REQUESTS.revoke("a", seen, "one", "it hangs", 5.0).by_text()) == "one"
    assert await backend.renew([claim]) == [Revoked("it hangs")]


# A user with as few rights as the page names


async def test_the_user_of_the_page_may_do_all_this(redis_binary: str):
    rules = PAGE.read_text().split("A user of its own needs")[1].split("```")[1].partition("\n")[2].split()
    assert rules[:4] == ["user", "locks", "on", ">..."]
    user = " ".join(["locks", "on", ">s", *rules[4:]])
    with Quorum(3, binary=redis_binary, appendonly=True, user=[user]) as quorum:
        await quorum.found()
        url = quorum.url.replace("://", "://locks:s@")
        async with connect(url) as locks, connect(url) as operator:
            lease = await locks.lock("a", ttl=60).acquire()
            waiting = asyncio.create_task(locks.lock("a", ttl=60).acquire())
            await eventually(lambda: operator.waiters("a"), what="the waiter is in line")
            assert [holder.token async for holder in operator.held()] == [lease.token]
            assert await operator.revoke("a", token=lease.token, reason="it hangs")
            await asyncio.wait_for(lease.wait_lost(), PATIENCE)
            following = await asyncio.wait_for(waiting, PATIENCE)
            await following.release()
        without = " ".join(["locks", "on", ">s", *(rule for rule in rules[4:] if rule != "+scan")])
        for node in quorum.nodes:
            await node.command("ACL", "SETUSER", *without.split(), "-scan")
        async with connect(url) as operator:
            with pytest.raises(BackendRefusedError, match="scan"):
                assert [holder async for holder in operator.held()]
