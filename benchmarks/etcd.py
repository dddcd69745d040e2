"""
What the etcd backend adds to bare calls of the gateway: requests, CPU, waiting, notices.

    uv run python -m benchmarks etcd
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from base64 import b64encode
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.table import Row, compare, compared, run
from fencing_sdk import Lease, LockClient
from fencing_sdk.abc import Claim, Place
from fencing_sdk.backends.etcd import EtcdBackend, from_url

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "servers"))

from etcd_server import EtcdCluster
from patience import until

TIMES = 200
LEASES = 1000
WAITERS = 50
NOTICES = 50


def _b64(text: str) -> str:
    return b64encode(text.encode()).decode()


class Bare:
    """The two transactions of a lock without a line: put if absent, delete if still mine."""

    def __init__(self, session: aiohttp.ClientSession, origin: str) -> None:
        self._session = session
        self._origin = origin
        self._key = _b64("bare/lock")
        self.lease = ""

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        async with self._session.post(f"{self._origin}/v3/{path}", json=body) as response:
            return dict(await response.json())

    async def open(self) -> None:
        self.lease = (await self.post("lease/grant", {"TTL": "3600"}))["ID"]

    async def pair(self) -> None:
        body: dict[str, Any] = {
            "compare": [{"key": self._key, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}],
            "success": [{"request_put": {"key": self._key, "value": self._key, "lease": self.lease}}],
            "failure": [{"request_range": {"key": self._key}}],
        }
        answer = await self.post("kv/txn", body)
        revision = answer["header"]["revision"]
        body = {
            "compare": [{"key": self._key, "target": "CREATE", "result": "EQUAL", "create_revision": revision}],
            "success": [{"request_delete_range": {"key": self._key}}],
        }
        assert (await self.post("kv/txn", body)).get("succeeded")


async def one_pair(server: EtcdCluster, *, times: int) -> list[Row]:
    backend, claim = from_url(server.url), Claim("bench", 3600.0)
    async with aiohttp.ClientSession() as session, LockClient(from_url(server.url)) as locks:
        bare = Bare(session, server.members[0].origin)
        await bare.open()

        async def pair() -> None:
            await backend.draw(claim)
            await backend.give_back(claim)

        lock = locks.lock("scoped", ttl=3600)

        async def scoped() -> None:
            async with lock:
                pass

        contestants = {
            "two transactions": bare.pair,
            "backend.draw, backend.give_back": pair,
            "async with lock": scoped,
        }
        rows = compared(await compare(contestants, times=times))
        before = {method: server.calls(method) for method in ("Txn", "Range", "LeaseKeepAlive", "LeaseGrant")}
        for _ in range(times):
            await pair()
        made = ", ".join(f"{method} {server.calls(method) - count}" for method, count in before.items())
        rows.append(Row(f"requests of {times} cycles", made))
    await backend.aclose()
    return rows


async def many_renewals(server: EtcdCluster) -> list[Row]:
    backend = from_url(server.url)
    claims = [Claim(f"bench/{number}", 600.0) for number in range(LEASES)]
    await asyncio.gather(*(backend.draw(claim) for claim in claims))
    await asyncio.sleep(1)
    before = {method: server.calls(method) for method in ("Txn", "Range", "LeaseKeepAlive")}
    cpu, wall = time.process_time(), time.perf_counter()
    outcomes = await backend.keep([(claim, 0) for claim in claims])
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    made = ", ".join(f"{method} {server.calls(method) - count}" for method, count in before.items())
    await asyncio.gather(*(backend.give_back(claim) for claim in claims))
    await backend.aclose()
    what = f"a renewal of {LEASES:,} leases"
    renewed = sum(isinstance(outcome, Place) for outcome in outcomes)
    return [
        Row(what, f"{wall * 1000:.0f} ms, {cpu / LEASES * 1e6:.0f} us of CPU for each"),
        Row(f"{what}: requests", made),
        Row(f"{what}: renewed", f"{renewed:,}", reach="all", reached=renewed == LEASES),
    ]


async def hand_off(server: EtcdCluster) -> list[Row]:
    """From the release to the next holder's body, with a line of waiters on two clients."""
    released_at, waits, order = 0.0, [], []

    async def wait(locks: LockClient, number: int) -> None:
        nonlocal released_at
        lease: Lease = await locks.lock("line", ttl=60).acquire()
        waits.append(time.perf_counter() - released_at)
        order.append(number)
        released_at = time.perf_counter()
        await lease.release()

    async with LockClient(from_url(server.url)) as here, LockClient(from_url(server.url)) as there:
        first = await here.lock("line", ttl=60).acquire()
        tasks = []
        for number in range(WAITERS):
            tasks.append(asyncio.create_task(wait((here, there)[number % 2], number)))
            await until(lambda: len(server.keys("fencing/line/")) == len(tasks) + 1, what="it stands in line")
        await asyncio.sleep(1)  # for the watches
        released_at = time.perf_counter()
        await first.release()
        await asyncio.gather(*tasks)
    what = f"hand-off, {WAITERS} waiters on two clients"
    ordered = order == sorted(order)
    return [
        Row(f"{what}: p50 / max", f"{statistics.median(waits) * 1000:.1f} / {max(waits) * 1000:.1f} ms"),
        Row(f"{what}: in order of arrival", "yes" if ordered else "no", reach="yes", reached=ordered),
    ]


async def _take(backend: EtcdBackend, claims: Sequence[Claim]) -> None:
    for start in range(0, len(claims), 25):
        await asyncio.gather(*(backend.draw(claim) for claim in claims[start : start + 25]))


async def notices(server: EtcdCluster) -> list[Row]:
    """Costs of a watch on what is held, and the time until a holder hears that its key was deleted."""
    backend = from_url(server.url)
    heard: dict[str, float] = {}
    claims = [Claim(f"held/{number}", 3600.0) for number in range(LEASES)]
    for claim in claims:
        backend.listen(claim, lambda _, name=claim.name: heard.setdefault(name, time.perf_counter()))  # type: ignore[misc]
    cpu = time.process_time()
    await _take(backend, claims)
    await asyncio.sleep(2)
    assert server.metric("etcd_debugging_mvcc_watcher_total") == LEASES
    bare = from_url(server.url)
    others = [Claim(f"bare/{number}", 3600.0) for number in range(LEASES)]
    watched, cpu = time.process_time() - cpu, time.process_time()
    await _take(bare, others)
    await asyncio.sleep(2)
    plain = time.process_time() - cpu
    waits = []
    for name in (claim.name for claim in claims[:NOTICES]):
        key, began = backend._keys.line(name)[0].decode(), time.perf_counter()
        await asyncio.to_thread(server.delete, key)
        await until(partial(heard.__contains__, name), what="the notice")
        waits.append(heard[name] - began)
    await backend.aclose()
    await bare.aclose()
    return [
        Row("CPU of a watch on a held lock", f"{(watched - plain) / LEASES * 1e6:.0f} us"),
        Row("news of a deleted lock: p50 / max", f"{statistics.median(waits) * 1e3:.1f} / {max(waits) * 1e3:.1f} ms"),
    ]


async def measure(*, quick: bool) -> list[Row]:
    with EtcdCluster() as server:
        version = server.ask("maintenance/status")["version"]
        print(f"aiohttp {aiohttp.__version__}, etcd {version}, one member, without fsync")
        rows = await one_pair(server, times=TIMES // 4 if quick else TIMES)
        rows += await many_renewals(server)
        rows += await hand_off(server)
        return rows + await notices(server)


if __name__ == "__main__":
    run(measure)
