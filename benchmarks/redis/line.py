"""Hand-off: from the end of one holder's body to the next holder's first line, with waiters in line."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass, field

from benchmarks.link import slow_link
from benchmarks.redis.floor import backend_alone
from benchmarks.redis.peers import TTL, BareLock, patient_client
from benchmarks.redis.server import OwnServer
from benchmarks.table import Row, p50_p99, percentile
from fencing_sdk import LockClient, connect
from fencing_sdk.backends.redis.keys import DEFAULT_PREFIX, RedisKeys

_NAME = "handed on"
_WAITING = f"{RedisKeys(DEFAULT_PREFIX).tag(_NAME)}:w"
_PATIENCE = 20.0


@dataclass
class Passing:
    """What was seen while a lock went from hand to hand."""

    trip: float
    """Seconds that a bare round trip took just before."""
    gaps: list[float] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    left_at: float = 0.0
    commands: float = 0.0
    cpu: float = 0.0

    def enter(self, number: int) -> None:
        self.gaps.append(time.perf_counter() - self.left_at)
        self.order.append(number)

    def leave(self) -> None:
        self.left_at = time.perf_counter()

    @property
    def in_order(self) -> bool:
        return self.order == sorted(self.order)


async def hand_off(server: OwnServer, *, waiters: int, rounds: int) -> list[Row]:
    """Also with a tenth of the waiters: the commands for each hand-off must not depend on their number."""
    few, many, theirs = [], [], []
    below = []  # in trips, as everything in the table: of the same round, because their length wanders
    bare = await BareLock.open(server.port)
    await _ours(server, waiters, 1.0)  # so that the server knows the scripts: those who teach it arrive a little later
    for _ in range(rounds):
        trip = statistics.median(await _bare_trips(bare, 300))
        many.append(await _ours(server, waiters, trip))
        below += [gap / trip for gap in await backend_alone(server, waiters)]
        few.append(await _ours(server, waiters // 10, trip))
        theirs.append(await _redis_py(server, waiters, trip))
    bare.close()
    far = await _far(server, waiters, rounds)
    alone = Row("hand-off: the backend alone", _p50_p99(below))
    return [*_rows(few, many, theirs, waiters), far, alone]


async def _far(server: OwnServer, waiters: int, rounds: int) -> Row:
    """The same over a link with a latency, where what counts is how often it is crossed."""
    with slow_link(server.port) as port:
        bare = await BareLock.open(port)
        trip = statistics.median(await _bare_trips(bare, 100))
        bare.close()
        url = server.url.replace(str(server.port), str(port))
        gaps = _trips([await _ours(server, waiters, trip, url) for _ in range(rounds)])
    what = f"hand-off, {waiters} waiters, {trip * 1e3:.1f} ms away: p50 / p99"
    return Row(what, _p50_p99(gaps), "", "", "p50 < 2 trips", statistics.median(gaps) < 2)


async def _bare_trips(bare: BareLock, times: int) -> list[float]:
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        await bare.renew("nobody's", "nobody")
        taken.append(time.perf_counter() - begin)
    return taken


async def _ours(server: OwnServer, waiters: int, trip: float, url: str = "") -> Passing:
    passing = Passing(trip)

    async def wait(locks: LockClient, number: int) -> None:
        async with locks.lock(_NAME, ttl=TTL, wait=_PATIENCE):
            passing.enter(number)
            passing.leave()

    async with connect(url or server.url) as locks:
        async with locks.lock(_NAME, ttl=TTL):
            tasks = []
            for number in range(waiters):
                tasks.append(asyncio.create_task(wait(locks, number)))
                await asyncio.sleep(0)
            await _all_in_line(server, waiters)
            commands, cpu = server.calls(), time.process_time()
            passing.leave()
        await asyncio.gather(*tasks)
        passing.cpu = (time.process_time() - cpu) / waiters
        passing.commands = (server.calls() - commands) / waiters
    return passing


async def _all_in_line(server: OwnServer, waiters: int) -> None:
    end = time.monotonic() + _PATIENCE
    while await asyncio.to_thread(server.waiting, _WAITING) < waiters:
        if time.monotonic() > end:
            raise TimeoutError("the waiters do not get into the line")
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)


async def _redis_py(server: OwnServer, waiters: int, trip: float) -> Passing:
    passing = Passing(trip)
    client = patient_client(server)

    async def wait(number: int) -> None:
        async with client.lock("handed on by redis-py", timeout=TTL, blocking_timeout=_PATIENCE):
            passing.enter(number)
            passing.leave()

    try:
        async with client.lock("handed on by redis-py", timeout=TTL):
            tasks = [asyncio.create_task(wait(number)) for number in range(waiters)]
            await asyncio.sleep(0.3)
            sets = server.calls(("set",))
            passing.leave()
        await asyncio.gather(*tasks)
        passing.commands = 1 + (server.calls(("set",)) - sets) / waiters
    finally:
        await client.aclose()
    return passing


def _gaps(passings: list[Passing]) -> list[float]:
    return [gap for passing in passings for gap in passing.gaps]


def _trips(passings: list[Passing]) -> list[float]:
    return [gap / passing.trip for passing in passings for gap in passing.gaps]


def _p50_p99(trips: list[float]) -> str:
    return f"{statistics.median(trips):,.1f} / {percentile(trips, 99):,.1f} trips"


def _rows(few: list[Passing], many: list[Passing], theirs: list[Passing], waiters: int) -> list[Row]:
    what = f"hand-off, {waiters} waiters"
    mine, other = _trips(many), _trips(theirs)
    p50 = statistics.median(mine)
    shortest, *_, longest = sorted(passing.trip * 1e6 for passing in many)
    commands = [statistics.median(passing.commands for passing in passings) for passings in (few, many, theirs)]
    ordered = sum(passing.in_order for passing in many)
    print(f"\n{what}: a bare round trip takes {shortest:.0f} to {longest:.0f} us (p50 of a round), {len(many)} rounds")
    cpu = statistics.median(passing.cpu for passing in many) * 1e6
    print(f"  ours      {p50_p99(_gaps(many))}, {cpu:.0f} us CPU for each hand-off")
    print(f"  redis-py  {p50_p99(_gaps(theirs))}")
    constant = f"{commands[1]:.2f} ({waiters // 10} waiters: {commands[0]:.2f})"
    return [
        Row(
            f"{what}: p50 / p99",
            _p50_p99(mine),
            f"redis-py {_p50_p99(other)}",
            f"{p50 / statistics.median(other):.3f}x",
            "p50 <= 2 trips",
            p50 <= 2,
        ),
        Row(
            f"{what}: in order of arrival",
            f"{ordered} of {len(many)} rounds",
            f"redis-py {sum(p.in_order for p in theirs)}",
            "",
            "all",
            ordered == len(many),
        ),
        Row(
            f"{what}: commands for each",
            constant,
            f"redis-py {commands[2]:.1f}",
            "",
            "constant",
            abs(commands[1] - commands[0]) < 0.5,
        ),
    ]
