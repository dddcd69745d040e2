"""
A process that works under locks and may be frozen, killed, blocked or told to leave at any moment.

    fire_worker.py CONFIG        JSON: url, sink, record, actor, names, ttl, seed, tasks

It writes to the resource behind the Unix socket *sink*, and into *record* what it sees. SIGTERM ends it in good order,
SIGUSR1 keeps its main thread busy for a while, SIGUSR2 cancels one of its tasks from outside, SIGHUP lengthens the ttl.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from typing import Any

from fencing_sdk import AcquireTimeoutError, Lease, LeaseLostError, LockClient, StaleTokenError, connect
from fencing_sdk._lease import state_of
from fencing_sdk._recording import Recorder
from fencing_sdk._values.clock import BootClock
from fencing_sdk._values.observers import keep_off_console
from fencing_sdk._values.token import format_token
from fencing_sdk.errors import BackendUnavailableError
from fencing_sdk.recipes import Election

CLOCK = BootClock()
TICK = 0.02
PERMITS = 3
STALL = 0.1
"""Seconds by which the loop may be late without being called blocked: a quarter of the safety buffer of 0.4 s."""


EXPECTED = (AcquireTimeoutError, BackendUnavailableError, StaleTokenError, LeaseLostError, asyncio.CancelledError)
"""What may come out of an acquisition."""


class OwnError(Exception):
    """What a body raises by itself."""


class Connection:
    """What is sent leaves at once; only the answer is waited for."""

    def __init__(self, actor: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._actor = actor
        self._reader = reader
        self._writer = writer

    def send(self, op: str, resource: str, token: str) -> None:
        self._writer.write(_request(self._actor, op, resource, token))

    async def answer(self) -> bool:
        """Whether the write was accepted."""
        return _accepted(await self._reader.readline())

    async def ask(self, op: str, resource: str, token: str) -> bool:
        self.send(op, resource, token)
        return await self.answer()


def _request(actor: str, op: str, resource: str, token: str) -> bytes:
    return json.dumps({"op": op, "resource": resource, "token": token, "actor": actor}).encode() + b"\n"


def _accepted(line: bytes) -> bool:
    if not line:
        raise ConnectionResetError("the resource is gone")
    return bool(json.loads(line)["accepted"])


class Resource:
    """The fenced resource, as its clients see it; also a guard that raises the fence from afar."""

    def __init__(self, path: str, actor: str) -> None:
        self._path = path
        self._actor = actor

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Connection]:
        reader, writer = await asyncio.open_unix_connection(self._path)
        try:
            yield Connection(self._actor, reader, writer)
        finally:
            writer.close()

    async def raise_to(self, resource: str, token: Any) -> None:
        async with self.connected() as resource_there:
            if not await resource_there.ask("raise", resource, format_token(token)):
                raise StaleTokenError(resource, int(token), int(token) + 1)  # at least

    async def highest(self, resource: str) -> Any:
        raise NotImplementedError

    @contextmanager
    def blocking(self) -> Iterator[Any]:
        """A function that writes from a thread, which nothing can cancel."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self._path)
            with connection.makefile("rb") as answers:

                def write(resource: str, token: str) -> bool:
                    connection.sendall(_request(self._actor, "write", resource, token))
                    return _accepted(answers.readline())

                yield write


class Worker:
    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.ttl: float = config["ttl"]
        self.random = random.Random(config["seed"])
        self.record = Recorder(config["record"], actor=config["actor"])
        self.resource = Resource(config["sink"], config["actor"])
        self.visits: dict[asyncio.Task[None], dict[str, bool]] = {}
        self.leaving = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._unhandled)
        loop.add_signal_handler(signal.SIGTERM, self.leaving.set)
        loop.add_signal_handler(signal.SIGUSR2, self._cancel_one)
        loop.add_signal_handler(signal.SIGHUP, self._lengthen)
        signal.signal(signal.SIGUSR1, self._block)
        ticking = loop.create_task(self._tick())
        locks = await self._open()
        self.record.record("ready")
        workers = [loop.create_task(self._visit_again_and_again(locks)) for _ in range(self.config["tasks"])]
        leaving = loop.create_task(self.leaving.wait())
        await asyncio.wait((leaving, *workers), return_when=asyncio.FIRST_COMPLETED)
        while self.leaving.is_set() and not all(worker.done() for worker in workers):
            for visit in list(self.visits):
                self._cancel(visit)
            await asyncio.sleep(0.01)
        for worker in workers:
            worker.result()  # one that has ended without being asked to has failed
        await locks.aclose()
        ticking.cancel()
        self.record.record("gone")

    async def _open(self) -> LockClient:
        """A client; the network may be cut when a worker begins."""
        while True:
            locks = connect(self.config["url"], observers=[self.record])
            with suppress(BackendUnavailableError):
                return await locks.__aenter__()
            await asyncio.sleep(0.1)

    # What is done to it

    def _unhandled(self, _loop: object, context: dict[str, Any]) -> None:
        self.record.record("unhandled", what=f"{context.get('message')}: {context.get('exception')!r}")

    def _block(self, *_: object) -> None:
        seconds = self.ttl * self.random.uniform(0.2, 1.4)
        time.sleep(seconds)
        self.record.record("blocked", seconds=seconds)

    def _lengthen(self) -> None:
        """From now on no lock frees itself soon; who waits for one asks again, with the new ttl."""
        self.ttl *= 10
        for visit in [visit for visit, state in self.visits.items() if not state["inside"]]:
            self._cancel(visit)

    def _cancel_one(self) -> None:
        waiting = [visit for visit, state in self.visits.items() if not state["outer"]]
        inside = [visit for visit in waiting if self.visits[visit]["inside"]]
        if chosen := inside or waiting:
            self._cancel(self.random.choice(chosen))

    def _cancel(self, visit: asyncio.Task[None]) -> None:
        if not self.visits[visit]["outer"]:
            self.visits[visit]["outer"] = True
            visit.cancel()

    async def _tick(self) -> None:
        """Notice when this loop does not turn, from the moment at which it should have."""
        while True:
            due = CLOCK.now() + TICK
            await asyncio.sleep(TICK)
            if (now := CLOCK.now()) - due > STALL:
                self.record.record("trouble", what="stalled", who=self.config["actor"], since=due - TICK, until=now)

    # What it does

    async def _visit_again_and_again(self, locks: LockClient) -> None:
        loop = asyncio.get_running_loop()
        while not self.leaving.is_set():
            state = {"outer": False, "inside": False}
            visit = loop.create_task(self._visit(locks, state))
            self.visits[visit] = state
            await asyncio.wait((visit,))
            del self.visits[visit]
            if not visit.cancelled():
                visit.result()
            if not self.leaving.is_set():
                await asyncio.sleep(self.random.uniform(0.0, 0.05))

    async def _visit(self, locks: LockClient, state: dict[str, bool]) -> None:
        name = self.random.choice(self.config["names"])
        fences = [self.resource] if self.random.random() < 0.7 else []
        wait = self.random.choice((None, None, 0.3, 5.0))
        lease: Lease | None = None
        error: BaseException | None = None
        try:
            async with self._lock(locks, name, ttl=self.ttl, wait=wait, fences=fences) as lease:
                state["inside"] = True
                about = {"name": name, "token": state_of(lease).number, "holder": lease.holder}
                self.record.record("entered", **about, fences=[lease.resource] if fences else [])
                how = "clean"
                try:
                    await self._body(lease)
                except BaseException as raised:
                    how = "cancelled" if isinstance(raised, asyncio.CancelledError) else type(raised).__name__
                    raise
                finally:
                    self.record.record("body_ended", **about, how=how)
        except BaseException as raised:  # what it may be is the checker's business
            error = raised
        if not state["inside"]:
            if not isinstance(error, EXPECTED):
                raise error or AssertionError
            return
        left = None if error is None else type(error).__name__
        noted = "was lost too" in "".join(getattr(error, "__notes__", []))
        self.record.record("left", **about, error=left, noted=noted, outer=state["outer"])

    def _lock(self, locks: LockClient, name: str, **options: Any) -> AbstractAsyncContextManager[Lease]:
        if name.startswith("lead/"):
            return _as_leader(locks.election(name, ttl=options["ttl"], fences=options["fences"]))
        if name.startswith("pool/"):
            return locks.semaphore(name, permits=PERMITS, **options)
        if name.startswith("catalog/"):
            catalog = locks.rwlock(name, **options)
            return self.random.choice((catalog.reader, catalog.reader, catalog.writer))
        return locks.lock(name, **options)

    async def _body(self, lease: Lease) -> None:
        end = CLOCK.now() + self.random.uniform(0.02, 0.2)
        match self.random.choices(("steps", "late", "thread", "error", "stay"), (20, 40, 20, 20, 6))[0]:
            case "late":
                await self._write_late(lease, end)
            case "thread":
                await asyncio.to_thread(self._write_from_thread, lease, end)
            case "stay":
                await self._stay(lease, CLOCK.now() + self.config["gone"] * self.random.uniform(1.2, 2.2))
            case shape:
                await self._write_in_steps(lease, end)
                if shape == "error":
                    raise OwnError

    async def _write_in_steps(self, lease: Lease, end: float) -> None:
        """As one should: the token is read for every write, right before it."""
        async with self.resource.connected() as resource:
            while CLOCK.now() < end:
                await resource.ask("write", lease.resource, self._read(lease))
                await asyncio.sleep(self.random.uniform(0.005, 0.03))

    async def _write_late(self, lease: Lease, end: float) -> None:
        """What happens between the look at the token and the write is nobody's promise; the next look is P2."""
        async with self.resource.connected() as resource:
            while CLOCK.now() < end:
                kept = self._read(lease)
                await resource.ask("prepare", lease.resource, kept)
                await asyncio.sleep(self.random.uniform(0.04, 0.1))
                resource.send("write", lease.resource, kept)
                if self.random.random() < 0.5:
                    self._read(lease)
                await resource.answer()

    async def _stay(self, lease: Lease, end: float) -> None:
        """Work on for long, and never ask whether the lease is held: only a cancellation ends this in time."""
        kept = self._read(lease)
        async with self.resource.connected() as resource:
            await resource.ask("stay", lease.resource, kept)
            while CLOCK.now() < end:
                await resource.ask("write", lease.resource, kept)
                await asyncio.sleep(self.random.uniform(0.01, 0.05))

    def _read(self, lease: Lease) -> str:
        before = CLOCK.now()
        token = lease.token
        self.record.record("read", t=before, name=lease.name, token=int(token), holder=lease.holder)
        return format_token(token)

    def _write_from_thread(self, lease: Lease, end: float) -> None:
        """Write with a token that was read once, and notice a loss only some writes later."""
        try:
            kept, more = self._read(lease), 3
        except LeaseLostError:
            return
        with self.resource.blocking() as write:
            while more and (CLOCK.now() < end or not lease.held):
                write(lease.resource, kept)
                with suppress(LeaseLostError):
                    self._read(lease)  # fails for ever, once it is lost
                more -= not lease.held
                time.sleep(0.01)


@asynccontextmanager
async def _as_leader(election: Election) -> AsyncIterator[Lease]:
    """One term of *election*, which rides out a loss without a word: here it is told as a lock tells it."""
    async for term in election:
        async with term as lease:
            yield lease
        if lease.lost_reason is not None:
            raise state_of(lease).loss()
        break


if __name__ == "__main__":
    keep_off_console()  # losses are what the fire is about; what a worker writes is a failure
    asyncio.run(Worker(json.loads(sys.argv[1])).run())
