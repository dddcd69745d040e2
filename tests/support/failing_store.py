"""What the tests of the failure modes share: a store that keeps a ledger, and a worker that leaves tracks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from event_log import CLOCK
from looking import holder

from fencing_sdk import Lease, LeaseLostError
from fencing_sdk.abc import Bell, Busy, Claim, Gone, Kept, News, Place
from fencing_sdk.backends.memory import MemoryBackend

OPERATIONS = ("acquire", "renew", "release", "inspect")


@dataclass(frozen=True, slots=True)
class Entry:
    """What the store did, for whom, and when."""

    operation: str
    holder: str
    at: float
    token: int = -1
    done: bool = True


class LedgerBackend(MemoryBackend):
    """The memory backend, and a record of everything that reached it and what became of it."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.entries: list[Entry] = []

    async def draw(self, claim: Claim, *, only_if_it_holds: bool = False) -> Place | Busy:
        at = CLOCK.now()
        place = await super().draw(claim, only_if_it_holds=only_if_it_holds)
        token = place.token if isinstance(place, Place) else None
        self.entries.append(Entry("acquire", claim.holder, at, -1 if token is None else token, token is not None))
        return place

    async def keep(self, tickets: Sequence[Kept]) -> Sequence[Place | Gone]:
        at = CLOCK.now()
        answers = await super().keep(tickets)
        for (claim, _), answer in zip(tickets, answers, strict=True):
            token = answer.token if isinstance(answer, Place) else None
            if token is not None and not self.of("acquire", claim.holder):  # its turn has come
                self.entries.append(Entry("acquire", claim.holder, at, token))
            self.entries.append(Entry("renew", claim.holder, at, done=token is not None))
        return answers

    async def give_back(self, claim: Claim, *, after: float = 0.0) -> Gone | None:
        before = await holder(self, claim.name)
        gone = await super().give_back(claim, after=after)
        freed = before is not None and before.id == claim.holder and gone is None
        self.entries.append(Entry("release", claim.holder, CLOCK.now(), before.token if freed else -1, freed))
        return gone

    def listen(self, claim: Claim, bell: Bell) -> Callable[[], object]:
        def heard(news: News) -> None:
            if isinstance(news, Place):
                self.entries.append(Entry("acquire", claim.holder, CLOCK.now(), news.token))
            bell(news)

        return super().listen(claim, heard)

    def of(self, operation: str, holder: str | None = None) -> list[Entry]:
        """What was done (refusals left out), for everybody or for one holder."""
        return [
            entry
            for entry in self.entries
            if entry.operation == operation and entry.done and holder in {None, entry.holder}
        ]

    @property
    def tidy(self) -> bool:
        """Whether no ticket and no bell is left."""
        return not any(line.rows for line in self._lines._lines.values()) and not self._bells

    def waiting(self, name: str) -> int:
        """How many tickets wait."""
        return sum(ticket.token is None for ticket in self._lines.tickets(name))


class Tracks:
    """The tracks of a worker: its last step, its last readable token, and how late its loop ever was."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.last = 0.0
        self.last_token = 0.0
        self.lag = 0.0

    async def walk(self, lease: Lease) -> None:
        """Work in small steps until cancelled. A step is noted before it does anything."""
        while True:
            now = CLOCK.now()
            self.lag = max(self.lag, now - self.last) if self.last else 0.0
            self.last = now
            with contextlib.suppress(LeaseLostError):
                assert lease.token >= 0
                self.last_token = now
            self.begun.set()
            await asyncio.sleep(0.002)
