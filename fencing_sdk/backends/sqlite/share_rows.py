"""
Permits and readers: the rules of `fencing_sdk.backends._shared.share_table`, as transactions.

While a name is shared, its row in `fencing_lock` belongs to no owner and ends with the share that lasts longest, so
that a plain lock is refused by what it reads anyway. The shares have a table of their own, which only shares look into.
Shares of a name whose row is gone or has an owner are over: an operator may have taken the name away.
"""

from __future__ import annotations

from dataclasses import dataclass

from fencing_sdk._values.claim import READER, Claim, Grant, Held, Holder, Mode, Permit, Renewal, Revoked, holder_of
from fencing_sdk._values.clock import wall_micros
from fencing_sdk.backends._shared.lock_table import age_of
from fencing_sdk.backends._shared.share_table import fits, free_permit
from fencing_sdk.backends.sqlite.requests import LockRow, LockRows, expiry
from fencing_sdk.backends.sqlite.waiter_rows import SECOND, TOLERANCE, LivingWaiter, mode_of

NO_OWNER = ""


@dataclass(frozen=True, slots=True)
class _ShareRow:
    owner: str
    token: int
    expires: int
    metadata: str | None
    mode: Mode
    permit: int | None


class ShareRows(LockRows):
    """The locks, and the shares beside them."""

    def acquire(self, claim: Claim, *, waiting: bool = False) -> Grant | Held:
        """See `LockRows.acquire`."""
        if not claim.mode.shared:
            return super().acquire(claim, waiting=waiting)
        with self._file.transaction(durable=True) as now:
            outcome = self._acquire_share(claim, now)
            waiter = self._next(claim.name, now) if isinstance(outcome, Grant) else None
        self._wake(claim.name, waiter)  # the next one may fit beside this one
        return outcome

    def _acquire_share(self, claim: Claim, now: int) -> Grant | Held:
        row, shares = self._living(claim.name, now), self._shares(claim.name, now)
        mine = next((share for share in shares if share.owner == claim.owner), None)
        if mine is not None:
            self._keep(claim, mine.token, mine.permit, now)
            return Grant(mine.token, permit=mine.permit)
        ahead = self._waiters.head(claim.name, now)
        if row is not None and not fits(claim.mode, [share.mode for share in shares]):
            return Held((min((share.expires for share in shares), default=row.expires) - now) / SECOND)
        if ahead is not None and ahead.owner != claim.owner:
            return Held((ahead.silent_at - now) / SECOND)
        if row is None:
            self._end_shares(claim.name)
        token = shares[0].token if shares and claim.mode == READER else self._draw_token()
        permit = free_permit(claim.mode, {share.permit for share in shares})
        self._keep(claim, token, permit, now)
        self._waiters.drop(claim.name, claim.owner)
        return Grant(token, permit=permit)

    def _keep(self, claim: Claim, token: int, permit: int | None, now: int) -> None:
        """Write the share of *claim*, new or with a fresh ttl."""
        self._file.execute(
            "INSERT OR REPLACE INTO fencing_share"
            " (name, owner, token, boot, renewed, expires, metadata, mode, permits, permit)"
            " VALUES (:name, :owner, :token, :boot, :now, :expires, :metadata, :mode, :permits, :permit)",
            name=claim.name,
            owner=claim.owner,
            token=token,
            boot=self._boot,
            now=now,
            expires=expiry(claim, now),
            metadata=claim.metadata,
            mode=claim.mode.word,
            permits=claim.mode.of if isinstance(claim.mode, Permit) else None,
            permit=permit,
        )
        self._settle(claim.name, now)

    def _settle(self, name: str, now: int) -> None:
        """Delete the shares that have ended, and let the row of *name* last as long as the others."""
        self._file.execute(
            "DELETE FROM fencing_share"
            " WHERE name = :name AND (boot <> :boot OR expires <= :now OR renewed > :now + :tolerance)",
            name=name,
            boot=self._boot,
            now=now,
            tolerance=TOLERANCE,
        )
        self._file.execute("DELETE FROM fencing_lock WHERE name = :name AND owner = ''", name=name)
        self._file.execute(
            "INSERT INTO fencing_lock (name, owner, token, boot, renewed, expires)"
            " SELECT name, '', max(token), boot, :now, max(expires) FROM fencing_share WHERE name = :name GROUP BY name"
            " ON CONFLICT (name) DO UPDATE SET owner = '', token = excluded.token, boot = excluded.boot,"
            " renewed = excluded.renewed, expires = excluded.expires, metadata = NULL",
            name=name,
            now=now,
        )

    def inspect(self, name: str) -> Holder | None:
        """See `LockRows.inspect`: one of the holders, if there are several."""
        return max(self.holders(name), key=lambda holder: holder.remaining, default=None)

    def holders(self, name: str) -> list[Holder]:
        """Describe every holder of *name*, by their permits, or else by their tokens."""
        with self._file.transaction() as now:
            return self._holders(name, now)

    def sweep(self) -> None:
        """See `LockRows.sweep`."""
        super().sweep()
        with self._file.transaction() as now:
            self._file.execute(
                "DELETE FROM fencing_share WHERE boot <> :boot OR expires <= :now OR renewed > :now + :tolerance",
                boot=self._boot,
                now=now,
                tolerance=TOLERANCE,
            )

    # Inside a transaction.

    def _holders(self, name: str, now: int) -> list[Holder]:
        row = self._living(name, now)
        if row is None or row.owner != NO_OWNER:
            return [] if row is None else [self._holder(name, row, now)]
        shares = sorted(self._shares(name, now), key=lambda share: (share.permit or 0, share.token))
        waiters, micros = self._waiters.count(name, now), wall_micros()
        return [
            Holder(
                name=name,
                token=share.token,
                holder=holder_of(share.owner),
                remaining=(share.expires - now) / SECOND,
                metadata=share.metadata,
                mode=share.mode,
                permit=share.permit,
                held_for=age_of(share.token, share.mode, micros),
                waiters=waiters,
            )
            for share in shares
        ]

    def _shares(self, name: str, now: int) -> list[_ShareRow]:
        """The shares that have not ended."""
        return [
            _ShareRow(owner, token, expires, metadata, mode_of(word, permits), permit)
            for owner, token, expires, metadata, word, permits, permit in self._file.execute(
                "SELECT owner, token, expires, metadata, mode, permits, permit FROM fencing_share"
                " WHERE name = :name AND boot = :boot AND expires > :now AND renewed <= :now + :tolerance"
                " AND EXISTS (SELECT 1 FROM fencing_lock l WHERE l.name = :name AND l.owner = '')",
                name=name,
                boot=self._boot,
                now=now,
                tolerance=TOLERANCE,
            )
        ]

    def _end_shares(self, name: str) -> None:
        """Those that are left of a name which an operator has taken away must not come back with a new share."""
        self._file.execute("DELETE FROM fencing_share WHERE name = :name", name=name)

    def _holds(self, claim: Claim, row: LockRow | None, now: int) -> bool:
        if row is None or row.owner != NO_OWNER:
            return super()._holds(claim, row, now)
        return any(share.owner == claim.owner for share in self._shares(claim.name, now))

    def _has_room(self, name: str, row: LockRow | None, waiter: LivingWaiter, now: int) -> bool:
        if row is None or row.owner != NO_OWNER:
            return super()._has_room(name, row, waiter, now)
        return fits(waiter.mode, [share.mode for share in self._shares(name, now)])

    def _extend(self, claim: Claim, now: int) -> None:
        if not claim.mode.shared:
            super()._extend(claim, now)
            return
        for share in self._shares(claim.name, now):
            if share.owner == claim.owner:
                self._keep(claim, share.token, share.permit, now)

    def _refusal(self, claim: Claim, now: int) -> Renewal | Revoked | None:
        if not claim.mode.shared:
            return super()._refusal(claim, now)
        if any(share.owner == claim.owner for share in self._shares(claim.name, now)):
            return None
        row = self._living(claim.name, now)
        return Renewal.REFUSED if row is None or row.owner == NO_OWNER else Renewal.TAKEN_OVER

    def _end_grant(self, claim: Claim, now: int) -> bool:
        if not claim.mode.shared:
            return super()._end_grant(claim, now)
        ended = self._file.execute(
            "DELETE FROM fencing_share WHERE name = :name AND owner = :owner", name=claim.name, owner=claim.owner
        )
        if ended.rowcount:
            self._settle(claim.name, now)
        return ended.rowcount > 0
