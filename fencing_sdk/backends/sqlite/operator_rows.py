"""
What operators ask of the file: which locks are held, and to take one away.

A page of the listing is one snapshot of so many rows, in the order of their names: it takes no write lock, and ends
before the next page begins. A grant is taken away in one transaction, which compares the token. What the operator wrote
stays in a table that renewals look into only when they are refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from fencing_sdk._values.claim import Claim, Listing, Renewal, Revoked, Waiting
from fencing_sdk.backends._shared.revocation_watcher import name_digest
from fencing_sdk.backends.sqlite.requests import LockRow
from fencing_sdk.backends.sqlite.share_rows import NO_OWNER, ShareRows
from fencing_sdk.backends.sqlite.waiter_rows import SECOND
from fencing_sdk.backends.sqlite.wakeup_socket import send_datagram

_TOLD_FOR = 60 * SECOND
"""How long a reason outlives the grant that was ended: its holder asks before that would have expired."""

_FIRST_NAMES = "SELECT name FROM fencing_lock WHERE name >= :start ORDER BY name LIMIT :limit"
_NEXT_NAMES = "SELECT name FROM fencing_lock WHERE name > :start ORDER BY name LIMIT :limit"


class OperatorRows(ShareRows):
    """The locks and shares, as holders and operators see them."""

    def list_held(self, prefix: str, cursor: str | None, limit: int) -> Listing:
        """Describe the holders among the next *limit* rows. Rows that have expired are read and passed over."""
        with self._file.snapshot() as now:
            found = self._file.execute(
                _FIRST_NAMES if cursor is None else _NEXT_NAMES, start=prefix if cursor is None else cursor, limit=limit
            ).fetchall()
            names = [name for (name,) in found if name.startswith(prefix)]
            holders = [holder for name in names for holder in self._holders(name, now)]
        return Listing(holders, names[-1] if len(names) == limit else None)

    def list_waiters(self, name: str) -> list[Waiting]:
        """Describe those that wait for *name*, in order of arrival."""
        with self._file.snapshot() as now:
            return self._waiters.line(name, now)

    def revoke(self, name: str, token: int, reason: str) -> bool:
        """End the grants of *name* that have this *token*, leave the *reason*, and wake the head of the line."""
        with self._file.transaction() as now:
            row = self._living(name, now)
            ended = [] if row is None else self._end(name, row, token, now)
            for owner, expires in ended:
                self._leave_reason(name, owner, expires + _TOLD_FOR, reason)
            self._forget_reasons(now)
            waiter = self._next(name, now) if ended else None
            listeners = self._listeners() if ended else []
        self._wake(name, waiter)
        self._tell(listeners, name)
        return bool(ended)

    def reasons(self, claims: Sequence[Claim]) -> list[str | None]:
        """Tell why each of *claims* was revoked; None if it was not, or if its owner holds the lock again."""
        with self._file.snapshot() as now:
            return [
                None if self._holds(claim, self._living(claim.name, now), now) else self._reason(claim)
                for claim in claims
            ]

    def listen(self, socket: str) -> None:
        """Have revocations told to the socket called *socket*."""
        with self._file.transaction():
            self._file.execute(
                "INSERT OR REPLACE INTO fencing_listener (socket, boot, network) VALUES (:socket, :boot, :network)",
                socket=socket,
                boot=self._boot,
                network=self._network,
            )

    def stop_listening(self, *sockets: str) -> None:
        """Tell nothing to these *sockets* any more."""
        with self._file.transaction():
            for socket in sockets:
                self._file.execute("DELETE FROM fencing_listener WHERE socket = :socket", socket=socket)

    def sweep(self) -> None:
        """See `ShareRows.sweep`."""
        super().sweep()
        with self._file.transaction() as now:
            self._forget_reasons(now)
            self._file.execute("DELETE FROM fencing_listener WHERE boot <> :boot", boot=self._boot)

    # Inside a transaction.

    def _end(self, name: str, row: LockRow, token: int, now: int) -> list[tuple[str, int]]:
        """End the grants with this *token*; return their owners, and when each would have expired."""
        if row.owner != NO_OWNER:
            ended = [(row.owner, row.expires)] if row.token == token else []
            if ended:
                self._file.execute("DELETE FROM fencing_lock WHERE name = :name", name=name)
            return ended
        ended = [(share.owner, share.expires) for share in self._shares(name, now) if share.token == token]
        for owner, _ in ended:
            self._file.execute(
                "DELETE FROM fencing_share WHERE name = :name AND owner = :owner", name=name, owner=owner
            )
        self._settle(name, now)
        return ended

    def _leave_reason(self, name: str, owner: str, until: int, reason: str) -> None:
        self._file.execute(
            "INSERT OR REPLACE INTO fencing_revoked (name, owner, boot, expires, reason)"
            " VALUES (:name, :owner, :boot, :until, :reason)",
            name=name,
            owner=owner,
            boot=self._boot,
            until=until,
            reason=reason,
        )

    def _forget_reasons(self, now: int) -> None:
        self._file.execute(
            "DELETE FROM fencing_revoked WHERE boot <> :boot OR expires <= :now", boot=self._boot, now=now
        )

    def _refusal(self, claim: Claim, now: int) -> Renewal | Revoked | None:
        refusal = super()._refusal(claim, now)
        reason = None if refusal is None else self._reason(claim)
        return refusal if reason is None else Revoked(reason)

    def _reason(self, claim: Claim) -> str | None:
        found = self._file.execute(
            "SELECT reason FROM fencing_revoked WHERE name = :name AND owner = :owner",
            name=claim.name,
            owner=claim.owner,
        ).fetchone()
        return None if found is None else str(found[0])

    def _listeners(self) -> list[str]:
        """The sockets that can be reached from here."""
        found = self._file.execute(
            "SELECT socket FROM fencing_listener WHERE boot = :boot AND network = :network",
            boot=self._boot,
            network=self._network,
        )
        return [socket for (socket,) in found]

    # After a transaction: a holder that is told must find it committed.

    def _tell(self, listeners: Sequence[str], name: str) -> None:
        """Tell the *listeners* that a grant of *name* was revoked. Forget those that are gone."""
        digest = name_digest(name)
        gone = [socket for socket in listeners if not send_datagram(socket, digest)]
        if gone:
            self.stop_listening(*gone)
