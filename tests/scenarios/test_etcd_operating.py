"""Listing and revoking on etcd: long lines, many readers, and keys of other programs."""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode

from etcd_server import EtcdCluster
from etcd_stage import backend_on, granted

from fencing_sdk._values.claim import READER, WRITER, Claim, Grant, Permit, Renewal, Revoked
from fencing_sdk.backends.etcd import EtcdBackend
from fencing_sdk.backends.etcd.requests import EtcdRequests

pytest_plugins = ["etcd_fixtures"]

TTL = 60.0


async def all_pages(backend: EtcdBackend, limit: int) -> list[tuple[str, int | None]]:
    page = await backend.list_held("", None, limit)
    told = list(page.holders)
    while page.cursor is not None:
        page = await backend.list_held("", page.cursor, limit)
        told += page.holders
    return sorted((holder.name, holder.waiters) for holder in told)


def put(cluster: EtcdCluster, key: str, value: bytes) -> None:
    cluster.ask("kv/put", {"key": b64encode(key.encode()).decode(), "value": b64encode(value).decode()})


async def test_a_line_that_is_longer_than_a_page_is_told_once(etcd_server: EtcdCluster):
    async with backend_on(etcd_server.url) as backend:
        for name in ("a", "b", "c"):
            await granted(backend, Claim(name, TTL))
        for _ in range(7):
            waiter = Claim("b", TTL)
            await backend._requests.join_line("queue", waiter, (await backend._leases.fresh("queue", TTL, 0.0)).number)
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
        async with backend.queue(writer) as turn:
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


async def test_a_permit_is_revoked_and_its_number_is_given_again(etcd_server: EtcdCluster):
    async with backend_on(etcd_server.url) as backend:
        permits = [Claim("a", TTL, mode=Permit(2)) for _ in range(3)]
        tokens = [await granted(backend, permit) for permit in permits[:2]]
        async with backend.queue(permits[2]) as turn:
            assert await backend.revoke("a", tokens[0], "enough")
            async with asyncio.timeout(60):
                await turn.wait()
            grant = await backend.acquire(permits[2])
        assert isinstance(grant, Grant)
        assert (grant.permit, grant.token > tokens[1]) == (0, True)
        assert list(await backend.renew(permits[:2])) == [Revoked("enough"), Renewal.RENEWED]
