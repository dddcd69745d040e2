"""
The waiters of each lock, in order of arrival: the table `fencing_waiter`, and the signs of life beside it.

A waiter that gave no sign for `LINE_TTL` has lost its place, whether its row is deleted or not. All waiters of one
backend object are one group, and share one slot for their signs.
"""

from __future__ import annotations

from dataclasses import dataclass

from fencing_sdk._values.claim import LOCK, READER, WRITER, Claim, Mode, Permit, Waiting, holder_of
from fencing_sdk.backends._shared.lock_table import LINE_TTL
from fencing_sdk.backends.sqlite.connection.file import LockFile
from fencing_sdk.backends.sqlite.signs_of_life import SignsOfLife
from fencing_sdk.backends.sqlite.wakeup_socket import WakeupAddress

SECOND = 1_000_000
TOLERANCE = SECOND
"""
A moment later than this after now was written in an earlier boot. Only systems that do not name their boots need it,
so it may be generous.
"""
_TTL = int(LINE_TTL * SECOND)


@dataclass(frozen=True, slots=True)
class LivingWaiter:
    """A waiter that has not lost its place."""

    owner: str
    network: str
    address: WakeupAddress
    silent_at: int
    """When it loses its place, without another sign."""
    mode: Mode


_MODES = {mode.word: mode for mode in (LOCK, WRITER, READER)}


def mode_of(word: str, permits: int | None) -> Mode:
    """The mode that a row tells."""
    return _MODES[word] if permits is None else Permit(of=permits)


class WaiterRows:
    """The waiters of one open file, as seen from one boot and one network namespace. Called inside a transaction."""

    def __init__(self, file: LockFile, signs: SignsOfLife, *, boot: str, network: str) -> None:
        self._file = file
        self._signs = signs
        self._boot = boot
        self._network = network

    def join(self, claim: Claim, address: WakeupAddress, now: int) -> None:
        """Put a waiter at the end of the line, unless it is in the line already."""
        slot = self._slot(address.group)
        self._signs.give(slot, now)
        self._file.execute(
            "INSERT INTO fencing_waiter"
            " (name, owner, boot, waiter_group, slot, network, socket, ticket, mode, permits, since, metadata)"
            " VALUES"
            " (:name, :owner, :boot, :group, :slot, :network, :socket, :ticket, :mode, :permits, :now, :metadata)"
            " ON CONFLICT (name, owner) DO NOTHING",
            name=claim.name,
            owner=claim.owner,
            boot=self._boot,
            group=address.group,
            slot=slot,
            network=self._network,
            socket=address.socket,
            ticket=address.ticket,
            mode=claim.mode.word,
            permits=claim.mode.of if isinstance(claim.mode, Permit) else None,
            now=now,
            metadata=claim.metadata,
        )

    def first(self, name: str, now: int) -> LivingWaiter | None:
        """The waiter whose turn it is: the first that lives. Writes nothing."""
        return self._first(name, now)[0]

    def head(self, name: str, now: int) -> LivingWaiter | None:
        """As `first`, and delete those before it, which have lost their places."""
        head, passed_over = self._first(name, now)
        for number in passed_over:
            self._file.execute("DELETE FROM fencing_waiter WHERE number = :number", number=number)
        return head

    def _first(self, name: str, now: int) -> tuple[LivingWaiter | None, list[int]]:
        passed_over: list[int] = []
        for number, owner, boot, waiter_group, slot, network, socket, ticket, word, permits in self._file.execute(
            "SELECT number, owner, boot, waiter_group, slot, network, socket, ticket, mode, permits FROM fencing_waiter"
            " WHERE name = :name ORDER BY number",
            name=name,
        ):
            silent_at = self._silent_at(boot, slot, now)
            if now < silent_at:
                address = WakeupAddress(socket, waiter_group, ticket)
                return LivingWaiter(owner, network, address, silent_at, mode_of(word, permits)), passed_over
            passed_over.append(number)
        return None, passed_over

    def count(self, name: str, now: int) -> int:
        """How many wait for *name*."""
        found = self._file.execute("SELECT boot, slot FROM fencing_waiter WHERE name = :name", name=name)
        return sum(now < self._silent_at(boot, slot, now) for boot, slot in found)

    def line(self, name: str, now: int) -> list[Waiting]:
        """Describe those that wait for *name*, in order of arrival."""
        found = self._file.execute(
            "SELECT boot, slot, owner, mode, permits, since, metadata FROM fencing_waiter"
            " WHERE name = :name ORDER BY number",
            name=name,
        )
        return [
            Waiting(holder_of(owner), mode_of(word, permits), (now - since) / SECOND, metadata)
            for boot, slot, owner, word, permits, since, metadata in found
            if now < self._silent_at(boot, slot, now)
        ]

    def drop(self, name: str, owner: str) -> bool:
        """Delete one waiter; False if it was not in the line."""
        dropped = self._file.execute(
            "DELETE FROM fencing_waiter WHERE name = :name AND owner = :owner", name=name, owner=owner
        )
        return dropped.rowcount > 0

    def give_sign(self, group: str, now: int) -> set[tuple[str, str]]:
        """Give a sign of life for the waiters of *group*; return their names and owners."""
        standing = self._file.execute(
            "SELECT name, owner, slot FROM fencing_waiter WHERE waiter_group = :group", group=group
        ).fetchall()
        for slot in {slot for _, _, slot in standing}:
            self._signs.give(slot, now)
        return {(name, owner) for name, owner, _ in standing}

    def sweep(self, now: int) -> None:
        """Delete the waiters that have lost their places."""
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

    def _slot(self, group: str) -> int:
        """The slot of *group*: the one that it has, or the first that is free."""
        (slot,) = self._file.execute(
            "SELECT coalesce((SELECT slot FROM fencing_waiter WHERE waiter_group = :group),"
            " (SELECT min(free.slot) FROM (SELECT 0 AS slot UNION SELECT slot + 1 FROM fencing_waiter) AS free"
            " WHERE free.slot NOT IN (SELECT slot FROM fencing_waiter)))",
            group=group,
        ).fetchone()
        return int(slot)
