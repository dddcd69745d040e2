"""
One round: workers on a store, faults for a while, then calm, and everybody leaves.

Everything that is done to the round is in its recording, so that a lease that was lost needs a cause in it. The store
is asked all the time by a bystander without faults of its own: when that one waits, everybody may wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from fire_crew import CLOCK, Crew, Place
from fire_network import FAULTS, Network
from fire_resource import Resource
from fire_store import Store
from patience import until

from fencing_sdk import FencingError, LockClient, connect
from fencing_sdk._recording import Recorder
from tests.simulation.check import read_lines
from tests.simulation.history import Line
from tests.simulation.judge import Report, check

Deck: TypeAlias = dict[str, Callable[[], Awaitable[bool]]]
"""Faults, each of which tells whether it really happened."""

NAMES = ("seats/1", "seats/2", "seats/3", "lead/seats")
SHARED_NAMES = ("pool/seats", "catalog/seats")
"""A semaphore and a read/write lock."""
HOLDER = 6.0
"""Seconds for which somebody who holds a lock is looked for."""
KINDS = 6
"""Kinds of fault without which a run shows too little."""
CALM = 1.0
"""Seconds for which everybody goes on when faults have ended and what dead clients held is free again."""
RELEASED = 5.0
"""Seconds after which what was released is seen to be free; by itself it would take ten times the usual ttl."""
TICK = 0.02
NOT_OURS = "unexpected connection_lost() call"
"""What asyncpg leaves in a future that nobody asks, when it is cancelled while it connects."""
LATE = 0.1
"""Seconds by which the bench may be late itself, or the store slow, without a line about it."""


@dataclass
class Outcome:
    """What one round, or many, came to."""

    report: Report = field(default_factory=Report)
    faults: Counter[str] = field(default_factory=Counter)
    """How often each kind of fault really happened."""
    missed: Counter[str] = field(default_factory=Counter)
    """How often one was tried and hit nobody."""
    lines: Counter[str] = field(default_factory=Counter)
    """How many lines of each kind were recorded."""
    failures: list[str] = field(default_factory=list)
    """What must not happen, and is not a history: a worker that died by itself, a row out of order."""
    seconds: float = 0.0

    def add(self, other: Outcome) -> None:
        self.report.add(other.report)
        for mine, its in ((self.faults, other.faults), (self.missed, other.missed), (self.lines, other.lines)):
            mine.update(its)
        self.failures += other.failures
        self.seconds += other.seconds


class Round:
    """
    One round.

    Args:
        store: The servers, which are running.

        folder: For the recordings; empty.

        seed: Of the faults and their moments.

        seconds: Of faults.

        least: Tokens that have to be used, besides `KINDS` kinds of fault and a refused write. While less has
            happened, faults go on, four times as long at most: machines are not equally fast.

        workers: Processes.

        guarded: False takes the guard out of the resource, to see who notices.

        shares: Permits, readers and writers in the place of locks.
    """

    def __init__(
        self,
        store: Store,
        folder: Path,
        *,
        seed: int,
        seconds: float,
        least: int = 0,
        workers: int = 5,
        guarded: bool = True,
        shares: bool = False,
    ) -> None:
        self.names = SHARED_NAMES if shares else NAMES
        self.store = store
        self.folder = folder
        self.seconds = seconds
        self.least = least
        self.workers = workers
        self.random = random.Random(seed)
        self.recorder = Recorder(folder / "bench.jsonl", actor="bench")
        self.resource = Resource(folder, self.recorder, guarded=guarded)
        self.outcome = Outcome()
        self.over = asyncio.Event()
        self._well = asyncio.Event()
        config = {"sink": self.resource.socket, "names": self.names, "ttl": store.ttl, "gone": store.gone, "tasks": 2}
        self.crew = Crew(store, folder, self.recorder, random.Random(seed + 1), config)

    async def run(self) -> Outcome:
        started = CLOCK.now()
        self.recorder.record("run", title=f"{self.store.name}, {self.workers} workers", declared=True)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.resource)
            networks = [await stack.enter_async_context(Network(self.store.ports)) for _ in range(self.workers)]
            stack.callback(self.crew.close)
            watching = [asyncio.create_task(watch) for watch in (self._tick(), self._bystand())]
            stack.push_async_callback(_end, watching)
            await self.crew.start(networks)
            await self._harm()
            await asyncio.to_thread(self.store.heal)
            await self._all_is_well()
            self.recorder.record("healed", within=self.store.served)
            for place in self.crew.places:
                place.signal(signal.SIGHUP)
            await asyncio.sleep(self.store.gone + CALM)
            self.outcome.failures += [f"{actor} did not leave in good order" for actor in await self.crew.leave()]
            await self._look_and_ask()
            self.outcome.failures += self.resource.out_of_order()
        self.recorder.close()
        self.outcome.seconds = CLOCK.now() - started
        await asyncio.to_thread(self._judge)
        return self.outcome

    # Faults

    async def _harm(self) -> None:
        processes: Deck = {
            "worker killed": lambda: self._on_worker(Place.kill),
            "holder killed": self._kill_holder,
            "worker dismissed": lambda: self._on_worker(Place.dismiss),
            "loop blocked": lambda: self._on_worker(Place.block),
            "task cancelled": lambda: self._on_worker(Place.cancel),
        }
        freezes: Deck = {
            "worker frozen": lambda: self._on_worker(lambda place: place.freeze(self._length())),
            "holder frozen": self._freeze_holder,
        }
        networks: Deck = {kind: lambda kind=kind: self._on_any_network(kind) for kind in FAULTS}
        cuts: Deck = {"holder cut off": self._cut_holder_off}
        if not self.store.ports:
            networks = cuts = {}
        servers = {kind: lambda kind=kind: self._on_store(kind) for kind in self.store.harms}
        async with asyncio.TaskGroup() as lanes:
            for deck, pause in ((freezes, 0.5), (processes, 0.5), (networks, 0.3), (cuts, 0.5), (servers, 1.2)):
                if deck:
                    lanes.create_task(self._lane(deck, pause))
            lanes.create_task(self._watch_workers())
            await asyncio.sleep(self.seconds)
            with contextlib.suppress(AssertionError):
                await until(self._enough, what="enough was seen", within=3 * self.seconds)
            self.over.set()

    def _enough(self) -> bool:
        """Whether a short round has seen what a verdict needs."""
        refused = self.resource.refused or not self.resource.guarded
        return bool(refused and len(self.outcome.faults) >= KINDS and len(self.resource.served) >= self.least)

    async def _lane(self, deck: Deck, pause: float) -> None:
        """Play every kind of a deck, in another order each time."""
        while True:
            for kind in self.random.sample(sorted(deck), len(deck)):
                await asyncio.sleep(pause * self.random.uniform(0.5, 1.5))
                if self.over.is_set():
                    return
                happened = await deck[kind]()
                (self.outcome.faults if happened else self.outcome.missed)[kind] += 1

    def _length(self) -> float:
        """Seconds: what a lease rides out, or what it may not survive."""
        low, high = self.random.choice(((0.05, 0.25), (0.05, 0.25), (0.4, 1.4)))
        return self.store.ttl * self.random.uniform(low, high)

    async def _on_place(self, place: Place, harm: Callable[[Place], Awaitable[bool]]) -> bool:
        place.busy = True
        try:
            return await harm(place)
        finally:
            place.busy = False

    async def _on_worker(self, harm: Callable[[Place], Awaitable[bool]]) -> bool:
        return await self._on_place(self.random.choice(self.crew.free()), harm)

    async def _holder(self, doing: str) -> tuple[Place, Callable[[], bool]] | None:
        """Whoever has just read its token and will use it later, and whether somebody else has used the lock since."""
        since = CLOCK.now()
        while CLOCK.now() < since + HOLDER:
            heard = self.resource.heard.get(doing)
            if heard is not None and heard.at >= since:
                for place in self.crew.free():
                    if place.actor == heard.actor:
                        return place, functools.partial(self.resource.has_seen_more, heard)
            await asyncio.sleep(0.002)
        return None

    async def _freeze_holder(self) -> bool:
        """Let a holder stand still until somebody else has got its lock, and used it."""
        if (found := await self._holder("prepare")) is None:
            return False
        place, succeeded = found

        async def freeze(place: Place) -> bool:
            await asyncio.sleep(0.01)  # until it has heard the answer, and does something else before it writes
            return await place.freeze(self.store.gone, succeeded)

        return await self._on_place(place, freeze)

    async def _kill_holder(self) -> bool:
        found = await self._holder("prepare")
        return found is not None and await self._on_place(found[0], Place.kill)

    async def _cut_holder_off(self) -> bool:
        """Let a holder that goes on and on reach nobody, until somebody else has got its lock, and used it."""
        if (found := await self._holder("stay")) is None:
            return False
        place, succeeded = found
        harm = self.random.choice((Network.unreachable, Network.blackhole))
        return await self._on_network("holder cut off", place, lambda it: harm(it, self.store.gone, succeeded))

    async def _on_network(self, kind: str, place: Place, harm: Callable[[Network], Awaitable[bool]]) -> bool:
        since = CLOCK.now()
        place.cut = True
        try:
            return await harm(place.network)
        finally:
            place.cut = False
            what, until = ("late" if kind == "slow network" else "cut"), CLOCK.now()
            for actor in place.actors(since, until):
                self.recorder.record("trouble", what=what, fault=kind, who=actor, since=since, until=until)

    async def _on_any_network(self, kind: str) -> bool:
        place = self.random.choice([place for place in self.crew.places if not place.cut])
        return await self._on_network(kind, place, lambda it: FAULTS[kind](it, self._length()))

    async def _on_store(self, kind: str) -> bool:
        since = CLOCK.now()
        try:
            return await self.store.harms[kind](self._length())
        finally:
            self.recorder.record("trouble", what="outage", fault=kind, since=since, until=CLOCK.now())

    async def _watch_workers(self) -> None:
        while not self.over.is_set():
            for place in self.crew.free():
                if not place.alive and not place.busy:
                    self.outcome.failures.append(f"{place.actor} died by itself")
                    await self._on_place(place, Place.kill)
            await asyncio.sleep(0.1)

    # What is known without the workers

    async def _tick(self) -> None:
        """All networks are in this event loop: when it is late, so is every message."""
        while True:
            due = CLOCK.now() + TICK
            await asyncio.sleep(TICK)
            if (now := CLOCK.now()) - due > LATE:
                self.recorder.record("trouble", what="late", since=due - TICK, until=now)

    async def _bystand(self) -> None:
        """Take and release a lock of one's own, on the servers directly, again and again."""
        async with connect(self.store.url()) as locks:
            lock = locks.lock("bystander", ttl=self.store.ttl)
            while True:
                since = CLOCK.now()
                try:
                    lease = await lock.try_acquire()
                    if lease is not None:
                        await lease.release()
                    answered = True
                except FencingError:
                    answered = False
                took = CLOCK.now() - since
                if answered and took < self.store.ttl / 2:
                    self._well.set()
                else:
                    self._well.clear()
                if not answered or took > LATE:
                    self.recorder.record("trouble", what="outage", since=since, until=CLOCK.now(), seen="bystander")
                await asyncio.sleep(0.05)

    async def _all_is_well(self) -> None:
        self._well.clear()
        async with asyncio.timeout(60.0):
            await self._well.wait()

    async def _look_and_ask(self) -> None:
        """When everybody has left, nothing is held; and somebody new gets every lock."""
        newcomer = Recorder(self.folder / "newcomer.jsonl", actor="newcomer")
        async with connect(self.store.url(), observers=[newcomer]) as locks:
            left, stop = list(self.names), CLOCK.now() + RELEASED
            while left and CLOCK.now() < stop:
                left = [name for name in left if await locks.inspect(name) is not None]
            self.recorder.record("end", held=left)
            async with asyncio.TaskGroup() as asking:
                for name in self.names:
                    asking.create_task(self._ask(locks, name))
        newcomer.close()

    async def _ask(self, locks: LockClient, name: str) -> None:
        lease = await locks.lock(name, ttl=self.store.ttl, wait=self.store.served + 20.0).acquire()
        await lease.release()

    # The verdict

    def _judge(self) -> None:
        lines = sorted(self._lines(), key=lambda line: float(line["t"]))
        with (self.folder / "history.jsonl").open("w") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        self.outcome.report = check(lines)
        self.outcome.lines = Counter(str(line["kind"]) for line in lines)
        unhandled = [str(line["what"]) for line in lines if line["kind"] == "unhandled"]
        self.outcome.failures += [what for what in unhandled if NOT_OURS not in what]
        if said := self.crew.log():
            self.outcome.failures.append(f"workers wrote:\n{said}")

    def _lines(self) -> list[Line]:
        found: list[Line] = []
        for path in self.folder.glob("*.jsonl"):
            if path.name == "history.jsonl":
                continue
            *whole, _torn = path.read_bytes().split(b"\n")  # a killed process may have written half a line
            found += read_lines(whole, path.name)
        return found


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def play(store: Store, folder: Path, **settings: Any) -> Outcome:
    """Play one round on a *store* that is running."""
    await asyncio.to_thread(folder.mkdir, parents=True)
    return await Round(store, folder, **settings).run()
