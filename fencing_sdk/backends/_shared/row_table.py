"""
The rows of a store in this process: dictionaries, on which the rules of `rules` are run.

Every call takes ``now``; there is no clock here, and no I/O.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Collection, Iterable

from fencing_sdk._values.claim import Busy, Claim, Grant, Holder, Renewal, Revoked, Waiting
from fencing_sdk.backends._shared import rules
from fencing_sdk.backends._shared.rules import GrantRow, TokenSource, WaiterRow

_SWEEP_FROM = 64
"""With more names than this, the table deletes what has ended."""


class RowTable:
    """The holders and the waiters of each lock, and the last token; one counter serves all names."""

    def __init__(self, next_token: TokenSource, backend: str = "MemoryBackend") -> None:
        self.next_token = next_token
        self.backend = backend
        self.last_token = 0
        # Name, then owner. No name has an empty dictionary; the waiters are in order of arrival.
        self.grants: dict[str, dict[str, GrantRow]] = {}
        self.lines: dict[str, OrderedDict[str, WaiterRow]] = {}
        self.reasons: dict[tuple[str, str], tuple[float, str]] = {}
        """Until when a reason is kept, and the reason."""
        self._sweep_at = _SWEEP_FROM

    def acquire(self, claim: Claim, now: float) -> Grant | Busy:
        """See `rules.acquire`. A try is also the waiter's sign of life, so it is advised to come back in time."""
        rows = TableRows(self, claim.name, now)
        in_line = rows.sign(claim.owner)
        answer = rules.acquire(rows, claim)
        if not isinstance(answer, Busy):
            self._sweep(now)
        elif in_line and answer.retry_after is not None:
            return Busy(min(answer.retry_after, rules.LINE_POLL))
        return answer

    def hand_over(self, claim: Claim, now: float) -> Grant:
        """Grant a free lock to a waiter, without being asked for it."""
        return rules.grant(TableRows(self, claim.name, now), claim)

    def transfer(self, of: Claim, to: Claim, now: float) -> Grant | Renewal | Revoked:
        """See `rules.transfer`."""
        return rules.transfer(TableRows(self, of.name, now), of, to)

    def renew(self, claim: Claim, now: float) -> Renewal | Revoked:
        """See `rules.renew`."""
        return rules.renew(TableRows(self, claim.name, now), claim)

    def release(self, claim: Claim, now: float) -> Renewal | Revoked | None:
        """See `rules.release`."""
        return rules.release(TableRows(self, claim.name, now), claim)

    def revoke(self, name: str, now: float, token: int | None = None, reason: str | None = None) -> list[str]:
        """See `rules.revoke`."""
        return rules.revoke(TableRows(self, name, now), token, reason)

    def inspect(self, name: str, now: float) -> Holder | None:
        """Describe one of the holders of *name*: the one that may hold it for longest."""
        return max(self.holders(name, now), key=lambda holder: holder.remaining, default=None)

    def holders(self, name: str, now: float) -> list[Holder]:
        """See `rules.holders`."""
        return rules.holders(TableRows(self, name, now), name)

    def waiting(self, name: str, now: float) -> list[Waiting]:
        """See `rules.waiting`."""
        return rules.waiting(TableRows(self, name, now))

    def names(self, prefix: str, after: str | None, limit: int) -> list[str]:
        """The next *limit* names that begin with *prefix*, in their order."""
        return heapq.nsmallest(
            limit, (name for name in self.grants if name.startswith(prefix) and (after is None or name > after))
        )

    def join(self, claim: Claim, now: float) -> None:
        """See `rules.join`."""
        rules.join(TableRows(self, claim.name, now), claim, None)

    def leave(self, claim: Claim) -> bool:
        """Take the owner out of the line, if it is there; return whether others are."""
        TableRows(self, claim.name, -math.inf).leave(claim.owner)
        return claim.name in self.lines

    def next_in_line(self, name: str, now: float) -> str | None:
        """The owner to wake or to hand the lock: see `rules.wake_next`."""
        rows = TableRows(self, name, now)
        rules.wake_next(rows)
        return None if rows.woken is None else rows.woken.owner

    def __len__(self) -> int:
        return len(self.grants) + len(self.lines)

    def forget_ended(self, name: str, now: float) -> None:
        """Delete the grants of *name* that have ended."""
        held = self.grants.get(name)
        if held is None:
            return
        for owner in [owner for owner, row in held.items() if row.expires <= now]:
            del held[owner]
        if not held:
            del self.grants[name]

    def _sweep(self, now: float) -> None:
        """Forget what has ended: no call asks about a name like "report/123" again."""
        if len(self.grants) + len(self.reasons) <= self._sweep_at:
            return
        for name in tuple(self.grants):
            self.forget_ended(name, now)
        self.reasons = {key: kept for key, kept in self.reasons.items() if kept[0] > now}
        self._sweep_at = 2 * (len(self.grants) + len(self.reasons)) + _SWEEP_FROM


class TableRows:
    """The rows of one name in a table: see `fencing_sdk.backends._shared.rules.Rows`."""

    __slots__ = ("_name", "backend", "now", "table", "woken")

    def __init__(self, table: RowTable, name: str, now: float) -> None:
        self.table = table
        self.backend = table.backend
        self._name = name
        self.now = now
        self.woken: WaiterRow | None = None
        """The waiter that is to be woken, or to be handed the lock."""
        table.forget_ended(name, now)

    def grants(self) -> Collection[GrantRow]:
        held = self.table.grants.get(self._name)
        return () if held is None else held.values()

    def add(self, grant: GrantRow) -> None:
        self.table.grants.setdefault(self._name, {})[grant.owner] = grant
        self.table.last_token = max(self.table.last_token, grant.token)

    def prolong(self, grant: GrantRow) -> None:
        """Do nothing: the rule has changed the row itself."""

    def drop(self, owner: str) -> bool:
        held = self.table.grants.get(self._name)
        if held is None or held.pop(owner, None) is None:
            return False
        if not held:
            del self.table.grants[self._name]
        return True

    def next_token(self) -> int:
        return self.table.next_token(self.table.last_token)  # `add` remembers it

    def line(self) -> Iterable[WaiterRow]:
        line = self.table.lines.get(self._name)
        return () if line is None else line.values()

    def join(self, claim: Claim, address: object) -> None:
        if not self.sign(claim.owner):
            waiter = WaiterRow(claim.owner, claim.mode, self.now + rules.LINE_TTL, self.now, claim.label, address)
            self.table.lines.setdefault(self._name, OrderedDict())[claim.owner] = waiter

    def sign(self, owner: str) -> bool:
        """Take a sign of life; return whether the owner is in the line."""
        line = self.table.lines.get(self._name)
        if line is None or owner not in line:
            return False
        line[owner].silent_at = self.now + rules.LINE_TTL
        return True

    def leave(self, owner: str) -> bool:
        line = self.table.lines.get(self._name)
        if line is None or line.pop(owner, None) is None:
            return False
        if not line:
            del self.table.lines[self._name]
        return True

    def wake(self, waiter: WaiterRow) -> None:
        self.woken = waiter

    def put_reason(self, owner: str, until: float, reason: str) -> None:
        self.table.reasons[self._name, owner] = until, reason

    def reason(self, owner: str) -> str | None:
        until, reason = self.table.reasons.get((self._name, owner), (0.0, None))
        return reason if self.now < until else None
