"""The answer to one request of a store, which outlives the caller that asked for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextvars import Context
from typing import Any, Generic, TypeAlias, TypeVar

T = TypeVar("T")


class Answer(Generic[T]):
    """
    An awaitable that the store settles when the answer arrives, and that no cancelled awaiter takes along.

    One task at a time may await it. It has what the client reads of an ``asyncio.Future``, and makes one when a task
    awaits it. `cancel` is the client's way to give the request up: its answer is not waited for any longer, and what
    still comes is dropped. The store takes back what it can, and closes a silent connection.

    Args:
        loop: The running event loop.

        give_up: Called when the request is given up before it was answered.
    """

    __slots__ = (
        "_awaiter",
        "_callbacks",
        "_error",
        "_give_up",
        "_given_up",
        "_loop",
        "_over",
        "_value",
        "on_end",
    )  # fmt: skip  (every request makes one)

    _value: T

    def __init__(self, loop: asyncio.AbstractEventLoop, give_up: Callable[[], object] | None = None) -> None:
        self._loop = loop
        self._give_up = give_up
        self._over = self._given_up = False
        self._error: BaseException | None = None
        self._awaiter: asyncio.Future[None] | None = None
        self._callbacks: tuple[tuple[Callable[[Any], object], Context | None], ...] = ()
        self.on_end: Callable[[Answer[T], bool], object] | None = None
        """Called at once when the answer is there (True), or an error, or the request is given up. For the client."""

    def settle(self, answer: T) -> None:
        """Take the answer, unless the request was given up, and wake the caller."""
        if not self._over:
            self._value = answer
            self._end()

    def fail(self, error: BaseException) -> None:
        """Take an error for an answer."""
        if not self._over:
            self._error = error
            self._end()

    def cancel(self) -> bool:
        """Give the request up; False if it was answered."""
        if self._over:
            return False
        self._given_up = True
        self._end()
        if self._give_up is not None:
            self._give_up()
        return True

    def _end(self) -> None:
        self._over = True
        if self.on_end is not None:
            self.on_end(self, not self._given_up and self._error is None)
        if self._awaiter is not None and not self._awaiter.done():
            self._awaiter.set_result(None)
        for callback, context in self._callbacks:
            self._loop.call_soon(callback, self, context=context)

    def done(self) -> bool:
        """Return whether the answer is there, or the request was given up."""
        return self._over

    def cancelled(self) -> bool:
        """Return whether the request was given up."""
        return self._given_up

    def exception(self) -> BaseException | None:
        """Return the error that came for an answer."""
        return self._error

    def result(self) -> T:
        """Return the answer, or raise the error that came for it."""
        if self._error is not None:
            raise self._error
        if self._given_up or not self._over:
            raise asyncio.CancelledError
        return self._value

    def add_done_callback(self, callback: Callable[[Any], object], *, context: Context | None = None) -> None:
        """See ``asyncio.Future.add_done_callback``."""
        if self._over:
            self._loop.call_soon(callback, self, context=context)
        else:
            self._callbacks = (*self._callbacks, (callback, context))

    def remove_done_callback(self, callback: Callable[[Any], object]) -> int:
        """See ``asyncio.Future.remove_done_callback``."""
        before = len(self._callbacks)
        self._callbacks = tuple(each for each in self._callbacks if each[0] != callback)
        return before - len(self._callbacks)

    def waiter(self) -> asyncio.Future[None]:
        """Return a future that is done once this one is, whatever its outcome, for one task to await."""
        self._awaiter = self._loop.create_future()
        return self._awaiter

    def __await__(self) -> Generator[Any, None, T]:
        if not self._over:
            yield from self.waiter()
        return self.result()


Call: TypeAlias = asyncio.Future[T] | Answer[T]
"""A request that was sent: in a task, or to a reader that settles it."""


def succeeded(call: Call[Any]) -> bool:
    """Return whether there is an answer, and no error came for it."""
    if isinstance(call, Answer):
        return call._over and not call._given_up and call._error is None  # noqa: SLF001  (its own module; three calls)
    return call.done() and not call.cancelled() and call.exception() is None


class Settled(Answer[T]):
    """An answer that is there already."""

    __slots__ = ()

    def __init__(self, answer: T) -> None:
        self._over, self._given_up, self._error = True, False, None
        self._value = answer

    def cancelled(self) -> bool:
        """Return False."""
        return False

    def exception(self) -> None:
        """Return None."""

    def result(self) -> T:
        """Return the answer."""
        return self._value
