"""One call that serves all callers that want the same thing, or the same kind of thing, at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from contextvars import Context
from typing import Any, Generic, TypeVar

from fencing_sdk._values.unawaited import cancel_and_wait, retrieve

T = TypeVar("T")
Q = TypeVar("Q", bound=Hashable)

__all__ = ["SharedBatches", "SharedCall", "ask_by_name"]


class SharedCall(Generic[T]):
    """
    A call that is under way, and the number of callers that wait for it.

    The call runs in its own task, in an empty context. It goes on when one caller is cancelled. When the last
    caller is cancelled, the call is cancelled too: most often its member hangs, and another one is asked next.
    """

    def __init__(self, call: Callable[[], Coroutine[Any, Any, T]], started: float) -> None:
        self.started = started
        self._callers = 0
        self._given_up = False
        self.task: asyncio.Task[T] = asyncio.get_running_loop().create_task(call(), context=Context())
        self.task.add_done_callback(retrieve, context=Context())

    def can_join(self, since: float) -> bool:
        """Whether this call serves a caller of the running loop that needs one begun at *since* or later."""
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


class SharedBatches(Generic[Q, T]):
    """
    Questions that are asked in the same turn of the event loop, as one call. Equal ones are asked once.

    Args:
        ask: Answers a batch of different questions, in order.

        limit: The most questions of one batch.

        one_by_one: Send a batch when the one before it is answered, so that it takes all that was asked meanwhile.
    """

    def __init__(
        self, ask: Callable[[Sequence[Q]], Awaitable[Sequence[T]]], limit: int, *, one_by_one: bool = False
    ) -> None:
        self._ask = ask
        self._limit = limit
        self._one_by_one = one_by_one
        self._sending: asyncio.Task[Sequence[T]] | None = None
        self._questions: dict[Q, int] = {}
        """Of the batch that is open, with their places."""
        self._call: SharedCall[Sequence[T]] | None = None
        """The batch that is open: it has not been sent, and is not full."""

    async def ask(self, question: Q) -> T:
        """Ask together with all others that ask now."""
        if self._call is None or len(self._questions) >= self._limit or not self._call.can_join(0.0):
            questions: dict[Q, int] = {}
            before = self._sending
            self._questions, self._call = questions, SharedCall(lambda: self._send(questions, before), 0.0)
            self._sending = self._call.task if self._one_by_one else None
        place, call = self._questions.setdefault(question, len(self._questions)), self._call
        return (await call.join())[place]

    async def _send(self, questions: dict[Q, int], before: asyncio.Task[Sequence[T]] | None) -> Sequence[T]:
        await asyncio.sleep(0)
        if before is not None and before.get_loop() is asyncio.get_running_loop():
            await asyncio.wait((before,))
        if self._questions is questions:
            self._call = None
        return await self._ask(list(questions))


async def ask_by_name(
    questions: Sequence[Q], name_of: Callable[[Q], str], ask: Callable[[str, list[Q]], Awaitable[Sequence[T]]]
) -> list[T]:
    """Ask about the *questions* of each name together, and about all names at once; answer in the order given."""
    groups: dict[str, list[Q]] = {}
    for question in questions:
        groups.setdefault(name_of(question), []).append(question)
    answered = await asyncio.gather(*(ask(name, group) for name, group in groups.items()))
    answers = dict(zip(groups, map(iter, answered), strict=True))
    return [next(answers[name_of(question)]) for question in questions]
