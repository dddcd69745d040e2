"""
Grants that end behind their holder's back, noticed by push.

The server remembers which leases were read on a connection (client tracking) and says when one is
changed from elsewhere: deleted by an operator, flushed, taken over after an expiry. What is said is
"changed", not "lost", so the lease is looked at then. Where the server does not allow tracking,
the next heartbeat notices.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextvars import Context

from fencing_sdk._values.claim import Claim, Renewal
from fencing_sdk.abc import LossNotice
from fencing_sdk.backends.redis._node import ignore
from fencing_sdk.backends.redis._pipe import Pipe, Reply
from fencing_sdk.errors import LossReason

Look = Callable[[Sequence[Claim]], Awaitable[Sequence[Renewal]]]

_REASONS = {Renewal.REFUSED: LossReason.REVOKED, Renewal.TAKEN_OVER: LossReason.TAKEN_OVER}


class Losses:
    """The grants of one backend, and who wants to hear of their loss."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._held: dict[str, Claim] = {}  # by the key of the lease
        self._notices: dict[LossNotice, None] = {}
        self._doubtful: dict[str, None] = {}
        self._looking: asyncio.Task[None] | None = None

    def on_loss(self, notice: LossNotice) -> Callable[[], None]:
        """See `fencing_sdk.abc.SupportsLossNotice.on_loss`."""
        self._notices[notice] = None
        return lambda: self._notices.pop(notice, None)

    def granted(self, key: str, claim: Claim) -> None:
        """Watch over a grant."""
        self._held[key] = claim

    def ended(self, key: str, claim: Claim) -> None:
        """A grant ended with its holder's knowledge."""
        held = self._held.get(key)
        if held is not None and held.owner == claim.owner:
            del self._held[key]

    def greet(self, pipe: Pipe) -> None:
        """Ask the server to tell of changes, except of our own; where it does not, the heartbeat notices."""
        pipe.call("CLIENT", "TRACKING", "ON", "NOLOOP").add_done_callback(ignore)
        self._doubt(self._held)  # what happened while there was no connection was told to nobody

    def hear(self, message: list[Reply]) -> None:
        """Look at the leases that a message says were changed; at all of them after FLUSHALL."""
        if message[0] != b"invalidate":
            return
        keys = message[1]
        self._doubt(self._held if keys is None else _texts(keys))

    def _doubt(self, keys: Iterable[str]) -> None:
        doubtful = [key for key in keys if key in self._held]
        self._doubtful.update(dict.fromkeys(doubtful))
        if doubtful and not self._is_looking():
            self._looking = asyncio.get_running_loop().create_task(self._look_at_all(), context=Context())

    def _is_looking(self) -> bool:
        """Whether somebody looks in this loop; who looked in another one may never have ended."""
        looking = self._looking
        return looking is not None and not looking.done() and looking.get_loop() is asyncio.get_running_loop()

    async def _look_at_all(self) -> None:
        try:
            while self._doubtful:
                held = [(key, self._held[key]) for key in self._doubtful if key in self._held]
                self._doubtful.clear()
                outcomes = await self._look([claim for _, claim in held])
                for (key, claim), outcome in zip(held, outcomes, strict=True):
                    if outcome in _REASONS:
                        self._lost(key, claim, _REASONS[outcome])
        except Exception:  # noqa: BLE001  (no answer is no proof; the heartbeat goes on asking)
            self._doubtful.clear()

    def _lost(self, key: str, claim: Claim, reason: LossReason) -> None:
        held = self._held.get(key)
        if held is None or held.owner != claim.owner:
            return  # released meanwhile
        del self._held[key]
        for notice in tuple(self._notices):
            notice(claim, reason)

    async def aclose(self) -> None:
        """Stop looking."""
        looking, self._looking = self._looking, None
        if looking is not None and looking.get_loop() is asyncio.get_running_loop():
            looking.cancel()
            await asyncio.wait((looking,))


def _texts(keys: object) -> list[str]:
    """Read the keys of an invalidation; those of others may be anything."""
    return [key.decode(errors="replace") for key in keys if isinstance(key, bytes)] if isinstance(keys, list) else []
