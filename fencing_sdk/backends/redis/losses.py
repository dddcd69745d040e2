"""
Notices a grant that ends behind its holder's back.

1. The server follows every lease that this connection has read or renewed (client tracking), and sends a
   message when another client changes it: an operator deletes it, FLUSHALL, a later grant after an expiry.
2. The message says "changed", not "lost". So the lease is renewed at once: a refusal is the loss.
3. Changes between two connections are told to no client. So all leases are renewed when a connection opens.
4. A lock that a job leaves taken is renewed with another ttl. The watcher forgets it, because a renewal with the former
   ttl would end it at the wrong time.

If the server does not permit tracking, the next heartbeat notices the loss.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence

from fencing_sdk._values.claim import Claim, Renewal, Revoked
from fencing_sdk._values.unawaited import retrieve
from fencing_sdk.abc import LossNotice
from fencing_sdk.backends._shared.background_task import BackgroundTask
from fencing_sdk.backends._shared.loss_notices import LossNotices
from fencing_sdk.backends.redis.connection.pipe import Pipe, Reply, pack
from fencing_sdk.errors import LossReason

Renew = Callable[[Sequence[Claim]], Awaitable[Sequence[Renewal | Revoked]]]

_REMEMBERED = 1000
"""Grants that were given back, and whose late answers are known."""

LOSS_REASONS = {Renewal.REFUSED: LossReason.REVOKED, Renewal.TAKEN_OVER: LossReason.TAKEN_OVER}


class RedisLossWatcher:
    """
    The grants of one backend, each until it ends.

    Args:
        renew: Renews claims, as `fencing_sdk.abc.Backend.renew` does.

        notices: Who is told, if others tell them too.
    """

    def __init__(self, renew: Renew, notices: LossNotices | None = None) -> None:
        self._renew = renew
        self._held: dict[str, Claim] = {}  # by the key of the lease
        self._changed: dict[str, None] = {}  # keys that are to be checked
        self._tokens: dict[str, int] = {}  # of the same grants
        self._given_back: dict[str, int] = {}  # by owner: the tokens of the last grants that their holders ended
        self._left: dict[str, None] = {}  # owners for which a waiter that left has sent a release
        self._former: dict[str, tuple[str, Claim]] = {}  # by owner: grants whose key has gone to another owner here
        self._notices = LossNotices() if notices is None else notices
        self._check = BackgroundTask()

    def on_loss(self, notice: LossNotice) -> Callable[[], None]:
        """See `fencing_sdk.abc.SupportsLossNotice.on_loss`."""
        return self._notices.on_loss(notice)

    def granted(self, key: str, claim: Claim, token: int) -> None:
        """
        Watch a new grant. An earlier one of this backend object that was not released has ended: check that too.

        The answer to an acquisition may come after its grant was handed over otherwise and given back. It must not take
        the place of the grant that followed, whose waiter would release it when it leaves the line.
        """
        if self._given_back.get(claim.owner) == token:
            return
        former = self._held.get(key)
        self._held[key], self._tokens[key] = claim, token
        if former is not None and former.owner != claim.owner:
            self._former[former.owner] = key, former
            self._check.start(self._check_changed)

    def renewing(self, keys: Iterable[str], claims: Iterable[Claim]) -> None:
        """Stop watching the grants among *claims* that get another ttl. Called before their renewal is sent."""
        for key, claim in zip(keys, claims, strict=True):
            held = self._held.get(key)
            if held is not None and held.ttl != claim.ttl and held.owner == claim.owner:
                del self._held[key], self._tokens[key]

    def holds(self, key: str, claim: Claim) -> bool:
        """Whether *claim* was granted, and has not ended."""
        held = self._held.get(key)
        return held is not None and held.owner == claim.owner

    def leaving(self, claim: Claim) -> None:
        """A waiter that has left sends a release of *claim*, which may overtake that of the holder."""
        self._left[claim.owner] = None
        if len(self._left) > _REMEMBERED:
            del self._left[next(iter(self._left))]

    def may_be_released(self, claim: Claim) -> bool:
        """Whether this client has sent another release of *claim*, so that a refusal of the holder's shows no loss."""
        return claim.owner in self._left

    def follow(self, key: str, pipe: Pipe | None) -> None:
        """Read a lease that was granted unasked, so that client tracking follows it."""
        if pipe is not None:
            pipe.post(pack(("EXISTS", key)), _drop)

    def ended(self, key: str, claim: Claim) -> None:
        """Stop watching a grant that its holder ends."""
        held = self._held.get(key)
        if held is not None and held.owner == claim.owner:
            del self._held[key]
            self._given_back[claim.owner] = self._tokens.pop(key)
            if len(self._given_back) > _REMEMBERED:
                del self._given_back[next(iter(self._given_back))]
        elif self._former:
            self._former.pop(claim.owner, None)

    def on_connect(self, pipe: Pipe) -> None:
        """Ask the server to report what other clients change of what tracked calls read, and check every lease."""
        pipe.call("CLIENT", "TRACKING", "ON", "OPTOUT", "NOLOOP").add_done_callback(retrieve)
        self._check_soon(self._held)

    def on_push(self, message: list[Reply]) -> None:
        """Check the leases that a message reports as changed; all of them after FLUSHALL."""
        if message[0] != b"invalidate":
            return
        keys = message[1]
        self._check_soon(self._held if keys is None else changed_keys(keys))

    def changed(self, key: str) -> None:
        """Check a lease that this connection has changed itself: the server does not report that."""
        self._check_soon([key])

    def _check_soon(self, keys: Iterable[str]) -> None:
        changed = [key for key in keys if key in self._held]
        self._changed.update(dict.fromkeys(changed))
        if changed:
            self._check.start(self._check_changed)

    async def _check_changed(self) -> None:
        try:
            while self._changed or self._former:
                former = list(self._former)
                held = [(key, self._held[key]) for key in self._changed if key in self._held]
                held += self._former.values()
                self._changed.clear()
                renewals = await self._renew([claim for _, claim in held])
                for (key, claim), renewal in zip(held, renewals, strict=True):
                    if isinstance(renewal, Revoked):
                        self._lost(key, claim, LossReason.REVOKED, renewal.reason)
                    elif renewal in LOSS_REASONS:
                        self._lost(key, claim, LOSS_REASONS[renewal])
                for owner in former:
                    self._former.pop(owner, None)
        except Exception:  # noqa: BLE001  (a failed request proves no loss; the heartbeat asks again)
            self._changed.clear()
            self._former.clear()

    def _lost(self, key: str, claim: Claim, reason: LossReason, detail: str = "") -> None:
        held = self._held.get(key)
        if held is not None and held.owner == claim.owner:
            del self._held[key], self._tokens[key]
        elif self._former.pop(claim.owner, None) is None:
            return  # the holder has released it meanwhile
        self._notices.tell(claim, reason, detail)

    async def aclose(self) -> None:
        """End the check that is under way, and watch no lease any more: a message may come while connections close."""
        self._held.clear()
        self._tokens.clear()
        self._changed.clear()
        self._former.clear()
        await self._check.aclose()


def _drop(reply: Reply) -> None:
    """Neither the value nor an error matters. Not a future: it would take a turn of the loop."""


def changed_keys(keys: object) -> list[str]:
    """Decode the keys of a message. Keys of other programs may have any bytes."""
    return [key.decode(errors="replace") for key in keys if isinstance(key, bytes)] if isinstance(keys, list) else []
