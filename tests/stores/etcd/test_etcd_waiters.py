"""Waiters and shares in etcd: in order, woken one by one, none forgotten, and what operators see and take of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from base64 import b64encode
from contextlib import AsyncExitStack

import pytest
from etcd_server import EtcdCluster, b64
from etcd_stage import Transactions, backend_on, granted, keys
from fault_proxy import FaultProxy
from patience import until
from shares_suite import MODES, NAME, claim_of, served
from shares_suite import granted as grant_of
from stays import PATIENCE

from fencing_sdk.abc import LOCK, READER, WRITER, Busy, Claim, Grant, Mode, Permit, Renewal, Revoked
from fencing_sdk.backends.etcd import EtcdBackend
from fencing_sdk.backends.etcd.line import EtcdRequests
from fencing_sdk.errors import BackendUnavailableError
from fencing_sdk.testing.promises.under_test import in_line

pytest_plugins = ["etcd_fixtures"]


# Many waiters for one lock in etcd: in order, woken one by one, and none is forgotten.


WAITERS = 60


async def test_a_release_wakes_the_next_and_nobody_else(etcd_server: EtcdCluster, monkeypatch: pytest.MonkeyPatch):
    async with backend_on(etcd_server.url) as backend:
        holder, claims = Claim("a", 60.0), [Claim("a", 60.0) for _ in range(3)]
        await granted(backend, holder)
        async with (
            in_line(backend, claims[0]) as one,
            in_line(backend, claims[1]) as two,
            in_line(backend, claims[2]) as three,
        ):
            await backend.release(holder)
            async with asyncio.timeout(20):
                await one.wait()
            await granted(backend, claims[0])
            for turn in (two, three):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.3):
                        await turn.wait()
            await backend.release(claims[0])
            async with asyncio.timeout(20):
                await two.wait()


async def test_a_watch_from_a_revision_that_etcd_has_forgotten_looks_again(
    etcd_server: EtcdCluster, monkeypatch: pytest.MonkeyPatch
):
    """Compaction between the look at the line and the watch: etcd cancels it, and no wake-up is lost."""
    async with backend_on(etcd_server.url) as backend, backend_on(etcd_server.url) as rival:
        holder, waiter = Claim("a", 60.0), Claim("a", 60.0)
        await granted(rival, holder)
        looked = backend._line.ahead
        looks = 0

        async def old(claim: Claim, created: int):
            nonlocal looks
            looks += 1
            ahead, revision = await looked(claim, created)
            return ahead, 0 if looks == 1 else revision

        monkeypatch.setattr(backend._line, "ahead", old)
        for _ in range(5):
            await etcd_server.command("kv/put", {"key": "eA==", "value": "eA=="})
        await asyncio.to_thread(etcd_server.compact)
        async with in_line(backend, waiter) as turn, asyncio.timeout(20):
            await until(lambda: looks >= 2, what="it looks again")
            await rival.release(holder)
            while isinstance(await backend.acquire(waiter), Busy):
                await turn.wait()


async def test_a_watch_that_breaks_is_opened_again(etcd_server: EtcdCluster, etcd_proxy: FaultProxy):
    """The release happens while there is no connection; the waiter is woken all the same, and not by its timer."""
    async with (
        backend_on(f"etcd://127.0.0.1:{etcd_proxy.port}") as backend,
        backend_on(etcd_server.url) as other,
    ):
        holder, waiter = Claim("a", 60.0), Claim("a", 60.0)
        await granted(other, holder)
        async with in_line(backend, waiter) as turn:
            assert isinstance(await backend.acquire(waiter), Busy)
            etcd_proxy.refuse()
            etcd_proxy.cut()
            await other.release(holder)
            etcd_proxy.heal()
            async with asyncio.timeout(20):
                await turn.wait()
            await granted(backend, waiter)


async def test_a_place_that_an_operator_removed_is_taken_again_at_the_end(etcd: EtcdBackend, etcd_server):
    holder, waiter, later = (Claim("a", 60.0) for _ in range(3))
    await granted(etcd, holder)
    async with in_line(etcd, waiter) as turn:
        own = (await keys(etcd_server, "a"))[1]
        await asyncio.to_thread(etcd_server.delete, own)
        async with in_line(etcd, later) as later_turn:
            assert isinstance(await etcd.acquire(waiter), Busy)
            await etcd.release(holder)
            async with asyncio.timeout(20):
                await later_turn.wait()
                assert isinstance(await etcd.acquire(waiter), Busy)
                await granted(etcd, later)
                with contextlib.suppress(TimeoutError):  # a wake-up that came for nothing
                    async with asyncio.timeout(0.5):
                        await turn.wait()
                assert isinstance(await etcd.acquire(waiter), Busy)
                await etcd.release(later)
                await turn.wait()
                while isinstance(await etcd.acquire(waiter), Busy):
                    await turn.wait()


async def test_a_release_between_the_look_at_the_line_and_the_watch_is_not_missed(
    etcd_server: EtcdCluster, monkeypatch: pytest.MonkeyPatch
):
    """The watch begins at the revision of the look, and so is told of what happened before it was opened."""
    async with backend_on(etcd_server.url) as backend:
        holder, waiter = Claim("a", 60.0), Claim("a", 60.0)
        await granted(backend, holder)
        looked = backend._line.ahead

        async def then_released(claim: Claim, created: int):
            seen = await looked(claim, created)
            await backend.release(holder)
            return seen

        monkeypatch.setattr(backend._line, "ahead", then_released)
        async with in_line(backend, waiter) as turn:
            async with asyncio.timeout(20):
                await turn.wait()
            await granted(backend, waiter)


# Permits, readers and writers in etcd, beside what every store does: keys, watches, and late requests.


@pytest.mark.parametrize("mode", [*MODES, LOCK], ids=lambda mode: mode.word)
async def test_a_grant_that_is_carried_out_after_the_waiter_has_left_grants_nothing(
    mode: Mode, etcd: EtcdBackend, etcd_server: EtcdCluster
):
    """That of a writer and of a lock ends the phase of readers, but not of those who came after it had left."""
    before = WRITER if mode.shared else READER
    async with backend_on(etcd_server.url) as rival:
        holder, claim, next_one = claim_of(before), claim_of(mode), claim_of(before)
        await grant_of(rival, holder)
        with Transactions(etcd) as requests:
            async with in_line(etcd, claim) as turn:
                await rival.release(holder)
                async with asyncio.timeout(PATIENCE):
                    await turn.wait()
                requests.late = lambda _: True
                with pytest.raises(BackendUnavailableError):
                    await etcd.acquire(claim)
                requests.late = lambda _: False
            await etcd.release(claim)
            token = (await grant_of(rival, next_one)).token
            await requests.deliver()
        assert [(one.token, one.id) for one in await rival.holders(NAME)] == [(token, next_one.holder)]
        assert len(await keys(etcd_server)) == (1 if before == WRITER else 2)


@pytest.mark.parametrize("waits", [False, True])
async def test_a_phase_that_a_dead_reader_has_left_ends_with_the_next_writer(
    waits: bool, etcd: EtcdBackend, etcd_server: EtcdCluster
):
    dead, writer, reader = claim_of(READER), claim_of(WRITER), claim_of(READER)
    await grant_of(etcd, dead)
    async with AsyncExitStack() as line:
        turn = await line.enter_async_context(in_line(etcd, writer)) if waits else None
        (key,) = [key for key in await keys(etcd_server, NAME) if dead.holder in key]
        await asyncio.to_thread(etcd_server.delete, key)  # as the end of its lease does
        assert f"fencing/{NAME}" in await keys(etcd_server)
        token = (await grant_of(etcd, writer) if turn is None else await served(etcd, writer, turn)).token
    await etcd.release(writer)
    assert (await grant_of(etcd, reader)).token > token


async def test_readers_of_one_client_share_a_watch_and_their_looks(etcd: EtcdBackend, etcd_server: EtcdCluster):
    writer, claims = claim_of(WRITER), [claim_of(READER) for _ in range(30)]
    await grant_of(etcd, writer)

    async def watched() -> float:
        return await asyncio.to_thread(etcd_server.metric, "etcd_debugging_mvcc_watcher_total")

    before = await watched()
    async with AsyncExitStack() as line:
        turns = [await line.enter_async_context(in_line(etcd, claim)) for claim in claims]
        await until(lambda: etcd._waiters._watches, what="the watch is opened")
        asked = await asyncio.to_thread(etcd_server.calls, "Txn")
        await etcd.release(writer)
        grants = await asyncio.gather(*(served(etcd, *each) for each in zip(claims, turns, strict=True)))
        assert len({grant.token for grant in grants}) == 1
        assert await asyncio.to_thread(etcd_server.calls, "Txn") - asked < len(claims) / 2
    assert await watched() - before <= 1
    await until(lambda: not etcd._waiters._watches, what="no watch is kept")


@pytest.mark.parametrize("gone", [(1,), (0, 2), (0, 1, 2)])
async def test_readers_begin_a_phase_although_some_that_were_woken_with_them_have_gone(
    gone: tuple[int, ...], etcd: EtcdBackend, etcd_server: EtcdCluster
):
    """Those join the line again, behind readers alone, and hold with the others."""
    writer, claims, stray = claim_of(WRITER), [claim_of(READER) for _ in range(3)], claim_of(READER)
    await grant_of(etcd, writer)
    phases = etcd._line._phases
    begin = phases._ask

    async def begin_late(readers):
        phases._ask = begin
        for key in await keys(etcd_server, NAME):
            if any(claims[number].holder in key for number in gone):
                await asyncio.to_thread(etcd_server.delete, key)
        return await begin(readers)

    async with AsyncExitStack() as line:
        for claim in claims:
            await line.enter_async_context(in_line(etcd, claim))
        await etcd.release(writer)
        phases._ask = begin_late
        grants = await asyncio.gather(*(grant_of(etcd, claim) for claim in claims))
    assert len({grant.token for grant in grants}) == 1
    assert {shown.id for shown in await etcd.holders(NAME)} == {claim.holder for claim in claims}
    assert (await grant_of(etcd, stray)).token == grants[0].token


async def test_a_reader_whose_key_an_operator_deletes_is_told(etcd: EtcdBackend, etcd_server: EtcdCluster):
    heard: list[str] = []
    etcd.on_loss(lambda claim, *_: heard.append(claim.owner))
    claims = [claim_of(READER) for _ in range(2)]
    for claim in claims:
        await grant_of(etcd, claim)
    await asyncio.sleep(0.3)
    key = next(key for key in await keys(etcd_server, NAME) if claims[0].holder in key)
    await asyncio.to_thread(etcd_server.delete, key)
    await until(lambda: heard, what="the holder is told")
    assert heard == [claims[0].owner]
    assert list(await etcd.renew(claims)) == [Renewal.REFUSED, Renewal.RENEWED]


async def test_a_name_in_which_another_program_writes_grants_no_permit(etcd: EtcdBackend, etcd_server: EtcdCluster):
    for value in ("", "[]", '{"of":"x"}', '{"of":2,"permit":-1}'):
        body = {"key": b64(f"fencing/{NAME}/permit-0"), "value": b64(value)}
        await asyncio.to_thread(etcd_server.ask, "kv/put", body)
        with pytest.raises(BackendUnavailableError):
            await etcd.acquire(claim_of(Permit(of=2)))


# Listing and revoking on etcd: long lines, many readers, and keys of other programs.


TTL = 60.0


async def all_pages(backend: EtcdBackend, limit: int) -> list[tuple[str, int | None]]:
    page = await backend.list_holders("", None, limit)
    heard = list(page.holders)
    while page.cursor is not None:
        page = await backend.list_holders("", page.cursor, limit)
        heard += page.holders
    return sorted((holder.name, holder.waiters) for holder in heard)


def put(cluster: EtcdCluster, key: str, value: bytes) -> None:
    cluster.ask("kv/put", {"key": b64encode(key.encode()).decode(), "value": b64encode(value).decode()})


async def test_a_line_that_is_longer_than_a_page_is_told_once(etcd_server: EtcdCluster):
    async with backend_on(etcd_server.url) as backend:
        for name in ("a", "b", "c"):
            await granted(backend, Claim(name, TTL))
        for _ in range(7):
            waiter = Claim("b", TTL)
            await backend._line.join("queue", waiter, (await backend._leases.fresh("queue", TTL, 0.0)).number)
        for limit in (1, 2, 3, 7, 8, 9, 100):
            assert await all_pages(backend, limit) == [("a", 0), ("b", 7), ("c", 0)], limit
        assert len(await backend.list_waiters("b")) == 7


async def test_what_other_programs_write_is_left_out(etcd_server: EtcdCluster):
    async with backend_on(etcd_server.url) as backend:
        await granted(backend, Claim("a", TTL))
        revoked = await granted(backend, Claim("b", TTL))
        assert await backend.revoke("b", revoked, "a test")  # leaves a note
        for key in ("fencing/", "fencing/x", "fencing/x/y", "fencing/%41/" + 32 * "0", "fencing/a/x"):
            await asyncio.to_thread(put, etcd_server, key, b"x")
        await asyncio.to_thread(put, etcd_server, "fencing/c/" + 32 * "0", json.dumps([1]).encode())
        for limit in (1, 2, 100):
            assert [name for name, _ in await all_pages(backend, limit)] == ["a"]


async def test_more_readers_than_fit_into_a_transaction_lose_their_phase(etcd_server: EtcdCluster):
    """All of them and their phase; the writer behind them is granted, and the next readers have a higher token."""
    async with backend_on(etcd_server.url) as backend:
        backend.on_loss(
            lambda *_: None
        )  # as a client does: the waiter learns by its watch that a key of its own is gone
        readers = [Claim("a", TTL, mode=READER) for _ in range(120)]
        grants = await asyncio.gather(*map(backend.acquire, readers))
        (token,) = {grant.token for grant in grants if isinstance(grant, Grant)}
        writer = Claim("a", TTL, mode=WRITER)
        async with in_line(backend, writer) as turn:
            assert [waiting.mode for waiting in await backend.list_waiters("a")] == [WRITER]
            assert await backend.revoke("a", token, "enough")
            async with asyncio.timeout(60):
                await turn.wait()
            written = await granted(backend, writer)
        assert written > token
        assert list(await backend.renew(readers)) == [Revoked("enough")] * 120
        assert not await backend.revoke("a", token, "again")
        await backend.release(writer)
        assert await granted(backend, Claim("a", TTL, mode=READER)) > written


async def test_a_reader_that_comes_meanwhile_is_not_forgotten(etcd_server: EtcdCluster, monkeypatch):
    """It has the token of the phase, so it loses it too; a phase that is deleted with a reader left would have two."""
    async with backend_on(etcd_server.url) as backend, backend_on(etcd_server.url) as other:
        early, late = Claim("a", TTL, mode=READER), Claim("a", TTL, mode=READER)
        token, end, came = await granted(backend, early), EtcdRequests.end, []

        async def delayed(*arguments: object) -> bool:
            if not came:
                came.append(await granted(other, late))
            return await end(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(EtcdRequests, "end", delayed)
        assert await backend.revoke("a", token, "enough")
        assert came == [token]
        assert list(await other.renew([late])) == list(await backend.renew([early])) == [Revoked("enough")]
        assert [key for key in etcd_server.keys("fencing/a") if ":revoked/" not in key] == []
