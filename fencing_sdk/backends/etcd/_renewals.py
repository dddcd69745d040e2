"""
Many renewals in a few requests.

For each lease one keep-alive, and beside it, for every so many locks, one transaction that compares
the revision of each key. A keep-alive alone proves nothing about a lock, because its key may have
been deleted; the comparison alone does not prolong it. Both are counted from before they were sent.

A claim that this client knows nothing of, such as that of a client that reconnected, is looked up,
and its key is moved to a lease of ours.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from typing import TypeVar

from fencing_sdk._values.claim import Claim, Renewal
from fencing_sdk.backends.etcd._calls import BATCH, Calls, Standing
from fencing_sdk.backends.etcd._leases import Holding, Leases, SharedLease
from fencing_sdk.errors import BackendError

__all__ = ["Renewals"]

T = TypeVar("T")


class Renewals:
    """One call that renews many claims."""

    def __init__(self, calls: Calls, leases: Leases, claims: Sequence[Claim], started: float) -> None:
        self._calls = calls
        self._leases = leases
        self._started = started
        self._claims = {calls.keys.own(claim): claim for claim in claims}
        self._tokens: dict[bytes, int] = {}
        self.outcomes: dict[bytes, Renewal] = {}
        self.failures: list[BackendError] = []

    async def run(self) -> None:
        """Find the outcome of each claim that has one; a failure leaves the others alone."""
        known: dict[SharedLease, dict[bytes, Holding]] = {}
        unknown: list[bytes] = []
        for key in self._claims:
            if (found := self._leases.find(key)) is None:
                unknown.append(key)
            else:
                known.setdefault(found[0], {})[key] = found[1]
        await self._all([self._renew_known(lease, holdings) for lease, holdings in known.items()])
        left = [key for key in self._claims if key in unknown or self.outcomes.get(key) is Renewal.REFUSED]
        await self._all([self._look_up(batch) for batch in _batches(left)])

    async def _all(self, works: Iterable[Awaitable[None]]) -> None:
        outcomes = await asyncio.gather(*works, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BackendError):
                self.failures.append(outcome)
            elif outcome is not None:
                raise outcome

    async def _renew_known(self, lease: SharedLease, holdings: dict[bytes, Holding]) -> None:
        """Each batch is proven by its own comparison; the keep-alive is the same for all of them."""
        longest = max(holding.ttl for holding in holdings.values())
        checks = [asyncio.ensure_future(self._unchanged(batch)) for batch in _batches(list(holdings.values()))]
        try:
            if await self._leases.keep("renew", lease, longest, self._started):
                await self._all([self._settled(check) for check in checks])
            else:
                self.outcomes |= dict.fromkeys(holdings, Renewal.REFUSED)
        finally:
            for check in checks:
                check.cancel()
            await asyncio.gather(*checks, return_exceptions=True)

    async def _unchanged(self, holdings: Sequence[Holding]) -> list[tuple[Holding, int]]:
        """Each with a revision at which it was there, or 0."""
        found = await self._calls.unchanged("renew", {holding.key: holding.modified for holding in holdings})
        if isinstance(found, int):
            return [(holding, found) for holding in holdings]
        entries = [found[holding.key] for holding in holdings]
        return [
            (holding, holding.proven if entry is not None and entry.modified == holding.modified else 0)
            for holding, entry in zip(holdings, entries, strict=True)
        ]

    async def _settled(self, check: Awaitable[list[tuple[Holding, int]]]) -> None:
        for holding, proven in await check:
            if proven:
                holding.renewed_at = max(holding.renewed_at, self._started)
                holding.proven = max(holding.proven, proven)
            else:
                self._leases.forget(holding.key)
                self._tokens[holding.key] = holding.created
            self.outcomes[holding.key] = Renewal.RENEWED if proven else Renewal.REFUSED

    async def _look_up(self, keys: Sequence[bytes]) -> None:
        claims = [self._claims[key] for key in keys]
        standings = await self._calls.standings("renew", claims)
        works = []
        for key, claim, standing in zip(keys, claims, standings, strict=True):
            if self._may_hold(key, standing):
                works.append(self._adopt(key, claim, standing))
            elif standing.first is None or standing.holds:
                self.outcomes[key] = Renewal.REFUSED
            else:
                self.outcomes[key] = Renewal.TAKEN_OVER
        await self._all(works)

    def _may_hold(self, key: bytes, standing: Standing) -> bool:
        """
        Whether a key that is first is that of the grant.

        It is not when it was given up, nor when it was made again by a request that arrived late:
        somebody else may have held the lock in between, and the token is another one.
        """
        if standing.own is None or not standing.holds or self._leases.debts.doomed(key, standing.own.created):
            return False
        if self._tokens.get(key, standing.own.created) == standing.own.created:
            return True
        self._leases.debts.owe(key, self._started, stray=True)
        return False

    async def _adopt(self, key: bytes, claim: Claim, standing: Standing) -> None:
        self.outcomes.pop(key, None)
        taken = await self._leases.take_over("renew", claim, standing, self._started)
        self.outcomes[key] = Renewal.RENEWED if taken else Renewal.REFUSED


def _batches(items: Sequence[T]) -> list[Sequence[T]]:
    return [items[start : start + BATCH] for start in range(0, len(items), BATCH)]
