"""
What is asked of the file: the rules of `fencing_sdk.backends._shared.lock_table`, as transactions.

Each call is one transaction that begins with the write lock, so that reading, deciding and writing are one step for
every process. A row is judged in one place, `_living` or `WaiterRows.first`, by the clock that was read under the
lock. A waiter that has to wait on costs no transaction: it reads what is committed, and takes the write lock only
when it may be granted.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from fencing_sdk._values.claim import LOCK, TOKEN_LIMIT, Claim, Grant, Held, Holder, Renewal, Revoked, holder_of
from fencing_sdk._values.clock import wall_micros
from fencing_sdk.backends._shared.lock_table import LINE_POLL, TokenSource, age_of
from fencing_sdk.backends.sqlite.connection.file import LockFile
from fencing_sdk.backends.sqlite.errors import BACKEND
from fencing_sdk.backends.sqlite.signs_of_life import SignsOfLife
from fencing_sdk.backends.sqlite.waiter_rows import SECOND, TOLERANCE, LivingWaiter, WaiterRows, mode_of
from fencing_sdk.backends.sqlite.wakeup_socket import WakeupAddress, send_wakeup
from fencing_sdk.errors import BackendRefusedError


@dataclass(frozen=True, slots=True)
class LockRow:
    """The grant of one name."""

    owner: str
    token: int
    expires: int
    metadata: str | None
    mode: str


class LockRows:
    """The locks, the line and the token counter of one open file, as seen from one boot and one network namespace."""

    def __init__(self, file: LockFile, signs: SignsOfLife, *, next_token: TokenSource, boot: str, network: str) -> None:
        self._file = file
        self._signs = signs
        self._waiters = WaiterRows(file, signs, boot=boot, network=network)
        self._next_token = next_token
        self._boot = boot
        self._network = network

    def acquire(self, claim: Claim, *, waiting: bool = False) -> Grant | Held:
        """Grant, repeat an earlier grant to the same owner, or refuse. *waiting*: the claim has a waiter."""
        held = self._still_held(claim) if waiting else None
        return self._acquire(claim) if held is None else held

    def _still_held(self, claim: Claim) -> Held | None:
        """The answer to a waiter, found without the write lock; None when it may be its turn."""
        with self._file.snapshot() as now:
            row = self._living(claim.name, now)
            first = self._waiters.first(claim.name, now)
            its_turn = first is None or first.owner == claim.owner
            if row is not None and row.owner != claim.owner:
                left = row.expires - now
                return Held(left / SECOND if its_turn else left / SECOND + LINE_POLL)  # the head is to try first
            if row is not None or first is None or its_turn:
                return None
            return Held(min((first.silent_at - now) / SECOND, LINE_POLL))

    def _acquire(self, claim: Claim) -> Grant | Held:
        with self._file.transaction(durable=True) as now:
            row = self._living(claim.name, now)
            if row is not None and row.owner == claim.owner:
                self._extend(claim, now)
                return Grant(row.token)
            ahead = self._waiters.head(claim.name, now)
            if row is not None:
                return Held((row.expires - now) / SECOND)
            if ahead is not None and ahead.owner != claim.owner:
                return Held((ahead.silent_at - now) / SECOND)
            return self._grant(claim, now)

    def renew(self, claims: Sequence[Claim]) -> list[Renewal | Revoked]:
        """Restart the ttl of the grants that have not ended."""
        with self._file.transaction() as now:
            return [self._renew(claim, now) for claim in claims]

    def release(self, claim: Claim) -> Renewal | Revoked | None:
        """End the owner's grant, and wake the head of the line; answer as a renewal when there is no such grant."""
        with self._file.transaction() as now:
            refusal = self._refusal(claim, now)
            waiter = self._next(claim.name, now) if self._end_grant(claim, now) else None
        self._wake(claim.name, waiter)
        return refusal

    def inspect(self, name: str) -> Holder | None:
        """Describe the holder of *name*, if there is one."""
        with self._file.transaction() as now:
            row = self._living(name, now)
            return None if row is None else self._holder(name, row, now)

    def join(self, claim: Claim, address: WakeupAddress) -> None:
        """Put a waiter at the end of the line, unless it is in the line already, or its owner holds the lock."""
        self._join([(claim, address)])

    def _join(self, waiters: Sequence[tuple[Claim, WakeupAddress]]) -> None:
        with self._file.transaction() as now:
            for claim, address in waiters:
                if not self._holds(claim, self._living(claim.name, now), now):
                    self._waiters.join(claim, address, now)

    def attend(self, group: str, waiters: Sequence[tuple[Claim, WakeupAddress]]) -> list[Claim]:
        """
        Give a sign of life for the *waiters* of a *group*; return the claims that should try now.

        It may be their turn although no datagram came. Or they were silent for too long and have lost their places:
        these join at the end of the line again.
        """
        with self._file.snapshot() as now:
            standing = self._waiters.give_sign(group, now)
            due = {(name, self._due(name, now)) for name in {name for name, _ in standing}}
        absent = [(claim, address) for claim, address in waiters if (claim.name, claim.owner) not in standing]
        if absent:
            self._join(absent)
        due.update((claim.name, claim.owner) for claim, _ in absent)
        return [claim for claim, _ in waiters if (claim.name, claim.owner) in due]

    def leave(self, claim: Claim) -> None:
        """Take a waiter out of the line. If it was its turn, wake the next."""
        with self._file.transaction() as now:
            waiter = self._next(claim.name, now) if self._waiters.drop(claim.name, claim.owner) else None
        self._wake(claim.name, waiter)

    def sweep(self) -> None:
        """Delete what has ended: no call may ask about it again. The token counter is a row apart and stays."""
        with self._file.transaction() as now:
            self._file.execute(
                "DELETE FROM fencing_lock WHERE boot <> :boot OR expires <= :now OR renewed > :now + :tolerance",
                boot=self._boot,
                now=now,
                tolerance=TOLERANCE,
            )
            self._waiters.sweep(now)

    def outdated(self) -> bool:
        """Whether the other processes use another file by now."""
        return self._file.moved()

    def close(self) -> None:
        """Close the file, and delete the file of the signs if there are no waiters any more."""
        with suppress(sqlite3.Error, OSError):
            self._tidy()
        self._signs.close()
        self._file.close()

    def _tidy(self) -> None:
        if self._signs.exist() and not self._file.moved():
            with self._file.transaction(patience=0.0):  # so that no waiter joins meanwhile
                if self._waiters.empty():
                    self._signs.remove()

    # Inside a transaction.

    def _holder(self, name: str, row: LockRow, now: int) -> Holder:
        return Holder(
            name=name,
            token=row.token,
            holder=holder_of(row.owner),
            remaining=(row.expires - now) / SECOND,
            metadata=row.metadata,
            mode=mode_of(row.mode, None),
            held_for=age_of(row.token, LOCK, wall_micros()),
            waiters=self._waiters.count(name, now),
        )

    def _living(self, name: str, now: int) -> LockRow | None:
        found = self._file.execute(
            "SELECT owner, token, expires, metadata, mode, boot, renewed FROM fencing_lock WHERE name = :name",
            name=name,
        ).fetchone()
        if found is None:
            return None
        *row, boot, renewed = found
        held = LockRow(*row)
        return held if boot == self._boot and renewed <= now + TOLERANCE and now < held.expires else None

    def _grant(self, claim: Claim, now: int) -> Grant:
        token = self._draw_token()
        self._file.execute(
            "INSERT OR REPLACE INTO fencing_lock (name, owner, token, boot, renewed, expires, metadata, mode)"
            " VALUES (:name, :owner, :token, :boot, :now, :expires, :metadata, :mode)",
            name=claim.name,
            owner=claim.owner,
            token=token,
            boot=self._boot,
            now=now,
            expires=expiry(claim, now),
            metadata=claim.metadata,
            mode=claim.mode.word,
        )
        self._waiters.drop(claim.name, claim.owner)
        return Grant(token)

    def _draw_token(self) -> int:
        (last,) = self._file.execute("SELECT last FROM fencing_token").fetchone()
        token = self._next_token(last)
        if token >= TOKEN_LIMIT:
            raise BackendRefusedError(BACKEND, "acquire", "the next token would not fit into 53 bits")
        self._file.execute("UPDATE fencing_token SET last = :token", token=token)
        return token

    def _renew(self, claim: Claim, now: int) -> Renewal | Revoked:
        refusal = self._refusal(claim, now)
        if refusal is None:
            self._extend(claim, now)
        return refusal or Renewal.RENEWED

    def _refusal(self, claim: Claim, now: int) -> Renewal | Revoked | None:
        """Why the owner's grant is over; None if it is not."""
        row = self._living(claim.name, now)
        if row is None:
            return Renewal.REFUSED
        return None if row.owner == claim.owner else Renewal.TAKEN_OVER

    def _end_grant(self, claim: Claim, _now: int) -> bool:
        """Delete the owner's grant, also one that has expired; return whether there was one."""
        ended = self._file.execute(
            "DELETE FROM fencing_lock WHERE name = :name AND owner = :owner", name=claim.name, owner=claim.owner
        )
        return ended.rowcount > 0

    def _extend(self, claim: Claim, now: int) -> None:
        self._file.execute(
            "UPDATE fencing_lock SET renewed = :now, expires = :expires WHERE name = :name",
            name=claim.name,
            now=now,
            expires=expiry(claim, now),
        )

    def _due(self, name: str, now: int) -> str | None:
        """The owner whose turn it is to take the lock, if it is free."""
        row = self._living(name, now)
        first = self._waiters.first(name, now) if row is None or not row.owner else None
        return None if first is None or not self._has_room(name, row, first, now) else first.owner

    def _next(self, name: str, now: int) -> LivingWaiter | None:
        """The waiter to wake: the head of the line, if the lock is free and the waiter can be reached from here."""
        row = self._living(name, now)
        if row is not None and row.owner:
            return None
        head = self._waiters.head(name, now)
        if head is None or head.network != self._network or not self._has_room(name, row, head, now):
            return None
        return head

    def _holds(self, claim: Claim, row: LockRow | None, _now: int) -> bool:
        return row is not None and row.owner == claim.owner

    def _has_room(self, _name: str, row: LockRow | None, _waiter: LivingWaiter, _now: int) -> bool:
        """Whether a waiter at the head of the line would be granted."""
        return row is None

    # After a transaction: a waiter that is woken must find it committed.

    def _wake(self, name: str, waiter: LivingWaiter | None) -> None:
        """Wake *waiter*, or the next in the line if it is gone."""
        while waiter is not None and not send_wakeup(waiter.address):
            with self._file.transaction() as now:
                self._waiters.drop(name, waiter.owner)
                waiter = self._next(name, now)


def expiry(claim: Claim, now: int) -> int:
    """The moment a grant ends, rounded up: the store never frees a lock early."""
    return now + math.ceil(claim.ttl * SECOND)
