"""
A world's inside: its network, its lock service, how it runs and how it ends.

Every client has one link, and what it sends or receives can be held up, lost or doubled. A message that has left cannot
be called back: pausing its sender, or healing the link, changes nothing about it. Messages of one link may overtake
each other. The lock service is the reference behind the network, on a clock of its own. Its tokens are 1, 2, 3, over
all names, and its bells are messages too.

The kernel refers to nothing that a test holds. So a world ends as soon as a test lets go of it: not when a garbage
collector finds it, in the middle of another test.

The thread of a test is the bridge from plain code to a simulated client: it lets time go on until each call is done. No
thread is started. Plain code runs where the test calls it, between two turns of all event loops, so that it may use
what refuses to run in one, such as Django's ORM, and the database connection of the test.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar, get_args

from fencing_sdk._client import LockClient
from fencing_sdk._lease import run_for
from fencing_sdk._values.claim import Busy, Claim, Gone, Holder, Place, Seen, check_name, holders_in
from fencing_sdk._values.clock import BootClock, Clock
from fencing_sdk._values.timing import Seconds, seconds
from fencing_sdk.abc import Bell, Kept, News
from fencing_sdk.backends.memory import MemoryBackend, MemoryLines
from fencing_sdk.errors import ConfigurationError, FencingError, StaleTokenError, UsageError, shown
from fencing_sdk.sync._bridge import Cancel, LoopThread, ThreadCall
from fencing_sdk.sync._client import ClientForThreads
from fencing_sdk.testing._loop import Process, ProcessClock, Timeline, check_python, never

T = TypeVar("T")
ForThreads = TypeVar("ForThreads", bound=ClientForThreads)

Operation = Literal["acquire", "renew", "release", "inspect", "bell", "write", "raise_to"]
Way = Literal["request", "reply"]


class NoAnswer(Exception):  # noqa: N818  (no caller sees it: the request is lost)
    """Raised by a peer that is down: nothing travels back."""


@dataclass(slots=True, eq=False)
class LinkFault:
    """Treatment of messages of one kind; None matches every kind."""

    operation: str | None
    way: str | None
    delay: float = 0.0
    lose: bool = False
    times: int | None = None
    again: float | None = None
    """Seconds after which the message arrives a second time."""
    struck: Callable[[], object] | None = None
    """Called with every message that is hit."""

    def strikes(self, operation: str, way: str) -> bool:
        """Return whether a message is hit, and count it."""
        if self.operation not in {None, operation} or self.way not in {None, way} or self.times == 0:
            return False
        if self.times is not None:
            self.times -= 1
        if self.struck is not None:
            self.struck()
        return True


class Link:
    """Links between one client, the lock service and the stores."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self._process = process
        self._faults: list[LinkFault] = []

    def delay(
        self,
        seconds_later: Seconds,
        operation: Operation | None = None,
        *,
        way: Way | None = None,
        times: int | None = None,
    ) -> None:
        """
        Deliver messages that are sent from now on *seconds_later* than usual.

        Args:
            seconds_later: Added to the latency, and to other delays that are set.

            operation: Only messages about this: ``"acquire"``, ``"renew"``, ``"release"``, ``"inspect"``, ``"bell"``
                (a reply without a request), ``"write"`` or ``"raise_to"``. All by default.

            way: Only ``"request"`` messages, or only ``"reply"`` messages. Both by default.

            times: Only so many messages. All until `heal` by default.
        """
        self.add(LinkFault(operation, way, delay=seconds(seconds_later, "delay"), times=times))

    def drop(self, operation: Operation | None = None, *, way: Way | None = None, times: int | None = None) -> None:
        """
        Lose messages that are sent from now on; the arguments select them as for `delay`.

        A lost request changes nothing. A lost reply leaves the client without an answer although the
        request took effect.
        """
        self.add(LinkFault(operation, way, lose=True, times=times))

    def duplicate(
        self,
        seconds_later: Seconds = 0.0,
        operation: Operation | None = None,
        *,
        way: Way | None = "request",
        times: int | None = None,
    ) -> None:
        """
        Deliver messages that are sent from now on twice, the second time *seconds_later* than the first.

        A driver that sends a request again when a connection breaks does this, and so does a proxy.
        The peer executes the request each time, and answers each time; the first answer counts. The
        second one also arrives where `drop` loses the first. The arguments select as for `delay`,
        but requests by default.
        """
        self.add(LinkFault(operation, way, again=seconds(seconds_later, "duplicate"), times=times))

    def heal(self) -> None:
        """Deliver messages that are sent from now on as usual."""
        self._faults.clear()

    def lift(self, fault: LinkFault) -> None:
        """End one fault. Idempotent."""
        if fault in self._faults:
            self._faults.remove(fault)

    def add(self, fault: LinkFault) -> None:
        """Set a fault, for messages that are sent from now on."""
        for value, kinds, parameter in ((fault.operation, Operation, "operation"), (fault.way, Way, "way")):
            if value not in {None, *get_args(kinds)}:
                msg = f"{parameter} must be one of {', '.join(get_args(kinds))}, got {shown(value)}"
                raise ConfigurationError(msg)
        self._faults.append(fault)

    async def ask(self, peer: str, operation: Operation, about: str, handle: Callable[[str], T]) -> T:
        """
        Send a request to *peer* and wait for the reply, for ever if need be.

        *handle* is called with the name of this client when the request arrives. What it returns
        travels back, and so does a `FencingError` that it raises.
        """
        name = self._process.name
        reply: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def arrived() -> None:
            try:
                outcome = _outcome(handle, name)
            except NoAnswer:
                return
            text = f"{peer} > {name}: {operation} {about}: {_in_words(outcome)}" if self._network.noted else ""
            self._carry(text, operation, "reply", back, outcome)

        def back(outcome: T | FencingError) -> None:
            self._process.loop.arrive(_settle, reply, outcome)

        text = f"{name} > {peer}: {operation} {about}" if self._network.noted else ""
        self._carry(text, operation, "request", arrived)
        return await reply

    def send(self, peer: str, operation: str, about: str, handle: Callable[[str], object]) -> None:
        """Send something to *peer* that it does not answer."""
        name = self._process.name

        def arrived() -> None:
            with contextlib.suppress(NoAnswer, FencingError):
                handle(name)

        self._carry(f"{name} > {peer}: {operation} {about}", operation, "request", arrived)

    def push(self, peer: str, operation: str, about: str, deliver: Callable[..., object], *message: object) -> None:
        """Let *peer* send something to this client that it did not ask for."""
        arrive = self._process.loop.arrive
        self._carry(
            f"{peer} > {self._process.name}: {operation} {about}", operation, "reply", arrive, deliver, *message
        )

    def _carry(self, text: str, operation: str, way: Way, deliver: Callable[..., None], *message: object) -> None:
        if not self._faults:
            self._network.carry(text, 0.0, deliver, *message)
            return
        struck = [fault for fault in self._faults if fault.strikes(operation, way)]
        late = sum(fault.delay for fault in struck)
        lost = any(fault.lose for fault in struck)
        self._network.carry(text, late, None if lost else deliver, *message)
        for again in [fault.again for fault in struck if fault.again is not None]:
            self._network.carry(f"{text} (again)", late + again, deliver, *message)


class Network:
    """The links of a world, found by the event loop that runs."""

    def __init__(self, timeline: Timeline, *, latency: tuple[float, float]) -> None:
        self._timeline = timeline
        self._latency = latency
        self._links: dict[asyncio.AbstractEventLoop, Link] = {}
        self.latest = 0.0
        """When the last of the messages that were sent by now arrives."""

    @property
    def noted(self) -> bool:
        """True if messages are written to the history."""
        return self._timeline.recording

    def connect(self, process: Process) -> Link:
        """Make the link of *process*."""
        link = self._links[process.loop] = Link(self, process)
        return link

    def here(self) -> Link:
        """The link of the client whose code runs now."""
        link = self._links.get(asyncio.get_running_loop())
        if link is None:
            msg = "only code of a client can reach a store: await it in client.run(...), or use client.write(...)"
            raise UsageError(msg)
        return link

    def carry(self, text: str, late: float, deliver: Callable[..., None] | None, *message: object) -> None:
        """Deliver a message after the latency and *late* seconds; None loses it."""
        if self.noted:
            fate = " (lost)" if deliver is None else f" ({late:g} s late)" if late else ""
            self._timeline.note(text + fate)
        if deliver is not None:
            travels = self._timeline.random.uniform(*self._latency)
            arrives = self._timeline.now + travels + late
            self.latest = max(self.latest, arrives)
            self._timeline.at(arrives, deliver, *message)

    def heal(self) -> None:
        """Heal every link."""
        for link in self._links.values():
            link.heal()


def _outcome(handle: Callable[[str], T], sender: str) -> T | FencingError:
    try:
        return handle(sender)
    except FencingError as error:
        return error


def _settle(reply: asyncio.Future[T], outcome: T | FencingError) -> None:
    if reply.done():
        return  # the caller was cancelled and has stopped waiting
    if isinstance(outcome, FencingError):
        reply.set_exception(outcome)
    else:
        reply.set_result(outcome)


_WORDS: dict[type, Callable[[Any], str]] = {
    Place: lambda place: "waits" if place.token is None else f"token {place.token}",
    Holder: lambda holder: f"token {holder.token}",
    Busy: lambda _: "held",
    Gone: lambda _: "gone",
    StaleTokenError: lambda e: f"refused, {e.token} {'from another holder' if e.conflict else f'< {e.fence}'}",
    list: lambda outcomes: ", ".join(map(_in_words, outcomes)),
    type(None): lambda _: "done",
}


def _in_words(outcome: object) -> str:
    return _WORDS.get(type(outcome), shown)(outcome)


_END_LIMIT = 120.0
"""Virtual seconds for all processes to end; a client that keeps to its limits needs fewer."""
SERVICE = "locks"
"""The lock service in histories."""


class Kernel:
    """Time, the network, the lock service and the processes of one world."""

    def __init__(self, seed: int, *, latency: tuple[float, float], service_rate: float, patience: float) -> None:
        check_python()
        self.timeline = Timeline(seed)
        self.network = Network(self.timeline, latency=latency)
        self.service = LockService(ProcessClock(self.timeline, rate=service_rate))
        self.processes: list[Process] = []
        self._names = {SERVICE}
        self._patience = patience
        self._closed = False

    def new_name(self, name: str) -> str:
        """Take *name* for a client or a store."""
        self.check_open()
        if check_name(name) in self._names:
            msg = f"{shown(name)} is in this world already; pass another name"
            raise ConfigurationError(msg)
        self._names.add(name)
        return name

    def new_process(self, name: str, *, clock_rate: float) -> Process:
        """Add a process."""
        process = Process(self.timeline, self.new_name(name), rate=clock_rate)
        self.processes.append(process)
        return process

    def check_open(self) -> None:
        """Raise if the world has ended."""
        if self._closed:
            msg = "this world has ended; make another one"
            raise UsageError(msg)

    def sleep(self, duration: float) -> None:
        """Let time go on."""
        self.check_open()
        until = self.timeline.now + duration
        self._run(until, never)
        self.timeline.now = max(self.timeline.now, until)

    def finish(self, task: asyncio.Task[T]) -> T:
        """Let time go on until *task* has ended; return or raise its outcome."""
        self.check_open()
        host = next((process for process in self.processes if process.loop is task.get_loop()), None)
        if host is None:
            msg = "the task does not belong to this world; make it with client.start(...)"
            raise UsageError(msg)
        self.wait(host, task.done)
        return task.result()

    def wait(self, host: Process, done: Callable[[], bool]) -> None:
        """Let time go on until *done*, by what *host* does."""
        self.check_open()
        if host.turning:
            msg = f"code of client {shown(host.name)} would wait for itself; await the coroutine instead"
            raise UsageError(msg)
        self._run(self.timeline.now + self._patience, done)
        if not done():
            raise UsageError(self._why_endless())

    def _why_endless(self) -> str:
        paused = ", ".join(process.name for process in self.processes if process.paused)
        hint = f"paused are {paused}: call resume()" if paused else "is a message lost that it waits for?"
        if self.timeline.over:
            return f"the call will never end, because nothing is left to happen; {hint}"
        return f"the call did not end within {self._patience:g} virtual seconds; {hint}"

    def _run(self, until: float, stop: Callable[[], bool]) -> None:
        self.timeline.run(until, stop)
        _raise(self._take_failures())

    def _take_failures(self) -> list[BaseException]:
        failures = list(self.timeline.failures)
        self.timeline.failures.clear()
        return failures

    def end(self) -> None:
        """Resume all processes, cancel their work, close their clients. The history ends before that. Idempotent."""
        if any(process.turning for process in self.processes):
            msg = "a world cannot be ended by code that runs in it"
            raise UsageError(msg)
        if self._closed:
            return
        self._closed = True
        before = [*self._take_failures(), *(error for process in self.processes for error in process.unseen())]
        self.timeline.recording = False
        self.network.heal()
        meanwhile = self._end_processes()
        _raise([*before, *(error for error in meanwhile if not isinstance(error, FencingError))])

    def _end_processes(self) -> list[BaseException]:
        """Return what failed; a lease that was lost because the world ended is among it."""
        endings = [process.end() for process in self.processes]
        limit = self.timeline.now + _END_LIMIT
        failures: list[BaseException] = []
        while True:
            self.timeline.run(limit, lambda: all(ending.done() for ending in endings))
            if not self.timeline.failures:
                break
            failures += self._take_failures()
        return [*failures, *(error for process in self.processes for error in process.close())]


def _raise(errors: Sequence[BaseException]) -> None:
    if len(errors) == 1:
        raise errors[0]
    if errors:
        msg = "errors of tasks that were never awaited"
        raise BaseExceptionGroup(msg, errors)


class LockService:
    """Lines of tickets for clients, of which it remembers by which name it knows them."""

    def __init__(self, clock: Clock) -> None:
        self._lines = MemoryLines(clock, lambda last: last + 1, self._ring)
        self._clients: dict[str, str] = {}
        self._links: dict[str, tuple[Link, Bell]] = {}  # by owner

    def draw(self, client: str, claim: Claim, *, only_if_it_holds: bool) -> Place | Busy:
        """Draw a ticket for *client*."""
        self._clients[claim.holder] = client
        return self._lines.draw(claim, only_if_it_holds=only_if_it_holds)

    def keep(self, tickets: Sequence[Kept]) -> Sequence[Place | Gone]:
        """Let tickets live on."""
        return self._lines.keep(tickets)

    def give_back(self, claim: Claim, after: float) -> Gone | None:
        """End a ticket."""
        return self._lines.give_back(claim, after)

    def end(self, name: str, token: int, reason: str) -> bool:
        """End the tickets that hold *name* with this *token*."""
        return self._lines.end(name, token, reason)

    def revoke(self, name: str) -> None:
        """Take *name* away from its holders. Its clients do not hear of it before their next request."""
        links, self._links = self._links, {}
        for holder in self.holders(name):
            self._lines.end(name, holder.token, "")
        self._links = links

    def tickets(self, name: str) -> Sequence[Seen]:
        """Return the tickets of *name*."""
        return self._lines.tickets(name)

    def names(self, prefix: str, cursor: str | None, limit: int) -> tuple[Sequence[str], str | None]:
        """Return names that may have tickets."""
        return self._lines.names(prefix, cursor, limit)

    def holders(self, name: str) -> Sequence[Holder]:
        """Return every holder of *name*."""
        return holders_in(name, self._lines.tickets(name))

    def inspect(self, name: str) -> Holder | None:
        """Return the holder of *name*."""
        return next(iter(self.holders(name)), None)

    def holder(self, name: str) -> str | None:
        """The client that holds *name* in the eyes of the service."""
        holder = self.inspect(name)
        return None if holder is None else self._clients[holder.id]

    def listen(self, link: Link, owner: str, bell: Bell) -> Callable[[], object]:
        """Send the news of this owner's bell over *link*."""
        self._links[owner] = link, bell
        return lambda: self._links.pop(owner, None)

    def _ring(self, owner: str, news: News) -> None:
        if (listener := self._links.get(owner)) is not None:
            link, bell = listener
            link.push(SERVICE, "bell", _in_words(news), bell, news)


class WorldBackend:
    """The client's end: a backend whose verbs and bells are messages."""

    modes = MemoryBackend.modes
    rings = True

    def __init__(self, link: Link, service: LockService) -> None:
        self._link = link
        self._service = service

    async def draw(self, claim: Claim, *, only_if_it_holds: bool = False) -> Place | Busy:
        """See `fencing_sdk.abc.Backend.draw`."""
        draw = partial(self._service.draw, claim=claim, only_if_it_holds=only_if_it_holds)
        return await self._link.ask(SERVICE, "acquire", claim.name, draw)

    async def keep(self, tickets: Sequence[Kept]) -> Sequence[Place | Gone]:
        """See `fencing_sdk.abc.Backend.keep`."""
        names = ", ".join(claim.name for claim, _ in tickets)
        return await self._link.ask(SERVICE, "renew", names, lambda _: self._service.keep(tickets))

    async def give_back(self, claim: Claim, *, after: float = 0.0) -> Gone | None:
        """See `fencing_sdk.abc.Backend.give_back`."""
        return await self._link.ask(SERVICE, "release", claim.name, lambda _: self._service.give_back(claim, after))

    async def end(self, name: str, token: int, reason: str) -> bool:
        """See `fencing_sdk.abc.Backend.end`."""
        return await self._link.ask(SERVICE, "inspect", name, lambda _: self._service.end(name, token, reason))

    async def tickets(self, names: Sequence[str]) -> Sequence[Sequence[Seen]]:
        """See `fencing_sdk.abc.Backend.tickets`."""
        return await self._link.ask(
            SERVICE, "inspect", ", ".join(names), lambda _: [*map(self._service.tickets, names)]
        )

    async def names(self, prefix: str, cursor: str | None, limit: int) -> tuple[Sequence[str], str | None]:
        """See `fencing_sdk.abc.Backend.names`."""
        return await self._link.ask(SERVICE, "inspect", prefix, lambda _: self._service.names(prefix, cursor, limit))

    def listen(self, claim: Claim, bell: Bell) -> Callable[[], object]:
        """See `fencing_sdk.abc.Backend.listen`."""
        return self._service.listen(self._link, claim.owner, bell)

    async def aclose(self) -> None:
        """Nothing is open."""


def without_thread(client: ForThreads, kernel: Kernel, process: Process) -> ForThreads:
    """Return *client*, which is for plain code, with *process* for the work of its background thread."""
    client._bridges[os.getpid()] = WorldThread(client._client, kernel, process)  # noqa: SLF001  (it did not make it)
    return client


class WorldThread(LoopThread):
    """The part of the background thread is played by a simulated process."""

    def __init__(self, client: LockClient, kernel: Kernel, process: Process) -> None:
        super().__init__(client)
        self._kernel = kernel
        self._process = process
        self._loop = process.loop

    def _prepare(
        self,
        function: Callable[[], Awaitable[T]],
        undo: Callable[[T], Awaitable[object]] | None,
        cancel: Cancel | None,
        *,
        opens: bool,
    ) -> ThreadCall[T]:
        if opens:
            self.open()
        return _WorldCall(self._wait, function, undo, cancel, acquires=opens)

    def call_aside(self, function: Callable[[], None]) -> None:
        """Call *function* now: a thread of its own would run on real time."""
        function()

    def open(self) -> asyncio.AbstractEventLoop:
        """Return the loop of the process, in which the client is open unless it was closed."""
        if self._closed:
            self._closed = False
            self.call(self._client.__aenter__)
        return self._process.loop

    def close(self) -> None:
        """See `LoopThread.close`."""
        if not self._closed:
            self.call(self._client.aclose)
            self._closed = True

    def close_soon(self) -> None:
        """Nothing: the world closes its clients."""

    def _post(
        self,
        begin: Callable[[], None],
        only: asyncio.AbstractEventLoop | None,  # noqa: ARG002  (a process has one)
        call: ThreadCall[Any] | None = None,
    ) -> None:
        self._kernel.check_open()
        if self._process.paused:
            msg = f"client {shown(self._process.name)} is paused, so none of its code runs: call resume() first"
            raise UsageError(msg)
        if call is not None:
            call.loop = self._process.loop
        self._process.loop.arrive(begin)

    def _wait(self, done: Callable[[], bool]) -> None:
        self._kernel.wait(self._process, done)


class _WorldCall(ThreadCall[T]):
    """One coroutine for which the world goes on."""

    __slots__ = ("_wait_until",)

    def __init__(
        self,
        wait_until: Callable[[Callable[[], bool]], None],
        function: Callable[[], Awaitable[T]],
        undo: Callable[[T], Awaitable[object]] | None = None,
        cancel: Cancel | None = None,
        *,
        acquires: bool,
    ) -> None:
        super().__init__(function, undo, cancel, acquires=acquires)
        self._wait_until = wait_until

    def begin(self) -> None:
        """See `ThreadCall.begin`. The loop numbers its tasks, so it makes them."""
        run_for(self._thread)
        self._task = asyncio.get_running_loop().create_task(self._run())

    def _sleep(self) -> None:
        self._wait_until(lambda: not self._woken.locked())
        self._woken.acquire()

    def _sleep_unless(self, cancel: Cancel, post: Callable[[], object]) -> None:
        began = BootClock.now()

        def woken() -> bool:
            cancel.check(began)
            return not self._woken.locked()

        woken()
        post()
        self._wait_until(woken)
        self._woken.acquire()

    def _outwait(self, undone: threading.Event) -> None:
        with contextlib.suppress(UsageError):  # the client is paused
            self._wait_until(undone.is_set)
