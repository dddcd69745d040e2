"""ZooKeeper on one server, and everything that can happen to a client of it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from typing import Self

import pytest
from event_log import CLOCK, ticks
from fault_proxy import FaultProxy
from inside import LAST_CALL, state_of
from kazoo.client import KazooClient
from kazoo.exceptions import ConnectionLoss
from kazoo.protocol.serialization import Create2, Exists
from patience import wait_until
from stays import PATIENCE, eventually, opened, staying
from zookeeper_server import CLEARING, ZooKeeperServer, fresh_root, require_zookeeper
from zookeeper_stage import granted, held_by, in_place, kept, kill_session, operating, tickets_of

from fencing_sdk import BackendUnavailableError, LossReason
from fencing_sdk.abc import Claim, Gone, News
from fencing_sdk.backends._shared.error_translation import NoConnectionError
from fencing_sdk.backends.zookeeper import from_url
from fencing_sdk.backends.zookeeper.driver import ALL_CLIENTS
from fencing_sdk.errors import BackendRefusedError, LockHeldError
from fencing_sdk.events import Renewed

pytest_plugins = ["zookeeper_fixtures"]


# ZooKeeper on one server, and everything that can happen to a client of it.


@pytest.fixture
def by_proxy(zookeeper_proxy, zookeeper_url):
    """The URL of the store, by way of a network with faults."""
    return f"zk://127.0.0.1:{zookeeper_proxy.port}/{zookeeper_url.rsplit('/', 1)[1]}"


# A lost reply.


async def test_an_owner_whose_draw_was_not_answered_finds_its_own_node(by_proxy, zookeeper_proxy, zookeeper_url):
    """The create is carried out and its answer lost: the next draw gets that very ticket, and leaves no second node."""
    backend = from_url(by_proxy)
    claim = Claim("a", 20.0)
    async with operating(zookeeper_url) as operator:
        await operator.keep_folder("a")
        await backend.draw(Claim("b", 20.0))
        zookeeper_proxy.half_open()
        lost = asyncio.ensure_future(backend.draw(claim))
        await operator.stands("a", 1)
        (node,) = await operator.line("a")
        zookeeper_proxy.cut()
        zookeeper_proxy.heal()
        with pytest.raises(BackendUnavailableError):
            await lost
        place = await granted(backend, claim)
        assert await operator.line("a") == [node]
        ((seen,),) = await backend.tickets(["a"])
        assert seen.token == place.token
        assert await kept(backend, claim) == [place]
    await backend.aclose()


async def test_a_waiter_whose_draw_was_not_answered_keeps_its_place(by_proxy, zookeeper_proxy, zookeeper_url):
    """The place is the one that was taken first, not a new one at the end of the line."""
    async with opened(zookeeper_url) as (locks, _), operating(zookeeper_url) as operator:
        backend, holder = from_url(by_proxy), await locks.lock("a", ttl=60).acquire()
        claim = Claim("a", 20.0)
        await operator.keep_folder("a")
        await backend.draw(Claim("b", 20.0))
        zookeeper_proxy.half_open()
        lost = asyncio.ensure_future(backend.draw(claim))
        await operator.stands("a", 2)
        later = asyncio.ensure_future(locks.lock("a", ttl=60, wait=PATIENCE).acquire())
        await in_place(locks)
        zookeeper_proxy.cut()
        zookeeper_proxy.heal()
        with pytest.raises(BackendUnavailableError):
            await lost
        await eventually(lambda: _answered(backend), what="another connection")
        assert (await backend.draw(claim)).token is None
        await operator.stands("a", 3)
        await holder.release()
        await granted(backend, claim)
        assert not later.done()
        await backend.give_back(claim)
        await (await later).release()
        await backend.aclose()


async def test_what_an_unanswered_draw_left_is_gone_after_its_ttl(by_proxy, zookeeper_proxy, zookeeper_url):
    """Nobody comes back for it, and the session lives on: the node goes all the same."""
    backend = from_url(by_proxy)
    async with operating(zookeeper_url) as operator:
        await operator.keep_folder("a")
        await backend.draw(Claim("b", 4.0))
        zookeeper_proxy.half_open()
        lost = asyncio.ensure_future(backend.draw(Claim("a", 4.0)))
        await operator.stands("a", 1)
        zookeeper_proxy.cut()
        zookeeper_proxy.heal()
        with pytest.raises(BackendUnavailableError):
            await lost
        session = next(iter(backend._sessions._by_ttl.values()))
        await operator.stands("a", 0)
        assert session.error is None
    await backend.aclose()


async def _answered(backend) -> bool:
    try:
        return bool(await kept(backend, Claim("b", 20.0)))
    except BackendUnavailableError:
        return False


# A connection that breaks.


async def test_a_short_outage_of_the_network_costs_nothing(by_proxy, zookeeper_proxy):
    """SUSPENDED is not LOST: the same session goes on, the lease with it, and a waiter keeps its place."""
    async with opened(by_proxy) as (locks, log):
        async with staying(locks.lock("a", ttl=10, heartbeat_interval=0.2)) as stay:
            waiting = asyncio.ensure_future(locks.lock("a", ttl=10).acquire())
            await in_place(locks)
            session = locks._backend._sessions.of(10.0)
            identity = session.id
            zookeeper_proxy.refuse()
            zookeeper_proxy.cut()
            await eventually(lambda: _has(log, "renewal_failed"), what="a renewal failed")
            zookeeper_proxy.heal()
            before = len(log.events)
            await eventually(lambda: _has(log, "renewed", since=before), what="a renewal again")
            assert session.id == identity
            await stay.end()
        lease = await asyncio.wait_for(waiting, PATIENCE)
        assert lease.token > stay.token
        await lease.release()


async def test_a_connection_that_hangs_is_given_up_for_another_one(by_proxy, zookeeper_proxy):
    """No answer comes and nothing is closed: another connection is tried long before the session ends."""
    async with opened(by_proxy) as (locks, log):
        async with staying(locks.lock("a", ttl=10, heartbeat_interval=0.2)) as stay:
            accepted = zookeeper_proxy.accepted
            zookeeper_proxy.blackhole()
            await eventually(lambda: _true(zookeeper_proxy.accepted > accepted), what="another connection")
            zookeeper_proxy.cut()
            zookeeper_proxy.heal()
            before = len(log.events)
            await eventually(lambda: _has(log, "renewed", since=before), what="a renewal again")
            await stay.end()


async def _true(value: object) -> bool:
    return bool(value)


async def _has(log, kind: str, *, since: int = 0) -> bool:
    return any(event.kind == kind for event in log.events[since:])


# Sessions and nodes that go.


async def test_a_session_that_the_server_ends_ends_its_leases_at_once(zookeeper_url):
    """Not at the next heartbeat, and those of another session go on; the next lock has a session again."""
    async with opened(zookeeper_url) as (locks, _):
        async with staying(locks.lock("a", ttl=600)) as stay, staying(locks.lock("b", ttl=50)) as other:
            await kill_session(locks._backend._sessions.of(600.0))
            await stay.over()
            assert stay.lost is LossReason.REFUSED
            async with staying(locks.lock("a", ttl=600, wait=PATIENCE)) as again:
                assert again.token > stay.token
            await other.end()


async def test_a_waiter_whose_session_ended_stands_in_line_again(zookeeper_url):
    async with opened(zookeeper_url) as (locks, _), opened(zookeeper_url) as (others, _):
        holder = await others.lock("a", ttl=50).acquire()
        waiting = asyncio.ensure_future(locks.lock("a", ttl=4).acquire())
        await in_place(locks)
        (former,) = tickets_of(locks._backend)
        await kill_session(former.session)
        await eventually(lambda: _true(former not in tickets_of(locks._backend)), what="it has heard of it")
        await in_place(locks)
        await holder.release()
        lease = await asyncio.wait_for(waiting, PATIENCE)
        assert lease.token > state_of(holder).number
        await lease.release()


async def test_a_keep_after_the_end_of_the_session_finds_the_tickets_gone(zookeeper_url):
    """Even if another session has the same locks now; and nothing is created anew."""
    backend = from_url(zookeeper_url)
    claims = [Claim("a", 60.0), Claim("b", 60.0)]
    for claim in claims:
        await backend.draw(claim)
    session = backend._sessions.of(60.0)
    await kill_session(session)
    await eventually(lambda: _true(session.error), what="the client has heard of it")
    other = Claim("b", 60.0)
    assert (await backend.draw(other)).token is not None
    assert await kept(backend, *claims) == [Gone(), Gone(taken=True)]
    assert await held_by(backend, "a") == []
    await backend.give_back(other)
    await backend.aclose()


async def test_a_session_that_ended_while_the_backend_was_closed_is_heard_of_when_it_opens_again(zookeeper_url):
    """Not followed by another one in silence."""
    backend, claim = from_url(zookeeper_url), Claim("a", 60.0)
    heard: list[News] = []
    backend.listen(claim, heard.append)
    await backend.draw(claim)
    session = backend._sessions.of(60.0)
    await backend.aclose()
    await kill_session(session)
    with pytest.raises(BackendUnavailableError):
        await held_by(backend, "a")
    assert heard == [None]
    assert await held_by(backend, "a") == []
    assert await kept(backend, claim) == [Gone()]
    await backend.aclose()


@pytest.mark.parametrize("way", ["keep", "draw"])
async def test_a_client_that_goes_on_with_a_claim_keeps_the_ticket_alive(way, zookeeper_url):
    """The first client's session ends: the ticket is the second one's by now, with its token and at its place."""
    first, second, rival = (from_url(zookeeper_url) for _ in range(3))
    claim, waiter = Claim("a", 60.0), Claim("a", 50.0)
    place = await first.draw(claim)
    assert (await rival.draw(waiter)).token is None
    if way == "keep":
        assert await kept(second, claim) == [place]
    else:
        assert await second.draw(claim) == place
    assert (await rival.draw(waiter)).token is None
    await kill_session(first._sessions.of(60.0))
    assert (await rival.draw(waiter)).token is None
    assert await kept(second, claim) == [place]
    assert await second.draw(claim) == place
    await second.give_back(claim)
    assert (await granted(rival, waiter)).token > place.token
    for backend in (first, second, rival):
        await backend.aclose()


async def test_a_folder_that_the_server_removed_is_made_again_and_tokens_grow(start_zookeeper):
    """Containers without children are removed; numbers start again at 0 then, and tokens do not."""
    url = start_zookeeper(jvm=[CLEARING]).url
    async with opened(url) as (locks, _), operating(url) as operator:
        tokens, numbers = [], []
        for _ in range(2):
            for _ in range(3):  # the folder may go after each of them: it is empty in between
                async with locks.lock("a", ttl=20) as lease:
                    tokens.append(lease.token)
                    numbers.append((await operator.line("a"))[0][-10:])
            await eventually(lambda: _no_folder(operator), what="the folder is removed")
        assert tokens == sorted(set(tokens))
        assert numbers[0] == numbers[3] == "0000000000"


async def _no_folder(operator) -> bool:
    return not await operator.has_folder("a")


async def test_tokens_grow_when_an_operator_deletes_the_folder_of_a_held_lock(zookeeper_url):
    """The holder learns at once that its grant is gone, and the next one's token is higher."""
    async with opened(zookeeper_url) as (locks, _), operating(zookeeper_url) as operator:
        async with staying(locks.lock("a", ttl=60)) as stay:
            await operator.delete("a")
            await stay.over()
            assert stay.lost is LossReason.REFUSED
            async with staying(locks.lock("a", ttl=60)) as again:
                assert again.token > stay.token
                assert (await operator.line("a"))[0].endswith("-0000000000")


async def test_a_node_of_the_same_name_is_not_taken_for_the_one_that_was_granted(zookeeper_url):
    """Deleted and created again by somebody else: the path is the same, the transaction is not."""

    backend = from_url(zookeeper_url)
    claim = Claim("a", 60.0)
    place = await backend.draw(claim)
    async with operating(zookeeper_url) as operator:
        await operator.keep_folder("a")
        (node,) = await operator.line("a")
        await operator.delete("a", node)
        session = await operator.session()
        await session.call(Create2(f"{operator._paths.folder('a')}/{node}", b"", ALL_CLIENTS, 0))
        assert await backend.keep([(claim, place.number)]) == [Gone(taken=True)]
        await operator.delete("a", node)
    await backend.aclose()


async def test_a_node_that_goes_while_the_loop_stands_still_is_not_renewed(zookeeper_server, zookeeper_url):
    """The answer that the node is watched, and the event that it has gone, are heard in the same turn of the loop."""
    backend, operator, claim = from_url(zookeeper_url), KazooClient(zookeeper_server.address), Claim("a", 60.0)
    await asyncio.to_thread(operator.start)
    await backend.draw(claim)
    (own,) = tickets_of(backend)
    posted = own.session._callbacks
    backend._tickets._watch_node(own)
    wait_until(lambda: len(posted) == 1, what="the node is watched")
    operator.delete(own.made.path)
    wait_until(lambda: len(posted) == 2, what="the event has come")
    await ticks(5)
    assert not posted
    assert not own.watched_on
    assert await kept(backend, claim) == [Gone()]
    await backend.aclose()
    operator.stop()
    operator.close()


async def test_a_place_that_an_operator_deleted_is_taken_again(zookeeper_url):
    async with opened(zookeeper_url) as (locks, _), operating(zookeeper_url) as operator:
        holder = await locks.lock("a", ttl=60).acquire()
        waiting = asyncio.ensure_future(locks.lock("a", ttl=60).acquire())
        await in_place(locks)
        await operator.delete("a", (await operator.line("a"))[1])
        await holder.release()
        lease = await asyncio.wait_for(waiting, PATIENCE)
        await lease.release()


# Where the servers are.


async def test_members_that_are_down_are_passed_over(zookeeper_server, monkeypatch):
    """Whichever is asked first: one that refuses, one that never answers, one whose name nobody knows."""
    monkeypatch.setattr(LAST_CALL, 60.0)  # a machine may stand still
    silent = socket.create_server(("127.0.0.1", 0))  # the kernel takes connections, and nobody answers
    port = silent.getsockname()[1]
    dead = f"127.0.0.1:1,127.0.0.1:{port},no-such-host.invalid"
    for _ in range(3):
        url = f"zk://{dead},{zookeeper_server.address}{fresh_root()}?connect_timeout=5"
        async with opened(url) as (locks, _), asyncio.timeout(PATIENCE):
            async with locks.lock("a", ttl=600):
                with pytest.raises(LockHeldError):
                    await locks.lock("a", wait=0).acquire()
    silent.close()


# A server that hangs, beside one that does not.


async def test_a_connection_that_hangs_is_left_early_where_there_is_another_server(zookeeper_server, zookeeper_url):
    """A twelfth of a ttl after the renewal that it owes, and not after a third: the lease is not near its end."""
    root = zookeeper_url.rsplit("/", 1)[1]
    async with FaultProxy(zookeeper_server.port) as one, FaultProxy(zookeeper_server.port) as other:
        url = f"zk://127.0.0.1:{one.port},127.0.0.1:{other.port}/{root}"
        async with opened(url) as (locks, log), staying(locks.lock("a", ttl=20, heartbeat_interval=1)) as stay:
            (one if one.connections else other).blackhole()
            silent_at = CLOCK.now()
            while (renewed := await log.seen(Renewed, len(log.of(Renewed)) + 1)).at < silent_at + 0.3:
                pass
            assert renewed.spare > 10.8, "10.7 s at most would be left if it were left as late as a single server"
            await stay.end()


async def test_a_single_server_that_is_slow_is_not_left_early(by_proxy, zookeeper_proxy):
    """There is no other one to ask."""
    backend, claim = from_url(by_proxy), Claim("a", 16.0)
    place = await backend.draw(claim)
    zookeeper_proxy.delay(replies=1.6)
    assert await kept(backend, claim) == [place]
    session = backend._sessions.any()
    assert session.connections == 1
    assert not session._driver._dial._connecting, "a connection that serves has the whole limit"
    zookeeper_proxy.heal()
    await backend.give_back(claim)
    await backend.aclose()


# A quota on the root that is used up: ZooKeeper enforces it from 3.7 on, if ``zookeeper.enforceQuota`` is set.


SetQuota = Callable[[str], None]


@pytest.fixture(scope="module")
def _strict_server() -> Iterator[ZooKeeperServer]:
    require_zookeeper()
    with ZooKeeperServer(jvm=["-Dzookeeper.enforceQuota=true"]) as server:
        yield server


@pytest.fixture
def strict_url(_strict_server: ZooKeeperServer) -> str:
    return f"{_strict_server.url}{fresh_root()}"


@pytest.fixture
def set_quota(_strict_server: ZooKeeperServer, strict_url: str) -> Iterator[SetQuota]:
    """``setquota -N`` or ``-B`` of ZooKeeper's shell: a hard limit, such as ``count=3``, on the root of the test."""
    folder = f"/zookeeper/quota/{strict_url.rpartition('/')[2]}"
    client = KazooClient(_strict_server.address)
    client.start()

    def set_quota(limit: str) -> None:
        kind, _, number = limit.partition("=")
        hard = {"count": -1, "byte": -1, kind: int(number)}
        data = f"count=-1,bytes=-1=;byteHardLimit={hard['byte']};countHardLimit={hard['count']}".encode()
        if client.exists(folder):
            client.set(f"{folder}/zookeeper_limits", data)
        else:
            client.create(f"{folder}/zookeeper_limits", data, makepath=True)
            client.create(f"{folder}/zookeeper_stats", b"count=0,bytes=0")
            client.set(f"{folder}/zookeeper_limits", data)

    yield set_quota
    client.stop()
    client.close()


@pytest.mark.parametrize("limit", ["count=3", "byte=20"])
async def test_who_is_above_the_quota_is_refused_and_leaves_nothing_behind(limit, strict_url, set_quota):
    """The root, the folder and the node of the holder are allowed, and 20 bytes of data: not a second node."""
    backend, other, claim, waiter = from_url(strict_url), from_url(strict_url), Claim("a", 20.0), Claim("a", 20.0)
    async with operating(strict_url) as operator:
        place = await backend.draw(claim)
        line = await operator.line("a")
        await asyncio.to_thread(set_quota, limit)
        for only_if_it_holds in (True, False):
            with pytest.raises(BackendRefusedError, match="quota of the root is used up"):
                await other.draw(waiter, only_if_it_holds=only_if_it_holds)
        assert await operator.line("a") == line
        assert await kept(backend, claim) == [place]
        await backend.give_back(claim)
        assert (await other.draw(waiter)).token is not None
    await other.aclose()
    await backend.aclose()


# A request that comes in the very moment in which ZooKeeper is lost, and answers that come out of turn.


@pytest.fixture
def server(start_zookeeper):
    return start_zookeeper()


@pytest.fixture
async def backend(server):
    backend = from_url(server.url)
    await backend.draw(Claim("a", 60.0))
    yield backend
    await backend.aclose()


def lose(server, session) -> None:
    """Kill the server while the loop stands still, so that it does not hear what the driver sees."""
    server.kill()
    client, end = session._driver._client, time.monotonic() + 20
    while client.connected:
        assert time.monotonic() < end
        time.sleep(0.01)
    time.sleep(0.1)
    assert session.connected


@pytest.mark.parametrize("call", ["tickets", "draw"])
async def test_it_fails_as_soon_as_the_loss_is_known(call, server, backend):
    session = backend._sessions.of(60.0)
    lose(server, session)
    async with asyncio.timeout(20.0):  # and not when the server comes back: it does not
        with pytest.raises(BackendUnavailableError):
            await (backend.tickets(["a"]) if call == "tickets" else backend.draw(Claim("b", 60.0)))


async def test_it_is_not_sent_when_the_connection_is_back(server, backend):
    session = backend._sessions.of(60.0)
    lose(server, session)
    asked = session.call(Create2("/late", b"", ALL_CLIENTS, 0))
    assert not asked.done()
    await asyncio.to_thread(server.start)
    with pytest.raises((NoConnectionError, ConnectionLoss)):
        await asked
    async with asyncio.timeout(20.0):
        assert await session.settled()
        assert await session.call(Exists("/late", None)) is None


class Relay:
    """Passes everything on, but for one answer."""

    def __init__(self, port: int) -> None:
        self.port = 0
        self.losing = False
        self._target = port
        self._links: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._link, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._links:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, requests = await asyncio.open_connection("127.0.0.1", self._target)
        self._links += [writer, requests]
        await asyncio.gather(self._requests(reader, requests), self._answers(answers, writer))

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(65536):
                writer.write(chunk)
        writer.close()

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                size = await reader.readexactly(4)
                answer = await reader.readexactly(int.from_bytes(size, "big"))
                if self.losing and int.from_bytes(answer[:4], "big", signed=True) > 0:  # no ping, no watch
                    self.losing = False
                else:
                    writer.write(size + answer)
        writer.close()


async def test_an_answer_out_of_turn_costs_the_connection_and_neither_session_nor_lease(server):
    claim = Claim("a", 60.0)
    async with Relay(server.port) as relay:
        backend = from_url(f"zk://127.0.0.1:{relay.port}/app")
        place = await backend.draw(claim)
        driver = backend._sessions.of(60.0)._driver
        relay.losing = True
        both = await asyncio.gather(backend.tickets(["a"]), backend.tickets(["b"]), return_exceptions=True)
        assert not relay.losing
        assert any(isinstance(outcome, BackendUnavailableError) for outcome in both)
        answers: list[object] = []
        for _ in range(200):
            with contextlib.suppress(BackendUnavailableError):
                answers = await kept(backend, claim)
            if answers not in ([], [None]):
                break
            await asyncio.sleep(0.1)
        assert answers == [place]
        assert backend._sessions.of(60.0)._driver is driver
        await backend.give_back(claim)
        await backend.aclose()
