"""
A process of tasks that work on leased rows of one table, for `torture`, until it is sent a SIGTERM.

``python torture_worker.py URL MODE SEED SLOW LOG``. The log says when each transaction of the application began and
ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fencing_sdk.errors import DrainingError, FencingError, LeaseLostError
from fencing_sdk.rows import LeasedRows, RowClient, RowLease, row_client

CANCELLED, PLAIN = "cancelled", "plain"
NO_COMPARE, COUNTER, REVIVES = "no-compare", "counter", "revives"
TTL = 2.0
POLL = 0.5
SLOW = 1.5 * TTL
"""Seconds of long work, and of slow transactions."""
TASKS = 8
CONNECTIONS = 4
IDLE_LIMIT = 2 * TTL
"""Seconds after which PostgreSQL ends the transaction of a process that is frozen."""
CLAIM_IDS = {"sqlite": "hex(randomblob(16))", "postgresql": "gen_random_uuid()::text", "mysql": "uuid()"}
FREE = {"sqlite": "0", "postgresql": "'epoch'", "mysql": "'1970-01-01'"}


def dialect_at(url: str) -> str:
    scheme = url.partition(":")[0]
    return "mysql" if scheme == "mariadb" else scheme


class Application:
    """The application's own connections, and a log of when its transactions began and ended."""

    def __init__(self, url: str, log: Path) -> None:
        self.url = url
        self.dialect = dialect_at(url)
        self._path = log
        self._log = -1
        self._number = 0
        self._most = asyncio.Semaphore(1 if self.dialect == "sqlite" else CONNECTIONS)
        self._idle: list[Any] = []

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        async with self._most:
            connection = self._idle.pop() if self._idle else await self._connect()
            self._number += 1
            number = self._number
            self._write("b", number)
            try:
                await self.execute(connection, "BEGIN IMMEDIATE" if self.dialect == "sqlite" else "BEGIN")
                yield connection
                await self.execute(connection, "COMMIT")
            except BaseException:
                await self._close(connection)  # which rolls back
                raise
            else:
                self._idle.append(connection)
            finally:
                self._write("e", number)

    async def execute(self, connection: Any, statement: str, *values: object) -> None:
        """Run a statement that writes its values as ``%s``."""
        if self.dialect == "postgresql":
            for number in range(1, len(values) + 1):
                statement = statement.replace("%s", f"${number}", 1)
            await connection.execute(statement, *values)
        elif self.dialect == "sqlite":
            await connection.execute(statement.replace("%s", "?"), values)
        else:
            async with connection.cursor() as cursor:
                await cursor.execute(statement, values)

    async def _connect(self) -> Any:
        path = self.url.partition("://")[2]
        if self.dialect == "sqlite":
            return await importlib.import_module("aiosqlite").connect(path[1:], timeout=20, isolation_level=None)
        if self.dialect == "postgresql":
            limit = str(int(IDLE_LIMIT * 1000))
            settings = {
                "idle_in_transaction_session_timeout": limit,
                "synchronous_commit": random.choice(("on", "off")),
            }
            return await importlib.import_module("asyncpg").connect(self.url, server_settings=settings)
        user, _, address = path.partition("@")
        host, _, database = address.partition("/")
        name, _, port = host.partition(":")
        connect = importlib.import_module("asyncmy").connect
        return await connect(host=name, port=int(port), user=user, db=database)

    async def _close(self, connection: Any) -> None:
        with contextlib.suppress(Exception):
            if self.dialect == "sqlite":
                await connection.close()
            elif self.dialect == "postgresql":
                connection.terminate()
            else:
                connection.close()

    async def aclose(self) -> None:
        while self._idle:
            await self._close(self._idle.pop())

    def _write(self, what: str, number: int) -> None:
        if self._log < 0:
            self._log = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(self._log, f"{what} {number} {time.monotonic():.3f}\n".encode())


class Worker:
    """Tasks that work on rows until the process is sent a SIGTERM."""

    def __init__(self, url: str, mode: str, seed: int, slow: float, log: Path) -> None:
        self.application = Application(url, log)
        self.mode = mode
        self.chance = random.Random(seed)
        self.slow = slow
        if mode == COUNTER:
            from fencing_sdk.rows import _postgresql

            _postgresql._NEXT = "{name}.lease_token + 1"
        if mode != CANCELLED:
            RowLease.check = lambda _: None  # type: ignore[method-assign]  # the compare alone protects

    async def work(self) -> None:
        async with row_client(self.application.url, open_wait=60) as db, db.draining_on(signal.SIGTERM, within=20):
            jobs = jobs_of(db, self.application.dialect)
            await asyncio.gather(*(self._loop(jobs) for _ in range(TASKS)))
        await self.application.aclose()

    async def _loop(self, jobs: LeasedRows) -> None:
        while True:
            try:
                await (self._one_cancelled(jobs) if self.mode == CANCELLED else self._one_plain(jobs))
            except DrainingError:
                return
            except Exception as error:  # the next row, as `LeasedRows.run` does
                if not isinstance(error, FencingError):
                    sys.stderr.write(f"{type(error).__name__}: {error}\n".replace("\n", " ") + "\n")
                    await asyncio.sleep(0.05)

    async def _one_cancelled(self, jobs: LeasedRows) -> None:
        async with jobs.take() as lease:
            await self._handle(lease)

    async def _one_plain(self, jobs: LeasedRows) -> None:
        lease = await jobs.take().acquire()
        renewing = asyncio.create_task(self._revive(lease)) if self.mode == REVIVES else None
        try:
            await self._handle(lease)
        finally:
            if renewing is not None:
                renewing.cancel()
            with contextlib.suppress(LeaseLostError):
                await lease.release()

    async def _revive(self, lease: RowLease) -> None:
        """Renew by hand, and so take the row back from a later claim."""
        until = "UPDATE jobs SET leased_until = clock_timestamp() + interval '2 s', lease_token = %s WHERE id = %s"
        while True:
            await asyncio.sleep(TTL / 6)
            async with self.application.transaction() as transaction:
                await self.application.execute(transaction, until, lease.row["lease_token"], lease.row["id"])

    async def _handle(self, lease: RowLease) -> None:
        row, run = lease.row, self.application.execute
        await asyncio.sleep(self.chance.expovariate(1 / 0.01))
        if self._is_slow():
            await asyncio.sleep(SLOW)
        async with self.application.transaction() as transaction:
            effect = "INSERT INTO effects (job, claim, process) VALUES (%s, %s, %s)"
            await run(transaction, effect, row["id"], row["claim"], os.getpid())
            if self._is_slow():
                await asyncio.sleep(SLOW)
            if self.mode == NO_COMPARE:
                free = FREE[self.application.dialect]
                await run(
                    transaction, f"UPDATE jobs SET state = 'done', leased_until = {free} WHERE id = %s", row["id"]
                )
            else:
                await lease.finish(transaction, state="done")
            if self._is_slow():
                await asyncio.sleep(SLOW)

    def _is_slow(self) -> bool:
        return self.chance.random() < self.slow


def jobs_of(db: RowClient, dialect: str) -> LeasedRows:
    counted = f"attempts = attempts + 1, claim = {CLAIM_IDS[dialect]}"
    return db.rows(
        "jobs", where="state = 'queued'", order="priority, id", on_claim=counted, ttl=TTL, poll=POLL, rest=0.1
    )


if __name__ == "__main__":
    address, how, seed, part, transactions = sys.argv[1:]
    logging.disable(logging.CRITICAL)
    asyncio.run(Worker(address, how, int(seed), float(part), Path(transactions)).work())
