"""
Many renewals in a few requests.

For each lease one keep-alive is sent, and for each `BATCH` of its locks one transaction that compares the revision
of each key. Both are needed: after a keep-alive alone, a key may have been deleted, and a comparison alone prolongs
nothing. A renewal counts from the moment before both were sent.

There are four cases for a claim:

1. This client holds its key: the keep-alive and the comparison decide.
2. The comparison failed: the key is read, because it may only have been moved to another lease.
3. This client does not know the claim, most often after a reconnection: the key is read.

4. The claim has another ttl than at the last call: the key is read.

In cases 2 to 4, a key that is still that of the grant is moved to a lease of this client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from typing import TypeVar

from fencing_sdk._values.claim import Claim, Renewal
from fencing_sdk.backends._shared.node_line import refusal
from fencing_sdk.backends.etcd.leases import HeldKey, SharedLease, SharedLeases
from fencing_sdk.backends.etcd.line import EtcdLine, Standing
from fencing_sdk.backends.etcd.requests import BATCH, EtcdRequests
from fencing_sdk.errors import BackendError

__all__ = ["EtcdRenewals"]

T = TypeVar("T")


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
        comparisons = [asyncio.ensure_future(self._compare(batch)) for batch in _batches(list(held.values()))]
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
