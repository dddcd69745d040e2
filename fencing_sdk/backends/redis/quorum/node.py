"""
One node of a quorum: an independent Redis server, and what this client knows about it.

A node votes while its connection is open and it has shown that it remembers the epoch. Both are asked once for each
connection, before the first request, because a server that was started again is a new connection:

1. Without an epoch it has lost its memory, or never had one.
2. Without an append-only file, a server that was started again has an old snapshot at best. So its run id must be the
   one at which it got its epoch.

A request to a node that does not vote fails at once. A connection is opened in the background, so that a node that
hangs costs no caller any time. What a node has to be told in any case (a release) is kept until it is back.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial

from fencing_sdk._values.clock import BootClock
from fencing_sdk._values.futures import retrieve
from fencing_sdk.backends._shared.background_task import BackgroundTasks
from fencing_sdk.backends.redis.connection.dial import BACKEND, RedisDialer
from fencing_sdk.backends.redis.connection.node import DIAL_PATIENCE, CallOutcome, RedisNode
from fencing_sdk.backends.redis.connection.pipe import Pipe, PipeError, Reply, ReplyError
from fencing_sdk.backends.redis.quorum.requests import PRELOADED, Knowledge, QuorumRequests, nodes_of, read_knowledge
from fencing_sdk.backends.redis.scripts import ScriptCall
from fencing_sdk.errors import BackendRefusedError

Answer = Callable[[int, CallOutcome], None]
"""Takes the number of a node, and its reply or the error."""

SILENCE = 1.0
"""Seconds without a byte, while requests wait, after which a connection is closed and opened anew."""

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
"""Seconds between two tries to connect to a node that is away."""

MOST_OWED = 10_000

_CLOCK = BootClock()
_NOT_MASTER = {"READONLY", "MASTERDOWN"}


class QuorumNode:
    """
    One node.

    Args:
        number: Its place among the nodes of this client.

        dialer: Opens connections to it.

        nodes: How many nodes there are.

        on_push: Receives the number of the node, and a message of the server that is no reply.

        on_vote: Called when a connection has shown that the node may vote.
    """

    def __init__(
        self,
        number: int,
        dialer: RedisDialer,
        requests: QuorumRequests,
        nodes: int,
        *,
        on_push: Callable[[int, list[Reply]], None],
        on_vote: Callable[[QuorumNode, Pipe], None],
    ) -> None:
        self.number = number
        self.knowledge: Knowledge | None = None
        """What the server said last about its quorum."""
        self.run = ""
        self.error: Exception | None = None
        """Why it does not vote, if its server could not be asked."""
        self._requests = requests
        self._nodes = nodes
        self._on_vote = on_vote
        self._node = RedisNode(dialer, on_push=partial(on_push, number), on_connect=_load_scripts, in_cluster=False)
        self._asked: Pipe | None = None  # the connection on which the server has told its knowledge
        self._remembers = False
        self._opening: asyncio.Task[None] | None = None
        self._opened_at = 0.0
        self._tasks = BackgroundTasks()
        self._pause = FIRST_PAUSE
        self._try_at = 0.0
        self._owed: OrderedDict[Hashable, tuple[ScriptCall, float]] = OrderedDict()
        self._unanswered: set[asyncio.Future[Reply]] = set()

    # Whether it votes

    @property
    def open_pipe(self) -> Pipe | None:
        """The connection, if it is open and the server has told its knowledge."""
        pipe = self._node.open_pipe
        return pipe if pipe is not None and pipe is self._asked else None

    @property
    def epoch(self) -> str | None:
        """The epoch in which the node votes; None if it does not vote."""
        return self.knowledge.epoch if self._remembers and self.knowledge and self.open_pipe else None

    @property
    def forgetful(self) -> bool:
        """Whether the server was asked, and does not remember an epoch."""
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
            pipe = await self._node.pipe()
            await self._ask(pipe)
        except Exception as error:  # noqa: BLE001  (told to the next caller that needs this node)
            self.error = error
            return
        self.error = None
        if self._remembers:
            self._pause = FIRST_PAUSE
            self._pay(pipe)
            self._on_vote(self, pipe)

    async def _ask(self, pipe: Pipe) -> None:
        call = self._requests.look()
        replies = [pipe.call(*call.by_text()), pipe.call("INFO", "server"), pipe.call("INFO", "persistence")]
        for reply in replies:
            reply.add_done_callback(retrieve)
        knowledge = read_knowledge(await replies[0])
        self.run = _field(await replies[1], "run_id")
        durable = _field(await replies[2], "aof_enabled") == "1"
        if knowledge.epoch and nodes_of(knowledge.epoch) != self._nodes:
            msg = f"the node belongs to a quorum of {nodes_of(knowledge.epoch)} nodes, but {self._nodes} are given"
            raise BackendRefusedError(BACKEND, "connect", msg)
        self.knowledge = knowledge
        self._remembers = bool(knowledge.epoch) and (durable or knowledge.run == self.run)
        self._asked = pipe

    # Requests

    def send(self, call: ScriptCall, answer: Answer) -> None:
        """Send a request. *answer* is called later, or at once if the node has no connection."""
        pipe = self.open_pipe
        if pipe is None:
            answer(self.number, PipeError("the node is not connected"))
            return
        if pipe.silent_for >= SILENCE:
            pipe.close("the node was silent")
            self.open_soon(at_once=True)
        self._call(pipe, call, call.by_hash(), answer)

    def _call(self, pipe: Pipe, call: ScriptCall, words: tuple[str | bytes | int, ...], answer: Answer) -> None:
        future = pipe.call(*words, follow=call.follow)
        future.add_done_callback(partial(self._answered, pipe, call, answer))

    def _answered(self, pipe: Pipe, call: ScriptCall, answer: Answer, future: asyncio.Future[Reply]) -> None:
        error = future.exception()
        if error is None:
            answer(self.number, future.result())
            return
        if isinstance(error, ReplyError):
            if error.code == "NOSCRIPT":
                self._call(pipe, call, call.by_text(), answer)
                return
            if error.code == "EPOCH":
                self._asked = None  # ask the server again what it knows
                self.open_soon()
            elif error.code in _NOT_MASTER:
                pipe.close("the node is no master")
        answer(self.number, error if isinstance(error, Exception) else PipeError("the request was given up"))

    async def ask(self, call: ScriptCall) -> Reply:
        """
        Run a script, and wait for its reply.

        Raises:
            Exception: the node refused it, or cannot be reached.
        """
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

        def answer(_node: int, outcome: CallOutcome) -> None:
            if future.done():
                return
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        self.send(call, answer)
        return await future

    # What it has to be told in any case

    def tell(self, key: Hashable, call: ScriptCall, ttl: float, answer: Answer | None = None) -> None:
        """Send a request that frees something. If it fails, it is sent again when the node is back within *ttl*."""
        until = _CLOCK.now() + ttl
        marker = asyncio.get_running_loop().create_future()
        self._unanswered.add(marker)

        def told(node: int, outcome: CallOutcome) -> None:
            self._unanswered.discard(marker)
            if not marker.done():
                marker.set_result(None)
            if isinstance(outcome, Exception) and not isinstance(outcome, ReplyError):
                self._owe(key, call, until)
            if answer is not None:
                answer(node, outcome)

        self.send(call, told)

    def _owe(self, key: Hashable, call: ScriptCall, until: float) -> None:
        self._owed[key] = call, until
        while len(self._owed) > MOST_OWED or (self._owed and next(iter(self._owed.values()))[1] < _CLOCK.now()):
            self._owed.popitem(last=False)

    def _pay(self, pipe: Pipe) -> None:
        """Send what is owed, before any other request on a new connection."""
        owed, now = self._owed, _CLOCK.now()
        self._owed = OrderedDict()
        for key, (call, until) in owed.items():
            if until > now:
                self._call(pipe, call, call.by_hash(), partial(self._paid, key, call, until))

    def _paid(self, key: Hashable, call: ScriptCall, until: float, _node: int, outcome: CallOutcome) -> None:
        if isinstance(outcome, PipeError):
            self._owe(key, call, until)

    async def aclose(self, *, patience: float) -> None:
        """Close the connection, after *patience* seconds at most for what was told the node and is unanswered."""
        loop = asyncio.get_running_loop()
        unanswered = [marker for marker in self._unanswered if marker.get_loop() is loop]
        self._unanswered.clear()
        if unanswered and self.open_pipe is not None:
            await asyncio.wait(unanswered, timeout=patience)
        await self._tasks.aclose(patience=0.0)
        self._asked = self._opening = None
        self._try_at = 0.0
        await self._node.aclose()


def _load_scripts(_node: RedisNode, pipe: Pipe) -> None:
    for script in PRELOADED:  # if the server does not permit it, the first use loads the script
        pipe.call("SCRIPT", "LOAD", script.text).add_done_callback(retrieve)


def _field(info: Reply, name: str) -> str:
    """A field of the reply to INFO, which RESP3 sends as text in a format of its own."""
    text = bytes(info).decode(errors="replace") if isinstance(info, bytes) else str(info)
    for line in text.splitlines():
        key, _, value = line.removeprefix("txt:").partition(":")
        if key == name:
            return value.strip()
    return ""
