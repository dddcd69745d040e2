"""
How a holder hears that its grant has ended behind its back, and why an operator took it away.

`RevocationWatcher` notices that before the next renewal, where a store reports revocations on request:

1. A client listens once a grant was held for a moment, so that a short hold costs nothing. It stops when no lock was
   held for a while, because every message costs the sender or the server something for each listener.
2. A message has a digest of the lock's name, and proves nothing: the client asks the store for the reason, and whether
   the owner has really lost the lock.
3. Messages that were sent before, or while a connection was broken, are missed. So all grants are looked at when the
   client begins to listen.

Where no messages arrive, the next renewal notices the loss. So it does if a message overtakes the answer that granted
the lock.
"""

from __future__ import annotations

import asyncio
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeAlias

import anyio

from fencing_sdk._values.claim import Claim, Renewal, Revoked
from fencing_sdk._values.clock import JITTER
from fencing_sdk._values.loop_owner import LoopOwner
from fencing_sdk._values.tasks import move_on_after
from fencing_sdk.abc import LossNotice
from fencing_sdk.backends._shared.background_task import BackgroundTask
from fencing_sdk.errors import LossReason

__all__ = ["LossNotices", "RevocationWatcher", "StopListening", "name_digest", "reason_for", "why_not", "with_reasons"]


class LossNotices:
    """The callbacks that clients have registered with one backend."""

    def __init__(self) -> None:
        self._notices: dict[LossNotice, None] = {}

    @property
    def wanted(self) -> bool:
        """True if a client wants notices."""
        return bool(self._notices)

    def on_loss(self, notice: LossNotice) -> Callable[[], None]:
        """See `fencing_sdk.abc.SupportsLossNotice.on_loss`."""
        self._notices[notice] = None
        return lambda: self._notices.pop(notice, None)

    def notify(self, claim: Claim, reason: LossReason, detail: str = "") -> None:
        """Call every callback. One may end its own registration meanwhile, or another's."""
        for notice in tuple(self._notices):
            notice(claim, reason, detail)


_MOMENT = 0.5
"""Seconds for which a lock is held before the client listens."""
_IDLE = 10.0
"""Seconds without a lock after which it listens no more."""
_LAST_PAUSE = 15.0
"""Seconds between two attempts while the store does not answer; the first ones follow one another faster."""

StopListening: TypeAlias = Callable[[], Awaitable[object]]
_Key = tuple[str, str]


def name_digest(name: str) -> str:
    """Return the digest of a name for a message, 64 characters: names are long, and no concern of other listeners."""
    return hashlib.sha256(name.encode()).hexdigest()


class RevocationWatcher(LossNotices, ABC):
    """The grants of one backend, each until it ends."""

    def __init__(self) -> None:
        super().__init__()
        self._owner: LoopOwner | None = None
        self._held: dict[_Key, Claim] = {}
        self._due: dict[_Key, None] = {}
        """Grants that are to be looked at."""
        self._listening = False
        self._stop_listening: StopListening | None = None
        self._task = BackgroundTask()
        self._stopping = BackgroundTask()

    @abstractmethod
    async def listen(self) -> StopListening | None:
        """Have messages brought to `on_message`; return what stops that, or None where no messages arrive."""

    @abstractmethod
    async def reasons(self, claims: Sequence[Claim]) -> Sequence[str | None]:
        """Return for each of *claims* why it was revoked; None if it was not, or if its owner holds the lock again."""

    def granted(self, claim: Claim) -> None:
        """Watch a grant, if a client wants notices."""
        if not self.wanted:
            return
        if self._owner is None or not self._owner.is_current:
            self._owner = LoopOwner()
            self._forget()
        self._held[claim.name, claim.owner] = claim
        if not self._listening:
            self._task.start(self._notice_losses)

    def ended(self, claim: Claim) -> None:
        """Stop watching a grant: its holder releases it, or knows that it is lost."""
        self._held.pop((claim.name, claim.owner), None)
        if not self._held and self._stop_listening is not None:
            self._stopping.start(self._stop_when_idle)

    def on_message(self, digest: str) -> None:
        """Look at the grants of the name with this *digest*."""
        self._due.update(dict.fromkeys(key for key in self._held if name_digest(key[0]) == digest))
        if self._due:
            self._task.start(self._notice_losses)

    def cut_off(self) -> None:
        """Listen again: messages arrive no more."""
        self._listening, self._stop_listening = False, None
        if self._held:
            self._task.start(self._notice_losses)

    async def _notice_losses(self) -> None:
        """Listen, unless the client does so already, and look at the grants that are due."""
        pause = _MOMENT
        while self._held and (not self._listening or self._due):
            if not self._listening and not await self._held_for(pause):
                continue
            try:
                if not self._listening:
                    self._stop_listening = await self.listen()
                    self._listening = True
                    self._due.update(dict.fromkeys(self._held))
                await self._look()
                pause = _MOMENT
            except Exception:  # noqa: BLE001  (until the next attempt, the heartbeat notices losses)
                pause = min(pause * JITTER.uniform(1.5, 2.0), _LAST_PAUSE)
                if self._listening:
                    await asyncio.sleep(pause)

    async def _held_for(self, seconds: float) -> bool:
        before = tuple(self._held)
        await asyncio.sleep(seconds)
        return any(key in self._held for key in before)

    async def _stop_when_idle(self) -> None:
        await asyncio.sleep(_IDLE)
        if self._held or self._stop_listening is None:
            return
        stop, self._stop_listening, self._listening = self._stop_listening, None, False
        with suppress(Exception):  # what breaks here brings no more messages
            await stop()

    async def _look(self) -> None:
        """Notify the clients of the grants that are due, and revoked."""
        due, self._due = self._due, {}
        claims = [self._held[key] for key in due if key in self._held]
        if not claims:
            return
        try:
            reasons = await self.reasons(claims)
        except BaseException:
            self._due = due | self._due
            raise
        for claim, reason in zip(claims, reasons, strict=True):
            # Unless it was released meanwhile.
            if reason is not None and self._held.pop((claim.name, claim.owner), None) is not None:
                self.notify(claim, LossReason.REVOKED, reason)

    def _forget(self) -> None:
        self._held, self._due, self._listening, self._stop_listening = {}, {}, False, None

    async def aclose(self) -> None:
        """Stop watching."""
        self._forget()
        await self._task.aclose()
        await self._stopping.aclose()


_LIMIT = 1.0
"""Seconds after which a holder gets the notice of its loss without a reason."""
_TRIES = 3
_PAUSE = 0.05
"""Seconds between two of them."""
_ENDED = {Renewal.REFUSED, Renewal.TAKEN_OVER}

Reasons = Callable[[Sequence[Claim]], Awaitable[Sequence[str | None]]]
"""Asks the store, for claims whose grants have ended: why they were revoked, or None."""


async def with_reasons(
    claims: Sequence[Claim], renewals: Sequence[Renewal], reasons: Reasons
) -> Sequence[Renewal | Revoked]:
    """Look for the *reasons* of refused renewals. If the store does not answer, they stay refusals."""
    ended = [n for n, renewal in enumerate(renewals) if renewal is not Renewal.RENEWED and renewal in _ENDED]
    if not ended:
        return renewals
    found = await _asked(reasons, [claims[index] for index in ended])
    outcomes: list[Renewal | Revoked] = list(renewals)
    for index, reason in zip(ended, found, strict=True):
        if reason is not None:
            outcomes[index] = Revoked(reason)
    return outcomes


async def why_not(of: Claim, to: Claim, refusal: Renewal, reasons: Reasons) -> Renewal | Revoked:
    """Return why a grant does not pass from *of* to *to*: an operator may have taken it from the heir since."""
    heirs, formers = await with_reasons([to, of], [refusal, refusal], reasons)
    return heirs if isinstance(heirs, Revoked) else formers


async def reason_for(claim: Claim, reasons: Reasons) -> str:
    """Look for the reason of one loss; "" if there is none, or the store does not answer."""
    (reason,) = await _asked(reasons, [claim])
    return reason or ""


async def _asked(reasons: Reasons, claims: Sequence[Claim]) -> Sequence[str | None]:
    with move_on_after(_LIMIT):
        for _ in range(_TRIES):
            # The loss is known, with or without a reason.
            with suppress(Exception):
                return await reasons(claims)
            await anyio.sleep(_PAUSE)  # the connection may have broken under the question
    return [None] * len(claims)
