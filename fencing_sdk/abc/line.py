"""
The rules of a line of tickets: what becomes of one name. No clock, no I/O; every store is compared with them.

::

    holds     a ticket that fits beside every one ahead of it, as each of those does beside those ahead of it
    fits      all ahead are of its mode, and fewer than its width: 1 for a lock or a writer, the number of permits for
              a permit, unbounded for a reader
    lives     for its ttl after its owner's last sign of life; while it waits for WAITER_TTL at most
    token     drawn in the step in which a ticket begins to hold; a reader beside readers takes theirs over
    number    of a permit: the lowest that is free in that step

A ticket that holds goes on to hold: nothing is ever put ahead of a ticket, and those ahead only become fewer. A death
that is acted upon is written in the same step, so that neither a late request nor a clock that was set back revives a
ticket which the line has passed over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fencing_sdk._values.claim import READER, Busy, Claim, Gone, Mode, Permit, Place, Seen, holder_of

WAITER_TTL = 5.0
"""Longest life, in seconds, of a ticket that waits: one whose owner died at the head holds up the others as long."""
REASON_TTL = 60.0
"""Seconds for which an operator's reason outlives the ticket that was ended: its owner asks before that."""

TokenSource = Callable[[int], int]
"""From the last token of the name to the next one."""


@dataclass(slots=True, eq=False)
class Row:
    """One ticket of a line."""

    owner: str
    mode: Mode
    label: str | None
    number: int
    dies: float
    """Seconds on the store's clock, as `since`."""
    longest: float
    """The longest that it was ever asked to live for: a clock that is set back does not keep it alive for longer."""
    since: float
    token: int | None = None
    """None while it waits."""
    permit: int | None = None
    address: object = None
    """Address at which the store reaches the owner."""

    def live_on(self, ttl: float, now: float) -> None:
        """Take a sign of life: it never shortens."""
        if self.token is None and ttl > WAITER_TTL:
            ttl = WAITER_TTL
        if now + ttl > self.dies:  # noqa: PLR1730  (each renewal comes here, and `max` costs as much as the rest)
            self.dies = now + ttl
        if ttl > self.longest:  # noqa: PLR1730
            self.longest = ttl


@dataclass(slots=True)
class Line:
    """The tickets of one name, in order: those that hold, then those that wait."""

    next_token: TokenSource
    last: int = 0
    """The last token of the name; 0: none."""
    drawn: int = 0
    """Number of tickets that were drawn."""
    rows: dict[str, Row] = field(default_factory=dict)
    """Tickets by their owners, in the order of the line."""
    ended: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Reasons of operators by the owners of ended tickets, each after the moment until which it is kept."""
    rung: list[Row] = field(default_factory=list)
    """Tickets that have begun to hold: the store rings for them, and empties the list."""

    def settle(self, now: float) -> list[Row]:
        """Pass over the dead, let those hold who do now, and return all who hold."""
        held: list[Row] = []
        for row in list(self.rows.values()):
            if not self._lives(row, now):
                continue
            if row.token is None:
                if held and (row.mode.word != held[0].mode.word or len(held) >= row.mode.width):
                    break
                if held and row.mode == READER:
                    row.token = held[0].token
                else:
                    row.token = self.last = self.next_token(self.last)
                if isinstance(row.mode, Permit):
                    taken = {each.permit for each in held}
                    row.permit = next(number for number in range(row.mode.of) if number not in taken)
                row.since = now
                self.rung.append(row)
            held.append(row)
        return held

    def draw(self, claim: Claim, now: float, *, only_if_it_holds: bool = False, address: object = None) -> Place | Busy:
        """Put a ticket at the end; one that the owner has already lives on instead."""
        owner = claim.owner
        if self._living(owner, now) is not None:
            place = self.keep(claim, now)
            assert isinstance(place, Place)  # it is there
            return place
        self.ended.pop(owner, None)
        self.drawn += 1
        longest = min(claim.ttl, WAITER_TTL)
        row = Row(owner, claim.mode, claim.label, self.drawn, now + longest, longest, now, None, None, address)
        self.rows[owner] = row
        held = self.settle(now)
        if row.token is not None:
            row.live_on(claim.ttl, now)
        elif only_if_it_holds:
            del self.rows[owner]
            return Busy(min(each.dies for each in held) - now)
        return self._place(row, now, held)

    def keep(self, claim: Claim, now: float, number: int = 0) -> Place | Gone:
        """Let a ticket live on. *number*: that of the ticket, unless 0: another one of the owner is not meant."""
        row = self._living(claim.owner, now)
        if row is None or (number and number != row.number):
            return self._gone(claim.owner, now)
        held = self.settle(now) if row.token is None or len(self.rows) > 1 else None
        row.live_on(claim.ttl, now)
        return self._place(row, now, held)

    def give_back(self, owner: str, now: float, after: float = 0.0) -> Gone | None:
        """End a ticket. *after*: one that holds goes on to stand there for exactly so long, and nothing reaches it."""
        parked = f"-{owner}"
        if after > 0:
            self.settle(now)
        row = self._living(owner, now)
        if row is None:
            return None if self._living(parked, now) is not None else self._gone(owner, now)
        if after > 0 and row.token is not None and self._living(parked, now) is None:
            self._rename(row, parked, now + after, after)
        else:
            del self.rows[owner]
        self.settle(now)
        return None

    def end(self, token: int, reason: str, now: float) -> list[Row]:
        """End all that hold with this *token*, and return them."""
        over = [row for row in self.settle(now) if row.token == token]
        self.ended = {owner: kept for owner, kept in self.ended.items() if kept[0] > now}
        for row in over:
            self.ended[row.owner] = row.dies + REASON_TTL, reason
            del self.rows[row.owner]
        self.settle(now)
        return over

    def pass_on(self, owner: str, heir: Claim, now: float, address: object = None) -> Place | Gone:
        """Give the place of a ticket that holds to *heir*, with a new token; readers keep the one that they share."""
        self.settle(now)
        row = self._living(owner, now)
        if self._living(heir.owner, now) is None and row is not None and row.token is not None:
            self._rename(row, heir.owner, now + heir.ttl, heir.ttl)
            row.label, row.address = heir.label, address
            if row.mode != READER:
                row.token = self.last = self.next_token(self.last)
        place = self.keep(heir, now)
        return place if isinstance(place, Place) or place.reason is not None else self._gone(owner, now)

    def seen(self, now: float) -> list[Seen]:
        """Return the living tickets."""
        self.settle(now)
        living = [row for row in list(self.rows.values()) if self._lives(row, now)]
        return [
            Seen(holder_of(row.owner), row.mode, row.token, row.permit, row.dies - now, now - row.since, row.label)
            for row in living
        ]

    def _living(self, owner: str, now: float) -> Row | None:
        row = self.rows.get(owner)
        return row if row is not None and self._lives(row, now) else None

    def _lives(self, row: Row, now: float) -> bool:
        if row.dies > now + row.longest:  # the clock was set back
            row.dies = now + row.longest
        elif row.dies <= now:
            del self.rows[row.owner]
            return False
        return True

    def _place(self, row: Row, now: float, held: list[Row] | None = None) -> Place:
        if row.token is not None:
            return Place(row.token, row.permit, row.number)
        held = self.settle(now) if held is None else held
        if row is not next(each for each in self.rows.values() if each.token is None):
            return Place(None, None, row.number)
        deaths = [each.dies for each in held]
        joins = row.mode.shared and row.mode.word == held[0].mode.word  # it needs one number to be free
        return Place(None, None, row.number, None, (min(deaths) if joins else max(deaths)) - now)

    def _gone(self, owner: str, now: float) -> Gone:
        held = self.settle(now)
        until, why = self.ended.get(owner, (now, None))
        return Gone(why if now < until else None, taken=bool(held) and not held[0].mode.shared)

    def _rename(self, row: Row, owner: str, dies: float, longest: float) -> None:
        self.rows = {(owner if each is row else before): each for before, each in self.rows.items()}
        row.owner, row.dies, row.longest = owner, dies, longest
