"""
How long a store may be away without cost: the share of leases that were lost, by the length of the outage.

    uv run python -m benchmarks outages

Real servers, each behind a proxy that swallows everything (silent) or refuses connections (refused) for a while. The
outages begin at sixteen moments between two heartbeats. Only here the ends count and not the speed: promise P6.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from benchmarks.table import Row, run
from fencing_sdk import connect

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "servers"))

from etcd_server import EtcdCluster
from fault_proxy import FaultProxy
from postgresql_proxy import PostgresqlProxy
from postgresql_server import PostgresqlServer
from redis_server import RedisServer

TTL = 6.0
INTERVAL = TTL / 5
PHASES = 16
PROMISED = 0.5
"""Part of a ttl for which a store may be away."""
LENGTHS = (0.40, 0.45, 0.50, 0.54, 0.58, 0.62, 0.66)
MakeProxy = Callable[[], FaultProxy]
MakeUrl = Callable[[FaultProxy], str]


async def lost(proxy: FaultProxy, url: str, phase: float, length: float, *, silent: bool) -> bool:
    """Return whether an outage of *length* ttl loses a lease, if it begins *phase* of an interval after a heartbeat."""
    async with connect(url) as locks:
        lease = await locks.lock(f"outages/{phase}", ttl=TTL).acquire()
        await asyncio.sleep(INTERVAL * (1.05 + phase))
        if silent:
            proxy.blackhole()
        else:
            proxy.refuse()
            proxy.cut()
        await asyncio.sleep(length * TTL)
        proxy.cut()  # what was sent meanwhile never arrives
        proxy.heal()
        await asyncio.sleep(INTERVAL)
        held = lease.held
        await lease.release()
        return not held


async def row(make_proxy: MakeProxy, url: MakeUrl, length: float, *, silent: bool) -> int:
    async def one(phase: int) -> bool:
        async with make_proxy() as proxy:
            return await lost(proxy, url(proxy), phase / PHASES, length, silent=silent)

    return sum(await asyncio.gather(*[one(phase) for phase in range(PHASES)]))


async def measure(*, quick: bool) -> list[Row]:
    lengths = LENGTHS[2:6:2] if quick else LENGTHS
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer())
        postgresql = stack.enter_context(PostgresqlServer())
        etcd = stack.enter_context(EtcdCluster())
        stores: dict[str, tuple[MakeProxy, MakeUrl]] = {
            "redis": (lambda: FaultProxy(redis.port), lambda proxy: f"redis://127.0.0.1:{proxy.port}"),
            "postgresql": (lambda: PostgresqlProxy(postgresql), lambda proxy: proxy.url),
            "etcd": (lambda: FaultProxy(etcd.members[0].port), lambda proxy: f"etcd://127.0.0.1:{proxy.port}"),
        }
        rows = []
        for silent in (True, False):
            for name, (make_proxy, url) in stores.items():
                numbers = [await row(make_proxy, url, length, silent=silent) for length in lengths]
                losses = ", ".join(f"{number} at {length:.2f}" for length, number in zip(lengths, numbers, strict=True))
                kept = not any(number for length, number in zip(lengths, numbers, strict=True) if length <= PROMISED)
                kind = "silent" if silent else "refused"
                rows.append(
                    Row(f"{name}, {kind}: lost of {PHASES}", losses, reach=f"0 up to {PROMISED} ttl", reached=kept)
                )
        return rows


if __name__ == "__main__":
    run(measure)
