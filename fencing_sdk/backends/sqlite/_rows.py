"""
What the rows mean: the rules of `fencing_sdk.backends._shared.lock_table`, as transactions on a file.

Each call is one transaction, begun with the write lock, so that reading, deciding and writing are
one step for every process. A row is judged in one place, `_living` or `_head`, with the clock
that was read under the lock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fencing_sdk._values.claim import TOKEN_LIMIT, Claim, Grant, Held, Holder, Renewal, holder_of
from fencing_sdk.backends._shared.lock_table import LINE_POLL, LINE_TTL, TokenSource
from fencing_sdk.backends.sqlite._bell import Place, ring
from fencing_sdk.backends.sqlite._file import LockFile
from fencing_sdk.backends.sqlite._translation import BACKEND
from fencing_sdk.errors import BackendRefusedError

_SECOND = 1_000_000
_LINE_TTL = int(LINE_TTL * _SECOND)
_TOLERANCE = _SECOND
"""
A row that was renewed later than this after now is of an earlier boot. Only systems that do not
name their boots need it, so it may be generous.
"""


@dataclass(frozen=True, slots=True)
class _Row:
    owner: str
    token: int
    expires: int
    metadata: str | None


@dataclass(frozen=True, slots=True)
class _Waiter:
    owner: str
    seen: int
    network: str
    place: Place


class LockRows:
    """The locks, the line and the token counter of one open file, as seen from one boot and one network namespace."""

    def __init__(self, file: LockFile, *, next_token: TokenSource, boot: str, network: str) -> None:
        self._file = file
        self._next_token = next_token
        self._boot = boot
        self._network = network

    def acquire(self, claim: Claim, place: Place | None = None) -> Grant | Held:
        """
        Grant, repeat an earlier grant to the same owner, or refuse.

        One who stands in line comes with its *place*: the try is its sign of life, and one who
        was silent for too long, and passed over, stands at the end of the line again.
        """
        with self._file.transaction(durable=True) as now:
            row = self._living(claim.name, now)
            if row is not None and row.owner == claim.owner:
                self._extend(claim, now)
                return Grant(row.token)
            if place is not None:
                self._stand(claim, place, now)
            ahead = self._head(claim.name, now)
            if row is not None:
                left = row.expires - now
            elif ahead is not None and ahead.owner != claim.owner:
                left = ahead.seen + _LINE_TTL - now
            else:
                return self._grant(claim, now)
            return Held(left / _SECOND if place is None else min(left / _SECOND, LINE_POLL))

    def renew(self, claims: Sequence[Claim]) -> list[Renewal]:
        """Restart the ttl of the grants that still live."""
        with self._file.transaction() as now:
            return [self._renew(claim, now) for claim in claims]

    def release(self, claim: Claim) -> None:
        """End the owner's grant, if it has one, and wake the head of the line."""
        with self._file.transaction() as now:
            ended = self._file.execute(
                "DELETE FROM fencing_lock WHERE name = :name AND owner = :owner", name=claim.name, owner=claim.owner
            )
            waiter = self._next(claim.name, now) if ended.rowcount else None
        self._wake(claim.name, waiter)

    def inspect(self, name: str) -> Holder | None:
        """Tell who holds *name*."""
        with self._file.transaction() as now:
            row = self._living(name, now)
        if row is None:
            return None
        return Holder(name, row.token, holder_of(row.owner), (row.expires - now) / _SECOND, row.metadata)

    def join(self, claim: Claim, place: Place) -> None:
        """Stand at the end of the line, unless in it already; a holder does not wait for itself."""
        with self._file.transaction() as now:
            row = self._living(claim.name, now)
            if row is None or row.owner != claim.owner:
                self._stand(claim, place, now)

    def leave(self, claim: Claim) -> None:
        """Leave the line; whoever leaves while it is its turn passes the turn on."""
        with self._file.transaction() as now:
            waiter = self._next(claim.name, now) if self._drop(claim.name, claim.owner) else None
        self._wake(claim.name, waiter)

    def sweep(self) -> None:
        """Delete what has ended and nobody asks about again. The token counter is a row apart and stays."""
        with self._file.transaction() as now:
            self._file.execute(
                "DELETE FROM fencing_lock WHERE boot <> :boot OR expires <= :now OR renewed > :now + :tolerance",
                boot=self._boot,
                now=now,
                tolerance=_TOLERANCE,
            )
            self._file.execute(
                "DELETE FROM fencing_waiter WHERE boot <> :boot OR seen <= :now - :ttl",
                boot=self._boot,
                now=now,
                ttl=_LINE_TTL,
            )

    def outdated(self) -> bool:
        """Whether these rows are not those that the other processes see."""
        return self._file.moved()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    # Inside a transaction.

    def _living(self, name: str, now: int) -> _Row | None:
        found = self._file.execute(
            "SELECT owner, token, expires, metadata, boot, renewed FROM fencing_lock WHERE name = :name", name=name
        ).fetchone()
        if found is None:
            return None
        *row, boot, renewed = found
        held = _Row(*row)
        return held if boot == self._boot and renewed <= now + _TOLERANCE and now < held.expires else None

    def _grant(self, claim: Claim, now: int) -> Grant:
        (last,) = self._file.execute("SELECT last FROM fencing_token").fetchone()
        token = self._next_token(last)
        if token >= TOKEN_LIMIT:
            raise BackendRefusedError(BACKEND, "acquire", "the next token would not fit into 53 bits")
        self._file.execute("UPDATE fencing_token SET last = :token", token=token)
        self._file.execute(
            "INSERT OR REPLACE INTO fencing_lock (name, owner, token, boot, renewed, expires, metadata)"
            " VALUES (:name, :owner, :token, :boot, :now, :expires, :metadata)",
            name=claim.name,
            owner=claim.owner,
            token=token,
            boot=self._boot,
            now=now,
            expires=_expiry(claim, now),
            metadata=claim.metadata,
        )
        self._drop(claim.name, claim.owner)
        return Grant(token)

    def _renew(self, claim: Claim, now: int) -> Renewal:
        row = self._living(claim.name, now)
        if row is None:
            return Renewal.REFUSED
        if row.owner != claim.owner:
            return Renewal.TAKEN_OVER
        self._extend(claim, now)
        return Renewal.RENEWED

    def _extend(self, claim: Claim, now: int) -> None:
        self._file.execute(
            "UPDATE fencing_lock SET renewed = :now, expires = :expires WHERE name = :name",
            name=claim.name,
            now=now,
            expires=_expiry(claim, now),
        )

    def _stand(self, claim: Claim, place: Place, now: int) -> None:
        self._file.execute(
            "INSERT INTO fencing_waiter (name, owner, boot, seen, network, bell, word)"
            " VALUES (:name, :owner, :boot, :now, :network, :bell, :word)"
            " ON CONFLICT (name, owner) DO UPDATE SET seen = :now",
            name=claim.name,
            owner=claim.owner,
            boot=self._boot,
            now=now,
            network=self._network,
            bell=place.bell,
            word=place.word,
        )

    def _head(self, name: str, now: int) -> _Waiter | None:
        """Whose turn it is; those who show no sign of life are dropped."""
        while True:
            found = self._file.execute(
                "SELECT owner, boot, seen, network, bell, word FROM fencing_waiter"
                " WHERE name = :name ORDER BY number LIMIT 1",
                name=name,
            ).fetchone()
            if found is None:
                return None
            owner, boot, seen, network, bell, word = found
            if boot == self._boot and now < seen + _LINE_TTL:
                return _Waiter(owner, seen, network, Place(bell, word))
            self._drop(name, owner)

    def _drop(self, name: str, owner: str) -> bool:
        dropped = self._file.execute(
            "DELETE FROM fencing_waiter WHERE name = :name AND owner = :owner", name=name, owner=owner
        )
        return dropped.rowcount > 0

    def _next(self, name: str, now: int) -> _Waiter | None:
        """Whom to wake: the head of the line, if the lock is free and it can be reached from here."""
        if self._living(name, now) is not None:
            return None
        head = self._head(name, now)
        return head if head is not None and head.network == self._network else None

    # After a transaction: a waiter that is woken must find it committed.

    def _wake(self, name: str, waiter: _Waiter | None) -> None:
        """Wake *waiter*, or whoever comes after it if it is gone."""
        while waiter is not None and not ring(waiter.place):
            with self._file.transaction() as now:
                self._drop(name, waiter.owner)
                waiter = self._next(name, now)


def _expiry(claim: Claim, now: int) -> int:
    """The moment a grant ends, rounded up: the store never frees a lock early."""
    return now + math.ceil(claim.ttl * _SECOND)
