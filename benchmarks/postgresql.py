"""
What locks and guards in PostgreSQL cost, beside bare asyncpg statements and an advisory lock.

    uv run python benchmarks/postgresql.py

Starts a server of its own, without fsync: the disk would be the same for everybody.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from pathlib import Path

import asyncpg
from _measure import Operation, compare, report

from fencing_sdk import LockClient, connect
from fencing_sdk.abc import Claim, Renewal
from fencing_sdk.backends.postgresql import from_url
from fencing_sdk.guards.sql import SqlGuard

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "servers"))

from postgresql_server import PostgresqlServer

TIMES = 400
LEASES = 1_000
WAITERS = 50
ROUNDS = 7
PATIENCE = 30.0


async def one_cycle(server: PostgresqlServer) -> None:
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

    backend = from_url(server.url)

    async def pair() -> None:
        claim = Claim("bench", 60.0)
        await backend.acquire(claim)
        await backend.release(claim)

    async with LockClient(backend) as locks:
        held = locks.lock("bench scoped")

        async def scoped() -> None:
            async with held:
                pass

        contestants: dict[str, Operation] = {
            "bare: two writes by asyncpg": writes,
            "pg_try_advisory_lock, pg_advisory_unlock": advisory,
            "backend.acquire, backend.release": pair,
            "async with lock": scoped,
        }
        report("acquire and release: two statements", await compare(contestants, times=TIMES))
    await bare.close()


async def statements(server: PostgresqlServer) -> None:
    """What the server was told, by its own log."""
    await server.execute(f"ALTER DATABASE {server.database} SET log_statement = 'all'")
    backend, claims = from_url(server.url), [Claim(f"counted/{number}", 60.0) for number in range(LEASES)]
    try:
        await backend.inspect("counted")  # connected, and the schema is there
        print(f"\nstatements, and {LEASES:,} leases")
        for what, call in {
            "acquire": lambda: backend.acquire(claims[0]),
            "renew": lambda: backend.renew(claims[:1]),
            "release": lambda: backend.release(claims[0]),
        }.items():
            print(f"  {what:38} {await _told(server, call)}")
        for claim in claims:
            await backend.acquire(claim)
        print(f"  {f'renew of {LEASES:,}':38} {await _told(server, lambda: backend.renew(claims))}")
        taken = []
        for _ in range(ROUNDS):
            wall, cpu = time.perf_counter(), time.process_time()
            outcomes = await backend.renew(claims)
            taken.append((time.perf_counter() - wall, time.process_time() - cpu))
            assert outcomes.count(Renewal.RENEWED) == LEASES
        print(f"  {'its time':38} {statistics.median(wall for wall, _ in taken) * 1e3:.1f} ms")
        print(f"  {'its CPU for each lease':38} {statistics.median(cpu for _, cpu in taken) / LEASES * 1e6:.1f} us")
    finally:
        await backend.aclose()
        await server.execute(f"ALTER DATABASE {server.database} RESET log_statement")


async def _told(server: PostgresqlServer, call: Operation) -> int:
    def lines() -> int:
        return sum(server.log().count(mark) for mark in ("LOG:  execute ", "LOG:  statement: "))

    before = lines()
    await call()
    return lines() - before


async def guarded_writes(server: PostgresqlServer) -> None:
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
    report("a write of the caller's", await compare(contestants, times=TIMES))
    await connection.close()


async def hand_off(server: PostgresqlServer) -> None:
    """From the end of one body to the first line of the next, beside a bare write that was measured just before."""
    trips, ordered, gaps = [], 0, []
    for _ in range(ROUNDS):
        trip = await _bare_trip(server)
        taken, order = await _passed_on(server)
        trips.append(trip)
        gaps += [gap / trip for gap in taken]
        ordered += order == sorted(order)
    gaps.sort()
    print(f"\nhand-off, {WAITERS} waiters")
    print(f"  {'a bare write':38} {statistics.median(trips) * 1e6:.0f} us")
    p99 = gaps[int(len(gaps) * 0.99)]
    print(f"  {'p50 / p99':38} {statistics.median(gaps):.1f} / {p99:.1f} bare writes")
    print(f"  {'in order of arrival':38} {ordered} of {ROUNDS} rounds")


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
                while await server.value("SELECT count(*) FROM fencing.fencing_waiter") <= number:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
            await asyncio.sleep(0.2)  # each tries once more when it stands in line
            left_at = time.perf_counter()
        await asyncio.gather(*tasks)
    return gaps, order


async def main() -> None:
    with PostgresqlServer() as server:
        version = await server.value("SHOW server_version")
        print(f"Python {sys.version.split()[0]}, asyncpg {asyncpg.__version__}, PostgreSQL {version}")
        await one_cycle(server)
        await statements(server)
        await guarded_writes(server)
        await hand_off(server)


if __name__ == "__main__":
    asyncio.run(main())
