"""Nodes of a quorum go, come back, forget and lie about the time, under holders and operators: tokens stay right."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from patience import until
from redis_quorum import Quorum, QuorumNetwork
from redis_stage import held_by_all, key
from required_program import require_program
from stays import PATIENCE, eventually, opened, staying
from zookeeper_clock import WallClock

from fencing_sdk import (
    BackendError,
    BackendRefusedError,
    BackendUnavailableError,
    LeaseLostError,
    LockClient,
    LossReason,
    connect,
)
from fencing_sdk.abc import Busy, Claim, Gone, Place
from fencing_sdk.backends.redis.connection.dial import OpenConnection, ServerDialer
from fencing_sdk.backends.redis.keys import RedisKeys
from fencing_sdk.backends.redis.quorum import RedisQuorumBackend, from_url
from fencing_sdk.backends.redis.quorum.ballots import QuorumHold
from fencing_sdk.backends.redis.quorum.requests import QuorumRequests
from fencing_sdk.events import Lost, Renewed

pytest_plugins = ["redis_fixtures"]


# Nodes of a quorum go, come back, forget, and lie about the time: locks go on, and tokens stay right.


REQUESTS = QuorumRequests(RedisKeys("fencing"))
EPOCH = "{fencing:}:epoch"
HELD = {"ttl": 8.0, "heartbeat_interval": 0.2}


@pytest.fixture
async def backend(redis_quorum: Quorum) -> AsyncIterator[RedisQuorumBackend]:
    async with contextlib.aclosing(from_url(redis_quorum.url)) as made:
        await voting(made, 3)
        yield made


async def token(backend: RedisQuorumBackend, claim: Claim) -> int:
    async with asyncio.timeout(PATIENCE):
        while True:
            with contextlib.suppress(BackendUnavailableError):
                place = await backend.draw(claim)
                if isinstance(place, Place):
                    assert place.token is not None
                    return place.token
            await asyncio.sleep(0.02)


async def kept(backend: RedisQuorumBackend, claim: Claim) -> Place | Gone | None:
    (answer,) = await backend.keep([(claim, 0)])
    return answer


async def voting(backend: RedisQuorumBackend, number: int) -> None:
    """Wait until so many nodes vote."""
    async with asyncio.timeout(PATIENCE):
        while (voters := backend._nodes.voters()) is None or len(voters.nodes) != number:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def counted(locks: LockClient) -> QuorumHold:
    """Wait until the one hold of a client counts on every node, and return it; a grant waits for a majority alone."""
    ((hold, _),) = locks._backend._holds._holds.values()
    await until(lambda: all(map(hold.counts, range(3))), what="the hold counts on every node")
    return hold


async def run(quorum: Quorum, node: int, call) -> object:
    words = call.by_text()
    return await quorum.nodes[node].command(*words)


# Nodes go and come back


async def test_a_lease_is_held_while_each_node_in_turn_is_away_until_its_hold_is_over(redis_quorum: Quorum):
    async with opened(redis_quorum.url) as (locks, log), staying(locks.lock("a", **HELD)) as stay:
        hold = await counted(locks)
        for number, node in enumerate(redis_quorum.nodes):
            with contextlib.suppress(ConnectionError):
                await asyncio.to_thread(node.ask_all, ["DEL", key("a", "h")], ["SHUTDOWN"])
            await asyncio.to_thread(node.stop)
            renewed = len(log.of(Renewed))
            await log.seen(Renewed, renewed + 3)
            await asyncio.to_thread(node.start)
            await eventually(lambda node=node: node.command("EXISTS", key("a", "h")), what="the node is healed")
            # The client hears later than the server that the node is healed, and a whole round must follow.
            await until(lambda number=number: hold.counts(number), what="the node counts")
        assert stay.lease.held
        assert log.of(Lost) == []
        await stay.end()


async def test_a_release_reaches_a_node_that_was_away(redis_quorum: Quorum, backend: RedisQuorumBackend):
    claim = Claim("a", 30.0)
    await token(backend, claim)
    await until(lambda: redis_quorum.nodes[2].ask("EXISTS", key("a", "h")), what="the slowest node has the hold, too")
    redis_quorum.nodes[2].kill()
    await backend.give_back(claim)
    redis_quorum.nodes[2].start()

    async def freed() -> bool:
        await backend.tickets(["b"])  # a client that is in use connects again to the nodes that it misses
        return not redis_quorum.nodes[2].ask("EXISTS", key("a", "h"))

    await eventually(freed, what="the node has freed it, too")


async def test_an_attempt_that_finds_no_majority_leaves_nothing(redis_quorum: Quorum, backend: RedisQuorumBackend):
    for node in redis_quorum.nodes[:2]:
        node.pause()
    with pytest.raises((BackendUnavailableError, TimeoutError)):
        async with asyncio.timeout(0.3):
            await backend.draw(Claim("a", 30.0))
    redis_quorum.heal()
    await token(backend, Claim("a", 30.0))


@pytest.mark.parametrize("lost", [1, 2, 3])
async def test_a_grant_whose_answer_is_lost_is_found_again_or_undone(redis_quorum: Quorum, lost: int):
    async with QuorumNetwork(redis_quorum) as network:
        backend = from_url(network.url)
        await voting(backend, 3)
        for proxy in network.proxies[:lost]:
            proxy.lose_replies(of=b"EVALSHA")
        claim = Claim("a", 30.0)
        if lost == 1:
            assert isinstance(await backend.draw(claim), Place)
        else:
            with pytest.raises((BackendUnavailableError, TimeoutError)):
                async with asyncio.timeout(2):
                    await backend.draw(claim)
        await voting(backend, 3)
        first = await token(backend, claim)
        assert await token(backend, claim) == first
        await backend.give_back(claim)
        await token(backend, Claim("a", 30.0))
        await backend.aclose()


async def test_acquisitions_that_are_cancelled_at_any_moment_leave_nothing(
    redis_quorum: Quorum, backend: RedisQuorumBackend
):
    for turns in range(60):
        claim = Claim("a", 60.0)
        task = asyncio.create_task(backend.draw(claim))
        for _ in range(turns % 12):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            await backend.give_back(claim)  # it was quicker
    for node in redis_quorum.nodes:
        await until(lambda node=node: not node.ask("EXISTS", key("a", "h")), what="nothing is left", within=PATIENCE)
    await token(backend, Claim("b", 30.0))


# Rivals


async def test_rivals_that_split_the_nodes_have_one_winner_each_time(redis_quorum: Quorum):
    """Each of two rivals is near one of the two living nodes, and far from the other."""
    redis_quorum.nodes[2].kill()
    async with QuorumNetwork(redis_quorum) as one, QuorumNetwork(redis_quorum) as two:
        one.proxies[0].delay(requests=0.01)
        two.proxies[1].delay(requests=0.01)
        rivals = [from_url(one.url), from_url(two.url)]
        for rival in rivals:
            await rival.open()
        won = lost = 0
        while won < 10:
            pairs = [(rival, Claim("a", 30.0)) for rival in rivals]
            outcomes = await asyncio.gather(*(rival.draw(claim) for rival, claim in pairs))
            winners = sum(isinstance(outcome, Place) for outcome in outcomes)
            assert winners <= 1
            won += winners
            lost += 1 - winners
            assert lost <= 3, "a round has no winner only if a node stands still"
            for rival, claim in pairs:
                await rival.give_back(claim)
        for rival in rivals:
            await rival.aclose()


async def test_a_refused_attempt_frees_the_nodes_that_had_granted_it(redis_quorum: Quorum, backend: RedisQuorumBackend):
    await token(backend, Claim("a", 60.0))
    await held_by_all(redis_quorum, "a")
    await redis_quorum.nodes[2].command("DEL", key("a", "h"))
    async with contextlib.aclosing(from_url(redis_quorum.url)) as rival:
        await voting(rival, 3)
        assert isinstance(await rival.draw(Claim("a", 60.0)), Busy)
        await until(lambda: not redis_quorum.nodes[2].ask("EXISTS", key("a", "h")), what="it is free", within=PATIENCE)


# Memory


async def test_a_node_that_has_forgotten_does_not_vote_and_is_admitted_while_leases_go_on(redis_quorum: Quorum):
    quick = HELD | {"ttl": 4.0}  # admission waits for the longest hold to end
    async with opened(redis_quorum.url) as (locks, log), staying(locks.lock("a", **quick)) as stay:
        hold = await counted(locks)
        redis_quorum.nodes[1].ask("FLUSHALL")
        renewed = len(log.of(Renewed))
        await log.seen(Renewed, renewed + 3)
        assert await redis_quorum.nodes[1].command("DBSIZE") == 0  # nothing is written without an epoch
        assert "1 of 3" in await redis_quorum.init()
        node = redis_quorum.nodes[1]
        await eventually(lambda: node.command("EXISTS", key("a", "h")), what="the node has the hold again")
        await until(lambda: hold.counts(1), what="the node counts")
        redis_quorum.nodes[0].kill()
        async with locks.lock("b", wait=PATIENCE) as lease:
            assert lease.token > 0
        assert log.of(Lost) == []
        await stay.end()


async def test_tokens_grow_across_a_lost_memory_although_clocks_are_of_no_help(redis_quorum: Quorum):
    """Hints of 1, 2, 3: the counters alone must do it. The node that is left knows none of the first tokens."""
    backend = from_url(redis_quorum.url)
    tokens = []

    async def use(times: int) -> None:
        backend._next_number = iter(range(1, 1000)).__next__
        for _ in range(times):
            claim = Claim("a", 5.0)
            tokens.append(await token(backend, claim))
            await backend.give_back(claim)

    redis_quorum.nodes[2].kill()
    await use(5)
    redis_quorum.nodes[0].ask("FLUSHALL")
    redis_quorum.nodes[2].start()
    await redis_quorum.init()
    redis_quorum.nodes[1].kill()
    await use(5)
    assert tokens == sorted(set(tokens))
    await backend.aclose()


async def test_a_majority_that_has_forgotten_is_an_error_and_no_new_beginning(
    redis_quorum: Quorum, backend: RedisQuorumBackend
):
    await token(backend, Claim("a", 1.0))
    for node in redis_quorum.nodes[:2]:
        node.ask("FLUSHALL")
    with pytest.raises(BackendUnavailableError):
        for _ in range(3):
            await backend.draw(Claim("b", 1.0))
    with pytest.raises(BackendRefusedError, match="only 1 of 3 nodes remember"):
        await redis_quorum.init()
    redis_quorum.nodes[2].ask("FLUSHALL")
    with pytest.raises(BackendRefusedError, match="fencing init"):
        async with asyncio.timeout(PATIENCE):
            while True:
                try:
                    await backend.draw(Claim("b", 1.0))
                except BackendUnavailableError:
                    await asyncio.sleep(0.05)


async def test_a_server_that_restarts_from_an_old_snapshot_does_not_vote(start_redis: Callable[..., object]):
    quorum = Quorum(3, appendonly=False)
    with quorum:
        await quorum.init()
        node = quorum.nodes[0]
        await node.command("SAVE")
        node.kill()
        node.start()
        assert await node.command("EXISTS", EPOCH) == 1
        backend = from_url(quorum.url)
        await backend.open()
        await voting(backend, 2)
        voters = backend._nodes.voters()
        assert voters is not None
        assert [one.number for one in voters.nodes] == [1, 2]
        assert "1 of 3" in await quorum.init()
        await voting(backend, 3)
        await backend.aclose()


# Founding


async def test_two_founders_at_once_found_one_quorum(redis_quorum: Quorum):
    for _ in range(5):
        redis_quorum.forget()
        await asyncio.gather(redis_quorum.init(), redis_quorum.init(), return_exceptions=True)
        await redis_quorum.init()
        epochs = {await node.command("GET", EPOCH) for node in redis_quorum.nodes}
        assert len(epochs) == 1
        assert None not in epochs


async def test_founding_that_was_broken_off_is_completed(redis_quorum: Quorum):
    epoch = await redis_quorum.nodes[0].command("GET", EPOCH)
    for node in redis_quorum.nodes[1:]:
        await node.command("DEL", EPOCH, "{fencing:}:run")
    assert "nothing to do" in await redis_quorum.init()
    assert {await node.command("GET", EPOCH) for node in redis_quorum.nodes} == {epoch}


@pytest.mark.parametrize("late", [0.0, 0.3])
async def test_two_addresses_of_one_server_are_refused(redis_quorum: Quorum, late: float):
    """Also when the second of them is reached after the majority that opened the client: it would vote twice."""
    async with QuorumNetwork(redis_quorum) as network:
        ports = [redis_quorum.nodes[0].port, network.proxies[0].port, redis_quorum.nodes[1].port]
        network.proxies[0].delay(requests=late)
        async with contextlib.aclosing(from_url(Quorum.url_at(ports))) as backend:
            with pytest.raises(BackendRefusedError, match="same server"):
                async with asyncio.timeout(PATIENCE):
                    await backend.open()
                    while True:
                        await backend.draw(Claim("a", 30.0))
                        await asyncio.sleep(0.01)
            redis_quorum.forget()
            with pytest.raises(BackendRefusedError, match="same server"):
                await backend.init()


class RefusedDialer(ServerDialer):
    """A server that no connection can be opened to."""

    def __init__(self) -> None: ...

    async def dial(self, protocol: asyncio.Protocol) -> OpenConnection:
        raise BackendRefusedError("RedisBackend", "connect", "the server is a Sentinel")


async def test_every_error_names_the_quorum(redis_quorum: Quorum):
    refused = RedisQuorumBackend([RefusedDialer()] * 3)
    unreachable = from_url(Quorum.url_at([1, 2, 3]))
    too_many = from_url(Quorum.url_at([*(node.port for node in redis_quorum.nodes), 1, 2]))
    for backend, kind in ((refused, "Refused"), (unreachable, "Unavailable"), (too_many, "Refused")):
        for asked in (backend.open(), backend.draw(Claim("a", 2.0)), backend.keep([(Claim("a", 2.0), 0)])):
            with pytest.raises(BackendError) as caught:
                await asked
            assert caught.value.backend == "RedisQuorumBackend"
            assert type(caught.value).__name__ == f"Backend{kind}Error"
        await backend.aclose()


async def test_a_quorum_of_another_size_is_refused(redis_quorum: Quorum):
    ports = [node.port for node in redis_quorum.nodes]
    backend = from_url(Quorum.url_at([*ports, 1, 2]))
    with pytest.raises(BackendRefusedError, match="a quorum of 3 nodes, but the client has 5"):
        await backend.open()
    await backend.aclose()


# Clocks


@pytest.mark.parametrize("hours", [-5, 5])
async def test_one_node_with_a_wrong_clock_changes_nothing(tmp_path: Path, hours: int):
    require_program("cc", "gcc libc6-dev")
    quorum, clock = Quorum(3, appendonly=True), WallClock(tmp_path)
    program = tmp_path / "redis-server"
    program.write_text(f'#!/bin/sh\nexec {" ".join(clock.prefix)} redis-server "$@"\n')
    program.chmod(0o755)
    quorum.nodes[0].binary = str(program)
    with quorum:
        await quorum.init()
        async with opened(quorum.url) as (locks, log), staying(locks.lock("a", **HELD)) as stay:
            await counted(locks)
            clock.shift(hours * 3600)
            rival = from_url(quorum.url)
            await voting(rival, 3)
            renewed = len(log.of(Renewed))
            while len(log.of(Renewed)) < renewed + 6:
                assert isinstance(await rival.draw(Claim("a", 1.0)), Busy)
                await asyncio.sleep(0.05)
            assert log.of(Lost) == []
            await stay.end()
            following = Claim("a", 1.0)
            assert await token(rival, following) > stay.token
            await rival.aclose()


# Operators, and the scripts themselves


async def test_a_hold_that_is_deleted_on_one_node_is_healed_and_on_a_majority_the_lease_is_lost(redis_quorum: Quorum):
    async with opened(redis_quorum.url) as (locks, log), staying(locks.lock("a", **HELD)) as stay:
        await counted(locks)
        redis_quorum.nodes[0].ask("DEL", key("a", "h"))
        renewed = len(log.of(Renewed))
        await log.seen(Renewed, renewed + 3)
        await eventually(lambda: redis_quorum.nodes[0].command("EXISTS", key("a", "h")), what="the node is healed")
        for node in redis_quorum.nodes[1:]:
            node.ask("DEL", key("a", "h"))
        await stay.over()
        assert stay.lost in {LossReason.REVOKED, LossReason.REFUSED}


async def test_a_confirmation_of_another_number_changes_nothing(redis_quorum: Quorum):
    claim, epoch = Claim("a", 30.0), await redis_quorum.nodes[0].command("GET", EPOCH)
    number = int(await run(redis_quorum, 0, REQUESTS.grant(claim, epoch, 5)))
    assert await run(redis_quorum, 0, REQUESTS.confirm(claim, epoch, number - 1, 10)) == 0
    assert await run(redis_quorum, 0, REQUESTS.confirm(Claim("a", 30.0), epoch, number, 10)) == 0
    assert await run(redis_quorum, 0, REQUESTS.confirm(claim, epoch, number, 10)) == 1
    await run(redis_quorum, 0, REQUESTS.give_back(claim))
    assert int(await run(redis_quorum, 0, REQUESTS.grant(Claim("a", 30.0), epoch, 0))) == 11


async def test_a_hint_far_ahead_of_the_clock_is_cut(redis_quorum: Quorum):
    epoch = await redis_quorum.nodes[0].command("GET", EPOCH)
    seconds = int((await redis_quorum.nodes[0].command("TIME"))[0])
    number = int(await run(redis_quorum, 0, REQUESTS.grant(Claim("a", 30.0), epoch, 2**52)))
    assert seconds * 10**5 < number < (seconds + 3700) * 10**5


async def test_a_late_undo_of_an_earlier_attempt_spares_the_hold_of_the_next(redis_quorum: Quorum):
    claim, epoch = Claim("a", 30.0), await redis_quorum.nodes[0].command("GET", EPOCH)
    first = await run(redis_quorum, 0, REQUESTS.grant(claim, epoch, 5))
    assert await run(redis_quorum, 0, REQUESTS.grant(claim, epoch, 6)) == first
    assert await run(redis_quorum, 0, REQUESTS.undo(claim, 5)) == 0
    assert await run(redis_quorum, 0, REQUESTS.undo(claim, 6)) == 1


async def test_a_broken_hold_is_gone(redis_quorum: Quorum, backend: RedisQuorumBackend):
    claim = Claim("a", 30.0)
    await token(backend, claim)
    await held_by_all(redis_quorum, "a")
    for node in redis_quorum.nodes[:2]:  # the same owner has a hold again, but not the same one
        await node.command("DEL", key("a", "h"))
        epoch = await node.command("GET", EPOCH)
        await node.command(*REQUESTS.grant(claim, epoch, 5).by_text())
    assert isinstance(await kept(backend, claim), Gone)


# Operators on a quorum, while nodes go, come back and hang: what is told is true, and what is taken away stays so.


PAGE = Path(__file__).parents[3] / "docs" / "backends" / "redis-quorum.md"


async def granted(backend: RedisQuorumBackend, claim: Claim) -> int:
    place = await backend.draw(claim)
    assert isinstance(place, Place)
    assert place.token is not None
    return place.token


async def listed(backend: RedisQuorumBackend) -> dict[str, int | None]:
    """What is held, by name: the tokens."""
    found: list[str] = []
    cursor: str | None = None
    while True:
        page, cursor = await backend.names("", cursor, 10)
        found += page
        if cursor is None:
            break
    assert len(set(found)) == len(found)
    seen = await backend.tickets(found)
    return {name: tickets[0].token for name, tickets in zip(found, seen, strict=True) if tickets}


# Listing


async def test_what_the_first_nodes_lack_is_told_all_the_same(redis_quorum: Quorum, backend: RedisQuorumBackend):
    """Each lock is missing on another node; two others have it, which is a majority."""
    names = [f"job/{number}" for number in range(9)]
    for number, name in enumerate(names):
        await granted(backend, Claim(name, 60.0))
        await held_by_all(redis_quorum, name)
        await redis_quorum.nodes[number % 3].command("DEL", key(name, "h"))
    assert (await listed(backend)).keys() == set(names)


async def test_what_a_minority_has_is_not_told(redis_quorum: Quorum, backend: RedisQuorumBackend):
    await granted(backend, Claim("a", 60.0))
    await held_by_all(redis_quorum, "a")
    for node in redis_quorum.nodes[1:]:
        await node.command("DEL", key("a", "h"))
    assert await listed(backend) == {}


async def test_a_node_that_was_healed_behind_the_listing_hides_no_lock(
    redis_quorum: Quorum, backend: RedisQuorumBackend
):
    """The listing has walked over the first node when that gets the hold, and comes to the second one afterwards."""
    claim = Claim("a", 60.0)
    await granted(backend, claim)
    await held_by_all(redis_quorum, "a")
    await redis_quorum.nodes[0].command("DEL", key("a", "h"))
    page, cursor = await backend.names("", None, 10)
    while cursor is not None and cursor.split(".")[1] == "0":  # on the first node
        assert page == []
        page, cursor = await backend.names("", cursor, 10)
    await asyncio.sleep(0.05)  # by the clock, the hold is younger than the listing
    assert isinstance(await kept(backend, claim), Place)
    await held_by_all(redis_quorum, "a")
    found: list[str] = []
    while cursor is not None:
        page, cursor = await backend.names("", cursor, 10)
        found += page
    assert found == ["a"]


async def test_a_listing_goes_on_when_a_node_is_killed(redis_quorum: Quorum, backend: RedisQuorumBackend):
    names = {f"job/{number}" for number in range(60)}
    for name in names:
        await granted(backend, Claim(name, 60.0))
        await held_by_all(redis_quorum, name)
    page, cursor = await backend.names("", None, 5)
    found = set(page)
    assert cursor is not None
    redis_quorum.nodes[0].kill()
    while cursor is not None:
        page, cursor = await backend.names("", cursor, 5)
        found |= set(page)
    assert found == names


# Taking a lock away


@pytest.mark.parametrize("down", [0, 1, 2])
async def test_the_holder_is_told_while_a_node_is_down(redis_quorum: Quorum, down: int):
    redis_quorum.nodes[down].kill()
    async with connect(redis_quorum.url) as locks, connect(redis_quorum.url) as operator:
        lease = await locks.lock("a", **HELD).acquire()
        token = lease.token
        assert await operator.revoke("a", token=token, reason="it hangs")
        await asyncio.wait_for(lease.wait_lost(), PATIENCE)
        with pytest.raises(LeaseLostError) as lost:
            lease.check()
        assert (lost.value.reason, lost.value.detail) == (LossReason.REVOKED, "it hangs")
        following = await operator.lock("a", ttl=60, wait=PATIENCE).acquire()
        assert following.token > token
        await following.release()


async def test_a_later_grant_of_the_same_owner_is_not_hit(redis_quorum: Quorum, backend: RedisQuorumBackend):
    """The request of a slow operator comes when the owner has released the lock, and acquired it again."""
    claim = Claim("a", 60.0)
    await granted(backend, claim)
    ((seen, _),) = await backend._operations.holds(["a"])
    assert seen is not None
    await backend.give_back(claim)
    await granted(backend, claim)
    await held_by_all(redis_quorum, "a")
    for node in redis_quorum.nodes:
        assert await node.command(*REQUESTS.end("a", seen, "one", "it hangs", 5.0).by_text()) == ""
    assert isinstance(await kept(backend, claim), Place)


async def test_a_node_that_hangs_does_not_hold_up_an_operator(redis_quorum: Quorum, backend: RedisQuorumBackend):
    token = await granted(backend, Claim("a", 60.0))
    redis_quorum.nodes[2].pause()
    async with asyncio.timeout(PATIENCE):
        assert await listed(backend) == {"a": token}
        assert await backend.end("a", token, "it hangs")


async def test_a_revocation_that_reaches_a_minority_is_an_error_and_may_be_repeated(
    redis_quorum: Quorum, backend: RedisQuorumBackend, monkeypatch: pytest.MonkeyPatch
):
    claim = Claim("a", 60.0)
    token = await granted(backend, claim)
    await held_by_all(redis_quorum, "a")
    async with QuorumNetwork(redis_quorum) as network, contextlib.aclosing(from_url(network.url)) as operator:
        look = operator._operations.holds

        async def look_and_lose_two(names: list[str]) -> object:
            found = await look(names)
            for proxy in network.proxies[1:]:
                proxy.refuse()
                proxy.cut()
            return found

        monkeypatch.setattr(operator._operations, "holds", look_and_lose_two)
        with pytest.raises(BackendUnavailableError):
            async with asyncio.timeout(PATIENCE):
                await operator.end("a", token, "it hangs")
        monkeypatch.undo()
        assert isinstance(await kept(backend, claim), Place)
        network.heal()
        async with asyncio.timeout(PATIENCE):
            while True:
                with contextlib.suppress(BackendUnavailableError):
                    await operator.end("a", token, "it hangs")
                    break
                await asyncio.sleep(0.05)
    assert await kept(backend, claim) == Gone("it hangs")
    assert await backend.tickets(["a"]) == [()]


async def test_a_hold_that_was_revoked_on_a_node_is_not_healed_there(redis_quorum: Quorum, backend: RedisQuorumBackend):
    """Else a holder that renews between two steps of an operator would have a majority again."""
    claim = Claim("a", 60.0)
    token = await granted(backend, claim)
    await held_by_all(redis_quorum, "a")
    ((seen, _),) = await backend._operations.holds(["a"])
    assert seen is not None
    first = redis_quorum.nodes[0]
    assert await first.command(*REQUESTS.end("a", seen, "one", "it hangs", 5.0).by_text()) == "one"
    assert await first.command(*REQUESTS.end("a", seen, "two", "it hangs", 5.0).by_text()) == "one"
    for _ in range(3):
        assert isinstance(await kept(backend, claim), Place)
    voters = backend._nodes.voters()
    assert voters is not None
    heal = REQUESTS.heal([(QuorumHold(claim, token), claim)], voters.epoch, token + 1)
    assert await first.command(*heal.by_text()) == ["0"]
    assert await first.command("EXISTS", key("a", "h")) == 0
    for node in redis_quorum.nodes[1:]:
        assert await node.command(*REQUESTS.end("a", seen, "one", "it hangs", 5.0).by_text()) == "one"
    assert await kept(backend, claim) == Gone("it hangs")


# A user with as few rights as the page names


async def test_the_user_of_the_page_may_do_all_this(redis_binary: str):
    rules = PAGE.read_text().split("A user of its own needs")[1].split("```")[1].partition("\n")[2].split()
    assert rules[:4] == ["user", "locks", "on", ">..."]
    user = " ".join(["locks", "on", ">s", *rules[4:]])
    with Quorum(3, binary=redis_binary, appendonly=True, user=[user]) as quorum:
        await quorum.init()
        url = quorum.url.replace("://", "://locks:s@")
        async with connect(url) as locks, connect(url) as operator:
            lease = await locks.lock("a", **HELD).acquire()
            waiting = asyncio.create_task(locks.lock("a", **HELD).acquire())
            assert [holder.token async for holder in operator.all_holders()] == [lease.token]
            assert await operator.revoke("a", token=lease.token, reason="it hangs")
            await asyncio.wait_for(lease.wait_lost(), PATIENCE)
            following = await asyncio.wait_for(waiting, PATIENCE)
            await following.release()
        without = " ".join(["locks", "on", ">s", *(rule for rule in rules[4:] if rule != "+scan")])
        for node in quorum.nodes:
            await node.command("ACL", "SETUSER", *without.split(), "-scan")
        async with connect(url) as operator:
            with pytest.raises(BackendRefusedError, match="scan"):
                assert [holder async for holder in operator.all_holders()]
