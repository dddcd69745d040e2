"""
Tasks of one event loop: turns, calls that serve many of them, and cancellations that are not lost.

asyncio makes one error of two cancellations of a task in one turn of its loop. anyio before 4.16 takes that error for
its own when a scope has cancelled the task: whatever else cancelled it, such as the closing of a client or a caller's
`asyncio.timeout`, is lost. The scopes here count the cancellations of the task, as later versions of anyio do.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from contextvars import Context
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import anyio

from fencing_sdk._values.loop_owner import no_task, running_loop
from fencing_sdk.errors import shown

S = TypeVar("S", bound="SteadyScope")

if TYPE_CHECKING:
    _AnyScope = anyio.CancelScope
else:
    _AnyScope = object  # anyio loads its scopes when one is first named, and `new_scope` brings them


SCOPES = "anyio._backends._asyncio"
"""Module of anyio's scopes for asyncio: where it is not loaded, none of them cancels a task. It takes 0.1 s to load."""


@functools.cache
def scope_class() -> type[anyio.CancelScope]:
    """The class behind `anyio.CancelScope`, which finds out at every call that this is asyncio."""
    asyncio.get_running_loop()  # elsewhere this fails and is not kept: trio's class would be returned for ever
    return type(anyio.CancelScope())


class SteadyScope(_AnyScope):
    """Lets a cancellation from outside pass. `new_scope` combines it with anyio's scope for asyncio."""

    task: asyncio.Task[object]
    cancelled_before: int
    """Number of cancellations of the task before."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        swallowed = super().__exit__(kind, error, traceback)
        return swallowed and self.task.cancelling() <= self.cancelled_before


@functools.cache
def _combined(kind: type) -> Any:
    return type(kind.__name__, (kind, scope_class()), {})


def new_scope(kind: type[S], task: asyncio.Task[object] | None = None) -> S:
    """
    Make a scope of *kind*, to be entered at once by the *task* that runs.

    Raises:
        UsageError: no task runs here.
    """
    scope: S = _combined(kind)()  # type: ignore[arg-type]  # a generic class is hashable too
    task = asyncio.current_task() if task is None else task
    if task is None:
        raise no_task()
    scope.task, scope.cancelled_before = task, task.cancelling()
    return scope


def move_on_after(seconds: float | None, *, shield: bool = False) -> anyio.CancelScope:
    """Do as `anyio.move_on_after`, and lose no cancellation. Enter it at once."""
    scope = new_scope(SteadyScope)
    scope.shield = shield
    if seconds is not None:
        scope.deadline = running_loop().time() + seconds
    return scope


async def outlast_cancellation(
    wait: Callable[[], Awaitable[object]], finished: Callable[[], bool]
) -> asyncio.CancelledError | None:
    """
    Await *wait* until *finished*, whatever cancels the caller, by anyio or by asyncio.

    Returns a cancellation that came meanwhile, for the caller to raise.
    """
    cancelled = None
    if finished():  # as most releases are by now: a scope would cost more than the look
        return cancelled
    driven = asyncio.current_task() is None  # by a callback: a scope needs a task
    with contextlib.nullcontext() if driven or SCOPES not in sys.modules else scope_class()(shield=True):
        while not finished():
            try:
                await wait()
            except asyncio.CancelledError as error:
                cancelled = error
    return cancelled


def start_task(work: Coroutine[Any, Any, T], name: str = "fencing-store") -> asyncio.Task[T]:
    """Run *work* in a task of the running loop. Its context is empty, so that it keeps nothing of the caller alive."""
    return asyncio.get_running_loop().create_task(work, context=Context(), name=name)


def retrieve(future: asyncio.Future[Any]) -> None:
    """
    Read the outcome of *future*, as a done callback, where no task awaits it.

    Else asyncio logs "exception was never retrieved" for an error that was handled elsewhere, or concerns no caller.
    """
    if not future.cancelled():
        future.exception()


async def cancel_and_wait(task: asyncio.Task[Any], *, limit: float | None = None) -> None:
    """Cancel *task* of the running loop and wait for its end, at most *limit* seconds. Its outcome is dropped."""
    task.cancel()
    await asyncio.wait((task,), timeout=limit)
    if task.done():
        retrieve(task)


HEAD_START = 0.5
"""Seconds for which a server that has answered waits for those that stand before it."""


async def first_in_order(
    works: Sequence[Coroutine[Any, Any, T]],
    blame: Callable[[Sequence[Exception]], Exception | None],
    discard: Callable[[T], object],
) -> T:
    """
    Do *works* side by side, and return the result of the first in their order that does not fail.

    One that is silent is passed over once a later one has been done for `HEAD_START` seconds. The others are cancelled.

    Args:
        works: In their order.

        blame: Makes the error to raise of the failures of the first works, in order; None: the next one may still do.

        discard: Gets the results that are not chosen.

    Raises:
        Exception: what *blame* has made.
    """
    attempts = [start_task(work) for work in works]
    chosen: asyncio.Task[T] | None = None

    def discard_unless_chosen(attempt: asyncio.Task[T]) -> None:
        if attempt is not chosen and not attempt.cancelled() and attempt.exception() is None:
            discard(attempt.result())

    try:
        while (chosen := _first_done(attempts, blame) or await _passed_over(attempts)) is None:
            pass
        return chosen.result()
    finally:
        for attempt in attempts:
            attempt.cancel()
            attempt.add_done_callback(discard_unless_chosen)


def _first_done(
    attempts: Sequence[asyncio.Task[T]], blame: Callable[[Sequence[Exception]], Exception | None]
) -> asyncio.Task[T] | None:
    """Return the first that does not fail, if it is done; raise what *blame* makes of those before it."""
    failures: list[Exception] = []
    for attempt in attempts:
        if not attempt.done():
            return None
        error = attempt.exception()
        if error is None:
            return attempt
        if not isinstance(error, Exception):
            raise error
        failures.append(error)
        if (final := blame(failures)) is not None:
            raise final
    return None


async def _passed_over(attempts: Sequence[asyncio.Task[T]]) -> asyncio.Task[T] | None:
    """Wait until one more is done; return the first that is done well if the others were silent for too long."""
    opened = [attempt for attempt in attempts if attempt.done() and attempt.exception() is None]
    pending = [attempt for attempt in attempts if not attempt.done()]
    limit = HEAD_START if opened else None
    done, _ = await asyncio.wait(pending, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
    return None if done else opened[0]


async def side_by_side(
    works: Sequence[Coroutine[Any, Any, None]], *, patience: float, enough: Callable[[], bool]
) -> list[Exception]:
    """
    Do *works* for *patience* seconds and until there is *enough*; cancel the rest. Return the errors.

    One alone is done to its end, without a task.
    """
    if len(works) == 1:
        try:
            await works[0]
        except Exception as error:  # noqa: BLE001  (the caller raises it)
            return [error]
        return []
    tasks = [start_task(work) for work in works]
    if not tasks:
        return []
    try:
        await asyncio.wait(tasks, timeout=patience)
        if not enough():
            await asyncio.wait(tasks)
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    return [end for end in ends if isinstance(end, Exception)]


def waiting_for(name: str) -> str:
    """Return how a task is called that waits for the lock *name*, in ``python -m asyncio ps``."""
    return f"fencing-wait {shown(name)}"


Turn = asyncio.Future[None]
"""Done when the turn has come."""


class Turns:
    """
    The turns of one event loop.

    Args:
        most: Number of turns at the same time.
    """

    def __init__(self, most: int) -> None:
        self._free = most
        self._hurried: deque[Turn] = deque()
        self._others: deque[Turn] = deque()

    def take_at_once(self) -> bool:
        """Take a turn if one is free, and nothing waits for it."""
        if self._free <= 0:
            return False
        self._free -= 1
        return True

    def ask(self, *, hurry: bool = False) -> Turn:
        """Ask for a turn; with *hurry*, before all that are in no hurry. It ends by `release`."""
        turn: Turn = asyncio.get_running_loop().create_future()
        if self.take_at_once():
            turn.set_result(None)
        else:
            (self._hurried if hurry else self._others).append(turn)
        return turn

    def release(self, turn: Turn | None = None) -> None:
        """End a turn, so that the next one begins; *turn* may be one that has not come yet."""
        if turn is not None and (turn.cancelled() or turn.cancel()):
            return
        for waiting in (self._hurried, self._others):
            while waiting:
                following = waiting.popleft()
                if not following.done():
                    following.set_result(None)
                    return
        self._free += 1

    def open_to_all(self) -> None:
        """Give a turn to all that wait."""
        for waiting in (self._hurried, self._others):
            for turn in waiting:
                if not turn.done():
                    self._free -= 1
                    turn.set_result(None)
            waiting.clear()

    @asynccontextmanager
    async def turn(self, *, hurry: bool = False) -> AsyncIterator[None]:
        """Wait for a turn, and have it for the length of a block."""
        turn = self.ask(hurry=hurry)
        try:
            await turn
            yield
        finally:
            self.release(turn)


T = TypeVar("T")

__all__ = ["SharedCall"]


class SharedCall(Generic[T]):
    """
    A call that is under way, and the number of callers that wait for it.

    The call runs in its own task, in an empty context. It goes on when one caller is cancelled. When the last
    caller is cancelled, the call is cancelled too: most often its member hangs, and the caller asks another one next.
    """

    def __init__(self, call: Callable[[], Coroutine[Any, Any, T]], started: float) -> None:
        self.started = started
        self._callers = 0
        self._given_up = False
        self.task = start_task(call())
        self.task.add_done_callback(retrieve, context=Context())

    def can_join(self, since: float) -> bool:
        """Return whether this call serves a caller of the running loop that needs one begun at *since* or later."""
        task = self.task
        return (
            not (task.done() or self._given_up)
            and self.started >= since
            and task.get_loop() is asyncio.get_running_loop()
        )

    async def join(self) -> T:
        """Wait for the outcome."""
        self._callers += 1
        try:
            return await asyncio.shield(self.task)
        finally:
            self._callers -= 1
            if not self._callers:
                self._given_up = True
                self.task.cancel()

    async def aclose(self) -> None:
        """Cancel the call and wait for its end."""
        if self.task.get_loop() is asyncio.get_running_loop():
            await cancel_and_wait(self.task)
