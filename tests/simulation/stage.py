"""The stage of one history: processes, links, the service, the resources, and the recording of it all."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Iterable
from typing import Any

from fencing_sdk._client import LockClient, on_clock
from fencing_sdk._lease import Lease
from fencing_sdk._values.token import Token, check_token
from fencing_sdk.errors import StaleTokenError
from fencing_sdk.events import Event
from fencing_sdk.guards.memory import MemoryGuard
from fencing_sdk.testing._kernel import Kernel, Link, Network
from fencing_sdk.testing._loop import Process, ProcessClock, Timeline
from tests.simulation.backend import SimulatedBackend, numbers
from tests.simulation.script import Script
from tests.simulation.service import Record, Service

LATENCY = (0.0002, 0.003)
_UNRECORDED = ("at", "stack", "kind", "error")
"""Fields of events that are told in another way, or that tell addresses."""


class Recording:
    """The lines of one history. Owner digests are random, so they are told as h1, h2, ... in order of appearance."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._holders: dict[object, str] = {}
        self.lines: list[dict[str, Any]] = []
        self.open = True

    def record(self, kind: str, /, actor: str, **fields: object) -> None:
        """Write a line."""
        if not self.open:
            return
        line: dict[str, Any] = {"t": round(self._timeline.now, 9), "kind": kind, "actor": actor, **fields}
        if holder := fields.get("holder"):
            line["holder"] = self._known(holder)
        if by := fields.get("by"):
            line["by"] = self._known(by)
        self.lines.append(line)

    def _known(self, digest: object) -> str:
        known = self._holders.get(digest)
        if known is None:
            known = self._holders[digest] = f"h{len(self._holders) + 1}"
        return known


def to_text(lines: Iterable[dict[str, Any]]) -> str:
    """The *lines* of a recording as a file holds them."""
    return "".join(json.dumps(line, default=str, allow_nan=False) + "\n" for line in lines)


class ClientClock:
    """The clock of a simulated client, and beside it the wall clock that the SDK never looks at."""

    def __init__(self, clock: ProcessClock) -> None:
        self.steady = clock
        self.stepped = 0.0

    def now(self) -> float:
        """See `fencing_sdk._values.clock.Clock.now`."""
        return self.steady.now()


class Resource:
    """What a lock protects: a real guard in a process of its own, reached by messages."""

    def __init__(self, timeline: Timeline, network: Network, record: Record, name: str) -> None:
        self.name = name
        self.guard = MemoryGuard()
        self.timeline = timeline
        self._network = network
        self._record = record
        self._permits: dict[str, Resource] = {}

    def of(self, lease: Lease) -> Resource:
        """What *lease* protects: this, or the resource of one permit."""
        if lease.resource == self.name:
            return self
        if lease.resource not in self._permits:
            permit = self._permits[lease.resource] = Resource(
                self.timeline, self._network, self._record, lease.resource
            )
            permit.guard = self.guard
        return self._permits[lease.resource]

    async def write(self, token: Token, sent: float) -> None:
        """
        Send a write and wait for the answer.

        Raises:
            StaleTokenError: the guard refused it.
        """
        await self._network.here().ask(self.name, "write", f"{token:d}", lambda who: self.arrived(who, token, sent))

    def arrived(self, who: str, token: Token, _sent: float) -> None:
        """Check and write, in one step."""
        try:
            self.guard.write(self.name, token, self.applied, who, token)
        except StaleTokenError as error:
            fields = {"resource": self.name, "token": int(token), "holder": token.holder, "fence": error.fence}
            self._record("write_refused", who, **fields)
            raise

    def applied(self, who: str, token: Token) -> None:
        """Record a write that took effect."""
        self._record("write_accepted", who, resource=self.name, token=int(token), holder=token.holder)

    async def raise_to(self, resource: str, token: int) -> None:
        """See `fencing_sdk.abc.Guard.raise_to`."""
        checked = check_token(token)
        await self._network.here().ask(self.name, "raise_to", f"{token:d}", lambda _: self.raised(resource, checked))

    def raised(self, resource: str, token: Token) -> None:
        """Raise the fence."""
        self.guard.admit(resource, token)

    async def highest(self, resource: str) -> Token | None:
        """See `fencing_sdk.abc.Guard.highest`."""
        return await self.guard.highest(resource)


class Actor:
    """A simulated process with the real client in it."""

    def __init__(self, stage: Stage, name: str, rate: float) -> None:
        self.name = name
        self.process: Process = stage.kernel.new_process(name, clock_rate=rate)
        self.link: Link = stage.kernel.network.connect(self.process)
        self.clock = ClientClock(self.process.clock)
        self.frozen_until = 0.0
        self.crashed = False
        self.stall: float | None = None
        """Seconds for which the next write stands still between its token and its departure."""
        backend = SimulatedBackend(
            self.link, stage.service, stage.recording.record, name, stage.numbers, not stage.script.polls
        )
        self.locks = on_clock(LockClient(backend, observers=[stage.observer(self)]), self.clock)
        self.process.on_close(self.locks.aclose)
        self.process.spawn(_open(self.locks))


async def _open(locks: LockClient) -> None:
    await locks.__aenter__()


_RECORDED: dict[type[Event], tuple[str, ...]] = {}


def _recorded_of(kind: type[Event]) -> tuple[str, ...]:
    """The fields of events of this *kind* that are told."""
    if kind not in _RECORDED:
        _RECORDED[kind] = tuple(field.name for field in dataclasses.fields(kind) if field.name not in _UNRECORDED)
    return _RECORDED[kind]


class Stage:
    """Everything that one history needs."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.kernel = Kernel(script.seed, latency=LATENCY, service_rate=1.0, patience=3600.0)
        self.timeline = self.kernel.timeline
        self.timeline.recording = False  # the history is told in lines of its own
        self.recording = Recording(self.timeline)
        self.numbers = numbers()
        record = self.recording.record
        self.service = Service(self.timeline, record, rate=script.rates[-1], tokens=script.tokens)
        self.resources = {name: Resource(self.timeline, self.kernel.network, record, name) for name in script.names}
        self.actors = [Actor(self, f"c{number}", rate) for number, rate in enumerate(script.rates[:-1])]
        self.max_holds: dict[asyncio.Task[Any] | None, float | None] = {}
        """What visits asked for, which no event tells."""

    @property
    def now(self) -> float:
        """Seconds since the world began."""
        return self.timeline.now

    def observer(self, actor: Actor) -> Callable[[Event], None]:
        """Tell the events of *actor* on the time of the world."""

        def observe(event: Event) -> None:
            rate = actor.process.clock.rate
            fields: dict[str, Any] = {field: getattr(event, field) for field in _recorded_of(type(event))}
            if "deadline" in fields:
                fields["deadline"] = self.now + (fields["deadline"] - event.at) / rate
            if event.kind == "acquired":
                fields["max_hold"] = self.max_holds.get(asyncio.current_task())
            self.recording.record(event.kind, actor.name, **fields)

        return observe
