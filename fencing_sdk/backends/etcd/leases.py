"""
Leases of etcd that many locks share, one for each ttl in whole seconds, and many renewals in a few requests.

A keep-alive proves that the lease lived when it was sent. A lease is a little longer than the ttl of its locks, so
one keep-alive also serves the calls of the next fraction of a second: a thousand locks, renewed one by one or
together, cost as many keep-alives as one lock.

A key of a shared lease lives as long as the lease, and any other lock of it keeps that alive. So before each
keep-alive, a claim that was not renewed for its ttl ends here, and its key becomes a pending delete.

A *pending delete* is a key that no claim uses, and that may still exist. Locks share leases, so
a forgotten key would live as long as any other lock of its lease. Its deletion is therefore sent again and again while
this client keeps a lease alive. If the client keeps none, the leases end, and etcd deletes their keys.

A claim that has left the line may come back and put its key again while deletions of the earlier key are under way. No
deletion deletes a key that was created after the last of them was sent. A key that was created before that moment must
not be used.

A deletion that finds no key proves that its grant was lost, if it is the only one. A claim that has just got the lock
may be leaving the line, or still be joining it, when it is released: then that may delete the key first.

A renewal sends one keep-alive for each lease, and for each `BATCH` of its locks one transaction that compares the
revision of each key. Both are needed: after a keep-alive alone, a key may have been deleted, and a comparison alone
prolongs nothing. A renewal counts from the moment before both were sent. There are four cases for a claim:

1. This client holds its key: the keep-alive and the comparison decide.
2. The comparison failed: the key is read, because it may only have been moved to another lease.
3. This client does not know the claim, most often after a reconnection: the key is read.
4. The claim has another ttl than at the last call: the key is read.

In cases 2 to 4, a key that is still that of the grant is moved to a lease of this client.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from fencing_sdk._etcd import LeaseNotFoundError
from fencing_sdk._values.claim import Claim, Renewal
from fencing_sdk._values.clock import BootClock
from fencing_sdk._values.loop_owner import ForkDetector
from fencing_sdk._values.tasks import SharedCall
from fencing_sdk._values.timing import DRIFT
from fencing_sdk.backends._shared.background_task import BackgroundTask
from fencing_sdk.backends._shared.node_line import refusal
from fencing_sdk.backends.etcd.line import BACKEND, BATCH, EtcdLine, EtcdRequests, Standing
from fencing_sdk.errors import BackendError, BackendUnavailableError

T = TypeVar("T")
SPARE = 0.5
"""Seconds by which a lease is at least longer than the ttl of its locks."""
_TRIES = 3
LATE_ARRIVAL = 600.0
"""Seconds for which a request without an answer may still arrive: longer than any kernel sends it again."""
_FIRST_PAUSE = 0.25
_LAST_PAUSE = 5.0
_LIMIT = 100_000


@dataclass(slots=True)
class _PendingDelete:
    since: float
    until: float
    """Before this moment, a confirmed deletion does not prove that the key stays away."""
    modified: int | None
    """Delete the key only at this revision: another client may have adopted it since."""
    due: float
    pause: float = _FIRST_PAUSE
    held: bool = False
    """True if it is that of a lock that was released."""
    deleted: bool = False
    """A deletion was confirmed, and only a request that puts the key again may still arrive."""
    sent: int = 0
    """How many deletions were sent."""


class PendingDeletes:
    """The keys to delete, and when each deletion is sent next."""

    def __init__(self) -> None:
        self._pending: OrderedDict[bytes, _PendingDelete] = OrderedDict()
        self._cancelled: OrderedDict[bytes, int] = OrderedDict()
        """For each key that is wanted again: the last revision of creation that a deletion may still reach."""

    def __contains__(self, key: bytes) -> bool:
        return key in self._pending

    def add(
        self,
        key: bytes,
        now: float,
        *,
        may_return: bool = False,
        modified: int | None = None,
        sending: bool = False,
        held: bool = False,
    ) -> None:
        """
        Delete *key*. With *may_return*, a request that puts the key may still arrive, for `LATE_ARRIVAL`.

        With *sending*, the caller sends the first deletion at once. *held* is for the key of a lock that is released.
        """
        due = now + _FIRST_PAUSE if sending else now
        until = now + LATE_ARRIVAL if may_return else now
        sent = self._pending[key].sent if key in self._pending else 0
        self._pending[key] = _PendingDelete(now, until, modified, due, held=held, sent=sent)
        if len(self._pending) > _LIMIT:
            self._pending.popitem(last=False)

    def was_held(self, key: bytes) -> bool:
        """Return whether *key*, which is pending, is that of a lock that was released."""
        return key in self._pending and self._pending[key].held

    def due(self, now: float) -> dict[bytes, int | None]:
        """The keys to delete now, each with the revision that it must have; their next turn is later."""
        due = {key: pending for key, pending in self._pending.items() if pending.due <= now}
        for pending in due.values():
            pending.due = now + pending.pause
            pending.pause = min(pending.pause * 2, _LAST_PAUSE)
        return {key: pending.modified for key, pending in due.items()}

    def send(self, key: bytes) -> _PendingDelete:
        """Count a deletion of *key*, which is pending, that is sent now; return what `sent_once` asks for."""
        pending = self._pending[key]
        pending.sent += 1
        return pending

    def sent_once(self, key: bytes, sent: _PendingDelete) -> bool:
        """Return whether no other deletion can have deleted *key* than the one for which `send` has returned *sent*."""
        return self._pending.get(key) is sent and sent.sent == 1

    def confirmed(self, key: bytes, now: float) -> None:
        """Take note that etcd has confirmed a deletion that was sent at *now* or later."""
        pending = self._pending.get(key)
        if pending is None:
            return
        pending.deleted = True
        if pending.until <= now:
            del self._pending[key]
            self._cancelled.pop(key, None)

    def never_confirmed(self) -> list[bytes]:
        """The keys of which no deletion was confirmed, apart from those that may be another client's by now."""
        return [key for key, pending in self._pending.items() if not pending.deleted and pending.modified is None]

    def cancel(self, key: bytes, since: float, revision: int) -> None:
        """Stop deleting *key*, which its owner puts again: what was pending at *since* was deleted up to *revision*."""
        pending = self._pending.get(key)
        if pending is None or pending.since > since:
            return
        del self._pending[key]
        self._cancelled[key] = revision
        if len(self._cancelled) > _LIMIT:
            self._cancelled.popitem(last=False)

    def may_delete(self, key: bytes, created: int) -> bool:
        """Return whether a deletion may delete, or has deleted, the key that was created at this revision."""
        return key in self._pending or created <= self._cancelled.get(key, 0)

    def clear(self) -> None:
        """Forget all keys."""
        self._pending.clear()
        self._cancelled.clear()


@dataclass(slots=True)
class HeldKey:
    """A key of this client that was first in its line."""

    key: bytes
    ttl: float
    created: int
    """The token."""
    modified: int
    renewed_at: float
    """When the last call that proved the key began."""
    proven: int
    """A revision at which the key was there."""


@dataclass(slots=True, eq=False)
class SharedLease:
    """A lease of etcd, and the held keys that live as long as it does."""

    number: int
    ttl: int
    """The seconds that etcd granted: at least the requested ones, and at least its own minimum."""
    renewed_at: float
    ended: bool = False
    held: dict[bytes, HeldKey] = field(default_factory=dict)
    keep_alive: SharedCall[bool] | None = None

    def keep_alive_needed_since(self, ttl: float, started: float) -> float:
        """The earliest keep-alive that serves a call begun at *started*."""
        return started - max(0.0, self.ttl - ttl) * (1 - DRIFT)


class SharedLeases:
    """The leases of one client, the keys that it holds by them, and the keys that it deletes."""

    def __init__(self, requests: EtcdRequests) -> None:
        self.pending_deletes = PendingDeletes()
        self._requests = requests
        self._clock = BootClock()
        self._leases: dict[int, SharedLease] = {}  # by the requested seconds
        self._grants: dict[int, SharedCall[SharedLease]] = {}
        self._deleting = BackgroundTask()
        self._fork = ForkDetector()
        self.on_deleted: Callable[[bytes, bool], object] = lambda *_: None
        """Called with each key whose deletion is confirmed, and whether it was that of a lock that was released."""

    def now(self) -> float:
        """
        The moment at which a call begins.

        A forked child drops what it has inherited. If it kept its parent's leases alive, the locks of a parent
        that died would never become free.
        """
        if self._fork.forked():
            self._leases.clear()
            self._grants.clear()
            self.pending_deletes.clear()
            self._deleting = BackgroundTask()
        return self._clock.now()

    # Keep-alives

    async def fresh(self, operation: str, ttl: float, started: float) -> SharedLease:
        """
        A lease that lives for *ttl* seconds from *started* on, or longer.

        Raises:
            BackendError: etcd gave no answer, or granted no lease.
        """
        seconds = math.ceil(ttl + SPARE)
        for _ in range(_TRIES):
            lease = self._leases.get(seconds)
            if lease is None:
                lease = await self._grant(operation, seconds, started)
            if await self.keep(operation, lease, ttl, started):
                return lease
        raise BackendUnavailableError(BACKEND, operation, "a lease ends as soon as it is made")

    async def _grant(self, operation: str, seconds: int, started: float) -> SharedLease:
        async def grant() -> SharedLease:
            lease = SharedLease(*await self._requests.grant_lease(operation, seconds), now)
            return self._leases.setdefault(seconds, lease)

        call = self._grants.get(seconds)
        if call is None or not call.can_join(started - SPARE):
            now = self.now()
            call = self._grants[seconds] = SharedCall(grant, now)
        return await call.join()

    async def keep(self, operation: str, lease: SharedLease, ttl: float, started: float) -> bool:
        """Make sure that *lease* lives for *ttl* seconds from *started* on; False: it has ended."""
        since = lease.keep_alive_needed_since(ttl, started)
        if lease.ended or lease.renewed_at >= since:
            return not lease.ended

        async def send() -> bool:
            self.give_up_overdue(now)
            if not self._deleting.running and (due := self.pending_deletes.due(now)):
                self._deleting.start(lambda: self._delete_all(due, now))
            if await self._requests.keep_alive(operation, lease.number) <= 0:
                self._end(lease)
                return False
            lease.renewed_at = max(lease.renewed_at, now)
            return True

        call = lease.keep_alive
        if call is None or not call.can_join(since):
            now = self.now()
            call = lease.keep_alive = SharedCall(send, now)
        return await call.join()

    def _end(self, lease: SharedLease) -> None:
        """Forget a lease that no longer exists; the next call makes another one."""
        lease.ended = True
        lease.held.clear()
        for seconds, found in list(self._leases.items()):
            if found is lease:
                del self._leases[seconds]

    async def with_lease(
        self, operation: str, claim: Claim, started: float, call: Callable[[SharedLease], Awaitable[T]]
    ) -> tuple[T, SharedLease]:
        """Make a call that needs a lease for *claim*. If the lease has just ended, make it once more with a new one."""
        lease = await self.fresh(operation, claim.ttl, started)
        try:
            return await call(lease), lease
        except LeaseNotFoundError:
            self._end(lease)
        lease = await self.fresh(operation, claim.ttl, started)
        return await call(lease), lease

    # Held keys

    async def hold(self, operation: str, claim: Claim, standing: Standing, started: float) -> SharedLease | None:
        """
        Hold the claim's own key, on a lease of this client that lives for the claim's ttl; None: the key is gone.

        The key is on another lease if another client has put it with this claim, or this one before a fork.
        """
        own = standing.own
        assert own is not None  # the callers have checked it

        async def move(lease: SharedLease) -> int | None:
            same = own.lease == lease.number
            return own.modified if same else await self._requests.adopt(operation, own, lease.number)

        modified, lease = await self.with_lease(operation, claim, started, move)
        if modified is None:
            return None
        self.remember(lease, HeldKey(own.key, claim.ttl, own.created, modified, started, modified))
        return lease

    def remember(self, lease: SharedLease, held: HeldKey) -> None:
        """Take note of a key that this client holds by *lease*."""
        self.forget(held.key)
        lease.held[held.key] = held

    def owns(self, lease: int) -> bool:
        """Return whether a key of this *lease* is one that this client has put."""
        return any(known.number == lease for known in self._leases.values())

    def find(self, key: bytes) -> tuple[SharedLease, HeldKey] | None:
        """The held key, with its lease."""
        for lease in self._leases.values():
            if (held := lease.held.get(key)) is not None:
                return lease, held
        return None

    def forget(self, key: bytes) -> None:
        """Hold *key* no longer. It may still exist."""
        for lease in self._leases.values():
            lease.held.pop(key, None)

    def give_up_overdue(self, now: float, keys: Iterable[bytes] | None = None) -> None:
        """Give up the claims that were not renewed for their ttl, of *keys* or of all: their keys may still exist."""
        for lease in self._leases.values():
            for key in list(lease.held if keys is None else lease.held.keys() & keys):
                held = lease.held[key]
                if held.renewed_at + held.ttl <= now:
                    del lease.held[key]
                    self.pending_deletes.add(key, now, modified=held.modified)

    # Pending deletes

    async def delete_pending(self, operation: str, keys: Sequence[bytes]) -> list[bytes]:
        """
        Delete those of *keys* that are pending, until etcd confirms it; return those that were gone before, for sure.

        Each further try reaches keys that were put meanwhile. It leaves out deletions that were cancelled meanwhile.

        Raises:
            BackendError: it is not confirmed.
        """
        gone: list[bytes] = []
        for start in range(0, len(keys), BATCH):
            gone += await self._delete_together(operation, keys[start : start + BATCH])
        return gone

    async def _delete_together(self, operation: str, keys: Sequence[bytes]) -> list[bytes]:
        for _ in range(_TRIES):
            now, pending = self.now(), [key for key in keys if key in self.pending_deletes]
            if not pending:
                return []
            sent = {key: self.pending_deletes.send(key) for key in pending}
            absent = await self._requests.delete(operation, pending)
            if absent is not None:
                gone = [key for key in absent if self.pending_deletes.sent_once(key, sent[key])]
                for key in pending:
                    self._confirm(key, now)
                return gone
        raise BackendUnavailableError(BACKEND, operation, "a key is made again whenever it is to be deleted")

    def _confirm(self, key: bytes, now: float) -> None:
        held = self.pending_deletes.was_held(key)
        self.pending_deletes.confirmed(key, now)
        self.on_deleted(key, held)

    async def finish_deleting(self, operation: str, key: bytes) -> None:
        """Before a claim puts its key again: delete the earlier key, and stop further deletions."""
        while key in self.pending_deletes:
            now = self.now()
            await self.delete_pending(operation, [key])
            self.pending_deletes.cancel(key, now, self._requests.highest_revision)

    def is_safe(self, key: bytes, created: int) -> bool:
        """Return True if no deletion can reach the key created at this revision. If one can, delete the key."""
        if not self.pending_deletes.may_delete(key, created):
            return True
        self.forget(key)
        self.pending_deletes.add(key, self.now(), may_return=True)
        return False

    async def _delete_all(self, due: dict[bytes, int | None], now: float) -> None:
        """After a failure, the keys stay pending, and a later keep-alive tries again."""
        plain = [key for key, modified in due.items() if modified is None]
        try:
            await self.delete_pending("release", plain)
            for key, modified in due.items():
                if modified is not None:
                    await self._requests.delete_unchanged("release", key, modified)
                    self._confirm(key, now)
        except BackendError:
            pass

    async def aclose(self) -> None:
        """Cancel what is under way. Without keep-alives, the leases end by themselves."""
        await self._deleting.aclose()
        grants, self._grants = self._grants, {}
        for call in grants.values():
            await call.aclose()
        for lease in self._leases.values():
            if lease.keep_alive is not None:
                await lease.keep_alive.aclose()


class EtcdRenewals:
    """One call that renews many claims."""

    def __init__(
        self,
        requests: EtcdRequests,
        line: EtcdLine,
        leases: SharedLeases,
        claims: Sequence[Claim],
        started: float,
    ) -> None:
        self._requests = requests
        self._line = line
        self._leases = leases
        self._started = started
        self._claims = {requests.keys.own(claim): claim for claim in claims}
        self._tokens: dict[bytes, int] = {}
        """The tokens of the keys that are held, and have to be read: their comparison failed, or their ttl changes."""
        self.outcomes: dict[bytes, Renewal] = {}
        self.failures: list[BackendError] = []

    async def run(self) -> None:
        """Fill `outcomes` and `failures`. A failed request leaves the claims of other requests alone."""
        by_lease: dict[SharedLease, dict[bytes, HeldKey]] = {}
        unknown: list[bytes] = []
        for key, claim in self._claims.items():
            if (found := self._leases.find(key)) is None:
                unknown.append(key)
            elif found[1].ttl != claim.ttl:
                unknown.append(key)
                self._tokens[key] = found[1].created
            else:
                by_lease.setdefault(found[0], {})[key] = found[1]
        await self._gather([self._renew_held(lease, held) for lease, held in by_lease.items()])
        unsettled = [key for key in self._claims if key in unknown or self.outcomes.get(key) is Renewal.REFUSED]
        await self._gather([self._look_up(batch) for batch in _batches(unsettled)])

    async def _gather(self, works: Iterable[Awaitable[None]]) -> None:
        outcomes = await asyncio.gather(*works, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BackendError):
                self.failures.append(outcome)
            elif outcome is not None:
                raise outcome

    async def _renew_held(self, lease: SharedLease, held: dict[bytes, HeldKey]) -> None:
        """Renew the keys of one lease: one keep-alive for all, and one comparison for each batch."""
        longest = max(each.ttl for each in held.values())
        batches = _batches(list(held.values()))
        comparisons = [asyncio.create_task(self._compare(batch), name="fencing-store") for batch in batches]
        try:
            if await self._leases.keep("renew", lease, longest, self._started):
                await self._gather([self._settle(comparison) for comparison in comparisons])
            else:
                self.outcomes |= dict.fromkeys(held, Renewal.REFUSED)
        finally:
            for comparison in comparisons:
                comparison.cancel()
            await asyncio.gather(*comparisons, return_exceptions=True)

    async def _compare(self, held: Sequence[HeldKey]) -> list[tuple[HeldKey, int]]:
        """Return each key with a revision at which it was there, or 0."""
        found = await self._requests.unchanged("renew", {each.key: each.modified for each in held})
        if isinstance(found, int):
            return [(each, found) for each in held]
        entries = [found[each.key] for each in held]
        return [
            (each, each.proven if entry is not None and entry.modified == each.modified else 0)
            for each, entry in zip(held, entries, strict=True)
        ]

    async def _settle(self, comparison: Awaitable[list[tuple[HeldKey, int]]]) -> None:
        for held, proven in await comparison:
            if proven:
                held.renewed_at = max(held.renewed_at, self._started)
                held.proven = max(held.proven, proven)
            else:
                self._leases.forget(held.key)
                self._tokens[held.key] = held.created
            self.outcomes[held.key] = Renewal.RENEWED if proven else Renewal.REFUSED

    async def _look_up(self, keys: Sequence[bytes]) -> None:
        claims = [self._claims[key] for key in keys]
        standings = await self._line.standings("renew", claims)
        works = []
        for key, claim, standing in zip(keys, claims, standings, strict=True):
            if self._is_granted_key(key, standing):
                works.append(self._hold(key, claim, standing))
            else:
                self.outcomes[key] = refusal(claim.mode, others=standing.others)
        await self._gather(works)

    def _is_granted_key(self, key: bytes, standing: Standing) -> bool:
        """
        Return whether the claim's key is first, and is the one that was granted.

        It is another one if a deletion may reach it, or if a late request has put it again under another token:
        another holder may have had the lock in between. Such a key is deleted.
        """
        if standing.own is None or not standing.holds:
            return False
        created, pending_deletes = standing.own.created, self._leases.pending_deletes
        if pending_deletes.may_delete(key, created):
            return False
        if self._tokens.get(key, created) == created:
            return True
        pending_deletes.add(key, self._started, may_return=True)
        return False

    async def _hold(self, key: bytes, claim: Claim, standing: Standing) -> None:
        self.outcomes.pop(key, None)
        lease = await self._leases.hold("renew", claim, standing, self._started)
        self.outcomes[key] = Renewal.RENEWED if lease else Renewal.REFUSED


def _batches(items: Sequence[T]) -> list[Sequence[T]]:
    return [items[start : start + BATCH] for start in range(0, len(items), BATCH)]
