"""
What the file remembers of one name, inside one transaction: the rows on which the rules are run.

A grant of another boot has ended, because its holder is dead. A waiter of another boot, or one that gave no sign of
life for `LINE_TTL`, has lost its place, whether its row is deleted or not.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from fencing_sdk._values.claim import Claim, mode_named, permits_of
from fencing_sdk.backends._shared import rules
from fencing_sdk.backends._shared.row_backend import WaiterAddress
from fencing_sdk.backends._shared.rules import GrantRow, TokenSource, WaiterRow
from fencing_sdk.backends.sqlite.file import BACKEND, SECOND, LockFile
from fencing_sdk.backends.sqlite.waiter_signs import SignsOfLife

TOLERANCE = SECOND
"""
A moment later than this after now was written in an earlier boot. Only systems that do not name their boots need it,
so it may be generous.
"""


@dataclass(frozen=True, slots=True)
class Place:
    """What all rows of an open file have in common: where they stand, and from where they are seen."""

    file: LockFile
    signs: SignsOfLife
    next_token: TokenSource
    boot: str
    network: str
    """The network namespace, within which messages arrive."""

    def silent_at(self, boot: str, slot: int, now: int) -> int:
        """When the waiters of a slot lose their places, in microseconds."""
        if boot != self.boot:
            return 0
        sign = self.signs.seen(slot)
        return sign + int(rules.LINE_TTL * SECOND) if sign <= now + TOLERANCE else 0


class SqliteRows:
    """The rows of one name: see `fencing_sdk.backends._shared.rules.Rows`."""

    backend = BACKEND

    def __init__(self, place: Place, name: str, now: int) -> None:
        self._place = place
        self._file = place.file
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
                if boot == self._place.boot and renewed <= self._micros + TOLERANCE and self._micros < expires:
                    mode, ends = mode_named(word, permits), expires / SECOND
                    self._held[owner] = GrantRow(owner, token, ends, mode, permit, label, since / SECOND)
                else:
                    self._ended = True
        return self._held

    def add(self, grant: GrantRow) -> None:
        """See `Rows.add`."""
        held = self._grants()
        if self._ended:
            self._forget_ended()
        self._file.execute(
            "INSERT INTO fencing_lock"
            " (name, owner, token, boot, since, renewed, expires, label, mode, permits, permit)"
            " VALUES (:name, :owner, :token, :boot, :since, :now, :expires, :label, :mode, :permits, :permit)",
            name=self._name,
            owner=grant.owner,
            token=grant.token,
            boot=self._place.boot,
            since=round(grant.since * SECOND),
            now=self._micros,
            expires=_end_of(grant),
            label=grant.label,
            mode=grant.mode.word,
            permits=permits_of(grant.mode),
            permit=grant.permit,
        )
        held[grant.owner] = grant

    def _forget_ended(self) -> None:
        self._file.execute(
            "DELETE FROM fencing_lock"
            " WHERE name = :name AND (boot <> :boot OR expires <= :now OR renewed > :now + :tolerance)",
            name=self._name,
            boot=self._place.boot,
            now=self._micros,
            tolerance=TOLERANCE,
        )
        self._ended = False

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
        token = self._place.next_token(last)
        self._file.execute("UPDATE fencing_token SET last = :token", token=token)
        return token

    def line(self) -> Iterator[WaiterRow]:
        """See `Rows.line`."""
        for owner, boot, group, slot, network, socket, ticket, word, permits, since, label in self._file.execute(
            "SELECT owner, boot, waiter_group, slot, network, socket, ticket, mode, permits, since, label"
            " FROM fencing_waiter WHERE name = :name ORDER BY number",
            name=self._name,
        ):
            silent_at = self._place.silent_at(boot, slot, self._micros) / SECOND
            address = WaiterAddress(socket, group, ticket) if network == self._place.network else None
            yield WaiterRow(owner, mode_named(word, permits), silent_at, since / SECOND, label, address)

    def join(self, claim: Claim, address: object) -> None:
        """See `Rows.join`."""
        assert isinstance(address, WaiterAddress)
        slot = self._slot(address.group)
        self._place.signs.give(slot, self._micros)
        self._file.execute(
            "INSERT INTO fencing_waiter"
            " (name, owner, boot, waiter_group, slot, network, socket, ticket, mode, permits, since, label)"
            " VALUES"
            " (:name, :owner, :boot, :group, :slot, :network, :socket, :ticket, :mode, :permits, :now, :label)"
            " ON CONFLICT (name, owner) DO NOTHING",
            name=claim.name,
            owner=claim.owner,
            boot=self._place.boot,
            group=address.group,
            slot=slot,
            network=self._place.network,
            socket=address.box,
            ticket=address.ticket,
            mode=claim.mode.word,
            permits=permits_of(claim.mode),
            now=self._micros,
            label=claim.label,
        )

    def _slot(self, group: str) -> int:
        """The slot of *group*: the one that it has, or the first that is free."""
        (slot,) = self._file.execute(
            "SELECT coalesce((SELECT slot FROM fencing_waiter WHERE waiter_group = :group),"
            " (SELECT min(free.slot) FROM (SELECT 0 AS slot UNION SELECT slot + 1 FROM fencing_waiter) AS free"
            " WHERE free.slot NOT IN (SELECT slot FROM fencing_waiter)))",
            group=group,
        ).fetchone()
        return int(slot)

    def leave(self, owner: str) -> bool:
        """See `Rows.leave`."""
        return self._deleted("fencing_waiter", owner)

    def wake(self, waiter: WaiterRow) -> None:
        """See `Rows.wake`."""
        if waiter.address is not None:  # in another network namespace, its timer wakes it
            self.woken.append(waiter)

    def put_reason(self, owner: str, until: float, reason: str) -> None:
        """See `Rows.put_reason`."""
        forget_reasons(self._place, self._micros)
        self._file.execute(
            "INSERT OR REPLACE INTO fencing_revoked (name, owner, boot, expires, reason)"
            " VALUES (:name, :owner, :boot, :until, :reason)",
            name=self._name,
            owner=owner,
            boot=self._place.boot,
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


def forget_reasons(place: Place, now: int) -> None:
    """Delete the reasons that no holder asks for."""
    place.file.execute("DELETE FROM fencing_revoked WHERE boot <> :boot OR expires <= :now", boot=place.boot, now=now)


def _end_of(grant: GrantRow) -> int:
    """The moment a grant ends, rounded up: the store never frees a lock early."""
    return math.ceil(grant.expires * SECOND)
