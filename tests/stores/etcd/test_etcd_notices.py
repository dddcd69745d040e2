"""Grants in etcd that end behind their holder's back: it hears of it at once, whatever becomes of the watch."""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from etcd_server import EtcdCluster
from etcd_stage import backend_on, granted
from event_log import CLOCK
from fault_proxy import FaultProxy
from patience import until
from stays import Stay, opened, staying

from fencing_sdk import LockClient, LossReason
from fencing_sdk._etcd import Json, StreamRequests, read_watch_answer
from fencing_sdk._http.requests import UnreadableAnswerError
from fencing_sdk.abc import LOCK, READER, WRITER, Claim, Mode, News, Permit, Place
from fencing_sdk.backends import etcd as backend_module
from fencing_sdk.backends.etcd import watches
from fencing_sdk.backends.etcd.keys import TicketKey

pytest_plugins = ["etcd_fixtures"]


TTL = 3600.0
"""The next heartbeat is minutes away, so a holder that knows of a loss had a notice."""


@asynccontextmanager
async def holding(locks: LockClient, *names: str) -> AsyncIterator[list[Stay]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(staying(locks.lock(name, ttl=TTL))) for name in names]


async def number_of_watches(cluster: EtcdCluster) -> int:
    return int(await asyncio.to_thread(cluster.metric, "etcd_debugging_mvcc_watcher_total"))


async def watched(cluster: EtcdCluster, count: int) -> None:
    """Wait until so many keys are watched."""
    stop = CLOCK.now() + 20
    while (found := await number_of_watches(cluster)) != count:
        assert CLOCK.now() < stop, f"{found} watches, and not {count}"
        await asyncio.sleep(0.05)


async def noticed(stay: Stay) -> None:
    await stay.over()
    assert stay.lost in {LossReason.REFUSED, LossReason.TAKEN_OVER}


async def test_a_key_that_is_deleted_ends_its_lock_and_no_other(etcd_server: EtcdCluster):
    async with opened(etcd_server.url) as (locks, _), holding(locks, "a", "b") as (lost, kept):
        await watched(etcd_server, 2)
        await asyncio.to_thread(etcd_server.delete, "fencing/a/")
        await noticed(lost)
        assert await etcd_server.command("kv/range", {"key": "eA=="})
        await kept.end()


async def test_a_lease_that_is_revoked_ends_all_of_its_locks(etcd_server: EtcdCluster):
    async with opened(etcd_server.url) as (locks, _), holding(locks, "a", "b", "c") as stays:
        (lease,) = {kv["lease"] for kv in (await asyncio.to_thread(etcd_server.keys)).values()}
        await etcd_server.command("lease/revoke", {"ID": lease})
        for stay in stays:
            await noticed(stay)


async def test_a_loss_before_the_watch_began_is_not_missed(etcd_server: EtcdCluster):
    """A watch begins where its key was last seen, and so hears of what happened since."""
    async with opened(etcd_server.url) as (locks, _), holding(locks, "a") as (stay,):
        await asyncio.to_thread(etcd_server.delete, "fencing/a/")
        await noticed(stay)


async def test_locks_that_are_held_for_a_moment_cost_no_watch(
    etcd_server: EtcdCluster, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(backend_module, "_MOMENT", 1.0)  # so long a moment that a machine may stand still in it
    before = await asyncio.to_thread(etcd_server.calls, "Watch")
    async with opened(etcd_server.url) as (locks, _):
        for number in range(50):
            async with locks.lock(f"a/{number}"):
                pass
        await asyncio.sleep(1.5 * backend_module._MOMENT)
    assert await asyncio.to_thread(etcd_server.calls, "Watch") == before


async def test_watches_come_and_go_with_their_locks_on_one_stream(etcd_server: EtcdCluster):
    before = await asyncio.to_thread(etcd_server.calls, "Watch")
    async with opened(etcd_server.url) as (locks, _):
        async with holding(locks, *(f"a/{number}" for number in range(20))) as stays:
            await watched(etcd_server, 20)
            for stay in stays[:15]:
                await stay.end()
            await watched(etcd_server, 5)
            async with holding(locks, "late") as (late,):
                await watched(etcd_server, 6)
                await asyncio.to_thread(etcd_server.delete, "fencing/late/")
                await noticed(late)
            for stay in stays[15:]:
                assert stay.lost is None
                await stay.end()
        await watched(etcd_server, 0)
    assert await asyncio.to_thread(etcd_server.calls, "Watch") == before + 1


async def test_what_happened_while_the_stream_was_broken_is_heard_when_it_is_back(
    etcd_server: EtcdCluster, etcd_proxy: FaultProxy
):
    url = f"etcd://127.0.0.1:{etcd_proxy.port}"
    async with opened(url) as (locks, _), holding(locks, "a", "b") as (lost, kept):
        await watched(etcd_server, 2)
        etcd_proxy.refuse()
        etcd_proxy.cut()
        await asyncio.to_thread(etcd_server.delete, "fencing/a/")
        await watched(etcd_server, 0)
        etcd_proxy.heal()
        await noticed(lost)
        await kept.end()


async def test_a_silent_network_is_left_for_a_new_stream(
    etcd_server: EtcdCluster, etcd_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
):
    """The client never sees an end of the connection. It takes a member that is silent for too long as gone."""
    monkeypatch.setattr(watches, "_SILENCE", 2.0)
    url = f"etcd://127.0.0.1:{etcd_proxy.port}"
    async with opened(url) as (locks, _), holding(locks, "a") as (stay,):
        for _ in range(5):
            await watched(etcd_server, 1)
            accepted = etcd_proxy.accepted
            await asyncio.sleep(2.6)  # longer than it takes to leave a silent member and to ask again
            if etcd_proxy.accepted == accepted:  # it has answered that it is there
                break
        else:  # once or twice the machine may have stood still, which is silence, too
            pytest.fail("a member that answers was left again and again")
        etcd_proxy.half_open()
        await asyncio.to_thread(etcd_server.delete, "fencing/a/")
        accepted = etcd_proxy.accepted
        await until(lambda: etcd_proxy.accepted >= accepted + 2)  # one that is open, and one that never opens
        etcd_proxy.cut()
        etcd_proxy.heal()
        await noticed(stay)


async def test_a_member_that_dies_takes_no_notice_along(etcd_cluster: EtcdCluster):
    async with opened(etcd_cluster.url) as (locks, _), holding(locks, "a") as (stay,):
        await watched(etcd_cluster, 1)
        asked = locks._backend._gateway._endpoints.in_turn()[0].origin
        next(member for member in etcd_cluster.members if member.origin == asked).kill()
        await etcd_cluster.await_leader()
        await asyncio.to_thread(etcd_cluster.delete, "fencing/a/")
        await noticed(stay)


async def test_compaction_of_what_was_already_proven_harms_no_stream(etcd_server: EtcdCluster, etcd_proxy: FaultProxy):
    """The stream breaks after the revision of the grant was forgotten; the watch begins at the last renewal."""
    url = f"etcd://127.0.0.1:{etcd_proxy.port}"
    async with opened(url) as (locks, _), holding(locks, "a") as (stay,):
        for _ in range(5):
            await etcd_server.command("kv/put", {"key": "eA==", "value": "eA=="})
        assert stay.lease is not None
        await stay.lease.renew()
        await asyncio.to_thread(etcd_server.compact)
        etcd_proxy.cut()
        await asyncio.to_thread(etcd_server.delete, "fencing/a/")
        await noticed(stay)


# Waiters, and what becomes of their watches


async def test_a_release_wakes_the_next_alone_and_after_compaction(etcd_server: EtcdCluster):
    """A watch from a revision that etcd has forgotten ends, and its ticket looks."""
    async with backend_on(etcd_server.url) as backend, backend_on(etcd_server.url) as rival:
        holder, claims = Claim("a", TTL), [Claim("a", TTL) for _ in range(3)]
        await granted(rival, holder)
        bells: list[list[News]] = [[] for _ in claims]
        for claim, bell in zip(claims, bells, strict=True):
            backend.listen(claim, bell.append)
            await backend.draw(claim)
        await watched(etcd_server, 3)
        for own in backend._own.values():
            own.seen = 1
            backend._unwatch(own)
        await asyncio.to_thread(etcd_server.compact)
        await backend.keep([(claim, 0) for claim in claims])
        await watched(etcd_server, 3)
        await rival.give_back(holder)
        await until(lambda: bells[0], what="the next one is rung")
        place = bells[0][-1]
        assert isinstance(place, Place)
        assert place.token == place.number
        await asyncio.sleep(0.2)
        assert bells[1:] == [[], []]


@pytest.mark.parametrize(
    ("held", "waits"),
    [(LOCK, LOCK), (WRITER, READER), (READER, WRITER), (Permit(1), Permit(1))],
    ids=lambda mode: mode.word,
)
async def test_a_release_before_the_watch_is_made_is_not_missed(
    etcd_server: EtcdCluster, monkeypatch: pytest.MonkeyPatch, held: Mode, waits: Mode
):
    """The release comes after the look that names the key ahead, and the watch after it and after other writes."""
    async with backend_on(etcd_server.url) as backend, backend_on(etcd_server.url) as rival:
        holder, waiter = Claim("a", TTL, mode=held), Claim("a", TTL, mode=waits)
        await granted(rival, holder)
        stream, asked, released = backend._gateway.stream, asyncio.Event(), asyncio.Event()

        @asynccontextmanager
        async def held_back(*request: Any) -> AsyncIterator[AsyncIterator[Json]]:
            asked.set()
            await released.wait()
            async with stream(*request) as answers:
                yield answers

        monkeypatch.setattr(backend._gateway, "stream", held_back)
        rung: list[News] = []
        backend.listen(waiter, rung.append)
        assert (await backend.draw(waiter)).token is None
        await asked.wait()
        await rival.give_back(holder)
        for _ in range(3):
            await etcd_server.command("kv/put", {"key": "eA==", "value": "eA=="})
        assert rung == []
        released.set()
        await until(lambda: rung, what="the waiter is rung, although no keep looks")
        assert isinstance(rung[-1], Place)
        assert rung[-1].token is not None


async def test_a_waiter_asks_for_what_is_not_written_yet_so_that_etcd_reports_it_as_it_comes():
    """After a stream without answers, it asks from what it has seen: etcd 3.5 then answers requests for progress."""
    async with backend_on("etcd://one") as backend:
        sent: list[list[tuple[int, int]]] = []

        async def no_answers() -> AsyncIterator[Json]:
            for answer in ():
                yield answer

        @asynccontextmanager
        async def recorded(_operation: str, _path: str, requests: StreamRequests) -> AsyncIterator[AsyncIterator[Json]]:
            bodies = [json.loads(line)["create_request"] for line in (await anext(requests)).splitlines()]
            sent.append([(body["watch_id"], int(body["start_revision"])) for body in bodies])
            yield no_answers()

        backend._gateway.stream = recorded  # type: ignore[method-assign,assignment]
        backend._watches.add(KEY, 7, lambda _: None, at_once=True)
        backend._watches.add(KEY, 9, lambda _: None)
        await until(lambda: len(sent) >= 3, what="the third stream")
        assert sent[:3] == [[(1, 8), (2, 9)], [(1, 7), (2, 9)], [(1, 7), (2, 9)]]


async def test_readers_that_are_let_in_together_look_no_more(etcd_server: EtcdCluster):
    """The one that gives back writes the token of all, and each is rung with it."""
    async with backend_on(etcd_server.url) as backend, backend_on(etcd_server.url) as rival:
        writer, readers = Claim("a", TTL, mode=WRITER), [Claim("a", TTL, mode=READER) for _ in range(30)]
        await granted(rival, writer)
        rung: list[News] = []
        for reader in readers:
            backend.listen(reader, rung.append)
            await backend.draw(reader)
        await watched(etcd_server, 60)
        before = await asyncio.to_thread(etcd_server.calls, "Txn")
        await rival.give_back(writer)
        await until(lambda: len(rung) >= 30, what="all are rung")
        assert len({news.token for news in rung if isinstance(news, Place)}) == 1
        assert await asyncio.to_thread(etcd_server.calls, "Txn") - before < 10


async def test_a_silent_stream_costs_a_waiter_no_turn(etcd_server: EtcdCluster, etcd_proxy: FaultProxy):
    """Its next keep finds that the ticket ahead has gone."""
    async with backend_on(f"etcd://127.0.0.1:{etcd_proxy.port}") as backend, backend_on(etcd_server.url) as rival:
        holder, waiter = Claim("a", TTL), Claim("a", TTL)
        await granted(rival, holder)
        assert (await backend.draw(waiter)).token is None  # no bell, so no watch
        assert (await backend.keep([(waiter, 0)]))[0].token is None
        await rival.give_back(holder)
        assert (await backend.keep([(waiter, 0)]))[0].token is not None


# What the answer of a watch says


KEY = b"fencing/a/" + 32 * b"0"
TEXT = b64encode(KEY).decode()
GONE = {"type": "DELETE", "kv": {"key": TEXT, "mod_revision": "9"}}
PUT = {"kv": {"key": TEXT, "mod_revision": "9", "create_revision": "5", "value": "eyJsYWJlbCI6bnVsbH0="}}


@pytest.mark.parametrize(
    "answer",
    [
        {"events": 5},
        {"events": [{"type": "DELETED", "kv": GONE["kv"]}]},
        {"events": [{"type": "DELETE", "kv": {"key": TEXT}}]},
        {"events": [GONE, 5]},
        {"events": [{"kv": {"key": TEXT, "mod_revision": "9"}}]},
        {"canceled": True, "watch_id": "x"},
        {"canceled": 1},
    ],
    ids=str,
)
def test_an_answer_that_cannot_be_read_is_no_deletion(answer: dict[str, Any]):
    with pytest.raises(UnreadableAnswerError):
        read_watch_answer(answer, TicketKey)


@pytest.mark.parametrize(
    ("answer", "changes"),
    [
        ({"watch_id": "1", "events": [GONE]}, [[]]),
        ({"watch_id": "1", "events": [PUT, GONE]}, [[]]),
        ({"watch_id": "1", "events": [PUT]}, [[5]]),
        ({"watch_id": "1", "canceled": True}, [[]]),
        ({"watch_id": "1", "events": [{"type": "DELETE", "kv": {"key": TEXT, "mod_revision": "7"}}]}, []),
        ({"watch_id": "2", "events": [GONE]}, []),
        ({"created": True, "watch_id": "1", "header": {"revision": "9"}}, []),
        ({"watch_id": "-1"}, []),
    ],
    ids=str,
)
async def test_a_watch_is_about_what_came_after_the_look(answer: dict[str, Any], changes: list[list[int]]):
    async with backend_on("etcd://one") as backend:
        heard: list[list[int]] = []
        backend._watches.add(KEY, 7, lambda puts: heard.append([put.created for put in puts]), puts=True)
        backend._watches._take(answer)
        assert heard == changes
