"""
A Kahuna cluster in trouble, and waiters that share its locks, on the stand-in: counts and times, not speed.

    uv run python -m benchmarks kahuna_cluster

Failover: each of three nodes in turn is stopped, cut off or killed for 1.2 s while 20 leases are held; times are scaled
by ten, so a failover takes 0.26 to 0.43 s. Polling: 12 tasks take 4 locks for 20 to 300 ms, with 3 s of patience, in
one client and in three processes, beside the same on ``memory://``; and ten waiters of a lock that is held.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.table import Row, p50_p99, percentile, run, times
from fencing_sdk import AcquireTimeoutError, Lease, LockClient, connect

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "servers"))

from kahuna_server import KahunaServer

TROUBLES = {"stopped": ("stop", "go_on"), "cut off": ("cut", "join"), "killed": ("down", "up")}
FAILOVER = (0.26, 0.43)
TROUBLE, REST = 1.2, 0.5
LEASES = 20
LEAST_LEFT = 0.35
TASKS, LOCKS, PATIENCE = 12, 4, 3.0
HOLDS = (0.02, 0.05, 0.1, 0.3)
PROCESSES = 3


async def ride_out(server: KahunaServer, trouble: str, ttl: float) -> tuple[int, float]:
    """How many leases are lost, and the least time that one had left."""
    begin, end = (getattr(server, order) for order in TROUBLES[trouble])
    server.reset()
    server.cluster(failover=FAILOVER)
    async with connect(server.url) as locks:
        leases = [await locks.lock(f"lock/{number}", ttl=ttl).acquire() for number in range(LEASES)]
        least = ttl
        for node in range(3):
            for order, seconds in ((begin, TROUBLE), (end, REST)):
                await asyncio.to_thread(order, node)
                least = min(least, await least_left(leases, seconds))
        lost = sum(not lease.held for lease in leases)
        for lease in leases:
            await lease.release()
    return lost, least


async def least_left(leases: list[Lease], seconds: float) -> float:
    least, end = float("inf"), time.monotonic() + seconds
    while time.monotonic() < end:
        least = min(least, *(lease.remaining for lease in leases))
        await asyncio.sleep(0.01)
    return least


async def share(url: str, tasks: int, seconds: float, seed: int) -> tuple[list[float], int]:
    """The waits of *tasks* that take locks in turn, and how many of them ran out of patience."""
    waits: list[float] = []
    timeouts = 0

    async def take(locks: LockClient, chance: random.Random) -> None:
        nonlocal timeouts
        while time.monotonic() < end:
            began = time.monotonic()
            try:
                async with locks.lock(f"shared/{chance.randrange(LOCKS)}", wait=PATIENCE):
                    waits.append(time.monotonic() - began)
                    await asyncio.sleep(chance.choice(HOLDS))
            except AcquireTimeoutError:
                timeouts += 1

    async with connect(url) as locks:
        end = time.monotonic() + seconds
        await asyncio.gather(*(take(locks, random.Random(100 * seed + number)) for number in range(tasks)))
    return waits, timeouts


async def share_in_processes(url: str, seconds: float) -> tuple[list[float], int]:
    program = "import asyncio, json; from benchmarks.kahuna_cluster import share"
    waits: list[float] = []
    timeouts = 0
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            f"{program}; print(json.dumps(asyncio.run(share({url!r}, {TASKS // PROCESSES}, {seconds}, {number}))))",
            stdout=asyncio.subprocess.PIPE,
        )
        for number in range(PROCESSES)
    ]
    for process in processes:
        output, _ = await process.communicate()
        more, lost = json.loads(output)
        waits += more
        timeouts += lost
    return waits, timeouts


async def wait_for_long(server: KahunaServer, clients: int, seconds: float) -> float:
    """Requests a second of each client, with ten waiters in all, for a lock that another client holds."""
    server.reset()
    async with connect(server.url) as holding:
        holder = await holding.lock("long", ttl=60).acquire()
        rivals = [connect(server.url) for _ in range(clients)]
        for rival in rivals:
            await rival.__aenter__()
        before = len(server.seen())
        tasks = [asyncio.create_task(rivals[number % clients].lock("long").acquire()) for number in range(10)]
        await asyncio.sleep(seconds)
        asked = len(server.seen()) - len(server.seen("try-extend")) - before
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await holder.release()
        for rival in rivals:
            await rival.aclose()
    return asked / seconds / clients


async def failovers(server: KahunaServer, *, quick: bool) -> list[Row]:
    rows = []
    for ttl, runs in ((1.0, 2 if quick else 10), (1.5, 1 if quick else 3)):
        for trouble in TROUBLES:
            results = [await ride_out(server, trouble, ttl) for _ in range(runs)]
            lost, least = sum(lost for lost, _ in results), min(least for _, least in results)
            measure = f"{trouble}, {LEASES} leases of {ttl:g} s, {runs} runs"
            reached = lost == 0 if ttl == 1.0 else least >= LEAST_LEFT
            reach = "none lost" if ttl == 1.0 else f"{LEAST_LEFT} s left"
            rows.append(Row(measure, f"{lost} lost, {least:.2f} s left at least", reach=reach, reached=reached))
    return rows


async def sharing(server: KahunaServer, *, quick: bool) -> list[Row]:
    seconds = 15.0 if quick else 60.0
    rows = []
    memory, _ = await share("memory://", TASKS, seconds, 1)
    peer = f"memory: {p50_p99(memory, scale=1, unit='s')}"
    for name, reach in (("one client", 1.0), (f"{PROCESSES} processes", 4.0)):
        server.reset()
        one = name == "one client"
        taken = await (share(server.url, TASKS, seconds, 1) if one else share_in_processes(server.url, seconds))
        waits, timeouts = taken
        part, requests = 100 * timeouts / (timeouts + len(waits)), len(server.seen()) / len(waits)
        figures = f"{part:.1f} % time out, {p50_p99(waits, scale=1, unit='s')}, {requests:.1f} requests a grant"
        ratio = times(percentile(waits, 99), percentile(memory, 99)) + " p99"
        measure = f"{TASKS} tasks on {LOCKS} locks, {name}"
        rows.append(Row(measure, figures, peer, ratio, f"{reach:g} % time out", part <= reach))
    return rows


async def waiting(server: KahunaServer, *, quick: bool) -> list[Row]:
    rows = []
    for clients, most in ((1, 5.0), (10, 5.0)):
        asked = await wait_for_long(server, clients, 10.0 if quick else 20.0)
        measure = f"ten waiters of a lock that is held, in {clients} client{'s' * (clients > 1)}"
        rows.append(Row(measure, f"{asked:.1f} requests/s each", reach=f"{most:g} each", reached=asked <= most))
    return rows


async def measure(*, quick: bool) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder, KahunaServer(Path(folder), nodes=3) as server:
        return [
            *await failovers(server, quick=quick),
            *await sharing(server, quick=quick),
            *await waiting(server, quick=quick),
        ]


if __name__ == "__main__":
    run(measure)
