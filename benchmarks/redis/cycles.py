"""Acquire and release: one after the other on a free lock, and by a thousand tasks at once."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from redis.asyncio import Redis

from benchmarks.redis.peers import TTL, BareLock, patient_client, redis_py_cycle, shipped_client
from benchmarks.redis.server import OwnServer
from benchmarks.table import Row, p50_p99, percentile, times
from fencing_sdk import Lock, connect
from fencing_sdk.abc import Claim
from fencing_sdk.backends.redis import from_url

Cycle = Callable[[str], Awaitable[None]]
Contestant = Callable[[OwnServer], AbstractAsyncContextManager[Cycle]]

OURS_ANEW = "ours: async with locks.lock(name)"
OURS_AGAIN = "ours: async with lock, one object"
BACKEND = "ours: the backend alone"
BARE = "bare hiredis protocol"
SHIPPED = "redis-py Lock, as shipped"
PATIENT = "redis-py Lock, blocking pool"


@asynccontextmanager
async def _ours(server: OwnServer) -> AsyncIterator[Cycle]:
    async with connect(server.url) as locks:

        async def cycle(name: str) -> None:
            async with locks.lock(name, ttl=TTL):
                pass

        yield cycle


@asynccontextmanager
async def _ours_again(server: OwnServer) -> AsyncIterator[Cycle]:
    async with connect(server.url) as locks:
        known: dict[str, Lock] = {}

        async def cycle(name: str) -> None:
            lock = known.get(name)
            if lock is None:
                lock = known[name] = locks.lock(name, ttl=TTL)
            async with lock:
                pass

        yield cycle


@asynccontextmanager
async def _backend(server: OwnServer) -> AsyncIterator[Cycle]:
    backend = from_url(server.url)
    try:

        async def cycle(name: str) -> None:
            claim = Claim(name, TTL)
            await backend.draw(claim, only_if_it_holds=True)
            await backend.give_back(claim)

        yield cycle
    finally:
        await backend.aclose()


@asynccontextmanager
async def _bare(server: OwnServer) -> AsyncIterator[Cycle]:
    lock = await BareLock.open(server.port)
    try:
        yield lock.cycle
    finally:
        lock.close()


def _redis_py(make: Callable[[OwnServer], Redis]) -> Contestant:
    @asynccontextmanager
    async def contestant(server: OwnServer) -> AsyncIterator[Cycle]:
        client = make(server)
        try:
            yield lambda name: redis_py_cycle(client, name)
        finally:
            await client.aclose()

    return contestant


CONTESTANTS: dict[str, Contestant] = {
    OURS_ANEW: _ours,
    OURS_AGAIN: _ours_again,
    BACKEND: _backend,
    BARE: _bare,
    SHIPPED: _redis_py(shipped_client),
    PATIENT: _redis_py(patient_client),
}


@dataclass
class Record:
    """What was seen of one contestant, in seconds for each cycle."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    latency: list[float] = field(default_factory=list)
    trips: float = 0.0
    commands: float = 0.0
    errors: int = 0
    connections: int = 0

    def add(self, wall: float, cpu: float, cycles: int) -> None:
        self.wall.append(wall / max(1, cycles))
        self.cpu.append(cpu / max(1, cycles))

    def line(self, name: str) -> str:
        wall, cpu = statistics.median(self.wall) * 1e6, statistics.median(self.cpu) * 1e6
        return f"  {name:36} {1e6 / wall:9,.0f} cycles/s {cpu:7.1f} us CPU (min {min(self.cpu) * 1e6:6.1f})"


def _in_turn(number: int, records: dict[str, Record]) -> list[str]:
    """Begin each round with another contestant."""
    names = list(records)
    start = number % len(names)
    return names[start:] + names[:start]


async def uncontended(server: OwnServer, *, rounds: int, cycles: int) -> list[Row]:
    """One task, one lock, which is always free."""
    records = {name: Record() for name in CONTESTANTS}
    async with AsyncExitStack() as stack:
        running = {name: await stack.enter_async_context(make(server)) for name, make in CONTESTANTS.items()}
        for number in range(rounds + 1):
            for name in _in_turn(number, records):
                record = records[name] if number else Record()  # the first round warms up
                await _one_round(server, name, running[name], record, cycles)
    print(f"\nuncontended: {rounds} rounds of {cycles} cycles, interleaved")
    for name, record in records.items():
        trips = f"{record.trips:.2f} round trips, {record.commands:.2f} commands"
        print(f"{record.line(name)}  {p50_p99(record.latency)}, {trips}")
    return _uncontended_rows(records)


async def _one_round(server: OwnServer, name: str, cycle: Cycle, record: Record, cycles: int) -> None:
    sent = ("evalsha", "eval") if name.startswith("ours") else ("evalsha", "eval", "set")  # ours call SET in a script
    reads, commands = server.reads(), server.calls(sent)
    clock, latency = time.perf_counter, []
    cpu, begin = time.process_time(), clock()
    for _ in range(cycles):
        before = clock()
        await cycle("uncontended")
        latency.append(clock() - before)
    wall, cpu = clock() - begin, time.process_time() - cpu
    record.add(wall, cpu, cycles)
    record.latency += latency
    looks = 2  # at the commands before, and at the reads after
    record.trips = (server.reads() - reads - looks) / cycles
    record.commands = (server.calls(sent) - commands) / cycles


def _uncontended_rows(records: dict[str, Record]) -> list[Row]:
    theirs, bare = records[SHIPPED], records[BARE]
    rows = [
        Row(
            "uncontended: round trips",
            f"{records[OURS_ANEW].trips:.2f}",
            f"redis-py {theirs.trips:.2f}, bare {bare.trips:.2f}",
            reach="2",
            reached=round(records[OURS_ANEW].trips, 1) == 2,
        )
    ]
    for name in (OURS_ANEW, OURS_AGAIN, BACKEND):
        record = records[name]
        cpu = statistics.median(record.cpu)
        ratio = cpu / statistics.median(theirs.cpu)
        rows.append(
            Row(
                f"uncontended: CPU, {name.removeprefix('ours: ')}",
                f"{cpu * 1e6:.0f} us (min {min(record.cpu) * 1e6:.0f})",
                f"redis-py {_cpu(theirs)}, bare {_cpu(bare)}",
                f"{ratio:.2f}x, {times(cpu, statistics.median(bare.cpu))} bare",
                "0.5x redis-py",
                ratio <= 0.5,
            )
        )
    mine = records[OURS_ANEW].latency
    peers = f"redis-py {_p50_p99(theirs.latency)}, bare {_p50_p99(bare.latency)}"
    slower = times(statistics.median(mine), statistics.median(theirs.latency))
    rows.append(Row("uncontended: p50 / p99", f"{_p50_p99(mine)} us", peers, slower))
    return rows


def _cpu(record: Record) -> str:
    return f"{statistics.median(record.cpu) * 1e6:.0f} (min {min(record.cpu) * 1e6:.0f})"


def _p50_p99(values: list[float]) -> str:
    return f"{statistics.median(values) * 1e6:.0f} / {percentile(values, 99) * 1e6:.0f}"


async def many_tasks(server: OwnServer, *, tasks: int, rounds: int, cycles: int) -> list[Row]:
    """Each task on a lock of its own; every contestant connects anew in every round, before the clock starts."""
    names = (OURS_ANEW, BACKEND, BARE, SHIPPED, PATIENT)
    records = {name: Record() for name in names}
    for number in range(rounds):
        for name in _in_turn(number, records):
            await _crowd(server, CONTESTANTS[name], records[name], tasks, cycles)
    print(f"\n{tasks:,} tasks on {tasks:,} names: {rounds} rounds of {cycles} cycles for each task, interleaved")
    for name, record in records.items():
        print(f"{record.line(name)}  {record.errors:,} errors, {record.connections} connections")
    return _crowd_rows(records, tasks)


async def _crowd(server: OwnServer, make: Contestant, record: Record, tasks: int, cycles: int) -> None:
    idle = server.connections()

    async def work(cycle: Cycle, name: str, times: int) -> int:
        done = 0
        for _ in range(times):
            try:
                await cycle(name)
            except Exception:  # noqa: BLE001  (whatever it is, it is counted)
                record.errors += 1
                await asyncio.sleep(0)  # an error that comes without a wait must not keep the others from working
            else:
                done += 1
        return done

    async with make(server) as cycle:
        await cycle("warm")
        cpu, begin = time.process_time(), time.perf_counter()
        done = sum(await asyncio.gather(*(work(cycle, f"crowd/{number}", cycles) for number in range(tasks))))
        record.add(time.perf_counter() - begin, time.process_time() - cpu, done)
        record.connections = max(record.connections, server.connections() - idle)
    server.clear()  # what a failed cycle left behind


def _crowd_rows(records: dict[str, Record], tasks: int) -> list[Row]:
    rates = {name: 1 / statistics.median(record.wall) for name, record in records.items()}
    shipped, patient, ours = records[SHIPPED], records[PATIENT], records[OURS_ANEW]
    what = f"{tasks:,} tasks"

    def rate(name: str, title: str) -> Row:
        ratio, pooled, bare = (rates[name] / rates[other] for other in (SHIPPED, PATIENT, BARE))
        return Row(
            f"{what}: cycles/s, {title}",
            f"{rates[name]:,.0f}",
            f"as shipped {rates[SHIPPED]:,.0f}, blocking pool {rates[PATIENT]:,.0f}, bare {rates[BARE]:,.0f}",
            f"{ratio:.1f}x, {pooled:.1f}x, {bare:.2f}x",
            "10x as shipped",
            ratio >= 10,
        )

    errors = f"as shipped {shipped.errors:,}, blocking pool {patient.errors:,}"
    connections = f"as shipped {shipped.connections}, blocking pool {patient.connections}"
    return [
        rate(OURS_ANEW, "async with"),
        rate(BACKEND, "the backend alone"),
        Row(f"{what}: errors", str(ours.errors), errors, reach="0", reached=ours.errors == 0),
        Row(f"{what}: connections", str(ours.connections), connections, reach="1", reached=ours.connections == 1),
    ]
