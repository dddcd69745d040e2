"""
A process that works under a lock and can be stopped at any moment.

    pause_worker.py URL SINK NAME TTL TASKS SHAPE

Its tasks send messages to the socket SINK: the time, read first, and the token, read last. It
reports on stdout, in JSON lines, how its leases go, and takes the lock again when it has lost it.

    calls     each task sends one message, and waits for the answer
    bursts    each task sends twenty messages without suspending, and then waits for the answers
    threads   the same as calls, from threads, which nothing can cancel
    careless  threads, with a token that was read once; they notice the loss some messages later
    blocked   calls, and in their middle something keeps the event loop for longer than the ttl
    endless   one computation that never awaits, for longer than the ttl
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import time
from collections.abc import Iterator
from typing import BinaryIO

from fencing_sdk import BackendUnavailableError, Lease, LeaseLostError, connect
from fencing_sdk._values.clock import BootClock
from fencing_sdk.events import Acquired, Event, Lost, Renewed

CLOCK = BootClock()
BURST = 20


def report(kind: str, **fields: object) -> None:
    print(json.dumps({"kind": kind, **fields}), flush=True)  # noqa: T201  (the controller reads it)


def observe(event: Event) -> None:
    if isinstance(event, Acquired | Renewed | Lost):
        report(**event.as_dict())


def line(lease: Lease) -> bytes:
    before = CLOCK.now()
    return b"%.9f %d\n" % (before, lease.token)


class Worker:
    def __init__(self, sink: str, ttl: float, tasks: int, shape: str) -> None:
        self.sink = sink
        self.ttl = ttl
        self.tasks = tasks
        self.shape = shape

    async def work(self, lease: Lease) -> None:
        if self.shape == "endless":
            return compute(self.ttl * 1.2)
        if self.shape in {"threads", "careless"}:
            send = self.send_from_thread if self.shape == "threads" else self.send_carelessly
            await asyncio.gather(*(asyncio.to_thread(send, lease) for _ in range(self.tasks)))
            return None
        async with asyncio.TaskGroup() as group:
            for _ in range(self.tasks):
                group.create_task(self.send(lease))
            if self.shape == "blocked":
                await asyncio.sleep(self.ttl)
                compute(self.ttl)
        return None

    async def send(self, lease: Lease) -> None:
        reader, writer = await asyncio.open_unix_connection(self.sink)
        count = BURST if self.shape == "bursts" else 1
        try:
            while True:
                for _ in range(count):
                    writer.write(line(lease))
                for _ in range(count):
                    await reader.readline()
        finally:
            writer.close()

    def send_from_thread(self, lease: Lease) -> None:
        with self.connection() as (connection, answers):
            while True:
                connection.sendall(line(lease))
                answers.readline()

    def send_carelessly(self, lease: Lease) -> None:
        kept, more = lease.token, 5
        with self.connection() as (connection, answers):
            while more:
                connection.sendall(b"%.9f %d\n" % (CLOCK.now(), kept))
                answers.readline()
                more -= not lease.held

    @contextlib.contextmanager
    def connection(self) -> Iterator[tuple[socket.socket, BinaryIO]]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self.sink)
            with connection.makefile("rb") as answers:
                yield connection, answers


def compute(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        sum(range(100))


async def main(url: str, sink: str, name: str, ttl: str, tasks: str, shape: str) -> None:
    worker = Worker(sink, float(ttl), int(tasks), shape)
    async with connect(url, observers=[observe]) as locks:
        lock = locks.lock(name, ttl=float(ttl))
        while True:
            try:
                async with lock as lease:
                    await worker.work(lease)
                report("left", reason="finished", tokens=[])
            except* LeaseLostError as lost:
                report("left", reason=reasons(lost)[0], tokens=sorted(tokens(lost)))
            except* BackendUnavailableError:  # it stood still for a ttl with a request on its way
                pass


def leaves(group: BaseExceptionGroup[LeaseLostError]) -> list[LeaseLostError]:
    return [leaf for error in group.exceptions for leaf in (leaves(error) if hasattr(error, "exceptions") else [error])]


def reasons(group: BaseExceptionGroup[LeaseLostError]) -> list[str]:
    return [error.reason.value for error in leaves(group)]


def tokens(group: BaseExceptionGroup[LeaseLostError]) -> set[int]:
    return {error.token for error in leaves(group)}


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
