"""A lock taken away behind its holder's back, and a server that falls silent."""

from __future__ import annotations

import asyncio
import statistics
import time

from benchmarks.redis.peers import TTL, BareConnection
from benchmarks.redis.server import OwnServer
from benchmarks.table import Row, p50_p99, percentile
from fencing_sdk import LeaseLostError, LockClient, connect
from fencing_sdk.backends.redis.keys import DEFAULT_PREFIX, LINE, RedisKeys

_SHORT = 2.0
_BUFFER = _SHORT / 5
_LEAVES_WITHIN = 2.0
_PATIENCE = 20.0


def _key(name: str) -> str:
    return f"{RedisKeys(DEFAULT_PREFIX).tag(name)}{LINE}"


class Body:
    """A body under a lock that waits until it is cancelled, and when it was."""

    def __init__(self, locks: LockClient, name: str, ttl: float) -> None:
        self._lock = locks.lock(name, ttl=ttl)
        self.entered = asyncio.Event()
        self.cancelled_at = 0.0
        self.left_at = 0.0

    async def run(self) -> None:
        try:
            async with self._lock:
                self.entered.set()
                try:
                    await asyncio.sleep(_PATIENCE)
                finally:
                    self.cancelled_at = time.perf_counter()
        except LeaseLostError:
            self.left_at = time.perf_counter()


async def deleted(server: OwnServer, *, rounds: int) -> list[Row]:
    """DEL by another connection, and the time until the body is cancelled."""
    operator = await BareConnection.open(server.port)
    noticed, trips = [], []
    async with connect(server.url) as locks:
        bodies = [Body(locks, f"deleted/{number}", TTL) for number in range(rounds)]
        tasks = [asyncio.create_task(body.run()) for body in bodies]
        await asyncio.gather(*(body.entered.wait() for body in bodies))
        await asyncio.sleep(0.5)  # a lock is followed from a quarter of a second after its grant on
        for number, (body, task) in enumerate(zip(bodies, tasks, strict=True)):
            begin = time.perf_counter()
            await operator.call("DEL", _key(f"deleted/{number}"))
            trips.append(time.perf_counter() - begin)
            await task
            noticed.append(body.cancelled_at - begin)
    operator.close()
    print(f"\ndeleted behind the holder's back: {p50_p99(noticed)}, the DEL itself {p50_p99(trips)}, {rounds} times")
    p50 = statistics.median(noticed)
    seen = f"{p50 * 1e3:.2f} / {percentile(noticed, 99) * 1e3:.2f} ms"
    return [Row("lock deleted: cancelled after, p50 / p99", seen, "redis-py: never", "", "p50 < 5 ms", p50 < 0.005)]


async def stopped(server: OwnServer, *, rounds: int, leases: int) -> list[Row]:
    """SIGSTOP, and how long before the end of the lease at the store the body is cancelled."""
    margins, exits, lost = [], [], 0
    for number in range(rounds):
        async with connect(server.url) as locks:
            names = [f"stopped/{number}/{lease}" for lease in range(leases)]
            bodies = [Body(locks, name, _SHORT) for name in names]
            tasks = [asyncio.create_task(body.run()) for body in bodies]
            await asyncio.gather(*(body.entered.wait() for body in bodies))
            await asyncio.sleep(
                _SHORT / 2 + number * 0.07
            )  # some renewals, and not always the same time since the last
            ends = [time.perf_counter() + server.seconds_left(_key(name)) for name in names]
            server.pause()
            try:
                await asyncio.gather(*tasks)
            finally:
                server.resume()
            margins += [end - body.cancelled_at for end, body in zip(ends, bodies, strict=True)]
            exits += [body.left_at - body.cancelled_at for body in bodies]
            lost += sum(body.left_at > 0 for body in bodies)
    early, worst, middle = min(margins), max(exits), statistics.median(margins)
    print(
        f"\nserver stopped: {len(margins)} leases of {_SHORT:g} s, safety buffer {_BUFFER:g} s, {lost} LeaseLostError"
    )
    print(f"  cancelled before the end at the store: {early:.3f} s at least, median {middle:.3f} s")
    print(f"  left after the cancellation: {p50_p99(exits, scale=1, unit='s')}, worst {worst:.3f} s")
    early_enough, soon_enough = f">= {_BUFFER:g} s (the buffer)", f"<= {_LEAVES_WITHIN:g} s"
    return [
        Row(
            "server stopped: cancelled before the end",
            f"{early:.3f} s at least",
            "redis-py: never",
            reach=early_enough,
            reached=early >= _BUFFER and lost == len(margins),
        ),
        Row(
            "server stopped: async with left after",
            f"{worst:.3f} s at most",
            reach=soon_enough,
            reached=worst <= _LEAVES_WITHIN,
        ),
    ]
