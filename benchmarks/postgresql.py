"""
What locks and guards in PostgreSQL cost, beside bare asyncpg statements and an advisory lock.

    uv run python -m benchmarks postgresql

Starts a server of its own, without fsync: the disk would be the same for everybody.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from pathlib import Path

import asyncpg

from benchmarks.cycle import cycle
from benchmarks.table import Operation, Row, compare, compared, percentile, run
from fencing_sdk import LockClient, connect
from fencing_sdk.abc import Claim, Place
from fencing_sdk.backends.postgresql import from_url
from fencing_sdk.guards.sql import SqlGuard

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "servers"))

from postgresql_server import PostgresqlServer

TIMES = 400
LEASES = 1_000
WAITERS = 50
ROUNDS = 7
PATIENCE = 30.0


async def one_cycle(server: PostgresqlServer, *, times: int) -> list[Row]:
    """Two statements each: an advisory lock and its unlock, two writes of a row, and our acquire and release."""
    bare = await asyncpg.connect(server.url)
    await bare.execute("CREATE TABLE plain (name text PRIMARY KEY, number bigint); INSERT INTO plain VALUES ('a', 0)")
    take = await bare.prepare("SELECT pg_try_advisory_lock($1)")
    give = await bare.prepare("SELECT pg_advisory_unlock($1)")
    write = await bare.prepare("UPDATE plain SET number = number + 1 WHERE name = $1 RETURNING number")

    async def advisory() -> None:
        await take.fetchval(42)
        await give.fetchval(42)

    async def writes() -> None:
        await write.fetchval("a")
        await write.fetchval("a")

    beside = {"two writes by asyncpg": writes, "pg_try_advisory_lock, pg_advisory_unlock": advisory}
    rows = await cycle(from_url(server.url), beside, times=times, reach=1.5)
    await bare.close()
    return rows


async def statements(server: PostgresqlServer) -> list[Row]:
    """Count the statements that reach the server, by its own log."""
    await server.execute(f"ALTER DATABASE {server.database} SET log_statement = 'all'")
    backend, claims = from_url(server.url), [Claim(f"counted/{number}", 60.0) for number in range(LEASES)]
    try:
        await backend.tickets(["counted"])  # connected, and the schema is there
        calls = {
            "acquire": lambda: backend.draw(claims[0]),
            "renew": lambda: backend.keep([(claims[0], 0)]),
            "release": lambda: backend.give_back(claims[0]),
        }
        counts = {what: await _logged(server, call) for what, call in calls.items()}
        for claim in claims:
            await backend.draw(claim)
        counts[f"renew of {LEASES:,}"] = await _logged(server, lambda: backend.keep([(claim, 0) for claim in claims]))
        taken = []
        for _ in range(ROUNDS):
            wall, cpu = time.perf_counter(), time.process_time()
            outcomes = await backend.keep([(claim, 0) for claim in claims])
            taken.append((time.perf_counter() - wall, time.process_time() - cpu))
            assert sum(isinstance(outcome, Place) for outcome in outcomes) == LEASES
        wall, cpu = (statistics.median(column) for column in zip(*taken, strict=True))
        cost = f"{wall * 1e3:.1f} ms, {cpu / LEASES * 1e6:.1f} us of CPU for each"
        return [
            *[
                Row(f"statements of {what}", str(number), reach="1", reached=number == 1)
                for what, number in counts.items()
            ],
            Row(f"a renewal of {LEASES:,} leases", cost),
        ]
    finally:
        await backend.aclose()
        await server.execute(f"ALTER DATABASE {server.database} RESET log_statement")


async def _logged(server: PostgresqlServer, call: Operation) -> int:
    def lines() -> int:
        return sum(server.log().count(mark) for mark in ("LOG:  execute ", "LOG:  statement: "))

    before = lines()
    await call()
    return lines() - before


async def guarded_writes(server: PostgresqlServer, *, times: int) -> list[Row]:
    """The caller's transaction: with nothing else, with one more statement, and with a guard."""
    connection, guard = await asyncpg.connect(server.url), SqlGuard()
    await connection.execute("CREATE TABLE seats (id text PRIMARY KEY, holder text)")
    await connection.execute("INSERT INTO seats VALUES ('42', NULL)")
    update = "UPDATE seats SET holder = $1 WHERE id = '42'"
    async with connection.transaction():
        await guard.admit(connection, "seats/42", 34)

    async def unguarded() -> None:
        async with connection.transaction():
            await connection.execute(update, "ann")

    async def and_one_more() -> None:
        async with connection.transaction():
            await connection.fetch("SELECT holder FROM seats WHERE id = $1 FOR UPDATE", "42")
            await connection.execute(update, "ann")

    async def guarded() -> None:
        async with connection.transaction():
            await guard.admit(connection, "seats/42", 34)
            await connection.execute(update, "ann")

    contestants: dict[str, Operation] = {
        "a transaction, and one more statement": and_one_more,
        "the transaction alone": unguarded,
        "the transaction with a guard": guarded,
    }
    rows = compared(await compare(contestants, times=times))
    await connection.close()
    return rows


async def hand_off(server: PostgresqlServer) -> list[Row]:
    """From the end of one body to the first line of the next, beside a bare write that was measured just before."""
    trips, ordered, gaps = [], 0, []
    for _ in range(ROUNDS):
        trip = await _bare_trip(server)
        taken, order = await _passed_on(server)
        trips.append(trip)
        gaps += [gap / trip for gap in taken]
        ordered += order == sorted(order)
    what = f"hand-off, {WAITERS} waiters"
    bare = f"a bare write: {statistics.median(trips) * 1e6:.0f} us"
    return [
        Row(f"{what}: p50 / p99", f"{statistics.median(gaps):.1f} / {percentile(gaps, 99):.1f} bare writes", bare),
        Row(f"{what}: in order of arrival", f"{ordered} of {ROUNDS} rounds", reach="all", reached=ordered == ROUNDS),
    ]


async def _bare_trip(server: PostgresqlServer) -> float:
    connection, taken = await asyncpg.connect(server.url), []
    write = await connection.prepare("UPDATE plain SET number = number + 1 WHERE name = 'a'")
    for _ in range(300):
        begin = time.perf_counter()
        await write.fetch()
        taken.append(time.perf_counter() - begin)
    await connection.close()
    return statistics.median(taken)


async def _passed_on(server: PostgresqlServer) -> tuple[list[float], list[int]]:
    gaps: list[float] = []
    order: list[int] = []
    left_at = 0.0

    async def wait(locks: LockClient, number: int) -> None:
        nonlocal left_at
        async with locks.lock("handed on", ttl=60, wait=PATIENCE):
            gaps.append(time.perf_counter() - left_at)
            order.append(number)
            left_at = time.perf_counter()

    async with connect(server.url) as locks:
        async with locks.lock("handed on", ttl=60):
            tasks = []
            for number in range(WAITERS):
                tasks.append(asyncio.create_task(wait(locks, number)))
                while len(await locks.waiters("handed on")) <= number:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
            await asyncio.sleep(0.2)  # the client listens
            left_at = time.perf_counter()
        await asyncio.gather(*tasks)
    return gaps, order


async def measure(*, quick: bool) -> list[Row]:
    times = TIMES // 4 if quick else TIMES
    with PostgresqlServer() as server:
        print(f"asyncpg {asyncpg.__version__}, PostgreSQL {await server.value('SHOW server_version')}")
        rows = await one_cycle(server, times=times)
        rows += await statements(server)
        rows += await guarded_writes(server, times=times)
        return rows + await hand_off(server)


if __name__ == "__main__":
    run(measure)
