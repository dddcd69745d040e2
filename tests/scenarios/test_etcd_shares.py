"""Permits, readers and writers in etcd: late and lost requests, tokens, and whom a release wakes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from etcd_server import EtcdCluster, b64
from etcd_stage import backend_on, keys
from patience import until

from fencing_sdk.abc import READER, WRITER, Claim, Grant, Held, Mode, Permit, Renewal, Turn
from fencing_sdk.backends.etcd import EtcdBackend
from fencing_sdk.errors import BackendUnavailableError

pytest_plugins = ["etcd_fixtures"]

MODES = [Permit(of=2), READER, WRITER]


def claim_of(mode: Mode, *, ttl: float = 60.0) -> Claim:
    return Claim("shared", ttl, mode=mode)


async def granted(backend: EtcdBackend, claim: Claim) -> Grant:
    outcome = await backend.acquire(claim)
    assert isinstance(outcome, Grant), outcome
    return outcome


async def served(backend: EtcdBackend, claim: Claim, turn: Turn) -> Grant:
    """Wait for the turn by wake-ups alone."""
    async with asyncio.timeout(20):
        while not isinstance(outcome := await backend.acquire(claim), Grant):
            await turn.wait()
    return outcome


class Transactions:
    """The requests of a backend that write: `lost` ones are carried out without an answer, `late` ones when told."""

    def __init__(self, backend: EtcdBackend) -> None:
        self._call = backend._gateway.call
        self.lost: Callable[[dict[str, Any]], bool] = lambda _: False
        self.late: Callable[[dict[str, Any]], bool] = lambda _: False
        self.tasks: list[asyncio.Task[Any]] = []
        self._delivered = asyncio.Event()
        backend._gateway.call = self._pass  # type: ignore[method-assign]

    async def _pass(self, operation: str, path: str, body: dict[str, Any], **options: bool) -> Any:
        if "request_put" in json.dumps(body) and self.late(body):
            self.tasks.append(asyncio.create_task(self._deliver(operation, path, body, **options)))
            raise BackendUnavailableError("EtcdBackend", operation, "no answer")
        reply = await self._call(operation, path, body, **options)
        if "request_put" in json.dumps(body) and self.lost(body):
            raise BackendUnavailableError("EtcdBackend", operation, "the answer is lost")
        return reply

    async def _deliver(self, *request: Any, **options: bool) -> Any:
        await self._delivered.wait()
        return await self._call(*request, **options)

    async def deliver(self) -> None:
        self._delivered.set()
        await asyncio.wait(self.tasks)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.word)
async def test_a_share_whose_answer_was_lost_is_found_again_and_leaves_nothing(
    mode: Mode, etcd: EtcdBackend, etcd_server: EtcdCluster
):
    requests, claim = Transactions(etcd), claim_of(mode)
    answers = [True]
    requests.lost = lambda _: bool(answers) and answers.pop()
    with pytest.raises(BackendUnavailableError):
        await etcd.acquire(claim)
    grant = await granted(etcd, claim)
    again = await granted(etcd, claim)
    assert (again.token, again.permit) == (grant.token, grant.permit)
    assert list(await etcd.renew([claim])) == [Renewal.RENEWED]
    await etcd.release(claim)
    assert await keys(etcd_server) == []


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.word)
async def test_a_waiter_whose_grant_was_not_answered_has_it(mode: Mode, etcd: EtcdBackend, etcd_server: EtcdCluster):
    async with backend_on(etcd_server.url) as rival:
        holder, claim, requests = claim_of(WRITER), claim_of(mode), Transactions(etcd)
        await granted(rival, holder)
        async with etcd.queue(claim) as turn:
            assert isinstance(await etcd.acquire(claim), Held)
            await rival.release(holder)
            async with asyncio.timeout(20):
                await turn.wait()
            answers = [True]
            requests.lost = lambda _: bool(answers) and answers.pop()
            with pytest.raises(BackendUnavailableError):
                await etcd.acquire(claim)
            grant = await granted(etcd, claim)
        (holder_now,) = await rival.holders("shared")
        assert (holder_now.token, holder_now.permit, holder_now.holder) == (grant.token, grant.permit, claim.holder)
        await etcd.release(claim)
        assert await keys(etcd_server) == []


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.word)
async def test_a_grant_that_is_carried_out_after_the_waiter_has_left_grants_nothing(
    mode: Mode, etcd: EtcdBackend, etcd_server: EtcdCluster
):
    async with backend_on(etcd_server.url) as rival:
        holder, claim, next_one, requests = claim_of(WRITER), claim_of(mode), claim_of(WRITER), Transactions(etcd)
        await granted(rival, holder)
        async with etcd.queue(claim) as turn:
            await rival.release(holder)
            async with asyncio.timeout(20):
                await turn.wait()
            requests.late = lambda _: True
            with pytest.raises(BackendUnavailableError):
                await etcd.acquire(claim)
        await etcd.release(claim)
        token = (await granted(rival, next_one)).token
        await requests.deliver()
        assert [(one.token, one.holder) for one in await rival.holders("shared")] == [(token, next_one.holder)]
        assert len(await keys(etcd_server)) == 1


async def test_a_writer_is_above_readers_that_drew_their_token_after_it_joined(etcd: EtcdBackend):
    """Its place in the line is older than the token of the readers before it."""
    first, reader, writer = claim_of(WRITER), claim_of(READER), claim_of(WRITER)
    await granted(etcd, first)
    async with etcd.queue(reader) as reading, etcd.queue(writer) as writing:
        await etcd.release(first)
        read = await served(etcd, reader, reading)
        await etcd.release(reader)
        assert (await served(etcd, writer, writing)).token > read.token


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
        (key,) = [key for key in await keys(etcd_server, "shared") if dead.holder in key]
        await asyncio.to_thread(etcd_server.delete, key)  # as the end of its lease does
        assert "fencing/shared" in await keys(etcd_server)
        token = (await granted(etcd, writer) if turn is None else await served(etcd, writer, turn)).token
    await etcd.release(writer)
    assert (await granted(etcd, reader)).token > token


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.word)
async def test_a_share_keeps_its_token_and_its_number_when_it_moves_to_another_lease(
    mode: Mode, etcd: EtcdBackend, etcd_server: EtcdCluster
):
    """Its claim asks for another ttl, and then another client goes on with it."""
    async with backend_on(etcd_server.url) as other:
        before, claim = claim_of(WRITER), claim_of(mode)
        await granted(etcd, before)
        async with etcd.queue(claim) as turn:
            await etcd.release(before)
            grant = await served(etcd, claim, turn)
        longer = Claim(claim.name, 90.0, claim.owner, mode=mode)
        assert list(await etcd.renew([longer])) == [Renewal.RENEWED]
        assert list(await other.renew([longer])) == [Renewal.RENEWED]
        again = await granted(other, longer)
        assert (again.token, again.permit) == (grant.token, grant.permit)
        await other.release(longer)


async def test_a_permit_that_is_given_back_wakes_the_first_waiter_alone(etcd: EtcdBackend):
    held, claims = [claim_of(Permit(of=2)) for _ in range(2)], [claim_of(Permit(of=2)) for _ in range(4)]
    for claim in held:
        await granted(etcd, claim)
    async with AsyncExitStack() as line:
        turns = [await line.enter_async_context(etcd.queue(claim)) for claim in claims]
        await etcd.release(held[1])
        assert (await served(etcd, claims[0], turns[0])).permit == 1
        for turn in turns[1:]:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await turn.wait()
        await etcd.release(held[0])
        assert (await served(etcd, claims[1], turns[1])).permit == 0


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
        assert await asyncio.to_thread(etcd_server.calls, "Txn") - asked < 2 * len(claims)
    assert await watched() - before <= 1
    await until(lambda: not etcd._waiters._watches, what="no watch is kept")


async def test_a_reader_whose_key_an_operator_deletes_is_told(etcd: EtcdBackend, etcd_server: EtcdCluster):
    told: list[str] = []
    etcd.on_loss(lambda claim, *_: told.append(claim.owner))
    claims = [claim_of(READER) for _ in range(2)]
    for claim in claims:
        await granted(etcd, claim)
    await asyncio.sleep(0.3)
    key = next(key for key in await keys(etcd_server, "shared") if claims[0].holder in key)
    await asyncio.to_thread(etcd_server.delete, key)
    await until(lambda: told, what="the holder is told")
    assert told == [claims[0].owner]
    assert list(await etcd.renew(claims)) == [Renewal.REFUSED, Renewal.RENEWED]


async def test_a_name_in_which_another_program_writes_grants_no_permit(etcd: EtcdBackend, etcd_server: EtcdCluster):
    for value in ("", "[]", '{"of":"x"}', '{"of":2,"permit":-1}'):
        body = {"key": b64("fencing/shared/permit-0"), "value": b64(value)}
        await asyncio.to_thread(etcd_server.ask, "kv/put", body)
        with pytest.raises(BackendUnavailableError):
            await etcd.acquire(claim_of(Permit(of=2)))
