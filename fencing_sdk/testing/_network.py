"""
The network of a world: every client has one link, and what it sends or receives can be held up, lost or doubled.

A message that has left cannot be called back: pausing its sender, or healing the link, changes
nothing about it. Messages of one link may overtake each other.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from fencing_sdk._values.claim import Busy, Grant, Holder, Renewal
from fencing_sdk._values.timing import Seconds, seconds
from fencing_sdk.errors import ConfigurationError, FencingError, StaleTokenError, UsageError, shown
from fencing_sdk.testing._loop import Timeline
from fencing_sdk.testing._process import Process

T = TypeVar("T")

Operation = Literal["acquire", "renew", "release", "inspect", "write", "raise_to"]
Way = Literal["request", "reply"]


class NoAnswer(Exception):  # noqa: N818  (no caller sees it: the request is lost)
    """Raised by a peer that is down: nothing travels back."""


@dataclass(slots=True, eq=False)
class LinkFault:
    """What happens to messages of one kind; None matches every kind."""

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
    """What connects one client with the lock service and the stores."""

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

            operation: Only messages about this: ``"acquire"``, ``"renew"``, ``"release"``, ``"inspect"``,
                ``"write"`` or ``"raise_to"``. All by default.

            way: Only ``"request"`` messages, or only ``"reply"`` messages. Both by default.

            times: Only so many messages. All until `heal` by default.

        Raises:
            ConfigurationError: an argument is none of these.
        """
        self.add(LinkFault(operation, way, delay=seconds(seconds_later, "delay"), times=times))

    def drop(self, operation: Operation | None = None, *, way: Way | None = None, times: int | None = None) -> None:
        """
        Lose messages that are sent from now on; the arguments select them as for `delay`.

        A lost request changes nothing. A lost reply leaves the client without an answer although the
        request took effect.

        Raises:
            ConfigurationError: an argument is none of these.
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

        Raises:
            ConfigurationError: an argument is none of these.
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
        """
        The link of the client whose code runs now.

        Raises:
            UsageError: none does.
        """
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


def _in_words(outcome: object) -> str:
    if isinstance(outcome, Grant | Holder):
        return f"token {outcome.token}"
    if isinstance(outcome, Busy):
        return "held"
    if isinstance(outcome, StaleTokenError):
        return f"refused, {outcome.token} {'from another holder' if outcome.conflict else f'< {outcome.fence}'}"
    if isinstance(outcome, Sequence) and not isinstance(outcome, str):
        return ", ".join(renewal.name.lower() for renewal in outcome)
    if isinstance(outcome, Renewal):  # of a release that found no grant of its owner
        return outcome.name.lower()
    return "done" if outcome is None else shown(outcome)
