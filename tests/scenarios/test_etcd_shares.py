"""Permits, readers and writers in etcd, beside what every store does: keys, watches, and late requests."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from etcd_server import EtcdCluster, b64
from etcd_stage import Transactions, backend_on, keys
from patience import until
from shares_suite import MODES, NAME, claim_of, granted, served
from stays import PATIENCE

from fencing_sdk.abc import LOCK, READER, WRITER, Grant, Mode, Permit, Renewal
from fencing_sdk.backends.etcd import EtcdBackend
from fencing_sdk.errors import BackendUnavailableError

pytest_plugins = ["etcd_fixtures"]


@pytest.mark.parametrize("mode", [*MODES, LOCK], ids=lambda mode: mode.word)
async def test_a_grant_that_is_carried_out_after_the_waiter_has_left_grants_nothing(
    mode: Mode, etcd: EtcdBackend, etcd_server: EtcdCluster
):
    """That of a writer and of a lock ends the phase of readers, but not of those who came after it had left."""
    before = WRITER if mode.shared else READER
    async with backend_on(etcd_server.url) as rival:
        holder, claim, next_one = claim_of(before), claim_of(mode), claim_of(before)
        await granted(rival, holder)
        with Transactions(etcd) as requests:
            async with etcd.queue(claim) as turn:
                await rival.release(holder)
                async with asyncio.timeout(PATIENCE):
                    await turn.wait()
                requests.late = lambda _: True
                with pytest.raises(BackendUnavailableError):
                    await etcd.acquire(claim)
                requests.late = lambda _: False
            await etcd.release(claim)
            token = (await granted(rival, next_one)).token
            await requests.deliver()
        assert [(one.token, one.holder) for one in await rival.holders(NAME)] == [(token, next_one.holder)]
        assert len(await keys(etcd_server)) == (1 if before == WRITER else 2)


async def test_readers_of_two_phases_have_two_tokens_and_no_key_stays(etcd: EtcdBackend, etcd_server: EtcdCluster):
    tokens = []
    for mode in (READER, WRITER, READER):
        claims = [claim_of(mode) for _ in range(2 if mode == READER else 1)]
        tokens.append({(await granted(etcd, claim)).token for claim in claims})
        for claim in claims:
            await etcd.release(claim)
    (one,), (two,), (three,) = tokens
    assert one < two < three
    assert await keys(etcd_server) == []


@pytest.mark.parametrize("waits", [False, True])
async def test_a_phase_that_a_dead_reader_has_left_ends_with_the_next_writer(
    waits: bool, etcd: EtcdBackend, etcd_server: EtcdCluster
):
    dead, writer, reader = claim_of(READER), claim_of(WRITER), claim_of(READER)
    await granted(etcd, dead)
    async with AsyncExitStack() as line:
        turn = await line.enter_async_context(etcd.queue(writer)) if waits else None
        (key,) = [key for key in await keys(etcd_server, NAME) if dead.holder in key]
        await asyncio.to_thread(etcd_server.delete, key)  # as the end of its lease does
        assert f"fencing/{NAME}" in await keys(etcd_server)
        token = (await granted(etcd, writer) if turn is None else await served(etcd, writer, turn)).token
    await etcd.release(writer)
    assert (await granted(etcd, reader)).token > token


async def test_readers_of_one_client_share_a_watch_and_their_looks(etcd: EtcdBackend, etcd_server: EtcdCluster):
    writer, claims = claim_of(WRITER), [claim_of(READER) for _ in range(30)]
    await granted(etcd, writer)

    async def watched() -> float:
        return await asyncio.to_thread(etcd_server.metric, "etcd_debugging_mvcc_watcher_total")

    before = await watched()
    async with AsyncExitStack() as line:
        turns = [await line.enter_async_context(etcd.queue(claim)) for claim in claims]
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
    writer, claims, stray = claim_of(WRITER), [claim_of(READER) for _ in range(3)], claim_of(READER)
    await granted(etcd, writer)
    phases = etcd._shares._phases
    begin = phases._ask

    async def begin_late(readers):
        phases._ask = begin
        for key in await keys(etcd_server, NAME):
            if any(claims[number].holder in key for number in gone):
                await asyncio.to_thread(etcd_server.delete, key)
        return await begin(readers)

    async with AsyncExitStack() as line:
        for claim in claims:
            await line.enter_async_context(etcd.queue(claim))
        await etcd.release(writer)
        phases._ask = begin_late
        outcomes = await asyncio.gather(*map(etcd.acquire, claims))
        granted_now = {number for number, outcome in enumerate(outcomes) if isinstance(outcome, Grant)}
        assert granted_now == {0, 1, 2} - set(gone)
    assert {shown.holder for shown in await etcd.holders(NAME)} == {claims[number].holder for number in granted_now}
    await granted(etcd, stray)


async def test_a_reader_whose_key_an_operator_deletes_is_told(etcd: EtcdBackend, etcd_server: EtcdCluster):
    told: list[str] = []
    etcd.on_loss(lambda claim, *_: told.append(claim.owner))
    claims = [claim_of(READER) for _ in range(2)]
    for claim in claims:
        await granted(etcd, claim)
    await asyncio.sleep(0.3)
    key = next(key for key in await keys(etcd_server, NAME) if claims[0].holder in key)
    await asyncio.to_thread(etcd_server.delete, key)
    await until(lambda: told, what="the holder is told")
    assert told == [claims[0].owner]
    assert list(await etcd.renew(claims)) == [Renewal.REFUSED, Renewal.RENEWED]


async def test_a_name_in_which_another_program_writes_grants_no_permit(etcd: EtcdBackend, etcd_server: EtcdCluster):
    for value in ("", "[]", '{"of":"x"}', '{"of":2,"permit":-1}'):
        body = {"key": b64(f"fencing/{NAME}/permit-0"), "value": b64(value)}
        await asyncio.to_thread(etcd_server.ask, "kv/put", body)
        with pytest.raises(BackendUnavailableError):
            await etcd.acquire(claim_of(Permit(of=2)))
