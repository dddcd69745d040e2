"""
The open file, and the rows of one name in one of its transactions, on which the rules are run.

Each step is one transaction that begins with the write lock, so that reading, deciding and writing are one step for
every process. A waiter that has to wait on costs no transaction: it reads what is committed. Messages are sent when the
transaction is committed, because the one who reads them looks at the file.

A grant of another boot has ended, because its holder is dead. A waiter of another boot, or one that gave no sign of
life for `LINE_TTL`, has lost its place, whether its row is deleted or not.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from typing import TypeVar

from fencing_sdk._values.claim import Claim, mode_named, permits_of
from fencing_sdk.backends._shared import rules
from fencing_sdk.backends._shared.row_backend import Step, WaiterAddress
from fencing_sdk.backends._shared.rules import GrantRow, Rows, TokenSource, WaiterRow
from fencing_sdk.backends.sqlite.file import BACKEND, SECOND, LockFile
from fencing_sdk.backends.sqlite.waiter_signs import SignsOfLife, send_datagram, send_wakeup

T = TypeVar("T")

TOLERANCE = SECOND
"""
A moment later than this after now was written in an earlier boot. Only systems that do not name their boots need it,
so it may be generous.
"""
_FIRST_NAMES = "SELECT DISTINCT name FROM fencing_lock WHERE name >= :start ORDER BY name LIMIT :limit"
_NEXT_NAMES = "SELECT DISTINCT name FROM fencing_lock WHERE name > :start ORDER BY name LIMIT :limit"


class OpenFile:
    """The open file, as seen from one boot and one network namespace; for the thread that made it alone."""

    def __init__(self, file: LockFile, signs: SignsOfLife, next_token: TokenSource, boot: str, network: str) -> None:
        self.file = file
        self.signs = signs
        self.next_token = next_token
        self.boot = boot
        self.network = network

    def silent_at(self, boot: str, slot: int, now: int) -> int:
        """When the waiters of a slot lose their places, in microseconds."""
        if boot != self.boot:
            return 0
        sign = self.signs.seen(slot)
        return sign + int(rules.LINE_TTL * SECOND) if sign <= now + TOLERANCE else 0

    def look(self, name: str, rule: Callable[[Rows], T]) -> T:
        """Run a *rule* that changes nothing on what is committed."""
        with self.file.snapshot() as now:
            return rule(SqliteRows(self, name, now))

    def run(self, steps: Sequence[Step[T]], *, reads: bool = False, durable: bool = False) -> list[T]:
        """Run the rules of all *steps* in one transaction; then wake the waiters that they name."""
        woken: list[tuple[str, WaiterRow]] = []
        answers: list[T] = []
        with self.file.snapshot() if reads else self.file.transaction(durable=durable) as now:
            for name, rule in steps:
                rows = SqliteRows(self, name, now)
                answers.append(rule(rows))
                woken += [(name, waiter) for waiter in rows.woken]
        for name, waiter in woken:
            self._send(name, waiter)
        return answers

    def _send(self, name: str, waiter: WaiterRow | None) -> None:
        """Wake *waiter*, or the next in the line if it is gone."""
        while waiter is not None and isinstance(waiter.address, WaiterAddress) and not send_wakeup(waiter.address):
            with self.file.transaction() as now:
                rows = SqliteRows(self, name, now)
                rows.leave(waiter.owner)  # if another process has deleted it, the next one is woken all the same
                rules.wake_next(rows)
            waiter = next(iter(rows.woken), None)

    def names(self, prefix: str, after: str | None, limit: int) -> list[str]:
        """See `RowStore.names`."""
        statement = _FIRST_NAMES if after is None else _NEXT_NAMES
        with self.file.snapshot():
            found = self.file.execute(statement, start=prefix if after is None else after, limit=limit).fetchall()
        return [name for (name,) in found if name.startswith(prefix)]

    def attend(self, group: str, waiters: Sequence[tuple[Claim, WaiterAddress]]) -> list[Claim]:
        """See `RowStore.attend`. All waiters of a group give one sign of life, in one slot, beside the database."""
        with self.file.snapshot() as now:
            standing = self.file.execute(
                "SELECT name, owner, slot FROM fencing_waiter WHERE waiter_group = :group", group=group
            ).fetchall()
            for slot in {slot for _, _, slot in standing}:
                self.signs.give(slot, now)
            names = {name for name, _, _ in standing}
            heads = [(name, rules.next_in_line(SqliteRows(self, name, now))) for name in names]
        due = {(name, head.owner) for name, head in heads if head is not None}
        absent, steps = rules.line_repairs(waiters, {(name, owner) for name, owner, _ in standing})
        if steps:
            self.run(steps)
        due.update((claim.name, claim.owner) for claim in absent)
        return [claim for claim, _ in waiters if (claim.name, claim.owner) in due]

    def listen(self, socket: str) -> None:
        """Enter the *socket* that hears of revocations."""
        with self.file.transaction():
            self.file.execute(
                "INSERT OR REPLACE INTO fencing_listener (socket, boot, network) VALUES (:socket, :boot, :network)",
                socket=socket,
                boot=self.boot,
                network=self.network,
            )

    def stop_listening(self, *sockets: str) -> None:
        """Delete *sockets* that hear no more."""
        with self.file.transaction():
            for socket in sockets:
                self.file.execute("DELETE FROM fencing_listener WHERE socket = :socket", socket=socket)

    def announce(self, message: str) -> None:
        """Send *message* to every socket that can be reached from here. Delete those that are gone."""
        with self.file.snapshot():
            found = self.file.execute(
                "SELECT socket FROM fencing_listener WHERE boot = :boot AND network = :network",
                boot=self.boot,
                network=self.network,
            ).fetchall()
        if gone := [socket for (socket,) in found if not send_datagram(socket, message)]:
            self.stop_listening(*gone)

    def sweep(self) -> None:
        """Delete what has ended: no call may ask about it again. The last token is a row apart and stays."""
        with self.file.transaction() as now:
            self.file.execute(
                "DELETE FROM fencing_lock WHERE boot <> :boot OR expires <= :now OR renewed > :now + :tolerance",
                boot=self.boot,
                now=now,
                tolerance=TOLERANCE,
            )
            for number, of, slot in self.file.execute("SELECT number, boot, slot FROM fencing_waiter").fetchall():
                if self.silent_at(of, slot, now) <= now:
                    self.file.execute("DELETE FROM fencing_waiter WHERE number = :number", number=number)
            self.forget_reasons(now)
            self.file.execute("DELETE FROM fencing_listener WHERE boot <> :boot", boot=self.boot)

    def forget_reasons(self, now: int) -> None:
        """Delete the reasons that no holder asks for."""
        self.file.execute("DELETE FROM fencing_revoked WHERE boot <> :boot OR expires <= :now", boot=self.boot, now=now)

    def close(self) -> None:
        """Close the file, and delete the file of the signs if the last waiter has gone."""
        with suppress(sqlite3.Error, OSError):
            if self.signs.exist() and not self.file.moved():
                with self.file.transaction(patience=0.0):  # so that no waiter joins meanwhile
                    if self.file.execute("SELECT 1 FROM fencing_waiter LIMIT 1").fetchone() is None:
                        self.signs.remove()
        self.signs.close()
        self.file.close()


class SqliteRows:
    """The rows of one name: see `fencing_sdk.backends._shared.rules.Rows`."""

    backend = BACKEND

    def __init__(self, opened: OpenFile, name: str, now: int) -> None:
        self._opened = opened
        self._file = opened.file
        self._name = name
        self._micros = now
        self.now = now / SECOND
        self._held: dict[str, GrantRow] | None = None
        self._ended = False
        """True if there are rows of grants that have ended."""
        self.woken: list[WaiterRow] = []

    def grants(self) -> Collection[GrantRow]:
        """See `Rows.grants`."""
        return self._grants().values()

    def _grants(self) -> dict[str, GrantRow]:
        if self._held is None:
            self._held = {}
            for owner, token, boot, since, renewed, expires, label, word, permits, permit in self._file.execute(
                "SELECT owner, token, boot, since, renewed, expires, label, mode, permits, permit"
                " FROM fencing_lock WHERE name = :name",
                name=self._name,
            ):
                if boot == self._opened.boot and renewed <= self._micros + TOLERANCE and self._micros < expires:
                    mode, ends = mode_named(word, permits), expires / SECOND
                    self._held[owner] = GrantRow(owner, token, ends, mode, permit, label, since / SECOND)
                else:
                    self._ended = True
        return self._held

    def add(self, grant: GrantRow) -> None:
        """See `Rows.add`."""
        held = self._grants()
        if self._ended:
            self._file.execute(
                "DELETE FROM fencing_lock"
                " WHERE name = :name AND (boot <> :boot OR expires <= :now OR renewed > :now + :tolerance)",
                name=self._name,
                boot=self._opened.boot,
                now=self._micros,
                tolerance=TOLERANCE,
            )
            self._ended = False
        self._file.execute(
            "INSERT INTO fencing_lock"
            " (name, owner, token, boot, since, renewed, expires, label, mode, permits, permit)"
            " VALUES (:name, :owner, :token, :boot, :since, :now, :expires, :label, :mode, :permits, :permit)",
            name=self._name,
            owner=grant.owner,
            token=grant.token,
            boot=self._opened.boot,
            since=round(grant.since * SECOND),
            now=self._micros,
            expires=_end_of(grant),
            label=grant.label,
            mode=grant.mode.word,
            permits=permits_of(grant.mode),
            permit=grant.permit,
        )
        held[grant.owner] = grant

    def prolong(self, grant: GrantRow) -> None:
        """See `Rows.prolong`."""
        self._file.execute(
            "UPDATE fencing_lock SET renewed = :now, expires = :expires WHERE name = :name AND owner = :owner",
            name=self._name,
            owner=grant.owner,
            now=self._micros,
            expires=_end_of(grant),
        )

    def drop(self, owner: str) -> bool:
        """See `Rows.drop`."""
        self._grants().pop(owner, None)
        return self._deleted("fencing_lock", owner)

    def next_token(self) -> int:
        """See `Rows.next_token`."""
        (last,) = self._file.execute("SELECT last FROM fencing_token").fetchone()
        token = self._opened.next_token(last)
        self._file.execute("UPDATE fencing_token SET last = :token", token=token)
        return token

    def line(self) -> Iterator[WaiterRow]:
        """See `Rows.line`."""
        for owner, boot, group, slot, network, socket, ticket, word, permits, since, label in self._file.execute(
            "SELECT owner, boot, waiter_group, slot, network, socket, ticket, mode, permits, since, label"
            " FROM fencing_waiter WHERE name = :name ORDER BY number",
            name=self._name,
        ):
            silent_at = self._opened.silent_at(boot, slot, self._micros) / SECOND
            address = WaiterAddress(socket, group, ticket) if network == self._opened.network else None
            yield WaiterRow(owner, mode_named(word, permits), silent_at, since / SECOND, label, address)

    def join(self, claim: Claim, address: object) -> None:
        """See `Rows.join`."""
        assert isinstance(address, WaiterAddress)
        # The slot that the group has, or the first that is free.
        (slot,) = self._file.execute(
            "SELECT coalesce((SELECT slot FROM fencing_waiter WHERE waiter_group = :group),"
            " (SELECT min(free.slot) FROM (SELECT 0 AS slot UNION SELECT slot + 1 FROM fencing_waiter) AS free"
            " WHERE free.slot NOT IN (SELECT slot FROM fencing_waiter)))",
            group=address.group,
        ).fetchone()
        self._opened.signs.give(slot, self._micros)
        self._file.execute(
            "INSERT INTO fencing_waiter"
            " (name, owner, boot, waiter_group, slot, network, socket, ticket, mode, permits, since, label)"
            " VALUES"
            " (:name, :owner, :boot, :group, :slot, :network, :socket, :ticket, :mode, :permits, :now, :label)"
            " ON CONFLICT (name, owner) DO NOTHING",
            name=claim.name,
            owner=claim.owner,
            boot=self._opened.boot,
            group=address.group,
            slot=slot,
            network=self._opened.network,
            socket=address.box,
            ticket=address.ticket,
            mode=claim.mode.word,
            permits=permits_of(claim.mode),
            now=self._micros,
            label=claim.label,
        )

    def leave(self, owner: str) -> bool:
        """See `Rows.leave`."""
        return self._deleted("fencing_waiter", owner)

    def wake(self, waiter: WaiterRow) -> None:
        """See `Rows.wake`."""
        if waiter.address is not None:  # in another network namespace, its timer wakes it
            self.woken.append(waiter)

    def put_reason(self, owner: str, until: float, reason: str) -> None:
        """See `Rows.put_reason`."""
        self._opened.forget_reasons(self._micros)
        self._file.execute(
            "INSERT OR REPLACE INTO fencing_revoked (name, owner, boot, expires, reason)"
            " VALUES (:name, :owner, :boot, :until, :reason)",
            name=self._name,
            owner=owner,
            boot=self._opened.boot,
            until=math.ceil(until * SECOND),
            reason=reason,
        )

    def reason(self, owner: str) -> str | None:
        """See `Rows.reason`."""
        found = self._file.execute(
            "SELECT reason FROM fencing_revoked WHERE name = :name AND owner = :owner", name=self._name, owner=owner
        ).fetchone()
        return None if found is None else str(found[0])

    def _deleted(self, table: str, owner: str) -> bool:
        statement = f"DELETE FROM {table} WHERE name = :name AND owner = :owner"  # noqa: S608  (one of our two tables)
        return self._file.execute(statement, name=self._name, owner=owner).rowcount > 0


def _end_of(grant: GrantRow) -> int:
    """The moment a grant ends, rounded up: the store never frees a lock early."""
    return math.ceil(grant.expires * SECOND)
