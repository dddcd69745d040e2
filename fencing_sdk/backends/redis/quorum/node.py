"""
One node of a quorum: an independent Redis server, and what this client knows about it.

A node votes while its connection is open and it has shown that it remembers the epoch. The client asks for both once on
each connection, before the first request, because a restarted server needs a new connection:

1. Without an epoch it has lost its memory, or never had one.
2. Without an append-only file, a server that was started again has an old snapshot at best. So its run id must be the
   one at which it got its epoch.

A request to a node that does not vote fails at once. A connection is opened in the background, so that a node that
hangs costs no caller any time. A request that a node has to get in any case (a release) is kept until it is back.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial

from fencing_sdk._values.clock import BootClock
from fencing_sdk._values.tasks import retrieve
from fencing_sdk.backends._shared.background_task import BackgroundTasks
from fencing_sdk.backends.redis.connection.dial import RedisDialer
from fencing_sdk.backends.redis.connection.node import DIAL_PATIENCE, NOT_MASTER, CallOutcome, RedisNode
from fencing_sdk.backends.redis.connection.pipe import Pipe, PipeError, Reply, ReplyError, pack
from fencing_sdk.backends.redis.quorum.requests import (
    BACKEND,
    PRELOADED,
    Knowledge,
    QuorumRequests,
    nodes_of,
    read_knowledge,
    renamed,
)
from fencing_sdk.backends.redis.scripts import ScriptCall
from fencing_sdk.errors import BackendError, BackendRefusedError

Answer = Callable[[int, CallOutcome], None]
"""Takes the number of a node, and its reply or the error."""

SILENCE = 1.0
"""Seconds without a byte, while requests wait, after which a connection is closed and opened anew."""

_READ_FIRST = 0.05
"""Seconds in which this process reads what has come, before it takes a node for silent."""

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
"""Seconds between two tries to connect to a node that is away."""

MOST_OWED = 10_000

_CLOCK = BootClock()


class NodeRequest:
    """A call of a script, packed once for all nodes that get it."""

    __slots__ = ("_by_hash", "_call")

    def __init__(self, call: ScriptCall) -> None:
        self._call = call
        self._by_hash: dict[bool, bytes] = {}

    def packed(self, *, by_text: bool, read_only: bool) -> bytes:
        """Pack the command of `ScriptCall.by_text` or `ScriptCall.by_hash`; the latter once for all nodes."""
        if by_text:
            return pack(self._call.by_text(read_only=read_only))
        if read_only not in self._by_hash:
            self._by_hash[read_only] = pack(self._call.by_hash(read_only=read_only))
        return self._by_hash[read_only]


class QuorumNode:
    """Node with this *number* among so many *nodes*."""

    def __init__(self, number: int, dialer: RedisDialer, requests: QuorumRequests, nodes: int) -> None:
        self.number = number
        self.knowledge: Knowledge | None = None
        """The server's last answer about its quorum."""
        self.run = ""
        self.error: Exception | None = None
        """Why it does not vote, if its server did not answer."""
        self._requests = requests
        self._nodes = nodes
        self.server = RedisNode(dialer, on_push=_drop, on_connect=_load_scripts, in_cluster=False)
        self.asked: Pipe | None = None
        """The last connection on which the server has reported its knowledge."""
        self._suspect: Pipe | None = None  # a connection that was silent at the last look
        self._remembers = False
        self._opening: asyncio.Task[None] | None = None
        self._opened_at = 0.0
        self._tasks = BackgroundTasks()
        self._pause = FIRST_PAUSE
        self._try_at = 0.0
        self._owed: OrderedDict[Hashable, tuple[NodeRequest, float]] = OrderedDict()
        self._unanswered = 0  # requests that free something
        self._all_answered: asyncio.Future[None] | None = None

    # Whether it votes

    @property
    def open_pipe(self) -> Pipe | None:
        """The connection, if it is open and the server has reported its knowledge."""
        pipe = self.server.open_pipe
        return pipe if pipe is not None and pipe is self.asked else None

    @property
    def epoch(self) -> str | None:
        """The epoch in which the node votes; None if it does not vote."""
        return self.knowledge.epoch if self._remembers and self.knowledge and self.open_pipe else None

    @property
    def forgetful(self) -> bool:
        """True if the server has answered, and does not remember an epoch."""
        return self.open_pipe is not None and not self._remembers

    def open_soon(self, *, at_once: bool = False) -> asyncio.Task[None] | None:
        """
        Connect and ask, in the background; return the task, or None if it is too early for another try.

        A task that has lasted for `DIAL_PATIENCE` is replaced, if the caller needs the node: it may hang.
        """
        task, now = self.opening, _CLOCK.now()
        if task is not None:
            if not at_once or now - self._opened_at < DIAL_PATIENCE:
                return task
            task.cancel()
        elif not at_once and now < self._try_at:
            return None
        self._opening, self._opened_at = self._tasks.start(self._open()), now
        return self._opening

    @property
    def opening(self) -> asyncio.Task[None] | None:
        """The task that connects now."""
        task = self._opening
        if task is None or task.done() or task.get_loop() is not asyncio.get_running_loop():
            return None
        return task

    async def _open(self) -> None:
        self._try_at = _CLOCK.now() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        try:
            pipe, before = await self.server.pipe(), self.epoch
            await self._ask(pipe)
        except Exception as error:  # noqa: BLE001  (raised to the next caller that needs this node)
            self.error = renamed(error) if isinstance(error, BackendError) else error
            return
        self.error = None
        if self._remembers:
            self._pause = FIRST_PAUSE
        if self._remembers and self.epoch != before:
            self._pay(pipe)

    async def _ask(self, pipe: Pipe) -> None:
        replies = [pipe.call(*self._requests.look()), pipe.call("INFO", "server"), pipe.call("INFO", "persistence")]
        for reply in replies:
            reply.add_done_callback(retrieve)
        knowledge = read_knowledge(await replies[0])
        self.run = _field(await replies[1], "run_id")
        durable = _field(await replies[2], "aof_enabled") == "1"
        if knowledge.epoch and nodes_of(knowledge.epoch) != self._nodes:
            msg = f"the node belongs to a quorum of {nodes_of(knowledge.epoch)} nodes, but the client has {self._nodes}"
            raise BackendRefusedError(BACKEND, "connect", msg)
        self.knowledge = knowledge
        self._remembers = bool(knowledge.epoch) and (durable or knowledge.run == self.run)
        self.asked = pipe

    # Requests

    def send(self, request: NodeRequest, answer: Answer) -> None:
        """Send a request. *answer* is called later, or at once if the node has no connection. It must not raise."""
        pipe = self.asked
        if pipe is not None and pipe is not self._suspect and pipe.silent_for >= SILENCE:
            self._suspect = pipe

            def close_if_silent() -> None:  # after this process, if it was stopped, has read what had come
                self._suspect = None
                if pipe.silent_for >= SILENCE:
                    pipe.close("the node was silent")
                    self.open_soon(at_once=True)

            asyncio.get_running_loop().call_later(_READ_FIRST, close_if_silent)
        if pipe is None or not self._post(pipe, request, answer):
            answer(self.number, PipeError("the node is not connected"))

    def _post(self, pipe: Pipe, request: NodeRequest, answer: Answer, *, by_text: bool = False) -> bool:
        def take(reply: Reply) -> None:
            if isinstance(reply, ReplyError):
                if self.server.wants_text(reply) and self._post(pipe, request, answer, by_text=True):
                    return
                if reply.code == "EPOCH":
                    self.asked = None  # ask the server again what it knows
                    self.open_soon()
                elif reply.code in NOT_MASTER:
                    pipe.close_soon("the node is not a master")
            answer(self.number, reply)

        return pipe.post(request.packed(by_text=by_text, read_only=self.server.read_only), take)

    # What it has to get in any case

    def deliver(self, key: Hashable, request: NodeRequest, ttl: float, answer: Answer | None = None) -> None:
        """Send a request that frees something. If it fails, it is sent again when the node is back within *ttl*."""
        self._unanswered += 1

        def arrived(node: int, outcome: CallOutcome) -> None:
            self._unanswered -= 1
            if isinstance(outcome, Exception) and not isinstance(outcome, ReplyError):
                self._owe(key, request, until)
            if answer is not None:
                answer(node, outcome)
            if not self._unanswered and self._all_answered is not None and not self._all_answered.done():
                self._all_answered.set_result(None)

        until = _CLOCK.now() + ttl
        self.send(request, arrived)

    def _owe(self, key: Hashable, request: NodeRequest, until: float) -> None:
        self._owed[key] = request, until
        while len(self._owed) > MOST_OWED or (self._owed and next(iter(self._owed.values()))[1] < _CLOCK.now()):
            self._owed.popitem(last=False)

    def _pay(self, pipe: Pipe) -> None:
        """Send what is owed, before any other request on a new connection."""
        owed, now = self._owed, _CLOCK.now()
        self._owed = OrderedDict()

        def owe_again(key: Hashable, request: NodeRequest, until: float, _node: int, outcome: CallOutcome) -> None:
            if isinstance(outcome, PipeError):
                self._owe(key, request, until)

        for key, (request, until) in owed.items():
            if until > now:
                self._post(pipe, request, partial(owe_again, key, request, until))

    async def aclose(self, *, patience: float) -> None:
        """Close the connection, after *patience* seconds at most for requests that the node has not answered."""
        if self._unanswered and self.open_pipe is not None:
            self._all_answered = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._all_answered,), timeout=patience)
            self._all_answered = None
        await self._tasks.aclose(patience=0.0)
        self.asked = self._opening = None
        self._try_at = 0.0
        await self.server.aclose()


def _load_scripts(_node: RedisNode, pipe: Pipe) -> None:
    for script in PRELOADED:  # if the server does not permit it, the first use loads the script
        pipe.call("SCRIPT", "LOAD", script.text).add_done_callback(retrieve)


def _drop(message: list[Reply]) -> None:
    """The client asks for no messages."""


def _field(info: Reply, name: str) -> str:
    """A field of the reply to INFO, which RESP3 sends as text in a format of its own."""
    text = bytes(info).decode(errors="replace") if isinstance(info, bytes) else str(info)
    for line in text.splitlines():
        key, _, value = line.removeprefix("txt:").partition(":")
        if key == name:
            return value.strip()
    return ""
