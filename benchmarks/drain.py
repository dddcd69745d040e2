"""
How long nothing is led when a leader ends: from its signal to the first line of the next leader.

    uv run python -m benchmarks drain

The leader is a process that gets a real signal, the candidate waits in this one. SIGTERM drains the leader. SIGKILL
is what a process without a drain comes to: its ttl has to pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks.table import Row, p50_p99, run
from fencing_sdk import connect
from fencing_sdk.recipes.election import Election

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "servers"))

from etcd_server import EtcdCluster
from postgresql_server import PostgresqlServer
from redis_server import RedisServer

STANDING = Path(__file__).parent.parent / "tests" / "support" / "workers" / "standing.py"
TTL = 3.0
IN_LINE = 0.3
"""Seconds after which a candidate stands in line for sure."""
REACH = 0.020
"""Seconds from SIGTERM to the next leader that the median may take."""


async def gap(url: str, name: str, ending: signal.Signals) -> float:
    """Seconds from the signal *ending* of a leader to the first line of the next one."""
    leader = await asyncio.create_subprocess_exec(
        sys.executable, str(STANDING), url, name, str(TTL), "0", stdout=asyncio.subprocess.PIPE
    )
    assert leader.stdout is not None
    try:
        assert (await leader.stdout.readline()).startswith(b"leads")
        async with connect(url) as locks:
            following = asyncio.create_task(first_line(locks.election(name, ttl=TTL)))
            await asyncio.sleep(IN_LINE)
            signalled = time.monotonic()
            leader.send_signal(ending)
            return await following - signalled
    finally:
        with contextlib.suppress(ProcessLookupError):
            leader.kill()
        await leader.wait()


async def first_line(election: Election) -> float:
    async for term in election:
        async with term:
            return time.monotonic()
    raise AssertionError("drained")


async def measure(*, quick: bool) -> list[Row]:
    rounds, kills = (5, 1) if quick else (21, 3)
    with ExitStack() as stack:
        urls = {
            "redis": stack.enter_context(RedisServer()).url,
            "postgresql": stack.enter_context(PostgresqlServer()).url,
            "etcd": stack.enter_context(EtcdCluster()).url,
        }
        gaps: dict[str, list[float]] = {name: [] for name in urls}
        killed: dict[str, list[float]] = {name: [] for name in urls}
        for number in range(rounds + 1):
            for name, url in urls.items():
                taken = await gap(url, f"drain/{number}", signal.SIGTERM)
                if number:  # the first one makes tables and compiles
                    gaps[name].append(taken)
        for number in range(kills):
            for name, url in urls.items():
                killed[name].append(await gap(url, f"kill/{number}", signal.SIGKILL))
        return [row(name, gaps[name], killed[name]) for name in urls]


def row(name: str, gaps: list[float], killed: list[float]) -> Row:
    median, without = statistics.median(gaps), statistics.median(killed)
    return Row(
        f"{name}: SIGTERM to the next leader",
        f"least {min(gaps) * 1e3:.3g}, {p50_p99(gaps, scale=1e3, unit='ms')}",
        f"SIGKILL, ttl {TTL:g} s: {without:.2f} s",
        f"{median / without:.4f}x",
        f"p50 {REACH * 1e3:g} ms",
        median <= REACH,
    )


if __name__ == "__main__":
    run(measure)
