"""
One server: its connection, opened when it is needed, and opened again when it is broken.

The node closes an open connection in three cases:

1. The connection breaks.
2. The server replies that it is no longer a master, or that it misses its replicas: they may have a new master.
3. The server is silent: a call is cancelled, and no byte has come for `SILENCE` seconds while calls waited.
   A new connection costs little. A half-open one would cost every lease.

Opening a connection may hang as well. When a caller gives up waiting for it after `DIAL_PATIENCE` seconds,
the next caller opens another one, long before the driver's own limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from fencing_sdk._values.clock import BootClock
from fencing_sdk._values.loop_owner import LoopOwner
from fencing_sdk._values.tasks import cancel_and_wait, retrieve, start_task
from fencing_sdk.backends.redis.connection.dial import BACKEND, REPLICA, RedisDialer
from fencing_sdk.backends.redis.connection.pipe import Pipe, PipeError, Reply, ReplyError
from fencing_sdk.backends.redis.scripts import Argument, ScriptCall
from fencing_sdk.errors import BackendRefusedError

SILENCE = 0.25
"""Seconds without a byte after which a cancelled call closes its connection; more than `_CONFIRM_MS`."""

DIAL_PATIENCE = 1.0
"""Seconds after which a cancelled caller ends the opening of a connection for which it has waited."""

_CONFIRM_MS = 200
"""Milliseconds in which replicas have to confirm a write. The other calls on the connection wait meanwhile."""

_A_CLUSTER = "the server is part of a cluster; write redis+cluster://, or pass a RedisCluster"
_CLOCK = BootClock()
_READ_ONLY_SINCE = (7,)
"""Version with EVAL_RO, which also runs during ``CLIENT PAUSE ... WRITE``."""
NOT_MASTER = {"READONLY", "MASTERDOWN", "NOREPLICAS"}
"""Errors of a server that is a replica now, or of a master that may have been replaced because it is cut off."""

CallOutcome = Reply | Exception
"""The reply to one of many calls, or its error."""


class UnconfirmedError(Exception):
    """The script ran, but fewer replicas than the call demands have what it wrote."""

    def __init__(self, reply: Reply, count: Reply) -> None:
        super().__init__(f"only {count} replicas confirmed")
        self.reply = reply


class RedisNode:
    """
    One server of a topology, or the master of a service that Sentinels watch.

    *on_push* receives the messages that are not replies; *on_connect* sends the first commands on every new connection.
    Unless *in_cluster*, a server that is part of a cluster is refused.
    """

    def __init__(
        self,
        dialer: RedisDialer,
        *,
        on_push: Callable[[list[Reply]], None],
        on_connect: Callable[[RedisNode, Pipe], None],
        in_cluster: bool,
    ) -> None:
        self._dialer = dialer
        self._in_cluster = in_cluster
        self._on_push = on_push
        self._on_connect = on_connect
        self._owner: LoopOwner | None = None
        self.connection: Pipe | None = None
        """The last connection that was opened, which may be broken or belong to another event loop."""
        self._opening: asyncio.Task[Pipe] | None = None
        self._opening_since = 0.0
        self.version: tuple[int, ...] = ()
        """The server's version, once a connection was open."""
        self.read_only = False
        """True if it has commands for scripts that only read."""

    @property
    def open_pipe(self) -> Pipe | None:
        """The connection, if it is open."""
        pipe = self.connection
        return pipe if pipe is not None and pipe.usable and self._is_owner() else None

    async def pipe(self) -> Pipe:
        """Return the open connection, after opening it if there is none. Raise the driver's error if that fails."""
        pipe = self.open_pipe
        return await self._connect() if pipe is None else pipe

    def _is_owner(self) -> bool:
        """Return whether this loop of this process opened the connection. A child must not even close its parent's."""
        return self._owner is not None and self._owner.is_current

    async def _connect(self) -> Pipe:
        """Wait for the connection that is being opened; all callers share one task."""
        if not self._is_owner():
            self.connection = self._opening = None
            self._owner = LoopOwner()
        if self._opening is None:
            self._opening = start_task(self._open())
            self._opening.add_done_callback(self._opened)
            self._opening_since = _CLOCK.now()
        opening, before = self._opening, cancellations()
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            if opening.cancelled() and cancellations() == before:
                msg = "the connection took too long to open, or the backend was closed meanwhile"
                raise PipeError(msg) from None
            if opening is self._opening and _CLOCK.now() - self._opening_since >= DIAL_PATIENCE:
                self._opening = None
                opening.cancel()
            raise

    def _opened(self, task: asyncio.Task[Pipe]) -> None:
        if task is self._opening:
            self._opening = None
        retrieve(task)

    async def _open(self) -> Pipe:
        pipe = Pipe(self._on_push)
        try:
            connection = await self._dialer.dial(pipe)
            pipe.attach(connection.transport)
            if connection.cluster and not self._in_cluster:
                raise BackendRefusedError(BACKEND, "connect", _A_CLUSTER)  # noqa: TRY301
        except BaseException:
            pipe.close()
            await pipe.closed()
            raise
        self.version = connection.version
        self.read_only = connection.version >= _READ_ONLY_SINCE
        self.connection = pipe
        pipe.version = connection.version
        self._on_connect(self, pipe)
        return pipe

    async def run(self, call: ScriptCall) -> Reply:
        """
        Run a script on this server.

        Raises:
            ReplyError: the server refused it.
            UnconfirmedError: it ran, but too few replicas have what it wrote.
            Exception: there is no connection, or it broke.
        """
        pipe = await self.pipe()
        try:
            return await self._answer(pipe, self._send(pipe, call))
        except ReplyError as error:
            if not self.wants_text(error):
                raise
        return await self._answer(pipe, self._send(pipe, call, by_text=True))

    def wants_text(self, error: ReplyError) -> bool:
        """Return whether a call may be repeated by its text; a command that the server lacks is not sent again."""
        if error.code == "NOCOMMAND" and error.command.endswith("_ro"):
            self.read_only = False
            return True
        return error.code == "NOSCRIPT"

    async def run_asking(self, call: ScriptCall) -> Reply:
        """Run a script on this server while the slot is still moving to it."""
        pipe = await self.pipe()
        pipe.call("ASKING").add_done_callback(retrieve)
        return await self._answer(pipe, self._send(pipe, call, by_text=True))

    async def ask(self, *words: Argument) -> Reply:
        """Send one command that is not a script, and has no keys. Raise as `run` does."""
        pipe = await self.pipe()
        return await self._reply(pipe, pipe.call(*words))

    async def run_all(self, calls: Sequence[ScriptCall]) -> list[CallOutcome]:
        """Run many scripts in one write. Each call has its own outcome."""
        try:
            pipe = await self.pipe()
        except Exception as error:  # noqa: BLE001  (each call fails with the driver's error)
            return [error] * len(calls)
        sent = [self._send(pipe, call) for call in calls]
        outcomes = [await outcome_of(self._answer(pipe, one)) for one in sent]
        again = [n for n, found in enumerate(outcomes) if isinstance(found, ReplyError) and self.wants_text(found)]
        texts: set[str] = set()  # each is sent once; the calls after it go by hash
        resent = []
        for number in again:
            call = calls[number]
            resent.append(self._send(pipe, call, by_text=call.script.sha not in texts))
            texts.add(call.script.sha)
        for number, one in zip(again, resent, strict=True):
            outcomes[number] = await outcome_of(self._answer(pipe, one))
        return outcomes

    def _send(self, pipe: Pipe, call: ScriptCall, *, by_text: bool = False) -> _Sent:
        """Send a call and, right behind it, the question for the replicas, or for the role if the script only reads."""
        words = (call.by_text if by_text else call.by_hash)(read_only=self.read_only)
        reply = pipe.call(*words)
        if call.follow:
            pipe.follow(call.follow)
        confirmation = pipe.confirm(call.replicas, _CONFIRM_MS) if call.replicas else None
        role = pipe.call("HELLO") if call.script.reads and self.read_only and not self._in_cluster else None
        return _Sent(reply, confirmation, call.replicas, role)

    async def _answer(self, pipe: Pipe, sent: _Sent) -> Reply:
        """Wait for the reply, and for the replicas that the call demands."""
        reply = await self._reply(pipe, sent.reply)
        if sent.role is not None:
            hello = await outcome_of(self._reply(pipe, sent.role))
            if isinstance(hello, dict) and hello.get(b"role") in REPLICA:  # which runs what only reads all the same
                pipe.close("the server is not a master")
                msg = "READONLY"
                raise ReplyError(msg)
        if sent.confirmation is None:
            return reply
        try:
            count = await self._reply(pipe, asyncio.shield(sent.confirmation))
        except ReplyError as error:
            raise UnconfirmedError(reply, 0) from error
        if not isinstance(count, int) or count < sent.replicas:
            raise UnconfirmedError(reply, count)
        return reply

    async def _reply(self, pipe: Pipe, future: asyncio.Future[Reply]) -> Reply:
        """Wait for a reply on *pipe*. Close the connection if the server is silent, or no master."""
        try:
            return await future
        except asyncio.CancelledError:
            if pipe.silent_for >= SILENCE:
                pipe.close("the server was silent")
            raise
        except ReplyError as error:
            if error.code in NOT_MASTER:
                pipe.close("the server is not a master")  # the next call looks for the master again
            raise

    async def aclose(self) -> None:
        """Close the connection; the next call opens another."""
        pipe, opening = self.connection, self._opening
        self.connection = self._opening = None
        if not self._is_owner():
            return
        if opening is not None:
            await cancel_and_wait(opening)
        if pipe is not None:
            pipe.close()
            await pipe.closed()


class _Sent(NamedTuple):
    """A call on its way, and the replicas that have to confirm it."""

    reply: asyncio.Future[Reply]
    confirmation: asyncio.Future[Reply] | None
    replicas: int
    role: asyncio.Future[Reply] | None


def cancellations() -> int:
    """Number of cancellations of the current task: separates its own cancellation from that of the task it awaits."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


async def outcome_of(run: Awaitable[Reply]) -> CallOutcome:
    """Return the error of *run* instead of raising it."""
    try:
        return await run
    except Exception as error:  # noqa: BLE001
        return error
