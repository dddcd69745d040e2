"""
The reference semantics of a lock service: a table of grants and lines, without clock and without I/O.

Every call takes ``now``. Rules that every backend keeps, in their shortest form:

* a grant ends when its ttl has passed since the last renewal, also if no call looks at it then;
* a renewal never creates and never revives; a release touches only the owner's grant;
* a later grant has a higher token, whatever happened in between;
* while the line has a waiter, only the head of the line is granted, and a waiter that gives no sign
  of life for `LINE_TTL` seconds has left it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from fencing_sdk._values.claim import (
    LOCK,
    READER,
    TOKEN_LIMIT,
    Claim,
    Grant,
    Held,
    Holder,
    Mode,
    Renewal,
    Waiting,
    holder_of,
)
from fencing_sdk.backends._shared.option_values import read_hybrid
from fencing_sdk.errors import BackendRefusedError

LINE_POLL = 1.0
"""Seconds after which a waiter in the line tries again although no message has woken it."""
LINE_TTL = 3 * LINE_POLL
_SWEEP_FROM = 64
"""With more grants than this, the table deletes those that have expired."""

_FIRST_HYBRID = 10**15
"""Hybrid tokens are above this moment of the year 2001, and no counter gets there."""

TokenSource = Callable[[int], int]
"""From the last token granted to the next one."""


def token_source(tokens: object, wall_micros: Callable[[], int]) -> TokenSource:
    """
    Choose how tokens grow.

    ``"hybrid"``: ``max(last + 1, microseconds since 1970)``, which keeps growing when the counter
    is lost with its process or file. ``"counter"``: 1, 2, 3, which starts again then.
    """
    if read_hybrid(tokens):
        return lambda last: max(last + 1, wall_micros())
    return lambda last: last + 1


def age_of(token: int, mode: Mode, micros: int) -> float | None:
    """
    Seconds since the grant. A hybrid *token* is the moment of its grant, in microseconds.

    None for a counter, and for a reader, which may have joined others with their token. *micros*: the time by the
    clock that the tokens come from.
    """
    return None if token < _FIRST_HYBRID or mode == READER else max(0.0, (micros - token) / 1e6)


@dataclass(slots=True)
class TableRow:
    """The grant of one name."""

    owner: str
    token: int
    expires: float
    metadata: str | None
    since: float
    """The moment of the grant."""
    mode: Mode = LOCK
    """How the owner holds it: as a lock, or as a writer."""


@dataclass(slots=True)
class TableWaiter:
    """A place in a line."""

    seen: float
    """The last sign of life."""
    mode: Mode
    since: float
    """The moment at which it joined."""
    metadata: str | None


class LockTable:
    """The holder and the waiters of each lock, and the last token; one counter serves all names."""

    def __init__(self, next_token: TokenSource) -> None:
        self._next_token = next_token
        self._last_token = 0
        self._rows: dict[str, TableRow] = {}
        self._lines: dict[str, OrderedDict[str, TableWaiter]] = {}  # name -> owner -> waiter, in order of arrival
        self._sweep_at = _SWEEP_FROM

    def acquire(self, claim: Claim, now: float) -> Grant | Held:
        """Grant, repeat an earlier grant to the same owner, or refuse."""
        row = self._living(claim.name, now)
        if row is None and claim.name not in self._lines:
            return self._grant(claim, now)
        if row is not None and row.owner == claim.owner:
            row.expires = now + claim.ttl
            return Grant(row.token)
        in_line = self._note_sign_of_life(claim, now)
        ahead = self.head(claim.name, now)
        if row is not None:
            left = row.expires - now
        elif ahead is not None and ahead != claim.owner:
            left = self._silent_at(claim.name, ahead) - now  # free, but it is another waiter's turn
        else:
            return self._grant(claim, now)
        return Held(min(left, LINE_POLL) if in_line else left)

    def hand_over(self, claim: Claim, now: float) -> Grant:
        """Grant a free lock to a waiter, without being asked for it."""
        return self._grant(claim, now)

    def _grant(self, claim: Claim, now: float) -> Grant:
        token = self._draw_token()
        self._add_row(claim.name, TableRow(claim.owner, token, now + claim.ttl, claim.metadata, now, claim.mode), now)
        if claim.name in self._lines:
            self.leave(claim)
        return Grant(token)

    def _draw_token(self) -> int:
        token = self._next_token(self._last_token)
        if token >= TOKEN_LIMIT:
            table, operation = type(self).__name__, "acquire"
            raise BackendRefusedError(table, operation, "the next token would not fit into 53 bits")
        self._last_token = token
        return token

    def _add_row(self, name: str, row: TableRow, now: float) -> None:
        self._rows[name] = row
        if len(self._rows) > self._sweep_at:
            self._sweep(now)

    def _sweep(self, now: float) -> None:
        """Forget grants that have ended: no call asks about a name like "report/123" again."""
        self._rows = {name: row for name, row in self._rows.items() if row.expires > now}
        self._sweep_at = 2 * len(self._rows) + _SWEEP_FROM

    def renew(self, claim: Claim, now: float) -> Renewal:
        """Restart the ttl of a grant that has not ended."""
        row = self._living(claim.name, now)
        if row is None:
            return Renewal.REFUSED
        if row.owner != claim.owner:
            return Renewal.TAKEN_OVER
        row.expires = now + claim.ttl
        return Renewal.RENEWED

    def release(self, claim: Claim, now: float) -> Renewal | None:
        """End the owner's grant; answer as a renewal when it has none."""
        row = self._living(claim.name, now)
        if row is None:
            return Renewal.REFUSED
        if row.owner != claim.owner:
            return Renewal.TAKEN_OVER
        del self._rows[claim.name]
        return None

    def revoke(self, name: str, now: float, token: int | None = None) -> list[str]:
        """End the grants of *name*, or those with this *token* alone; return the owners who had one."""
        row = self._living(name, now)
        if row is None or token not in {None, row.token}:
            return []
        del self._rows[name]
        return [row.owner]

    def inspect(self, name: str, now: float) -> Holder | None:
        """Describe the holder of *name*, if there is one."""
        row = self._living(name, now)
        if row is None:
            return None
        holder, waiting = holder_of(row.owner), len(self.waiting(name, now))
        left, age = row.expires - now, now - row.since
        return Holder(name, row.token, holder, left, row.metadata, row.mode, held_for=age, waiters=waiting)

    def waiting(self, name: str, now: float) -> list[Waiting]:
        """Describe the waiters of *name*, in the order of the line."""
        line = self._lines.get(name, OrderedDict[str, TableWaiter]())
        return [
            Waiting(holder_of(owner), place.mode, now - place.since, place.metadata)
            for owner, place in line.items()
            if place.seen + LINE_TTL > now
        ]

    def page(self, prefix: str, after: int, limit: int, now: float) -> tuple[list[str], int | None]:
        """
        Return *limit* names at most that begin with *prefix* and have a token above *after*, and the last such token.

        Rows stand in the order of their tokens, so what is released meanwhile moves no other name past the reader.
        """
        found: list[str] = []
        for name, row in self._rows.items():
            if row.token > after and row.expires > now and name.startswith(prefix):
                found.append(name)
                if len(found) == limit:
                    return found, row.token
        return found, None

    def join(self, claim: Claim, now: float) -> None:
        """Put the owner at the end of the line, unless it is in the line already, or holds the lock."""
        row = self._living(claim.name, now)
        if row is None or row.owner != claim.owner:
            line = self._lines.setdefault(claim.name, OrderedDict())
            waiter = line.setdefault(claim.owner, TableWaiter(now, claim.mode, now, claim.metadata))
            waiter.seen = now

    def leave(self, claim: Claim) -> bool:
        """Take the owner out of the line, if it is there; return whether others are."""
        line = self._lines.get(claim.name)
        if line is None:
            return False
        line.pop(claim.owner, None)
        if line:
            return True
        del self._lines[claim.name]
        return False

    def head(self, name: str, now: float) -> str | None:
        """The owner whose turn it is. Owners ahead of it that gave no sign of life are dropped."""
        line = self._lines.get(name)
        while line:
            owner, waiter = next(iter(line.items()))
            if waiter.seen + LINE_TTL > now:
                return owner
            del line[owner]
        self._lines.pop(name, None)
        return None

    def next_in_line(self, name: str, now: float) -> str | None:
        """The owner to wake: the head of the line, if the lock is free."""
        return None if self._living(name, now) is not None else self.head(name, now)

    def __len__(self) -> int:
        return len(self._rows) + len(self._lines)

    def _note_sign_of_life(self, claim: Claim, now: float) -> bool:
        line = self._lines.get(claim.name)
        if line is None or claim.owner not in line:
            return False
        line[claim.owner].seen = now
        return True

    def _silent_at(self, name: str, owner: str) -> float:
        """When a waiter loses its place, without another sign of life."""
        return self._lines[name][owner].seen + LINE_TTL

    def _living(self, name: str, now: float) -> TableRow | None:
        row = self._rows.get(name)
        if row is not None and row.expires <= now:
            del self._rows[name]
            return None
        return row
