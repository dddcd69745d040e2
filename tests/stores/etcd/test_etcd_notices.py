"""Grants in etcd that end behind their holder's back: it hears of it at once, whatever becomes of the watch."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
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
from fencing_sdk.abc import Claim, LossNotice, Renewal
from fencing_sdk.backends.etcd import EtcdBackend, from_url, watches
from fencing_sdk.backends.etcd.keys import LineKey
from fencing_sdk.backends.etcd.leases import HeldKey, SharedLease
from fencing_sdk.backends.etcd.watches import EtcdWaiter
from fencing_sdk.errors import BackendError

pytest_plugins = ["etcd_fixtures"]


# Grants in etcd that end behind their holder's back: it is told at once, whatever became of the stream meanwhile.


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
    assert stay.lost is LossReason.REVOKED


async def test_a_key_that_is_deleted_ends_its_lock_and_no_other(etcd_server: EtcdCluster):
    async with opened(etcd_server.url) as (locks, _), holding(locks, "a", "b") as (lost, kept):
        await watched(etcd_server, 2)
        await asyncio.to_thread(etcd_server.delete, "fencing/a/")
        await noticed(lost)
        assert await etcd_server.command("kv/range", {"key": "eA=="})
        await kept.end()


async def test_a_lease_that_is_revoked_ends_all_of_its_locks(etcd_server: EtcdCluster):
    async with opened(etcd_server.url) as (locks, _), holding(locks, "a", "b", "c") as stays:
        (lease,) = await asyncio.to_thread(etcd_server.leases)
        await etcd_server.command("lease/revoke", {"ID": lease})
        for stay in stays:
            await noticed(stay)


async def test_a_loss_before_the_watch_began_is_not_missed(etcd_server: EtcdCluster):
    """A watch begins where its key was last seen, and so hears of what happened since."""
    async with opened(etcd_server.url) as (locks, _), holding(locks, "a") as (stay,):
        await asyncio.to_thread(etcd_server.delete, "fencing/a/")
        await noticed(stay)


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_client_hears_of_a_grant_with_which_it_goes_on(elsewhere: bool, etcd_server: EtcdCluster):
    """After it was closed, or instead of another client."""
    async with backend_on(etcd_server.url) as backend, backend_on(etcd_server.url) as other:
        claim, heard = Claim("a", TTL), list[str]()
        for each in (backend, other):
            each.on_loss(lambda claim, *_: heard.append(claim.owner))
        await granted(backend, claim)
        await backend.aclose()
        assert list(await (other if elsewhere else backend).renew([claim])) == [Renewal.RENEWED]
        await watched(etcd_server, 1)
        await asyncio.to_thread(etcd_server.delete, "fencing/a/")
        await until(lambda: heard, what="the client is told")
        assert heard == [claim.owner]


async def test_locks_that_are_held_for_a_moment_cost_no_watch(
    etcd_server: EtcdCluster, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(watches, "_MOMENT", 1.0)  # so long a moment that a machine may stand still in it
    before = await asyncio.to_thread(etcd_server.calls, "Watch")
    async with opened(etcd_server.url) as (locks, _):
        for number in range(50):
            async with locks.lock(f"a/{number}"):
                pass
        await asyncio.sleep(1.5 * watches._MOMENT)
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


async def test_a_claim_that_is_released_and_taken_again_is_watched_once(etcd_server: EtcdCluster):
    """Both between two words to etcd: the watch of the first grant ends, that of the second does not."""
    noticed: list[Claim] = []
    async with backend_on(etcd_server.url) as backend:
        backend.on_loss(lambda claim, *_: noticed.append(claim))
        again, other, third = Claim("a", TTL), Claim("b", TTL), Claim("c", TTL)
        await granted(backend, again)
        await watched(etcd_server, 1)
        await backend.release(again)
        await granted(backend, again)
        await granted(backend, other)
        await watched(etcd_server, 2)
        assert noticed == []
        await granted(backend, again)  # as after an answer that was lost
        await granted(backend, third)
        await watched(etcd_server, 3)
        await asyncio.to_thread(etcd_server.delete, "fencing/")
        await until(lambda: len(noticed) == 3)
        for claim in (again, other, third):
            await backend.release(claim)
        await watched(etcd_server, 0)


async def test_a_deletion_before_the_grant_is_none_of_it(etcd_server: EtcdCluster):
    """The same claim was granted before, and what happened to that grant is heard late."""
    noticed: list[Claim] = []
    async with backend_on(etcd_server.url) as backend:
        backend.on_loss(lambda claim, *_: noticed.append(claim))
        claim = Claim("a", TTL)
        token = await granted(backend, claim)
        key = backend._keys.own(claim)
        for revision in (token - 1, token + 1):
            kv = {"key": b64encode(key).decode(), "mod_revision": str(revision)}
            backend._losses._on_answer({"events": [{"type": "DELETE", "kv": kv}]})
        await until(lambda: noticed)
        assert noticed == [claim]


async def test_what_happened_while_the_stream_was_broken_is_told_when_it_is_back(
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


# What a watch of etcd tells, to holders and to waiters: an answer that is not understood is not a deletion.


Answer = dict[str, Any]
CLAIM = Claim("a", 60.0)
KEY = b"fencing/a/0123"
TEXT = b64encode(KEY).decode()
GONE = {"type": "DELETE", "kv": {"key": TEXT, "mod_revision": "9"}}
SPOILT: list[Answer] = [
    {"events": 5},
    {"events": [{"type": "DELETED", "kv": GONE["kv"]}]},
    {"events": [{"type": "DELETE", "kv": {"key": TEXT}}]},
    {"events": [GONE, 5]},
    {"canceled": True, "watch_id": "x"},
]
HARMLESS: list[Answer] = [
    {"created": True, "header": {"revision": "9"}},
    {"events": []},
    {"events": [{"type": "PUT", "kv": {"key": TEXT, "mod_revision": "9"}}]},
    {"events": [{"type": "DELETE", "kv": {"key": b64encode(b"other").decode(), "mod_revision": "9"}}]},
    {"canceled": False, "watch_id": "-1"},
]


@pytest.mark.parametrize("answer", SPOILT, ids=str)
async def test_a_holder_keeps_its_lease_and_hears_of_its_end_on_the_next_stream(answer: Answer, quick: None):
    streams = Streams([answer], [{"events": [GONE]}])
    lost = await held_until_lost(streams, lambda: streams.opened == 2)
    assert lost == [CLAIM]
    assert streams.lost_at_opening == [0, 0]


@pytest.mark.parametrize("answer", SPOILT, ids=str)
async def test_a_waiter_looks_again_and_is_woken_by_the_next_stream(answer: Answer, quick: None):
    streams = Streams([answer], [{"events": [GONE]}])
    assert await waiting(streams, 3) == [1, 2, 3]


@pytest.mark.parametrize("answer", HARMLESS, ids=str)
async def test_what_says_nothing_of_the_own_key_ends_no_stream(answer: Answer, quick: None):
    streams = Streams([answer, {"events": [GONE]}])
    assert await held_until_lost(streams, lambda: streams.opened == 1) == [CLAIM]
    assert streams.said == 2
    streams = Streams([answer, {"events": [GONE]}])
    assert await waiting(streams, 2) == [1, 2]
    assert streams.opened == 1
    assert streams.said == (1 if answer.get("events") else 2)  # after any change within its watch, a waiter looks again


class Streams:
    """Streams that say this, one after the other, and then nothing."""

    def __init__(self, *answers: list[Answer]) -> None:
        self._answers = list(answers)
        self.opened = 0
        self.said = 0
        self.lost: list[Claim] = []
        self.lost_at_opening: list[int] = []

    @asynccontextmanager
    async def __call__(self, operation: str, *_: object) -> AsyncIterator[AsyncIterator[Answer]]:
        self.opened += 1
        self.lost_at_opening.append(len(self.lost))
        try:
            yield self._say(self._answers.pop(0) if self._answers else [])
        except ValueError as error:  # as the gateway has it
            raise BackendError("EtcdBackend", operation, f"{error}") from error

    async def _say(self, answers: list[Answer]) -> AsyncIterator[Answer]:
        for answer in answers:
            self.said += 1
            yield answer
        await asyncio.Event().wait()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watches, "_MOMENT", 0.0)
    monkeypatch.setattr(watches, "_SILENCE", 3600.0)  # a stream ends because of what it said
    monkeypatch.setattr(watches, "_FIRST_PAUSE", 0.001)


def backend_with(streams: Streams) -> EtcdBackend:
    backend = from_url("etcd://one")
    backend._gateway.stream = streams  # type: ignore[method-assign, assignment]
    return backend


async def held_until_lost(streams: Streams, opened: Callable[[], bool]) -> list[Claim]:
    """Hold a lock until it is lost; who was told."""
    backend = backend_with(streams)
    notice: LossNotice = lambda claim, *_: streams.lost.append(claim)  # noqa: E731
    backend.on_loss(notice)
    lease = backend._leases._leases[61] = SharedLease(1, 61, 0.0)
    backend._leases.remember(lease, HeldKey(KEY, 60.0, 7, 7, backend._leases.now(), 7))
    backend._losses.granted(KEY, CLAIM)
    await until(lambda: streams.lost, what="the holder is told")
    assert opened()
    await backend.aclose()
    return streams.lost


async def waiting(streams: Streams, looks: int) -> list[int]:
    """Wait behind a key; how often it was looked who is before, until so many looks."""
    backend, looked = backend_with(streams), []

    async def ahead(*_: object) -> tuple[list[LineKey], int]:
        looked.append(len(looked) + 1)
        return [LineKey(KEY, b"", 5, 5, 1)] if len(looked) < looks else [], 8

    backend._line.ahead = ahead  # type: ignore[method-assign]
    waiter: EtcdWaiter = backend._waiters.add(CLAIM, 7)
    async with asyncio.timeout(20):
        await waiter.wait()
    await backend._waiters.remove(waiter)
    await backend.aclose()
    return looked
