"""
Notices a grant that ends behind its holder's back.

1. The server follows every lease that this connection has read or renewed (client tracking), and sends a
   message when another client changes it: an operator deletes it, FLUSHALL, a later grant after an expiry.
2. The message says "changed", not "lost", so the watcher looks. It renews what is held alone: a refusal is the loss.
   The lease of a shared name also changes with every share that comes, goes or is renewed. So shares are looked at once
   a second at most, by a script that writes nothing, since a write would send a message to all who hold others.
3. The server reports no change that happens between two connections. So the watcher looks at all grants when a
   connection opens.
4. A grant that is renewed with another ttl is not watched any longer, because a look, which renews it with the former
   ttl, would end it at the wrong time.

If the server does not permit tracking, the next heartbeat notices the loss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial

from fencing_sdk._values.claim import Claim, Renewal, Revoked
from fencing_sdk._values.tasks import retrieve
from fencing_sdk.backends._shared.background_task import BackgroundTask
from fencing_sdk.backends._shared.losses import LossNotices
from fencing_sdk.backends.redis.connection.pipe import Pipe, Reply, pack
from fencing_sdk.errors import LossReason

__all__ = ["RedisLossWatcher"]

Look = Callable[[Sequence[Claim]], Awaitable[Sequence[Renewal | Revoked]]]

_LOOK_EVERY = 1.0
"""Seconds between two looks at shares."""
_REMEMBERED = 1000
"""Grants that were released, and whose late answers are known."""
_REASONS = {Renewal.REFUSED: LossReason.REVOKED, Renewal.TAKEN_OVER: LossReason.TAKEN_OVER}


class RedisLossWatcher(LossNotices):
    """
    The grants of one backend, each until it ends.

    *look* answers for claims what a renewal answers, and lets client tracking follow their leases again. It may renew
    what is held alone, and changes no share.
    """

    def __init__(self, look: Look) -> None:
        super().__init__()
        self._look = look
        self._held: dict[str, dict[str, tuple[Claim, int]]] = {}  # by the key of the lease, and by owner: the token
        self._released: dict[str, int] = {}  # by owner: the tokens of the last grants that their holders ended
        self._left: dict[str, None] = {}  # owners for which a waiter that left has sent a release
        self._to_look_at: dict[str, tuple[str, Claim]] = {}  # by owner: what is held alone, and may have ended
        self._task = BackgroundTask()
        self._shares_to_look_at: dict[str, tuple[str, Claim]] = {}
        self._share_task = BackgroundTask()

    def granted(self, key: str, claim: Claim, token: int) -> None:
        """
        Watch a new grant. An earlier one beside which it does not fit has ended: look at that too.

        The answer to an acquisition may come after its grant was handed over otherwise and released. It is not
        watched, since its end would never be noted.
        """
        if self._released.get(claim.owner) == token:
            return
        held = self._held.get(key)
        if held is None:
            self._held[key] = {claim.owner: (claim, token)}
            return
        formers = [former for former, _ in held.values() if former.owner != claim.owner]
        held[claim.owner] = claim, token
        beside = claim.mode.shared and claim.mode.word
        self._look_soon([(key, former) for former in formers if former.mode.word != beside])

    def renewing(self, keys: Iterable[str], claims: Iterable[Claim]) -> None:
        """Stop watching the grants among *claims* that get another ttl. Called before their renewal is sent."""
        for key, claim in zip(keys, claims, strict=True):
            held = self._held.get(key)
            if held is not None and claim.owner in held and held[claim.owner][0].ttl != claim.ttl:
                self._forget(key, claim)

    def holds(self, key: str, claim: Claim) -> bool:
        """Return whether *claim* was granted, and has not ended."""
        return claim.owner in self._held.get(key, ())

    def leaving(self, claim: Claim) -> None:
        """A waiter that has left sends a release of *claim*, which may overtake that of the holder."""
        self._left[claim.owner] = None
        if len(self._left) > _REMEMBERED:
            del self._left[next(iter(self._left))]

    def may_be_released(self, claim: Claim) -> bool:
        """Return whether this client has sent another release of *claim*; then it need not see a loss in a refusal."""
        return claim.owner in self._left

    def follow(self, key: str, pipe: Pipe | None) -> None:
        """Read a lease that was granted unasked, so that client tracking follows it."""
        if pipe is not None:
            pipe.post(pack(("EXISTS", key)), _drop)

    def ended(self, key: str, claim: Claim) -> bool:
        """Stop watching a grant that its holder ends; return whether this client holds others of the name."""
        if (token := self._forget(key, claim)) is not None:
            self._released[claim.owner] = token
            if len(self._released) > _REMEMBERED:
                del self._released[next(iter(self._released))]
        return key in self._held

    def _forget(self, key: str, claim: Claim) -> int | None:
        """Stop watching a grant; return its token, or None if it was not watched."""
        held = self._held.get(key)
        if held is None or (watched := held.pop(claim.owner, None)) is None:
            return None
        if not held:
            del self._held[key]
        return watched[1]

    def on_connect(self, pipe: Pipe) -> None:
        """Ask the server to report what other clients change of what tracked calls read, and look at every grant."""
        pipe.call("CLIENT", "TRACKING", "ON", "OPTOUT", "NOLOOP").add_done_callback(retrieve)
        self._look_soon(self._of_keys(self._held))

    def on_push(self, message: list[Reply]) -> None:
        """Look at the leases that a message reports as changed; at all of them after FLUSHALL."""
        if message[0] == b"invalidate":
            keys: Iterable[str] = self._held
            if isinstance(message[1], list):  # keys of other programs may have any bytes
                keys = [key.decode(errors="replace") for key in message[1] if isinstance(key, bytes)]
            self._look_soon(self._of_keys(keys))

    def changed(self, key: str) -> None:
        """Look at a lease that this connection has changed itself: the server does not report that."""
        self._look_soon(self._of_keys([key]))

    def _of_keys(self, keys: Iterable[str]) -> list[tuple[str, Claim]]:
        return [(key, claim) for key in keys if key in self._held for claim, _ in self._held[key].values()]

    def _look_soon(self, grants: Iterable[tuple[str, Claim]]) -> None:
        for key, claim in grants:
            to_look_at = self._shares_to_look_at if claim.mode.shared else self._to_look_at
            to_look_at[claim.owner] = key, claim
        if self._to_look_at:
            self._task.start(partial(self._look_at, self._to_look_at, 0.0))
        if self._shares_to_look_at:
            self._share_task.start(partial(self._look_at, self._shares_to_look_at, _LOOK_EVERY))

    async def _look_at(self, grants: dict[str, tuple[str, Claim]], pause: float) -> None:
        while grants:
            looked = [(key, claim) for key, claim in grants.values() if self.holds(key, claim)]
            grants.clear()
            renewals: Sequence[Renewal | Revoked] = []
            with suppress(Exception):  # a failed request proves no loss; the heartbeat asks again
                renewals = await self._look([claim for _, claim in looked]) if looked else []
            for (key, claim), renewal in zip(looked, renewals, strict=False):
                reason = LossReason.REVOKED if isinstance(renewal, Revoked) else _REASONS.get(renewal)
                if reason is not None and self._forget(key, claim) is not None:  # else its holder has released it
                    self.notify(claim, reason, renewal.reason if isinstance(renewal, Revoked) else "")
            if pause:
                await asyncio.sleep(pause)

    async def aclose(self) -> None:
        """End the looks that are under way, and watch no lease again: a message may come while connections close."""
        self._held.clear()
        self._to_look_at.clear()
        self._shares_to_look_at.clear()
        await self._task.aclose()
        await self._share_task.aclose()


def _drop(reply: Reply) -> None:
    """Neither the value nor an error matters. Not a future: it would take a turn of the loop."""
