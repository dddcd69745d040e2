"""
The rules of a lock service: what is decided about one name, for every store whose rows this process reads.

A rule is a function without clock and without I/O. It reads the rows of one name, and changes them, through `Rows`; the
store runs it in a step that excludes every other step about that name. All modes follow one path, because a lock and a
writer are grants beside which nothing fits.

    room      nothing is held; or only readers are, and a reader asks; or permits are, and fewer than there may be
    turn      no living waiter stands before the claim
    token     higher than every earlier one of the name; readers who hold together share one
    number    of a permit: the lowest that is free
    waiter    a waiter that gave no sign of life for `LINE_TTL` seconds has lost its place

A grant ends when its ttl has passed since the last renewal, also if no call looks at it then. A renewal never creates
and never revives. A release touches the owner's grant alone. What frees room wakes the head of the line, if it fits;
so does a granted share, beside which the next waiter may fit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from fencing_sdk._values.claim import (
    READER,
    Busy,
    Claim,
    Grant,
    Holder,
    Mode,
    Permit,
    Renewal,
    Revoked,
    Waiting,
    holder_of,
)
from fencing_sdk._values.clock import TICK
from fencing_sdk._values.token import TOKEN_LIMIT
from fencing_sdk._values.url import read_hybrid
from fencing_sdk.errors import BackendRefusedError

LINE_POLL = 1.0
"""Seconds after which a waiter in the line tries again although no message has woken it."""
LINE_TTL = 3 * LINE_POLL
_SET_BACK = 10.0
"""Seconds that a sign of life may be ahead: a store may have read its clock some seconds before the line."""
REASON_TTL = 60.0
"""Seconds for which a reason outlives the grant that was ended: its holder asks before that."""

FIRST_HYBRID = 10**14
"""Hybrid tokens are above this moment of the year 2001, and no counter gets there."""

TokenSource = Callable[[int], int]
"""From the last token granted to the next one."""


@dataclass(slots=True)
class GrantRow:
    """One grant of a name."""

    owner: str
    token: int
    expires: float
    """Seconds of the clock of `Rows.now`."""
    mode: Mode
    permit: int | None
    label: str | None
    since: float


@dataclass(slots=True)
class WaiterRow:
    """One waiter in the line of a name."""

    owner: str
    mode: Mode
    silent_at: float
    """The moment at which it loses its place, without another sign of life."""
    since: float
    label: str | None
    address: object = None
    """How the store reaches it."""


class Rows(Protocol):
    """The rows of one name, during one step of the store."""

    backend: str
    """The name of the store in errors."""
    now: float
    """Seconds of the store's clock, read after the step has begun."""

    def grants(self) -> Collection[GrantRow]:
        """The grants that have not ended."""
        ...

    def add(self, grant: GrantRow) -> None:
        """Write a grant to an owner that has none."""
        ...

    def prolong(self, grant: GrantRow) -> None:
        """Write the new end of a grant."""
        ...

    def drop(self, owner: str) -> bool:
        """Delete the owner's grant, also one that has ended and is there still; return whether there was one."""
        ...

    def next_token(self) -> int:
        """Draw a token above every earlier one of the name. A step that fails may leave it unused."""
        ...

    def line(self) -> Iterable[WaiterRow]:
        """The waiters in order of arrival, also those that have lost their places."""
        ...

    def join(self, claim: Claim, address: object) -> None:
        """Put a waiter at the end of the line; if it is in the line already, take a sign of life from it."""
        ...

    def leave(self, owner: str) -> bool:
        """Delete a waiter; return whether it was in the line."""
        ...

    def wake(self, waiter: WaiterRow) -> None:
        """Send *waiter* a message once the step is carried out. A store passes over a waiter that is gone."""
        ...

    def put_reason(self, owner: str, until: float, reason: str) -> None:
        """Keep why the owner's grant was ended, until a moment after which its holder does not ask."""
        ...

    def reason(self, owner: str) -> str | None:
        """Why the owner's grant was ended; None if it was not."""
        ...


# Tokens


def token_source(tokens: object, wall_ticks: Callable[[], int]) -> TokenSource:
    """
    Choose how tokens grow.

    ``"hybrid"``: ``max(last + 1, ticks of 10 microseconds since 1970)``, which keeps growing when the counter
    is lost with its process or file. ``"counter"``: 1, 2, 3, which starts again then.
    """
    if read_hybrid(tokens):
        return lambda last: max(last + 1, wall_ticks())
    return lambda last: last + 1


def age_of(token: int, mode: Mode, micros: int) -> float | None:
    """
    Seconds since the grant. A hybrid *token* is the moment of its grant, in ticks of ten microseconds.

    None for a counter, and for a reader, which may have joined others with their token. *micros*: the time by the
    clock that the tokens come from.
    """
    return None if token < FIRST_HYBRID or mode == READER else max(0.0, (micros - token * TICK) / 1e6)


# Holders


def fits(mode: Mode, held: Collection[Mode]) -> bool:
    """Return whether a grant of *mode* may stand beside grants of the modes *held*."""
    if not held:
        return True
    alike = mode.shared and all(other.word == mode.word for other in held)
    return alike and (not isinstance(mode, Permit) or len(held) < mode.of)


def free_permit(mode: Mode, taken: Collection[int | None]) -> int | None:
    """The lowest free number, of which there is one; None for what is not a permit."""
    return next(n for n in range(mode.of) if n not in taken) if isinstance(mode, Permit) else None


def acquire(rows: Rows, claim: Claim) -> Grant | Busy:
    """Grant, repeat an earlier grant to the same owner, or refuse."""
    held = rows.grants()
    mine = _of(claim.owner, held)
    if mine is not None:
        _prolong(rows, mine, claim)
        return Grant(mine.token, permit=mine.permit)
    head = _head(rows)
    if not _has_room(claim.mode, held):
        return Busy(_first_end(held) - rows.now)
    if head is not None and head.owner != claim.owner:
        return Busy(head.silent_at - rows.now)  # it is the turn of another waiter
    granted = grant(rows, claim)
    if claim.mode.shared:
        wake_next(rows)
    return granted


def refusal(rows: Rows, claim: Claim) -> Busy | None:
    """The answer to a waiter that has to wait on, found without a change; None if a try may be granted."""
    held = rows.grants()
    if _of(claim.owner, held) is not None:
        return None
    head = next(living(rows), None)
    its_turn = head is None or head.owner == claim.owner
    if not _has_room(claim.mode, held):
        left = _first_end(held) - rows.now
        return Busy(left if its_turn else left + LINE_POLL)  # the head is to try first
    return None if head is None or its_turn else Busy(min(head.silent_at - rows.now, LINE_POLL))


def grant(rows: Rows, claim: Claim) -> Grant:
    """Grant a name that has room, to a claim whose turn it is."""
    held = rows.grants()
    token = _token_for(rows, claim.mode, held)
    permit = free_permit(claim.mode, {other.permit for other in held})
    rows.add(GrantRow(claim.owner, token, rows.now + claim.ttl, claim.mode, permit, claim.label, rows.now))
    rows.leave(claim.owner)
    return Grant(token, permit=permit)


def renew(rows: Rows, claim: Claim) -> Renewal | Revoked:
    """Restart the ttl of a grant that has not ended."""
    held = rows.grants()
    mine = _of(claim.owner, held)
    if mine is None:
        return _why_over(rows, claim, held)
    _prolong(rows, mine, claim)
    return Renewal.RENEWED


def release(rows: Rows, claim: Claim) -> Renewal | Revoked | None:
    """End the owner's grant, and wake the next waiter; answer as a renewal when there is no such grant."""
    held = rows.grants()
    over = _why_over(rows, claim, held) if _of(claim.owner, held) is None else None
    if rows.drop(claim.owner):
        wake_next(rows)
    return over


def transfer(rows: Rows, of: Claim, to: Claim) -> Grant | Renewal | Revoked:
    """
    Pass the grant of one owner to another, in its mode and with its number and its age, under a token of its own.

    A request that is repeated finds *to* as the owner. The line stays as it is: no room was freed.
    """
    held = rows.grants()
    heir = _of(to.owner, held)
    if heir is not None:
        _prolong(rows, heir, to)
        return Grant(heir.token, permit=heir.permit)
    mine = _of(of.owner, held)
    if mine is None:
        why = rows.reason(to.owner)  # the heir may have held it since
        return _why_over(rows, of, held) if why is None else Revoked(why)
    token = _token_for(rows, mine.mode, held)
    rows.put_reason(of.owner, mine.expires + REASON_TTL, handed_over(to))
    rows.drop(of.owner)
    rows.add(GrantRow(to.owner, token, rows.now + to.ttl, mine.mode, mine.permit, to.label, mine.since))
    return Grant(token, permit=mine.permit)


def handed_over(to: Claim) -> str:
    """The reason that a former owner reads."""
    return f"handed over to {to.holder}"


def revoke(rows: Rows, token: int | None, reason: str | None) -> list[str]:
    """End the grants with this *token*, or all, and keep the *reason*; return their owners."""
    ended = [row for row in rows.grants() if token is None or row.token == token]
    for row in ended:
        rows.drop(row.owner)
        if reason is not None:
            rows.put_reason(row.owner, row.expires + REASON_TTL, reason)
    if ended:
        wake_next(rows)
    return [row.owner for row in ended]


def reason(rows: Rows, claim: Claim) -> str | None:
    """Why *claim* was revoked; None if it was not, or if its owner holds the name again."""
    return None if _of(claim.owner, rows.grants()) is not None else rows.reason(claim.owner)


def _of(owner: str, held: Collection[GrantRow]) -> GrantRow | None:
    for row in held:
        if row.owner == owner:
            return row
    return None


def _has_room(mode: Mode, held: Collection[GrantRow]) -> bool:
    return not held or fits(mode, [row.mode for row in held])


def _first_end(held: Collection[GrantRow]) -> float:
    return min(row.expires for row in held)


def _token_for(rows: Rows, mode: Mode, held: Collection[GrantRow]) -> int:
    if mode == READER and held:
        return next(iter(held)).token
    token = rows.next_token()
    if token >= TOKEN_LIMIT:
        raise BackendRefusedError(rows.backend, "acquire", "the next token would not fit into 53 bits")
    return token


def _prolong(rows: Rows, row: GrantRow, claim: Claim) -> None:
    row.expires = rows.now + claim.ttl
    rows.prolong(row)


def _why_over(rows: Rows, claim: Claim, held: Collection[GrantRow]) -> Renewal | Revoked:
    why = rows.reason(claim.owner)
    if why is not None:
        return Revoked(why)
    return Renewal.TAKEN_OVER if any(not row.mode.shared for row in held) else Renewal.REFUSED


# Waiters


def join(rows: Rows, claim: Claim, address: object) -> None:
    """Put a waiter at the end of the line, unless it is in the line already, or holds the name."""
    if _of(claim.owner, rows.grants()) is None:
        rows.join(claim, address)


def leave(rows: Rows, owner: str) -> None:
    """Take a waiter out of the line, or pass over one that is gone. It may have been its turn."""
    if rows.leave(owner):
        wake_next(rows)


def line_repairs(
    waiters: Sequence[tuple[Claim, object]], in_line: Collection[tuple[str, str]]
) -> tuple[list[Claim], list[tuple[str, Callable[[Rows], None]]]]:
    """
    Compare the *waiters* of a client, each with its address, with the names and owners that stand in line for it.

    Return the claims that have lost their places, and the steps, each with its name, that mend the lines. These join
    again, at the end. Owners that no longer wait leave: their own requests to do so were lost, and the signs of life of
    the others would keep their places.
    """
    absent = [(claim, address) for claim, address in waiters if (claim.name, claim.owner) not in in_line]
    gone = set(in_line) - {(claim.name, claim.owner) for claim, _ in waiters}
    joins = [(claim.name, partial(join, claim=claim, address=address)) for claim, address in absent]
    leaves = [(name, partial(leave, owner=owner)) for name, owner in gone]
    return [claim for claim, _ in absent], [*joins, *leaves]


def living(rows: Rows) -> Iterator[WaiterRow]:
    """The waiters that have not lost their places."""
    now = rows.now
    return (waiter for waiter in rows.line() if _lives(waiter, now))


def _lives(waiter: WaiterRow, now: float) -> bool:
    """A sign of life from the future is from before the clock was set back: a dead waiter would keep its place."""
    return now < waiter.silent_at <= now + LINE_TTL + _SET_BACK


def next_in_line(rows: Rows) -> WaiterRow | None:
    """The waiter that would be granted now: the head of the line, if it fits. Changes nothing."""
    head = next(living(rows), None)
    return head if head is not None and _has_room(head.mode, rows.grants()) else None


def wake_next(rows: Rows) -> None:
    """Wake the head of the line, if it fits."""
    head = _head(rows)
    if head is not None and _has_room(head.mode, rows.grants()):
        rows.wake(head)


def _head(rows: Rows) -> WaiterRow | None:
    """The first living waiter. Those before it have lost their places, and are deleted."""
    silent: list[str] = []
    head = None
    for waiter in rows.line():
        if _lives(waiter, rows.now):
            head = waiter
            break
        silent.append(waiter.owner)
    for owner in silent:
        rows.leave(owner)
    return head


# Operators


def holders(rows: Rows, name: str) -> list[Holder]:
    """Describe every holder of *name*, by their permits, or else by their tokens."""
    held = sorted(rows.grants(), key=lambda row: (row.permit or 0, row.token))
    waiters = sum(1 for _ in living(rows)) if held else 0
    return [
        Holder(
            name=name,
            token=row.token,
            id=holder_of(row.owner),
            remaining=row.expires - rows.now,
            label=row.label,
            mode=row.mode,
            permit=row.permit,
            held_for=rows.now - row.since,
            waiters=waiters,
        )
        for row in held
    ]


def waiting(rows: Rows) -> list[Waiting]:
    """Describe the waiters, in the order of the line."""
    return [
        Waiting(holder_of(waiter.owner), waiter.mode, rows.now - waiter.since, waiter.label) for waiter in living(rows)
    ]
