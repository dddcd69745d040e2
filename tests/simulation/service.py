"""
The lock service of a simulated history: the lines of the reference, and their misfortunes.

Everything that it grants, extends and ends is recorded as it happens, on the time of the world:
this is the truth by which the clients' beliefs are measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from fencing_sdk._values.claim import Holder, holder_of, holders_in
from fencing_sdk.abc import LOCK, Busy, Claim, Gone, Kept, News, Place, Seen
from fencing_sdk.abc.line import Line, Row, TokenSource
from fencing_sdk.backends.memory import MemoryLines
from fencing_sdk.errors import BackendUnavailableError
from fencing_sdk.testing._kernel import NoAnswer
from fencing_sdk.testing._loop import ProcessClock, Timeline

NAME = "locks"
_EPOCH = 1_700_000_000_000_000
"""Microseconds since 1970 when a world begins."""


class Record(Protocol):
    """Writes a line of the recording."""

    def __call__(self, kind: str, /, actor: str, **fields: object) -> None: ...


class RecordedLines(MemoryLines):
    """Lines that record who begins to hold, lives on, and is no longer there."""

    service: Service

    def _line(self, name: str) -> Line:
        self._before = self._holding(name)
        return super()._line(name)

    def _leave(self, name: str, line: Line, asked_by: str | None = None) -> None:
        before = self._before
        super()._leave(name, line, asked_by)
        self.service.compare(name, before, self._holding(name), asked_by)

    def _holding(self, name: str) -> dict[str, Row]:
        line = self._lines.get(name)
        return {} if line is None else {o: replace(row) for o, row in line.rows.items() if row.token is not None}


class Service:
    """A lock service that can be down, restarted, stepped, and made to forget."""

    def __init__(self, timeline: Timeline, record: Record, *, rate: float, tokens: str) -> None:
        self._timeline = timeline
        self._record = record
        self._clock = ProcessClock(timeline, rate=rate)
        self._tokens = tokens
        self.stepped = 0.0
        """Seconds by which the clock of grants was stepped."""
        self.wall_stepped = 0.0
        """Seconds by which the clock of tokens was stepped."""
        self.silent = False
        """Whether requests vanish."""
        self.refusing = False
        """Whether requests are refused at once, as by a port without a listener."""
        self.bells: dict[str, Callable[[News], object]] = {}
        self.lines = self.new_lines()
        self._why = ""

    def new_lines(self) -> RecordedLines:
        """Lines without tickets and without a last token."""
        lines = RecordedLines(self, self.token_source(), self.ring)
        lines.service = self
        return lines

    def token_source(self) -> TokenSource:
        """How tokens grow, as in the backends."""
        if self._tokens == "counter":
            return lambda last: last + 1
        return lambda last: max(last + 1, self.wall_micros())

    def wall_micros(self) -> int:
        """The wall clock that hybrid tokens look at."""
        return _EPOCH + int((self._timeline.now + self.wall_stepped) * 1e6)

    def now(self) -> float:
        """The clock by which tickets die."""
        return self._clock.now() + self.stepped

    # What clients ask.

    def reached(self) -> None:
        """Let a request in, or not."""
        if self.silent:
            raise NoAnswer
        if self.refusing:
            backend, operation = "Simulated", "connect"
            raise BackendUnavailableError(backend, operation, "connection refused")

    def draw(self, claim: Claim, *, only_if_it_holds: bool) -> Place | Busy:
        """Draw a ticket."""
        self.reached()
        return self.lines.draw(claim, only_if_it_holds=only_if_it_holds)

    def keep(self, tickets: tuple[Kept, ...]) -> list[Place | Gone]:
        """Let tickets live on."""
        self.reached()
        return list(self.lines.keep(tickets))

    def give_back(self, claim: Claim, after: float) -> Gone | None:
        """End a ticket."""
        self.reached()
        self._why = "released"
        try:
            return self.lines.give_back(claim, after)
        finally:
            self._why = ""

    def tickets(self, name: str) -> list[Seen]:
        """Return the tickets of *name*."""
        self.reached()
        return list(self.lines.tickets(name))

    def listen(self, owner: str, bell: Callable[[News], object]) -> Callable[[], object]:
        """Ring for this owner."""
        self.bells[owner] = bell
        return lambda: self.bells.pop(owner, None)

    def ring(self, owner: str, news: News) -> None:
        """Ring, unless the connection was broken since."""
        if (bell := self.bells.get(owner)) is not None:
            bell(news)

    # What happens to it.

    def holders(self, name: str) -> list[Holder]:
        """The holders of *name* at this moment."""
        return holders_in(name, self.lines.tickets(name))

    def holder(self, name: str) -> Holder | None:
        """The holder of *name* at this moment."""
        return next(iter(self.holders(name)), None)

    def hang_up(self) -> None:
        """Break every connection: no bell rings until a client asks again."""
        for bell in tuple(self.bells.values()):
            bell(None)

    def forget(self, *, tokens: bool) -> None:
        """Come back without the tickets, and without the last token too."""
        last = self.lines._last
        for name in list(self.lines._lines):
            for owner, row in self.lines._holding(name).items():
                if row.dies > self.now():
                    self.ended(name, owner, row, "forgotten", "")
        self.lines = self.new_lines()
        if not tokens:
            self.lines._last = last

    def revoke(self, name: str, token: int) -> bool:
        """End the tickets with this *token*, and tell their holders."""
        self._why, self._meant = "revoked", token
        try:
            return self.lines.end(name, token, "")
        finally:
            self._why = ""

    # What is recorded.

    def compare(self, name: str, before: dict[str, Row], after: dict[str, Row], asked_by: str | None) -> None:
        """Record what a step has changed."""
        for owner, row in before.items():
            if owner not in after and f"-{owner}" not in after and row.dies > self.now():
                by = "" if asked_by is None or self._why == "revoked" else holder_of(asked_by)
                self.ended(name, owner, row, self._why, by)
        for owner, row in after.items():
            was = before.get(owner) or before.get(owner.removeprefix("-"))
            if was is None or was.token != row.token:
                self.record("granted", name, owner, row)
            elif was.dies != row.dies:
                self.record("extended", name, owner, row)

    def record(self, kind: str, name: str, owner: str, row: Row) -> None:
        """Record a grant or its extension, with the moment it ends by itself."""
        until = self._timeline.now + (row.dies - self.now()) / self._clock.rate
        how = {} if row.mode == LOCK else {"mode": row.mode.word, "permit": row.permit}
        holder = holder_of(owner.removeprefix("-"))
        self._record(kind, NAME, name=name, holder=holder, token=row.token, until=until, **how)

    def ended(self, name: str, owner: str, row: Row, why: str, by: str) -> None:
        """Record the end of a grant before its time."""
        fields = {"name": name, "holder": holder_of(owner.removeprefix("-")), "token": row.token}
        more = {"meant": self._meant} if why == "revoked" else {}
        self._record("ended", NAME, **fields, **more, why=why, by=by)
