"""
The reference semantics of shares: a table in which several owners may hold one name, as permits or as readers.

A plain lock does not know of shares. While a name is shared, its row in the lock table belongs to no owner and lasts as
long as the share that lasts longest, so that a lock or a writer is refused. What comes on top:

* a reader is granted while only readers hold the name, and has their token;
* a permit is granted while fewer than `Permit.of` are held, and gets the lowest free number and a token of its own;
* the line is the one of the lock table. A granted share makes its caller wake the next head, if that one fits too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fencing_sdk._values.claim import LOCK, READER, Claim, Grant, Held, Holder, Mode, Permit, Renewal, holder_of
from fencing_sdk.backends._shared.lock_table import LINE_POLL, LockTable, TableRow, TokenSource

_NO_OWNER = ""
"""Whose row it is while a name is shared: no claim has such an owner."""


@dataclass(slots=True)
class TableShare:
    """What one owner holds of a name that is shared."""

    token: int
    expires: float
    metadata: str | None
    mode: Mode
    permit: int | None
    since: float
    """The moment of the grant."""


def fits(mode: Mode, held: Sequence[Mode]) -> bool:
    """Whether a share of *mode* may be granted beside those *held*. None are, if an owner holds the name alone."""
    return {other.word for other in held} == {mode.word} and (not isinstance(mode, Permit) or len(held) < mode.of)


def free_permit(mode: Mode, taken: Collection[int | None]) -> int | None:
    """The lowest free number, of which there is one; None for a reader."""
    return next(n for n in range(mode.of) if n not in taken) if isinstance(mode, Permit) else None


class ShareTable(LockTable):
    """A lock table that takes claims of every mode."""

    def __init__(self, next_token: TokenSource) -> None:
        super().__init__(next_token)
        self._shares: dict[str, dict[str, TableShare]] = {}  # name -> owner -> what it holds; never empty for a name

    def acquire(self, claim: Claim, now: float) -> Grant | Held:
        """See `LockTable.acquire`."""
        if claim.mode is LOCK or not claim.mode.shared:
            return super().acquire(claim, now)
        row = self._living(claim.name, now)
        shares = self._shares.get(claim.name, {})
        if claim.owner in shares:
            return self._prolonged(claim, now)
        in_line = self._note_sign_of_life(claim, now)
        ahead = self.head(claim.name, now)
        if row is not None and not fits(claim.mode, [share.mode for share in shares.values()]):
            left = min((share.expires for share in shares.values()), default=row.expires) - now
        elif ahead is not None and ahead != claim.owner:
            left = self._silent_at(claim.name, ahead) - now
        else:
            return self._grant_share(claim, now)
        return Held(min(left, LINE_POLL) if in_line else left)

    def _grant_share(self, claim: Claim, now: float) -> Grant:
        shares = self._shares.get(claim.name, {})
        joins = claim.mode == READER and shares
        token = next(iter(shares.values())).token if joins else self._draw_token()
        permit = free_permit(claim.mode, {share.permit for share in shares.values()})
        if not shares:
            self._shares[claim.name] = shares
            self._add_row(claim.name, TableRow(_NO_OWNER, token, now + claim.ttl, None, now), now)
        shares[claim.owner] = TableShare(token, now, claim.metadata, claim.mode, permit, now)
        self.leave(claim)
        return self._prolonged(claim, now)

    def _prolonged(self, claim: Claim, now: float) -> Grant:
        share = self._shares[claim.name][claim.owner]
        share.expires = now + claim.ttl
        self._settle(claim.name)
        return Grant(share.token, permit=share.permit)

    def renew(self, claim: Claim, now: float) -> Renewal:
        """See `LockTable.renew`."""
        self._living(claim.name, now)
        if claim.owner in self._shares.get(claim.name, ()):
            self._prolonged(claim, now)
            return Renewal.RENEWED
        return Renewal.REFUSED if claim.name in self._shares else super().renew(claim, now)

    def release(self, claim: Claim, now: float) -> Renewal | None:
        """See `LockTable.release`."""
        if not self._shares:
            return super().release(claim, now)
        self._living(claim.name, now)
        shares = self._shares.get(claim.name)
        if shares is None or shares.pop(claim.owner, None) is None:
            return Renewal.REFUSED if shares else super().release(claim, now)
        self._settle(claim.name)
        return None

    def revoke(self, name: str, now: float, token: int | None = None) -> list[str]:
        """See `LockTable.revoke`."""
        self._living(name, now)
        shares = self._shares.get(name)
        if shares is None:
            return super().revoke(name, now, token)
        ended = [owner for owner, share in shares.items() if token in {None, share.token}]
        for owner in ended:
            del shares[owner]
        self._settle(name)
        return ended

    def join(self, claim: Claim, now: float) -> None:
        """See `LockTable.join`."""
        if claim.owner not in self._shares.get(claim.name, ()):
            super().join(claim, now)

    def next_in_line(self, name: str, now: float) -> str | None:
        """The owner to wake: the head of the line, if there is room for it."""
        owner = super().next_in_line(name, now)
        if owner is None and (shares := self._shares.get(name)) and (head := self.head(name, now)) is not None:
            held = [share.mode for share in shares.values()]
            return head if fits(self._lines[name][head].mode, held) else None
        return owner

    def inspect(self, name: str, now: float) -> Holder | None:
        """Describe one of the holders of *name*: the one that may hold it for longest."""
        return max(self.holders(name, now), key=lambda holder: holder.remaining, default=None)

    def holders(self, name: str, now: float) -> list[Holder]:
        """Describe every holder of *name*, by their permits, or else by their tokens."""
        only = super().inspect(name, now)
        shares = self._shares.get(name)
        if not shares:
            return [] if only is None else [only]
        waiting = len(self.waiting(name, now))
        found = [_holder(name, owner, share, now, waiting) for owner, share in shares.items()]
        return sorted(found, key=lambda holder: (holder.permit or 0, holder.token))

    def _living(self, name: str, now: float) -> TableRow | None:
        shares = self._shares.get(name) if self._shares else None
        if shares is not None and any(share.expires <= now for share in shares.values()):
            self._shares[name] = {owner: share for owner, share in shares.items() if share.expires > now}
            self._settle(name)
        return super()._living(name, now)

    def _settle(self, name: str) -> None:
        """Let the row of *name* last as long as its shares."""
        if shares := self._shares[name]:
            self._rows[name].expires = max(share.expires for share in shares.values())
        else:
            del self._shares[name], self._rows[name]

    def _sweep(self, now: float) -> None:
        super()._sweep(now)
        self._shares = {name: shares for name, shares in self._shares.items() if name in self._rows}


def _holder(name: str, owner: str, share: TableShare, now: float, waiting: int) -> Holder:
    return Holder(
        name=name,
        token=share.token,
        holder=holder_of(owner),
        remaining=share.expires - now,
        metadata=share.metadata,
        mode=share.mode,
        permit=share.permit,
        held_for=now - share.since,
        waiters=waiting,
    )
