"""
Who waits for which lock, in order of arrival: the table `fencing_waiter`, and the signs of life beside it.

A waiter that has shown no sign for `LINE_TTL` has lost its place, whether its row is deleted or not. All waiters of one
backend share a station, and with it one slot for their signs.
"""

from __future__ import annotations

from dataclasses import dataclass

from fencing_sdk._values.claim import Claim
from fencing_sdk.backends._shared.lock_table import LINE_TTL
from fencing_sdk.backends.sqlite._bell import Place
from fencing_sdk.backends.sqlite._file import LockFile
from fencing_sdk.backends.sqlite._signs import SignsOfLife

SECOND = 1_000_000
TOLERANCE = SECOND
"""
What was written later than this after now is of an earlier boot. Only systems that do not name their boots need it, so
it may be generous.
"""
_TTL = int(LINE_TTL * SECOND)


@dataclass(frozen=True, slots=True)
class WaiterRow:
    """One who waits and lives."""

    owner: str
    network: str
    place: Place
    silent_at: int
    """When it loses its place, without another sign."""


class WaitQueue:
    """The waiters of one open file, as seen from one boot and one network namespace. Called inside a transaction."""

    def __init__(self, file: LockFile, signs: SignsOfLife, *, boot: str, network: str) -> None:
        self._file = file
        self._signs = signs
        self._boot = boot
        self._network = network

    def stand(self, claim: Claim, place: Place, now: int) -> None:
        """Put a waiter at the end, unless it is in the queue already."""
        slot = self._slot(place.station)
        self._signs.show(slot, now)
        self._file.execute(
            "INSERT INTO fencing_waiter (name, owner, boot, station, slot, network, bell, word)"
            " VALUES (:name, :owner, :boot, :station, :slot, :network, :bell, :word)"
            " ON CONFLICT (name, owner) DO NOTHING",
            name=claim.name,
            owner=claim.owner,
            boot=self._boot,
            station=place.station,
            slot=slot,
            network=self._network,
            bell=place.bell,
            word=place.word,
        )

    def first(self, name: str, now: int) -> WaiterRow | None:
        """Whose turn it is: the first that lives. Nothing is written."""
        return self._first(name, now)[0]

    def head(self, name: str, now: int) -> WaiterRow | None:
        """As `first`, and those before it, who have lost their place, are deleted."""
        head, passed_over = self._first(name, now)
        for number in passed_over:
            self._file.execute("DELETE FROM fencing_waiter WHERE number = :number", number=number)
        return head

    def _first(self, name: str, now: int) -> tuple[WaiterRow | None, list[int]]:
        passed_over: list[int] = []
        for number, owner, boot, station, slot, network, bell, word in self._file.execute(
            "SELECT number, owner, boot, station, slot, network, bell, word FROM fencing_waiter"
            " WHERE name = :name ORDER BY number",
            name=name,
        ):
            silent_at = self._silent_at(boot, slot, now)
            if now < silent_at:
                return WaiterRow(owner, network, Place(bell, station, word), silent_at), passed_over
            passed_over.append(number)
        return None, passed_over

    def drop(self, name: str, owner: str) -> bool:
        """Delete one waiter; False if it was not in the queue."""
        dropped = self._file.execute(
            "DELETE FROM fencing_waiter WHERE name = :name AND owner = :owner", name=name, owner=owner
        )
        return dropped.rowcount > 0

    def show(self, station: str, now: int) -> set[tuple[str, str]]:
        """Show that the waiters of *station* live; return their names and owners."""
        standing = self._file.execute(
            "SELECT name, owner, slot FROM fencing_waiter WHERE station = :station", station=station
        ).fetchall()
        for slot in {slot for _, _, slot in standing}:
            self._signs.show(slot, now)
        return {(name, owner) for name, owner, _ in standing}

    def sweep(self, now: int) -> None:
        """Delete all who have lost their place."""
        for number, boot, slot in self._file.execute("SELECT number, boot, slot FROM fencing_waiter").fetchall():
            if self._silent_at(boot, slot, now) <= now:
                self._file.execute("DELETE FROM fencing_waiter WHERE number = :number", number=number)

    def empty(self) -> bool:
        """Whether there are no waiters, dead or alive."""
        return self._file.execute("SELECT 1 FROM fencing_waiter LIMIT 1").fetchone() is None

    def _silent_at(self, boot: str, slot: int, now: int) -> int:
        if boot != self._boot:
            return 0
        sign = self._signs.seen(slot)
        return sign + _TTL if sign <= now + TOLERANCE else 0

    def _slot(self, station: str) -> int:
        """The slot of *station*: the one that it has, or the first that is free."""
        (slot,) = self._file.execute(
            "SELECT coalesce((SELECT slot FROM fencing_waiter WHERE station = :station),"
            " (SELECT min(free.slot) FROM (SELECT 0 AS slot UNION SELECT slot + 1 FROM fencing_waiter) AS free"
            " WHERE free.slot NOT IN (SELECT slot FROM fencing_waiter)))",
            station=station,
        ).fetchone()
        return int(slot)
