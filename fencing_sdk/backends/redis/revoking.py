"""
Takes grants away, and tells their holders why.

The server compares the token, ends the grant and wakes or grants the next waiter in one step (`revoke.lua`). It keeps
the reason for as long as the grant would have lasted. A holder hears of the end by client tracking, as of any other
change of its lease, or at its next heartbeat; only when its renewal is refused does it ask for a reason.
"""

from __future__ import annotations

from collections.abc import Sequence

from fencing_sdk._values.claim import Claim
from fencing_sdk.backends.redis.connection.router import RedisRouter
from fencing_sdk.backends.redis.requests import RedisRequests


class RedisRevocations:
    """Revokes for one backend."""

    def __init__(self, requests: RedisRequests, router: RedisRouter) -> None:
        self._requests = requests
        self._router = router

    async def revoke(self, name: str, token: int, reason: str) -> bool:
        """See `fencing_sdk.abc.SupportsRevoking.revoke`."""
        return await self._router.run(self._requests.revoke(name, token, reason)) == 1

    async def reasons(self, claims: Sequence[Claim]) -> list[str | None]:
        """For claims whose grants have ended: why they were revoked; None where no operator did it."""
        answers = await self._router.run_all([self._requests.revoked(claim) for claim in claims])
        return [answer.decode(errors="replace") if isinstance(answer, bytes) else None for answer in answers]
