"""What the tests of the failure modes share: a store that keeps a ledger, and a worker that leaves tracks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from event_log import CLOCK
from inside import holder_of

from fencing_sdk import Lease, LeaseLostError
from fencing_sdk.abc import Busy, Claim, Grant, PlaceInLine, Renewal, WaiterNotice
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

    async def acquire(self, claim: Claim) -> Grant | Busy:
        at = CLOCK.now()
        answer = await super().acquire(claim)
        granted = isinstance(answer, Grant)
        self.entries.append(Entry("acquire", claim.holder, at, answer.token if granted else -1, granted))
        return answer

    def stand(self, claim: Claim, notify: WaiterNotice, *, hand_over: bool) -> PlaceInLine:
        def handed(grant: Grant | None = None, age: float = 0.0) -> None:
            if grant is not None:
                self.entries.append(Entry("acquire", claim.holder, CLOCK.now(), grant.token))
            notify(grant, age)

        return super().stand(claim, handed, hand_over=hand_over)

    async def renew(self, claims: Sequence[Claim]) -> Sequence[Renewal]:
        at = CLOCK.now()
        answers = await super().renew(claims)
        for claim, answer in zip(claims, answers, strict=True):
            self.entries.append(Entry("renew", claim.holder, at, done=answer is Renewal.RENEWED))
        return answers

    async def release(self, claim: Claim) -> Renewal | None:
        before = await self.inspect(claim.name)
        refusal = await super().release(claim)
        after = await self.inspect(claim.name)
        freed = before is not None and (after is None or after.token != before.token)
        self.entries.append(Entry("release", holder_of(claim.owner), CLOCK.now(), before.token if freed else -1, freed))
        return refusal

    def of(self, operation: str, holder: str | None = None) -> list[Entry]:
        """What was done (refusals left out), for everybody or for one holder."""
        return [
            entry
            for entry in self.entries
            if entry.operation == operation and entry.done and holder in {None, entry.holder}
        ]

    @property
    def tidy(self) -> bool:
        """Whether no grant and no waiter is left."""
        return len(self._table) == 0 and not self._waiters


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
