"""
What locks in Redis cost, beside redis-py's own `Lock` and the least that a Python client can do.

    uv run python -m benchmarks redis [--quick]
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Awaitable, Callable

from benchmarks.path import path
from benchmarks.redis.cycles import many_tasks, uncontended
from benchmarks.redis.faults import deleted, stopped
from benchmarks.redis.held import held_leases
from benchmarks.redis.line import hand_off
from benchmarks.redis.scripts import scripts
from benchmarks.redis.server import OwnServer, missing
from benchmarks.table import Row, run
from fencing_sdk import connect


async def measure_all(server: OwnServer, *, quick: bool) -> list[Row]:
    """One after the other; one that fails is a row of its own."""
    measures: dict[str, Callable[[], Awaitable[list[Row]]]] = {
        "path": lambda: _path(server),
        "uncontended": lambda: uncontended(server, rounds=3 if quick else 11, cycles=200 if quick else 500),
        "many tasks": lambda: many_tasks(server, tasks=1000, rounds=2 if quick else 5, cycles=3 if quick else 5),
        "hand-off": lambda: hand_off(server, waiters=100, rounds=3 if quick else 9),
        "leases held": lambda: held_leases(server, intervals=1 if quick else 3),
        "lock deleted": lambda: deleted(server, rounds=30 if quick else 300),
        "server stopped": lambda: stopped(server, rounds=1 if quick else 3, leases=20),
        "scripts": lambda: scripts(server, locks=1_000, rounds=3 if quick else 9),
    }
    rows: list[Row] = []
    for name, measuring in measures.items():
        begin = time.monotonic()
        try:
            rows += await measuring()
        except Exception as error:  # noqa: BLE001  (the other measures are worth having)
            rows.append(Row(name, f"failed: {error!r}", reached=False))
        server.clear()
        print(f"  ({name} took {time.monotonic() - begin:.0f} s)")
    return rows


async def _path(server: OwnServer) -> list[Row]:
    async with connect(server.url) as locks:
        return await path(locks)


async def measure(*, quick: bool) -> list[Row]:
    with OwnServer() as server:
        print(f"Redis {server.version()}")
        return await measure_all(server, quick=quick)


if __name__ == "__main__":
    if hint := missing():
        sys.exit(hint)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # and the server is stopped on the way out
    run(measure)
