"""
The lock service of a simulated history: the reference table, a line, and its misfortunes.

The line wakes the waiter at its head, or hands it the lock (`Service.hand_on`), as `line.lua` does in Redis.

Everything that it grants, extends and ends is recorded as it happens, on the time of the world:
this is the truth by which the clients' beliefs are measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from fencing_sdk.abc import LOCK, Busy, Claim, Grant, Holder, Renewal, Revoked
from fencing_sdk.backends._shared.row_table import RowTable, TableRows
from fencing_sdk.backends._shared.rules import TokenSource, living
from fencing_sdk.errors import BackendUnavailableError
from fencing_sdk.testing._kernel import NoAnswer
from fencing_sdk.testing._loop import ProcessClock, Timeline

NAME = "locks"
_EPOCH = 1_700_000_000_000_000
"""Microseconds since 1970 when a world begins."""


SUSPECT = 1.25
"""Seconds after its last sign of life from which on a waiter is woken, and not handed the lock."""


@dataclass(frozen=True, slots=True)
class Sign:
    """The last sign of life of a waiter that may be handed the lock."""

    claim: Claim
    client: str
    number: int
    at: float
    hand: Callable[[Claim, int, Grant | None], None]
    """Sends the waiter a message: the number of this sign, and a grant; or no grant, to wake it."""
    notice: Callable[[Claim], None]


class Record(Protocol):
    """Writes a line of the recording."""

    def __call__(self, kind: str, /, actor: str, **fields: object) -> None: ...


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
        self.table = self.new_table()
        self.wakers: dict[tuple[str, str], Callable[[str], None]] = {}
        self.signs: dict[tuple[str, str], Sign] = {}
        self.gone: set[str] = set()
        """Clients whose process has ended, and its connections with it."""
        self.notices: dict[str, Callable[[Claim], None]] = {}
        self._held: dict[str, Claim] = {}

    def new_table(self) -> RowTable:
        """A table without grants and without a last token."""
        return RowTable(self.token_source())

    def token_source(self) -> TokenSource:
        """How tokens grow, as in the backends."""
        if self._tokens == "counter":
            return lambda last: last + 1
        return lambda last: max(last + 1, self.wall_micros())

    def wall_micros(self) -> int:
        """The wall clock that hybrid tokens look at."""
        return _EPOCH + int((self._timeline.now + self.wall_stepped) * 1e6)

    def now(self) -> float:
        """The clock that grants expire on."""
        return self._clock.now() + self.stepped

    # What clients ask.

    def reached(self) -> None:
        """Let a request in, or not."""
        if self.silent:
            raise NoAnswer
        if self.refusing:
            backend, operation = "Simulated", "connect"
            raise BackendUnavailableError(backend, operation, "connection refused")

    def acquire(self, claim: Claim, notice: Callable[[Claim], None]) -> Grant | Busy:
        """One try."""
        self.reached()
        now = self.now()
        if (claim.name, claim.owner) in self.wakers:
            self.table.join(claim, now)
        before = self.granted_to(claim)
        answer = self.table.acquire(claim, now)
        if isinstance(answer, Grant):
            self.signs.pop((claim.name, claim.owner), None)
            self.notices[claim.owner] = notice
            again = before is not None and before.token == answer.token
            self.record("extended" if again else "granted", claim, answer.token, answer.permit)
        if isinstance(answer, Busy) or claim.mode.shared:
            self.hand_on(claim.name)
        return answer

    def renew(self, claim: Claim) -> Renewal | Revoked:
        """Restart the ttl of a grant that still lives."""
        self.reached()
        renewal = self.table.renew(claim, self.now())
        if renewal is Renewal.RENEWED:
            holder = self.granted_to(claim)
            self.record("extended", claim, -1 if holder is None else holder.token)
        return renewal

    def release(self, claim: Claim) -> Renewal | Revoked | None:
        """Release the lock, if *claim* has it; answer as `Backend.release`."""
        self.reached()
        before = self.granted_to(claim) or self.holder(claim.name)
        self.signs.pop((claim.name, claim.owner), None)
        self.table.leave(claim)
        refusal = self.table.release(claim, self.now())
        if refusal is None and before is not None and self.granted_to(claim) is None:
            self.ended(before, "released", claim.holder)
        self.hand_on(claim.name)
        return refusal

    def inspect(self, name: str) -> Holder | None:
        """Return the holder of *name*."""
        self.reached()
        return self.holder(name)

    def holders(self, name: str) -> list[Holder]:
        """Return every holder of *name*."""
        self.reached()
        return self.table.holders(name, self.now())

    def join(self, claim: Claim, waker: Callable[[str], None]) -> None:
        """Stand in line."""
        self.reached()
        self.wakers[claim.name, claim.owner] = waker
        self.table.join(claim, self.now())

    def leave(self, claim: Claim) -> None:
        """Leave the line. A waiter that leaves during its turn passes the turn on."""
        self.reached()
        self.wakers.pop((claim.name, claim.owner), None)
        self.table.leave(claim)
        self.hand_on(claim.name)

    def sign(self, sign: Sign) -> Grant | None:
        """Take a sign of life, which also joins the line; return the grant that was on its way to the waiter."""
        self.reached()
        claim = sign.claim
        holder = self.holder(claim.name)
        if holder is not None and holder.id == claim.holder:
            return self.repeat(sign)
        self.signs[claim.name, claim.owner] = replace(sign, at=self.now())
        self.table.join(claim, self.now())
        self.hand_on(claim.name)
        return None

    def repeat(self, sign: Sign) -> Grant | None:
        """The message was lost, or is late: repeat the grant, with a fresh ttl."""
        answer = self.acquire(sign.claim, sign.notice)
        return answer if isinstance(answer, Grant) else None

    def hand_on(self, name: str) -> None:
        """Hand a free lock to the first waiter that can be reached, or wake the one whose turn it is."""
        for owner in self.line(name):
            if self.holder(name) is not None and self.table.next_in_line(name, self.now()) != owner:
                break
            sign, waker = self.signs.get((name, owner)), self.wakers.get((name, owner))
            if sign is None and waker is not None:
                waker("wake")
                break
            if sign is None or sign.client in self.gone:
                continue  # no message reaches it
            if self.now() - sign.at > SUSPECT:
                sign.hand(sign.claim, sign.number, None)
                break
            self.hand(sign)

    def line(self, name: str) -> list[str]:
        """The owners that wait and have given a sign of life, in the order of their arrival."""
        now = self.now()
        self.table.next_in_line(name, now)  # forgets those at the head that have not
        return [waiter.owner for waiter in living(TableRows(self.table, name, now))]

    def hand(self, sign: Sign) -> None:
        """Grant, then tell: the other way round, a waiter could use a lock that it does not have yet."""
        sign.hand(sign.claim, sign.number, self.grant(sign))

    def grant(self, sign: Sign) -> Grant:
        """Grant the lock to a waiter, for its full ttl."""
        grant = self.table.hand_over(sign.claim, self.now())
        del self.signs[sign.claim.name, sign.claim.owner]
        self.notices[sign.claim.owner] = sign.notice
        self.record("granted", sign.claim, grant.token)
        return grant

    # What happens to it.

    def holder(self, name: str) -> Holder | None:
        """The holder of *name* at this moment."""
        return self.table.inspect(name, self.now())

    def granted_to(self, claim: Claim) -> Holder | None:
        """What *claim* holds at this moment."""
        held = self.table.holders(claim.name, self.now())
        return next((holder for holder in held if holder.id == claim.holder), None)

    def hang_up(self) -> None:
        """Break every connection: waiters have to join the line again."""
        for waker in self.wakers.values():
            waker("broken")
        self.wakers.clear()
        self.signs.clear()

    def forget(self, *, tokens: bool) -> None:
        """Come back without the grants, and without the last token too."""
        living = [holder for name in self._held for holder in self.table.holders(name, self.now())]
        for holder in living:
            self.ended(holder, "forgotten", "")
            self.table.revoke(holder.name, self.now())
        if tokens:
            self.table = self.new_table()

    def revoke(self, name: str, token: int) -> bool:
        """Take away the grants with this *token*, and tell their holders."""
        holders = {holder.id: holder for holder in self.table.holders(name, self.now())}
        ended = self.table.revoke(name, self.now(), token)
        for owner in ended:
            claim = Claim(name, 0.0, owner)
            self.notices[owner](claim)
            self.ended(holders[claim.holder], "revoked", "", meant=token)
        self.hand_on(name)
        return bool(ended)

    def record(self, kind: str, claim: Claim, token: int, permit: int | None = None) -> None:
        """Record a grant or its extension, with the moment it ends by itself."""
        self._held[claim.name] = claim
        until = self._timeline.now + claim.ttl / self._clock.rate
        how = {} if claim.mode == LOCK else {"mode": claim.mode.word, "permit": permit}
        self._record(kind, NAME, name=claim.name, holder=claim.holder, token=token, until=until, **how)

    def ended(self, holder: Holder, why: str, by: str, **more: object) -> None:
        """Record the end of a grant before its time."""
        fields = {"name": holder.name, "holder": holder.id, "token": holder.token, **more}
        self._record("ended", NAME, **fields, why=why, by=by)
