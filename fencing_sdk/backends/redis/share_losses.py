"""
Notices a share that ends behind its holder's back: see `losses.py` for plain locks.

The server follows the lease of the name. It changes with every share that comes, goes or is renewed, and not only
when one is taken away. So a message makes this client look at its shares, once a second at most. The look
writes nothing, so no other client gets a message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

from fencing_sdk._values.claim import Claim, Renewal, Revoked
from fencing_sdk.backends._shared.background_task import BackgroundTask
from fencing_sdk.backends._shared.loss_notices import LossNotices
from fencing_sdk.backends.redis.connection.pipe import Reply
from fencing_sdk.backends.redis.losses import LOSS_REASONS, changed_keys
from fencing_sdk.errors import LossReason

__all__ = ["ShareLossWatcher"]

Check = Callable[[Sequence[Claim]], Awaitable[Sequence[Renewal | Revoked]]]

_LOOK_EVERY = 1.0
"""Seconds between two looks."""


class ShareLossWatcher:
    """
    The shares of one backend, each until it ends.

    Args:
        check: Tells of claims what a renewal would, and changes nothing. Client tracking follows their leases again.

        notices: Who is told.
    """

    def __init__(self, check: Check, notices: LossNotices) -> None:
        self._check = check
        self._notices = notices
        self._held: dict[str, dict[str, Claim]] = {}  # by the key of the lease, and by owner
        self._changed: set[str] = set()
        self._look = BackgroundTask()

    def granted(self, key: str, claim: Claim) -> None:
        """Watch a new share."""
        self._held.setdefault(key, {})[claim.owner] = claim

    def ended(self, key: str, claim: Claim) -> bool:
        """Stop watching a share; return whether this client holds others of the name."""
        shares = self._held.get(key, {})
        shares.pop(claim.owner, None)
        if not shares:
            self._held.pop(key, None)
        return bool(shares)

    def on_connect(self) -> None:
        """Look at every share: what has changed meanwhile was told to no client."""
        self._look_soon(self._held)

    def on_push(self, message: list[Reply]) -> None:
        """Look at the shares of the leases that a message reports as changed; at all of them after FLUSHALL."""
        if message[0] == b"invalidate":
            self._look_soon(self._held if message[1] is None else changed_keys(message[1]))

    def changed(self, key: str) -> None:
        """Look at shares of a lease that this connection has changed itself: the server does not report that."""
        self._look_soon([key])

    def _look_soon(self, keys: Iterable[str]) -> None:
        changed = [key for key in keys if key in self._held]
        self._changed.update(changed)
        if changed:
            self._look.start(self._look_at_changed)

    async def _look_at_changed(self) -> None:
        while self._changed:
            shares = [(key, claim) for key in self._changed for claim in self._held.get(key, {}).values()]
            self._changed.clear()
            try:
                renewals = await self._check([claim for _, claim in shares])
            except Exception:  # noqa: BLE001  (a failed request proves no loss; the heartbeat asks again)
                renewals = []
            for (key, claim), renewal in zip(shares, renewals, strict=False):
                if isinstance(renewal, Revoked):
                    self._lost(key, claim, LossReason.REVOKED, renewal.reason)
                elif renewal in LOSS_REASONS:
                    self._lost(key, claim, LOSS_REASONS[renewal])
            await asyncio.sleep(_LOOK_EVERY)

    def _lost(self, key: str, claim: Claim, reason: LossReason, detail: str = "") -> None:
        if claim.owner in self._held.get(key, {}):  # else its holder has released it meanwhile
            self.ended(key, claim)
            self._notices.tell(claim, reason, detail)

    async def aclose(self) -> None:
        """End the look that is under way, and watch no share any more: a message may come while connections close."""
        self._held.clear()
        self._changed.clear()
        await self._look.aclose()
