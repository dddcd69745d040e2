"""
Locks in ZooKeeper, against kazoo's own lock recipe on the same server, which this script starts.

    uv run python -m benchmarks zookeeper

The server does not wait for its disk (``forceSync=no``), so that what is measured is the client and the protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from kazoo.client import KazooClient

from benchmarks.table import Row, p50_p99, run
from fencing_sdk import Lease, LockClient
from fencing_sdk.abc import Claim, Place
from fencing_sdk.backends.zookeeper import from_url

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "servers"))

from zookeeper_server import ZooKeeperServer

TIMES = 100
ROUNDS = 15
HANDOFFS = 40
HANDOFF_ROUNDS = 20
WAITERS = 50
LEASES = 1000


def timed(work: Callable[[], object]) -> float:
    """Microseconds for one call: the median of `TIMES`, so that other processes on the machine matter less."""
    walls = []
    for _ in range(TIMES):
        begun = time.perf_counter()
        work()
        walls.append(time.perf_counter() - begun)
    return statistics.median(walls) * 1e6


async def atimed(work: Callable[[], Awaitable[object]]) -> float:
    walls = []
    for _ in range(TIMES):
        begun = time.perf_counter()
        await work()
        walls.append(time.perf_counter() - begun)
    return statistics.median(walls) * 1e6


async def free_lock(server: ZooKeeperServer, kazoo: KazooClient, *, rounds: int) -> list[Row]:
    """Acquire and release a free lock."""
    backend = from_url(f"{server.url}/ours")
    recipe = kazoo.Lock("/kazoo/free")
    kazoo.ensure_path("/bare")

    def bare() -> None:
        kazoo.delete(kazoo.create("/bare/n-", b"", ephemeral=True, sequence=True))

    def by_recipe() -> None:
        with recipe:
            pass

    async def pair() -> None:
        claim = Claim("free", 15.0)
        assert isinstance(await backend.draw(claim), Place)
        await backend.give_back(claim)

    async with LockClient(backend) as locks:
        lock = locks.lock("free")

        async def scoped() -> None:
            async with lock:
                pass

        samples: dict[str, list[float]] = {}
        for number in range(rounds + 1):
            taken = {
                "bare: kazoo create, delete": await asyncio.to_thread(timed, bare),
                "kazoo Lock": await asyncio.to_thread(timed, by_recipe),
                "backend.draw, backend.give_back": await atimed(pair),
                "async with lock": await atimed(scoped),
            }
            for name, wall in taken.items():
                samples.setdefault(name, []).extend([wall] if number else [])
    walls = {name: statistics.median(taken) for name, taken in samples.items()}
    peer = walls.pop("kazoo Lock")
    return [
        Row(name, f"{wall:.0f} us", f"kazoo Lock: {peer:.0f} us", f"{wall / peer:.2f}x") for name, wall in walls.items()
    ]


def kazoo_handoffs(hosts: str) -> list[float]:
    """Two clients take turns; the seconds from the release to the other's grant."""
    clients = [KazooClient(hosts), KazooClient(hosts)]
    for client in clients:
        client.start()
    locks = [client.Lock("/kazoo/handoff") for client in clients]
    lags: list[float] = []
    released = 0.0
    locks[0].acquire()
    for number in range(HANDOFFS):
        holder, waiter = locks[number % 2], locks[1 - number % 2]
        granted = threading.Event()
        at: list[float] = []

        def wait(waiter: object = waiter, at: list[float] = at, granted: threading.Event = granted) -> None:
            waiter.acquire()  # type: ignore[attr-defined]
            at.append(time.perf_counter())
            granted.set()

        threading.Thread(target=wait).start()
        while len(holder.contenders()) < 2:
            time.sleep(0.001)
        time.sleep(0.005)
        released = time.perf_counter()
        holder.release()
        granted.wait()
        lags.append(at[0] - released)
    for client in clients:
        client.stop()
        client.close()
    return lags


async def our_handoffs(url: str) -> list[float]:
    lags: list[float] = []
    async with LockClient(from_url(url)) as first, LockClient(from_url(url)) as second:
        clients = (first, second)
        lease = await first.lock("handoff", ttl=30).acquire()
        for number in range(HANDOFFS):
            waiting = asyncio.create_task(granted(clients[1 - number % 2]))
            while not await first.waiters("handoff"):  # noqa: ASYNC110  (it waits in the store)
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.005)
            released = time.perf_counter()
            await lease.release()
            lease, at = await waiting
            lags.append(at - released)
        await lease.release()
    return lags


async def granted(client: LockClient) -> tuple[Lease, float]:
    lease = await client.lock("handoff", ttl=30).acquire()
    return lease, time.perf_counter()


async def handoff(server: ZooKeeperServer, *, rounds: int) -> list[Row]:
    """The one that is first in a round is last in the next one, so that the load of the machine meets both."""
    theirs: list[float] = []
    ours: list[float] = []
    ratios = []
    for number in range(rounds + 1):
        if number % 2:
            kazoo = await asyncio.to_thread(kazoo_handoffs, server.address)
            own = await our_handoffs(f"{server.url}/ours")
        else:
            own = await our_handoffs(f"{server.url}/ours")
            kazoo = await asyncio.to_thread(kazoo_handoffs, server.address)
        if number:
            theirs += kazoo
            ours += own
            ratios.append(statistics.median(own) / statistics.median(kazoo))
    ratio = statistics.median(ratios)
    peer = f"kazoo Lock: {p50_p99(theirs)}"
    return [Row("hand-off to another client", p50_p99(ours), peer, f"{ratio:.2f}x", "1x", ratio <= 1)]


async def line(server: ZooKeeperServer) -> list[Row]:
    """Fifty waiters of two clients, in the order of their arrival."""
    served: list[int] = []

    async def wait(number: int) -> None:
        async with clients[number % 2].lock("line", ttl=60):
            served.append(number)

    url = f"{server.url}/ours"
    async with LockClient(from_url(url)) as first, LockClient(from_url(url)) as second:
        clients = (first, second)
        async with first.lock("line", ttl=60):
            tasks = []
            for number in range(WAITERS):
                tasks.append(asyncio.create_task(wait(number)))
                while len(await first.waiters("line")) <= number:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            begun = time.perf_counter()
        await asyncio.gather(*tasks)
        wall = time.perf_counter() - begun
    ordered = served == list(range(WAITERS))
    what = f"{WAITERS} waiters of two clients"
    return [
        Row(f"{what}: each", f"{wall / WAITERS * 1e6:.0f} us"),
        Row(f"{what}: in order of arrival", "yes" if ordered else "no", reach="yes", reached=ordered),
    ]


async def held(server: ZooKeeperServer) -> list[Row]:
    """What one heartbeat of a thousand leases costs."""
    backend = from_url(f"{server.url}/ours")
    claims = [Claim(f"held/{number}", 60.0) for number in range(LEASES)]
    await asyncio.gather(*(backend.draw(claim) for claim in claims))
    walls, cpus = [], []
    for _ in range(ROUNDS):
        wall, cpu = time.perf_counter(), time.process_time()
        await backend.keep([(claim, 0) for claim in claims])
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    wall, cpu = statistics.median(walls) * 1e3, statistics.median(cpus) * 1e3
    await asyncio.gather(*(backend.give_back(claim) for claim in claims))
    await backend.aclose()
    return [Row(f"a renewal of {LEASES:,} leases", f"{wall:.0f} ms, {cpu * 1e3 / LEASES:.1f} us of CPU for each")]


async def measure(*, quick: bool) -> list[Row]:
    with ZooKeeperServer() as server:
        kazoo = KazooClient(server.address)
        kazoo.start()
        with contextlib.closing(kazoo):
            rows = await free_lock(server, kazoo, rounds=3 if quick else ROUNDS)
            rows += await handoff(server, rounds=4 if quick else HANDOFF_ROUNDS)
            rows += await line(server)
            rows += await held(server)
            kazoo.stop()
    return rows


if __name__ == "__main__":
    run(measure)
