"""
Takes grants away, and tells their holders why.

The line of the lock is read, and who holds with the token. One transaction compares that their keys are still those
that were created then, deletes them, and leaves a note for each holder. The deletion wakes the next waiter and
reaches the holders by the watches that both have anyway. The notes live on a lease of their own, as long as the
grants would have lived.

Readers who hold together may be more than one transaction can delete. The last one compares that no reader came
since the line was read, and deletes the phase too. Until then the rest holds, and the next look finds who is left.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from fencing_sdk._etcd.json_codec import Entry, Json, compared, delete, put
from fencing_sdk._values.claim import Claim
from fencing_sdk.backends.etcd.errors import BACKEND
from fencing_sdk.backends.etcd.requests import BATCH, EtcdRequests
from fencing_sdk.backends.etcd.shares import EtcdShares, SeenLine
from fencing_sdk.errors import BackendUnavailableError

__all__ = ["EtcdRevocations"]

_LONGER = 5
"""Seconds for which a note is kept longer than the grant would have lasted."""
_AT_ONCE = 50
"""Holders in one transaction: etcd allows 128 operations, and a holder needs two."""
_TRIES = 10
"""Times that a lock is looked at while its holders come and go."""


class EtcdRevocations:
    """Revokes for one backend."""

    def __init__(self, requests: EtcdRequests, shares: EtcdShares) -> None:
        self._requests = requests
        self._keys = requests.keys
        self._shares = shares

    async def revoke(self, name: str, token: int, reason: str) -> bool:
        """See `fencing_sdk.abc.SupportsRevoking.revoke`."""
        ended, failures = False, 0
        while failures < _TRIES:
            seen = await self._shares.look("revoke", name)
            victims = [entry for entry in seen.held if seen.token(entry) == token]
            if not victims:
                return ended
            succeeded = await self._end(seen, victims[:_AT_ONCE], reason, last=len(victims) <= _AT_ONCE)
            if succeeded and len(victims) <= _AT_ONCE:
                return True
            ended, failures = ended or succeeded, failures + (not succeeded)
        raise BackendUnavailableError(BACKEND, "revoke", "the holders of the lock change whenever it is looked at")

    async def _end(self, seen: SeenLine, victims: Sequence[Entry], reason: str, *, last: bool) -> bool:
        """End the grants of *victims*, if all of them still hold; with the *last* readers also their phase."""
        remaining = await self._shares.remaining("revoke", [victim.lease for victim in victims])
        longest = max((left or 0.0 for left in remaining.values()), default=0.0)
        lease, _ = await self._requests.grant_lease("revoke", math.ceil(longest) + _LONGER)
        value = json.dumps({"reason": reason}).encode()
        steps = [put(self._keys.note(seen.name, victim.key), value, lease) for victim in victims]
        compare = [compared(victim.key, "CREATE", "EQUAL", victim.created) for victim in victims]
        if last and self._keys.phase_of_reader(victims[0].key):
            compare += self._no_reader_since(seen)
            steps.append(delete(self._keys.phase(seen.name)))
        return await self._requests.end("revoke", compare, [victim.key for victim in victims], steps)

    def _no_reader_since(self, seen: SeenLine) -> list[Json]:
        begin, end = self._keys.readers(seen.name)
        return [compared(begin, "CREATE", "LESS", seen.revision + 1, end=end)]

    async def reasons(self, claims: Sequence[Claim]) -> list[str | None]:
        """For claims whose grants have ended: why they were revoked; None for those that were not."""
        found: list[Entry | None] = []
        for start in range(0, len(claims), BATCH):
            found += await self._requests.notes("renew", claims[start : start + BATCH])
        return [None if note is None else _read_reason(note.value) for note in found]


def _read_reason(value: bytes) -> str:
    try:
        reason = json.loads(value).get("reason")
    except (ValueError, AttributeError, RecursionError):
        reason = None
    return reason if isinstance(reason, str) else ""
