"""What scenarios on all stores share: a client whose events are kept, a stay under a lock, proof of nothing left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from event_log import CLOCK, Log
from inside import wall_micros
from patience import until

import fencing_sdk
from fencing_sdk import BackendUnavailableError, Lease, Lock, LockClient, LossReason, connect
from fencing_sdk.events import Renewed

T = TypeVar("T")

PACKAGE = Path(fencing_sdk.__file__).parent
PATIENCE = 60.0
"""Seconds after which something that should happen soon has not happened."""

SHORT = {"ttl": 4.0, "safety_buffer": 2.4, "heartbeat_interval": 0.4}
"""For a lease that is to be lost. The buffer is longer than an interval, and than a machine may stand still."""

LONG = {"ttl": 12.0, "safety_buffer": 0.6, "heartbeat_interval": 0.3}
"""For a lease that is to be kept, on a machine that may stand still for seconds."""

LEAVING = 15.0
"""Seconds in which an ``async with`` is left whatever the server does: release is given two. Machines stand still."""


class Stay:
    """One stay inside ``async with lock``, and when it ended."""

    def __init__(self, lock: Lock, *, work: float | None = None) -> None:
        self._lock = lock
        self._work = work
        self._stop = asyncio.Event()
        self.entered = asyncio.Event()
        self.lease: Lease | None = None
        self.token = -1
        self.granted_at = self.body_ended_at = self.left_at = float("nan")
        self.body_ended_micros = 0
        self.error: BaseException | None = None
        self.task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        try:
            async with self._lock as lease:
                self.lease, self.token, self.granted_at = lease, lease.token, CLOCK.now()
                self.entered.set()
                try:
                    async with asyncio.timeout(self._work):
                        await self._stop.wait()
                except TimeoutError:
                    pass
                finally:
                    self.body_ended_at, self.body_ended_micros = CLOCK.now(), wall_micros()
        except Exception as error:
            self.error = error
        finally:
            self.left_at = CLOCK.now()

    @property
    def lost(self) -> LossReason | None:
        """Why the lease was lost, if a bare `LeaseLostError` left."""
        return self.error.reason if isinstance(self.error, fencing_sdk.LeaseLostError) else None

    async def begun(self) -> Lease:
        """Wait until the body runs."""
        entered = asyncio.ensure_future(self.entered.wait())
        async with asyncio.timeout(PATIENCE):
            await asyncio.wait((entered, self.task), return_when=asyncio.FIRST_COMPLETED)
        entered.cancel()
        if self.lease is None:
            raise AssertionError(f"the lock was not entered: {self.error!r}") from self.error
        return self.lease

    async def over(self, within: float = PATIENCE) -> None:
        """Wait until the ``async with`` was left."""
        async with asyncio.timeout(within):
            await asyncio.wait((self.task,))

    async def end(self) -> None:
        """Let the body end, and see the ``async with`` left without an error."""
        self._stop.set()
        await self.over()
        assert self.error is None, self.error

    async def abandon(self) -> None:
        """Cancel the task, whatever it does."""
        self.task.cancel()
        await asyncio.wait((self.task,))


@asynccontextmanager
async def staying(lock: Lock, **options: Any) -> AsyncIterator[Stay]:
    """A stay whose body runs, and that does not outlive the block."""
    stay = Stay(lock, **options)
    try:
        await stay.begun()
        yield stay
    finally:
        await stay.abandon()


@asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncIterator[tuple[LockClient, Log]]:
    """A client and its events, and afterwards the proof that it left no task and no unhandled error behind."""
    log = Log()
    with no_loose_ends():
        async with connect(url, observers=[log], **options) as client:
            yield client, log


_clients: list[asyncio.AbstractEventLoop] = []


@contextlib.contextmanager
def no_loose_ends() -> Iterator[None]:
    """When the last client of the loop is closed: no task of the package, and nothing that only the loop was told."""
    loop = asyncio.get_running_loop()
    unhandled: list[dict[str, Any]] = []
    handler = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: unhandled.append(context))
    _clients.append(loop)
    try:
        yield
        assert loop in _clients[:-1] or [task for task in asyncio.all_tasks() if _runs_the_package(task)] == []
        assert unhandled == []
    finally:
        _clients.pop()
        loop.set_exception_handler(handler)


def _runs_the_package(task: asyncio.Task[Any]) -> bool:
    code = getattr(task.get_coro(), "cr_code", None)
    return code is not None and Path(code.co_filename).is_relative_to(PACKAGE)


async def eventually(ask: Any, *, what: str, within: float = PATIENCE) -> Any:
    """Ask a server again and again, until the answer is true; return it."""
    stop = CLOCK.now() + within
    while not (answer := await ask()):
        assert CLOCK.now() < stop, f"{what}: not within {within} s"
        await asyncio.sleep(0.01)
    return answer


async def none_left(leavings: Callable[[], Awaitable[Collection[object]]], *, within: float = PATIENCE) -> None:
    """See that a store keeps nothing of closed clients."""
    stop = CLOCK.now() + within
    while left := await leavings():
        assert CLOCK.now() < stop, left
        await asyncio.sleep(0.01)


async def answered(ask: Callable[[], Awaitable[T]], *, within: float = PATIENCE) -> T:
    """
    Make a call that is not repeated by itself until the store answers; return the answer, or raise its refusal.

    On a machine that stands still the client gives such a call up, also because a renewal beside it was given up.
    """
    stop = CLOCK.now() + within
    while True:
        try:
            return await ask()
        except BackendUnavailableError:
            if CLOCK.now() >= stop:
                raise
        await asyncio.sleep(0.01)


async def renewed_or_over(log: Log, stay: Stay) -> None:
    """Wait until a short lease was renewed, or is over already because the machine stood still."""
    await until(lambda: log.of(Renewed) or stay.task.done(), what="the lease is renewed")


async def use_in_turn(clients: Any, *, tasks: int, times: int, **options: Any) -> list[int]:
    """Let *tasks* tasks of each client enter one lock *times* times; the tokens, after a look at every one of them."""
    inside: list[int] = []
    tokens: list[int] = []

    async def use(locks: Any, number: int) -> None:
        for _ in range(times):
            async with locks.lock("a", ttl=60, wait=100, **options) as lease:
                assert inside == []
                inside.append(number)
                tokens.append(lease.token)
                await asyncio.sleep(0.001)
                assert inside.pop() == number

    await asyncio.gather(*(use(locks, number) for locks in clients for number in range(tasks)))
    assert tokens == sorted(set(tokens))
    assert len(tokens) == len(clients) * tasks * times
    return tokens
