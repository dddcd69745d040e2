"""
A lock is taken, renewed, handed on, taken away and released, under a scratch name that no other client uses.

Whatever happens, every claim is released at the end. What a store remembers of any free lock, the last token, it
remembers of this one too, for as long as its page says.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import anyio

from fencing_sdk._values.claim import Busy, Claim, Grant, Renewal
from fencing_sdk._values.clock import BootClock
from fencing_sdk._values.reports import Finding, error, warning
from fencing_sdk._values.tasks import move_on_after
from fencing_sdk.abc import Backend, Guard, PlaceInLine, SupportsLine, SupportsLossNotice, SupportsRevoking
from fencing_sdk.diagnosis.checks import too_slow
from fencing_sdk.errors import BackendError, BackendRefusedError, BackendUnavailableError, LossReason, StaleTokenError

TTL = 15.0
"""Seconds after which the store forgets the scratch lock if this process dies."""
WOKEN_WITHIN = 0.5
"""Seconds in which a store wakes a waiter, or notifies a holder of its loss, unless the machine is busy."""
_HAND_ONS = 3
"""Times that the lock is handed on at most: polling is slow each time, a busy machine now and then."""
_WAKE_LIMIT = 2.0
"""Seconds in which a store that wakes waiters, or sends notices of losses, does so even on a busy machine."""
_TRIES = 3
_POLL = 0.05
_LIMIT = 8.0
_CLEAN_UP_LIMIT = 2.0
_CLOCK = BootClock()


@dataclass(slots=True)
class SelfTest:
    """
    The self-test, and what it has found.

    Args:
        first: The holder's backend.

        second: The backend of the next holder: another connection to the same store, or *first* again.

        name: The scratch name.

        guards: Guards to test with the tokens.
    """

    first: Backend
    second: Backend
    name: str
    guards: Sequence[Guard] = ()
    findings: list[Finding] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    handed_on: float | None = None
    woken: bool | None = None
    """
    True if the store woke a waiter before the waiter asked again by itself; None where the store wakes no waiters.
    """
    loss_noticed: float | None = None
    _claims: list[Claim] = field(default_factory=list)

    async def run(self) -> None:
        """Do every step. An error of the store ends the test, and is a finding."""
        step = "acquire"
        try:
            with anyio.fail_after(3 * _LIMIT):
                one, two = self._claim(), self._claim()
                await self._take(one)
                step = "renew"
                await self._renew(one)
                step = "hand on"
                await self._hand_on(one, two)
                for _ in range(_HAND_ONS - 1):
                    if self.woken is not False and (self.handed_on or 0.0) <= WOKEN_WITHIN:
                        break
                    await self.second.release(two)
                    one, two = self._claim(), self._claim()
                    await self._take(one)
                    await self._hand_on(one, two)
                step = "release"
                await self._release(two)
                step = "notice"
                await self._notice(self._claim())
                self._check_tokens()
                step = "guard"
                await self._check_guards()
        except BackendError as failure:
            fix = "repair the store, and run the diagnosis again"
            if isinstance(failure, BackendRefusedError):
                fix = "give the user what the page of the store lists"
            self.findings.append(error(f"self-test.{step}", str(failure), f"this client cannot {step}", fix))
        except TimeoutError:
            self.findings.append(too_slow(f"self-test.{step}", _LIMIT, "leases would be lost, and waiters wait"))
        finally:
            await self._clean_up()

    def _claim(self) -> Claim:
        claim = Claim(self.name, TTL)
        self._claims.append(claim)
        return claim

    async def _take(self, claim: Claim) -> None:
        outcome = await _acquire(self.first, claim)
        if isinstance(outcome, Grant):
            self.tokens.append(outcome.token)
            return
        self._found("acquire", "a lock that no other client knows is held", "a free lock must be granted at once")

    async def _renew(self, claim: Claim) -> None:
        (outcome,) = await self.first.renew([claim])
        if outcome is Renewal.REFUSED:
            self._found("renew", "a lease was refused right after its grant", "the store forgets what it has granted")

    async def _hand_on(self, one: Claim, two: Claim) -> None:
        if isinstance(await _acquire(self.second, two), Grant):
            self._found("exclusion", "two owners were granted one lock", "the lock excludes no other holder")
            return
        news = asyncio.Event()

        def notify(grant: Grant | None = None, age: float = 0.0) -> None:  # noqa: ARG001  (it is not handed over)
            news.set()

        line = self.second if isinstance(self.second, SupportsLine) else None
        place = None if line is None else line.stand(two, notify, hand_over=False)
        try:
            if place is None or place.polls:
                await self.first.release(one)
                await self._take_in_turn(two, _CLOCK.now())
            else:
                await self._wake(one, two, place, news)
        finally:
            if place is not None and (leaving := place.leave()) is not None:
                await asyncio.wait((leaving,))

    async def _wake(self, one: Claim, two: Claim, place: PlaceInLine, news: asyncio.Event) -> None:
        with anyio.fail_after(_LIMIT):
            while place.retry_after(_POLL) is None:  # noqa: ASYNC110  (a place need not announce that it is in the line)
                await anyio.sleep(_POLL)
        news.clear()
        outcome = await _acquire(self.second, two)  # as every waiter does once it is in the line
        advice = outcome.retry_after if isinstance(outcome, Busy) else None
        since = _CLOCK.now()
        await self.first.release(one)
        with move_on_after(_WAKE_LIMIT if advice is None else min(advice, _WAKE_LIMIT)) as pause:
            await news.wait()
        self.woken = self.woken or not pause.cancelled_caught
        await self._take_in_turn(two, since)

    async def _take_in_turn(self, claim: Claim, since: float) -> None:
        with anyio.fail_after(_LIMIT):
            outcome = await _acquire(self.second, claim)
            while isinstance(outcome, Busy):
                await anyio.sleep(_POLL)
                outcome = await _acquire(self.second, claim)
        self.tokens.append(outcome.token)
        self.handed_on = min(_CLOCK.now() - since, math.inf if self.handed_on is None else self.handed_on)

    async def _release(self, claim: Claim) -> None:
        await self.second.release(claim)
        if await self.first.inspect(self.name) is not None:
            self._found("release", "a lock is held after its release", "the next holder waits for the ttl to end")

    async def _notice(self, claim: Claim) -> None:
        """Take the lock away by the other connection, and wait for the notice to its holder."""
        if not isinstance(self.first, SupportsLossNotice) or self.second is self.first:
            await self._take(claim)
            await self.first.release(claim)
            return
        noticed = asyncio.Event()

        def on_loss(lost: Claim, _reason: LossReason, _detail: str = "") -> None:
            if lost.name == self.name:
                noticed.set()

        stop = self.first.on_loss(on_loss)
        try:
            await self._take(claim)
            since = _CLOCK.now()
            await self.second.release(claim)
            patience = WOKEN_WITHIN if self.woken is False else _WAKE_LIMIT  # it sends notices, too
            if not isinstance(self.second, SupportsRevoking):
                await _within(patience, noticed)
            elif not await _within(WOKEN_WITHIN, noticed):
                since = await self._revoke(self.second)
                await _within(patience, noticed)
        finally:
            stop()
        if noticed.is_set():
            self.loss_noticed = _CLOCK.now() - since
        else:
            self.findings.append(_NOT_NOTIFIED)

    async def _revoke(self, second: SupportsRevoking) -> float:
        """Take the lock away as an operator does, because some stores send a notice of nothing else. Return when."""
        await self._take(self._claim())
        since = _CLOCK.now()
        with suppress(BackendError):  # the user may lack the permission
            await second.revoke(self.name, self.tokens[-1], "self-test")
        return since

    def _check_tokens(self) -> None:
        if any(later <= earlier for earlier, later in zip(self.tokens, self.tokens[1:], strict=False)):
            shown = ", ".join(map(str, self.tokens))
            self._found("tokens", f"the tokens do not grow: {shown}", "a guard would accept a stale writer")

    async def _check_guards(self) -> None:
        for guard in self.guards if len(self.tokens) > 1 else ():
            await guard.raise_to(self.name, self.tokens[-1])
            try:
                await guard.raise_to(self.name, self.tokens[0])
            except StaleTokenError:
                continue
            what = f"{type(guard).__name__} accepted token {self.tokens[0]} after {self.tokens[-1]}"
            self._found("guard", what, "a stale writer would be accepted")

    def _found(self, step: str, what: str, reason: str) -> None:
        fix = "look for two stores behind one address, a cache or a proxy; then report it, with the store's version"
        self.findings.append(error(f"self-test.{step}", what, reason, fix))

    async def _clean_up(self) -> None:
        with move_on_after(_CLEAN_UP_LIMIT, shield=True):
            for claim in self._claims:
                with suppress(BackendError):
                    await self.second.release(claim)
                    await self.first.release(claim)


async def _acquire(backend: Backend, claim: Claim) -> Grant | Busy:
    """Try as a lock does: again where another try may help, such as a write that its replicas confirm too late."""
    for _ in range(_TRIES - 1):
        sent_at = _CLOCK.now()
        try:
            return await backend.acquire(claim)
        except BackendUnavailableError:
            if _CLOCK.now() - sent_at > _LIMIT / _TRIES:
                raise  # with as many more of these the time would be over, and the report would lack the store's error
        await anyio.sleep(_POLL)
    return await backend.acquire(claim)


async def _within(limit: float, noticed: asyncio.Event) -> bool:
    with move_on_after(limit):
        await noticed.wait()
    return noticed.is_set()


_NOT_NOTIFIED = warning(
    "self-test.notice",
    "a holder got no notice that its grant was taken away",
    "a holder learns of a loss by its next renewal only",
    "let the store's messages reach the client: see 'losses' on the page of the store",
)
