"""
One server: its connection, opened when it is needed and again when it has broken.

A connection is dropped when the server is gone, when it says that it is no master any more, and
when it is silent: a call was given up, and not one byte has come for as long as calls have waited.
A new one costs little, and a half-open one would cost every lease. The opening of one may be lost
on the way as well, so that is begun anew long before the driver gives it up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import Context
from typing import Any, Protocol

from fencing_sdk._values.clock import BootClock
from fencing_sdk._values.process import generation
from fencing_sdk.backends.redis._dial import BACKEND, Dialer, Link
from fencing_sdk.backends.redis._pipe import Pipe, PipeError, Reply, ReplyError
from fencing_sdk.backends.redis._script import Call, Word
from fencing_sdk.errors import BackendRefusedError

SILENCE = 0.25
"""Seconds without a byte after which a call that is given up condemns its connection; more than `_CONFIRM_MS`."""

DIAL_PATIENCE = 1.0
"""Seconds after which the opening of a connection is begun anew when somebody has given up waiting for it."""

_CONFIRM_MS = 200
"""Milliseconds that replicas have to confirm a write. Other calls on the connection wait meanwhile."""

_A_CLUSTER = "the server is part of a cluster; write redis+cluster://, or pass a RedisCluster"
_CLOCK = BootClock()
_NOT_MASTER = {"READONLY", "MASTERDOWN"}


Outcome = Reply | Exception
"""What became of one call of many."""


class UnconfirmedError(Exception):
    """A script ran, but too few replicas have what it wrote."""

    def __init__(self, reply: Reply, count: Reply) -> None:
        super().__init__(f"only {count} replicas confirmed")
        self.reply = reply


class Greeting(Protocol):
    """What is sent first on a new connection."""

    def __call__(self, node: Node, pipe: Pipe) -> None: ...


class Node:
    """One server of a topology, or the master of a service that Sentinels watch."""

    def __init__(
        self, dialer: Dialer, *, on_push: Callable[[Node, list[Reply]], None], greet: Greeting, alone: bool
    ) -> None:
        self._dialer = dialer
        self._alone = alone
        self._on_push = on_push
        self._greet = greet
        self._pipe: Pipe | None = None
        self._dialing: asyncio.Task[Pipe] | None = None
        self._dialing_since = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._generation = generation()
        self.version: tuple[int, ...] = ()
        """The server's, once a connection was open."""

    @property
    def open_pipe(self) -> Pipe | None:
        """The connection, if it is open."""
        pipe = self._pipe
        return pipe if pipe is not None and pipe.usable and self._is_ours() else None

    async def pipe(self) -> Pipe:
        """
        Return the open connection, after opening it if there is none.

        Raises:
            Exception: whatever the driver raises when it cannot connect.
        """
        pipe = self.open_pipe
        return await self._dial() if pipe is None else pipe

    def _is_ours(self) -> bool:
        """Whether this loop of this process opened the connection; a child must not even close its parent's."""
        return self._loop is asyncio.get_running_loop() and self._generation == generation()

    async def _dial(self) -> Pipe:
        if not self._is_ours():
            self._pipe = self._dialing = None
            self._loop, self._generation = asyncio.get_running_loop(), generation()
        if self._dialing is None:
            self._dialing = asyncio.get_running_loop().create_task(self._open(), context=Context())
            self._dialing.add_done_callback(self._dialed)
            self._dialing_since = _CLOCK.now()
        dialing, before = self._dialing, cancellations()
        try:
            return await asyncio.shield(dialing)
        except asyncio.CancelledError:
            if dialing.cancelled() and cancellations() == before:
                msg = "the connection took too long to open, or the backend was closed meanwhile"
                raise PipeError(msg) from None
            if dialing is self._dialing and _CLOCK.now() - self._dialing_since >= DIAL_PATIENCE:
                self._dialing = None
                dialing.cancel()
            raise

    def _dialed(self, task: asyncio.Task[Pipe]) -> None:
        if task is self._dialing:
            self._dialing = None
        if not task.cancelled():
            task.exception()  # each who waits is told; if nobody does any more, nobody is

    async def _open(self) -> Pipe:
        pipe = Pipe(lambda message: self._on_push(self, message))
        try:
            link = await self._dialer.dial(pipe)
            pipe.attach(link.transport)
            self._check(link)
        except BaseException:
            pipe.close()
            await pipe.closed()
            raise
        self.version = link.version
        self._pipe = pipe
        self._greet(self, pipe)
        return pipe

    def _check(self, link: Link) -> None:
        if self._alone and link.cluster:
            raise BackendRefusedError(BACKEND, "connect", _A_CLUSTER)

    async def run(self, call: Call) -> Reply:
        """
        Run a script here.

        Raises:
            ReplyError: the server refused it.
            UnconfirmedError: it ran, but too few replicas have what it wrote.
            Exception: there is no connection, or it broke.
        """
        pipe = await self.pipe()
        try:
            return await self._ask(pipe, call, call.by_hash())
        except ReplyError as error:
            if error.code != "NOSCRIPT":
                raise
        return await self._ask(pipe, call, call.by_text())

    async def run_asking(self, call: Call) -> Reply:
        """Run a script here although its slot is only just moving to this server."""
        pipe = await self.pipe()
        pipe.call("ASKING").add_done_callback(ignore)
        return await self._ask(pipe, call, call.by_text())

    def _ask(self, pipe: Pipe, call: Call, words: tuple[Word, ...]) -> Coroutine[Any, Any, Reply]:
        """Send at once, and return what waits for the answer."""
        sent = pipe.call(*words, follow=call.follow)
        if not call.replicas:
            return self._answer(pipe, sent)
        return self._confirmed(pipe, sent, pipe.confirm(call.replicas, _CONFIRM_MS), call.replicas)

    async def _ask_all(self, pipe: Pipe, questions: Sequence[tuple[Call, tuple[Word, ...]]]) -> list[Outcome]:
        sent = [
            (call.replicas, pipe.call(*words), pipe.confirm(call.replicas, _CONFIRM_MS) if call.replicas else None)
            for call, words in questions
        ]
        return [
            await outcome_of(
                self._answer(pipe, reply)
                if confirmation is None
                else self._confirmed(pipe, reply, confirmation, replicas)
            )
            for replicas, reply, confirmation in sent
        ]

    async def _confirmed(
        self, pipe: Pipe, sent: asyncio.Future[Reply], confirmation: asyncio.Future[Reply], replicas: int
    ) -> Reply:
        reply = await self._answer(pipe, sent)
        try:
            count = await self._answer(pipe, asyncio.shield(confirmation))
        except ReplyError as error:
            raise UnconfirmedError(reply, 0) from error
        if not isinstance(count, int) or count < replicas:
            raise UnconfirmedError(reply, count)
        return reply

    async def run_all(self, calls: Sequence[Call]) -> list[Outcome]:
        """Run many scripts in one write; one that fails stops no other."""
        try:
            pipe = await self.pipe()
        except Exception as error:  # noqa: BLE001  (each call fails by what the driver raised)
            return [error] * len(calls)
        outcomes = await self._ask_all(pipe, [(call, call.by_hash()) for call in calls])
        again = [n for n, found in enumerate(outcomes) if isinstance(found, ReplyError) and found.code == "NOSCRIPT"]
        answers = await self._ask_all(pipe, _each_text_once([calls[n] for n in again]))
        for number, answer in zip(again, answers, strict=True):
            outcomes[number] = answer
        return outcomes

    async def _answer(self, pipe: Pipe, future: asyncio.Future[Reply]) -> Reply:
        """Wait for a reply on *pipe*, and drop the connection if it is silent or not a master's."""
        try:
            return await future
        except asyncio.CancelledError:
            if pipe.silent_for >= SILENCE:
                pipe.close("the server was silent")
            raise
        except ReplyError as error:
            if error.code in _NOT_MASTER:
                pipe.close("the server is no master")  # the next call asks again who is
            raise

    async def aclose(self) -> None:
        """Close the connection; the next call opens another."""
        pipe, dialing = self._pipe, self._dialing
        self._pipe = self._dialing = None
        if not self._is_ours():
            return
        if dialing is not None:
            dialing.cancel()
            await asyncio.wait((dialing,))
        if pipe is not None:
            pipe.close()
            await pipe.closed()


def _each_text_once(calls: Sequence[Call]) -> list[tuple[Call, tuple[Word, ...]]]:
    """Tell a server that has forgotten the scripts each of them once; it remembers them for the calls behind."""
    first = {call.script: number for number, call in reversed(list(enumerate(calls)))}
    return [
        (call, call.by_text() if first[call.script] == number else call.by_hash()) for number, call in enumerate(calls)
    ]


def cancellations() -> int:
    """How often the current task was cancelled: tells its own cancellation from that of what it waits for."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


async def outcome_of(run: Awaitable[Reply]) -> Outcome:
    """Catch what *run* raises, so that one of many calls has an outcome of its own."""
    try:
        return await run
    except Exception as error:  # noqa: BLE001
        return error


def ignore(future: asyncio.Future[Reply]) -> None:
    """Look at an outcome that nobody waits for, so that the loop does not report it."""
    if not future.cancelled():
        future.exception()
