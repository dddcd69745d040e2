"""
What a ``with`` of fencing_sdk.sync costs on Redis, beside the locks of other libraries for threads, and where it goes.

    uv run python -m benchmarks sync

The contestants take turns in every round, each with one connection. A peer does not renew its lock, and has no token.
Ours runs twice: with uvloop in its background thread, as it does where that is installed, and with the loop of asyncio.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import threading
import time
from collections.abc import Callable

import redis
import redis_lock

from benchmarks.link import slow_link
from benchmarks.redis.server import HOST, OwnServer, missing
from benchmarks.table import Row, run
from fencing_sdk.sync import LockClient, connect

Operation = Callable[[], object]
REACH = 1.5


def compare(contestants: dict[str, Operation], *, times: int, rounds: int) -> dict[str, float]:
    """Microseconds for one operation: the least of the rounds, after one that does not count."""
    best: dict[str, float] = {}
    for number in range(rounds + 1):
        for name, operation in contestants.items():
            began = time.perf_counter()
            for _ in range(times):
                operation()
            taken = (time.perf_counter() - began) / times * 1e6
            if number:
                best[name] = min(taken, best.get(name, taken))
    return best


def on_asyncio(url: str) -> LockClient:
    """Open a client as if uvloop were not installed."""
    installed = sys.modules.get("uvloop")
    sys.modules["uvloop"] = None  # type: ignore[assignment]
    try:
        return connect(url).__enter__()
    finally:
        del sys.modules["uvloop"]
        if installed is not None:
            sys.modules["uvloop"] = installed


def cycles(port: int, locks: LockClient, plain: LockClient, *, times: int, rounds: int, where: str) -> list[Row]:
    client = redis.Redis(host=HOST, port=port)
    ours, on_plain = locks.lock(f"bench/{where}", ttl=30), plain.lock(f"bench/{where}/asyncio", ttl=30)

    def with_ours() -> None:
        with ours:
            pass

    def with_asyncio() -> None:
        with on_plain:
            pass

    def with_redis_py() -> None:
        with client.lock("bench-redis-py", timeout=30):
            pass

    def with_redis_lock() -> None:
        with redis_lock.Lock(client, "bench-redis-lock", expire=30):
            pass

    peers = {"redis-py": with_redis_py, "python-redis-lock": with_redis_lock}
    best = compare({"uvloop": with_ours, "asyncio": with_asyncio, **peers}, times=times, rounds=rounds)
    client.close()
    name = min(peers, key=best.__getitem__)
    others = ", ".join(f"{peer} {best[peer]:.0f}" for peer in peers)
    rows = []
    for loop in ("uvloop", "asyncio"):
        ratio = best[loop] / best[name]
        texts = f"with, {where}, {loop}", f"{best[loop]:.0f} us", f"{others} us", f"{ratio:.2f}x {name}"
        rows.append(Row(*texts, f"{REACH}x", ratio <= REACH))
    return rows


def parts(locks: LockClient, *, times: int, rounds: int) -> list[Row]:
    """A cycle has two hand-offs to the background thread and back, and two trips to the store."""

    async def nothing() -> None: ...

    async def cycle() -> None:
        async with task_lock:
            pass

    async def many() -> float:
        began = time.perf_counter()
        for _ in range(times):
            await cycle()
        return (time.perf_counter() - began) / times * 1e6

    task_lock = locks._client.lock("bench/task", ttl=30)
    memory = connect("memory://")
    memory_lock = memory.lock("a", ttl=30)

    def with_memory() -> None:
        with memory_lock:
            pass

    best = compare({"hand-off": lambda: locks.run(nothing), "memory": with_memory}, times=times, rounds=rounds)
    in_loop = min(locks.run(many) for _ in range(rounds))
    memory.close()
    return [
        Row(
            "a hand-off there and back, bridge alone",
            f"{best['hand-off']:.0f} us",
            f"two threads: {switch(times):.0f} us",
        ),
        Row("with, on memory (two hand-offs, no trip)", f"{best['memory']:.0f} us"),
        Row("async with on Redis, in the loop itself", f"{in_loop:.0f} us"),
    ]


def switch(times: int) -> float:
    """Microseconds for what no bridge can avoid: one thread wakes an idle event loop, and the loop wakes it."""
    loop, lock = asyncio.new_event_loop(), threading.Lock()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    lock.acquire()
    taken = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(times):
            loop.call_soon_threadsafe(lock.release)
            lock.acquire()
        taken.append((time.perf_counter() - began) / times * 1e6)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    return statistics.median(taken)


async def measure(*, quick: bool) -> list[Row]:
    if why := missing():
        print(why)
        sys.exit(0)
    times, rounds = (100, 3) if quick else (400, 9)
    with (
        OwnServer() as server,
        slow_link(server.port) as far,
        connect(server.url) as near,
        connect(f"redis://{HOST}:{far}") as away,
        on_asyncio(server.url) as plain,
        on_asyncio(f"redis://{HOST}:{far}") as plain_away,
    ):
        rows = cycles(server.port, near, plain, times=times, rounds=rounds, where="loopback")
        rows += cycles(far, away, plain_away, times=times // 10, rounds=rounds, where="1 ms away")
        return rows + parts(near, times=times, rounds=rounds)


if __name__ == "__main__":
    run(measure)
