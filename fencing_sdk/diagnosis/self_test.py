"""
Takes a lock, hands it on, renews it and releases it, under a scratch name that no other client uses.

Every claim is released at the end. The store keeps the last token of the scratch name as long as that of any free lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

import anyio

from fencing_sdk._values.claim import Busy, Claim, Gone, Place
from fencing_sdk._values.clock import BootClock, wall_seconds
from fencing_sdk._values.reports import Finding
from fencing_sdk._values.tasks import move_on_after
from fencing_sdk.abc import Backend, Guard, PassesOn, SupportsDiagnosis, SupportsOpen
from fencing_sdk.diagnosis.checks import ERROR, WARNING
from fencing_sdk.errors import BackendError, BackendRefusedError, BackendUnavailableError, StaleTokenError

_TTL = 15.0
"""Seconds after which the store forgets the scratch lock if this process dies."""
_WAKE_LIMIT = 0.5
"""Seconds in which a store wakes a waiter. One that it does not wake asks again after a second."""
_HAND_ONS = 3
"""Hand-overs at most: a store that wakes no waiter is late each time, a busy machine only once."""
_TRIES = 3
_LISTENING = 0.5
"""Seconds after which a client surely hears the bells of what it has drawn."""
_POLL = 0.05
_STEP_LIMIT = 8.0
_CLEAN_UP_LIMIT = 2.0
_RENEWAL_PAUSE = 0.1
_CLOCK = BootClock()


@dataclass(frozen=True, slots=True)
class ClockReading:
    """The store's clock, and this machine's in the middle of the call that read it."""

    store: float
    ours: float
    """Seconds of the clock on which leases are measured."""
    wall: float
    error: float
    """Seconds by which *store* may have been read earlier or later."""


@dataclass(slots=True)
class SelfTest:
    """
    The self-test and its results.

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
    renewals: list[float] = field(default_factory=list)
    """Seconds that each renewal took."""
    readings: list[ClockReading] = field(default_factory=list)
    _step: str = "acquire"
    _tokens: list[int] = field(default_factory=list)
    _claims: list[Claim] = field(default_factory=list)

    async def run(self, store: SupportsDiagnosis | None, over: float) -> None:
        """Do every step, and renew for *over* seconds. An error of the store ends the test, and is a finding."""
        limit = over + 3 * _STEP_LIMIT
        try:
            with anyio.fail_after(limit):
                await self._read_clock(store)
                if self.first.modes:
                    await self._take_and_hand_on(over)
                else:  # a store that grants no lock, such as leased rows
                    await anyio.sleep(over)
                self._step = "clock"
                await self._read_clock(store)
        except BackendError as failure:
            fix = "repair the store, and run the diagnosis again"
            if isinstance(failure, BackendRefusedError):
                fix = "give the user what the page of the store lists"
            check, reason = f"self-test.{self._step}", f"this client cannot {self._step}"
            self.findings.append(Finding(check, ERROR, str(failure), reason, fix))
        except TimeoutError:
            what, reason = f"not done within {limit:g} s", "leases would be lost, and waiters wait"
            check, fix = f"self-test.{self._step}", "look at the store's load and log"
            self.findings.append(Finding(check, ERROR, what, reason, fix))
        finally:
            with move_on_after(_CLEAN_UP_LIMIT, shield=True):
                for claim in self._claims:
                    with suppress(BackendError):
                        await self.second.give_back(claim)
                        await self.first.give_back(claim)

    async def _take_and_hand_on(self, over: float) -> None:
        one, two, three = self._claim(), self._claim(), self._claim()
        if not await self._take(one):
            return
        self._step = "renew"
        await self._renew(one, over)
        if self.second is not self.first and isinstance(self.second, SupportsOpen):
            self._step = "open a second connection"
            await self.second.open()
        self._step = "hand on"
        hand_ons = 1
        while not await self._hand_on(one, two):
            if hand_ons == _HAND_ONS:
                self.findings.append(_NOT_WOKEN)
                break
            hand_ons += 1
            await self.second.give_back(two)
            two = self._claim()  # another bell: that of one who has held rings for any change
            await self._take(one)
        self._step = "release"
        await self.second.give_back(two)
        if any(await self.first.tickets([self.name])):
            self._found("release", "a lock is held after its release", "the next holder waits for the ttl")
            return
        await self._take(three)
        self._step = "detach"
        await self._detach(three)
        self._step = "guard"
        await self._check_tokens()

    def _claim(self) -> Claim:
        claim = Claim(self.name, _TTL)
        self._claims.append(claim)
        return claim

    async def _take(self, claim: Claim) -> bool:
        place = await _draw(self.first, claim, at_once=True)
        if isinstance(place, Place) and place.token is not None:
            self._tokens.append(place.token)
            return True
        self._found("acquire", "a lock that no other client knows is held", "a free lock must be granted at once")
        return False

    async def _renew(self, claim: Claim, over: float) -> None:
        end = _CLOCK.now() + over
        while True:
            before = _CLOCK.now()
            (outcome,) = await self.first.keep([(claim, 0)])
            if isinstance(outcome, Gone):
                self._found("renew", "a lease was refused right after its grant", "the store forgets its grants")
                return
            self.renewals.append(_CLOCK.now() - before)
            if (left := end - _CLOCK.now()) <= 0:
                return
            await anyio.sleep(min(_RENEWAL_PAUSE, left))

    async def _hand_on(self, one: Claim, two: Claim) -> bool:
        """Have *two* wait in line, release *one*, and return False if no bell rang for *two*."""
        rung, rings = asyncio.Event(), self.second.rings
        stop = self.second.listen(two, lambda _: rung.set()) if rings else None
        try:
            with anyio.fail_after(_STEP_LIMIT):
                place = await _draw(self.second, two, at_once=not rings)
                if isinstance(place, Place) and place.token is not None:
                    self._found("exclusion", "two owners were granted one lock", "the lock excludes no other holder")
                    return True
                if rings:
                    await anyio.sleep(_LISTENING)
                    rung.clear()
                await self.first.give_back(one)
                if rings:
                    with move_on_after(_WAKE_LIMIT):
                        await rung.wait()
                while not isinstance(place, Place) or place.token is None:
                    place = await _draw(self.second, two, at_once=not rings)
                    await anyio.sleep(_POLL)
                self._tokens.append(place.token)
                return not rings or rung.is_set()
        finally:
            if stop is not None:
                stop()

    async def _detach(self, claim: Claim) -> None:
        """Pass the lock on to another owner, as a lease that is detached, where the store can."""
        if isinstance(self.first, PassesOn):
            place = await self.first.pass_on(claim, self._claim())
            if isinstance(place, Place) and place.token is not None:
                self._tokens.append(place.token)
            else:
                self._found("detach", "a lock that is held cannot change hands", "no lease can be detached or resumed")

    async def _check_tokens(self) -> None:
        shown = ", ".join(map(str, self._tokens))
        if any(later <= earlier for earlier, later in pairwise(self._tokens)):
            self._found("tokens", f"the tokens do not grow: {shown}", "a guard would accept a stale writer")
            return
        for guard in self.guards:
            await guard.raise_to(self.name, self._tokens[-1])
            try:
                await guard.raise_to(self.name, self._tokens[0])
            except StaleTokenError:
                continue
            what = f"{type(guard).__name__} accepted the first of the tokens {shown} after the last"
            self._found("guard", what, "a stale writer would be accepted")

    async def _read_clock(self, store: SupportsDiagnosis | None) -> None:
        before, wall = _CLOCK.now(), wall_seconds()
        theirs = None if store is None else await store.server_time()
        half = (_CLOCK.now() - before) / 2
        if theirs is not None:
            self.readings.append(ClockReading(theirs, before + half, wall + half, half))

    def _found(self, step: str, what: str, reason: str) -> None:
        fix = "look for two stores behind one address, a cache or a proxy; then report it, with the store's version"
        self.findings.append(Finding(f"self-test.{step}", ERROR, what, reason, fix))


_NOT_WOKEN = Finding(
    "self-test.wake",
    WARNING,
    f"a waiter was not woken within {_WAKE_LIMIT:g} s of a release, {_HAND_ONS} times",
    "waiters poll, and are not woken",
    "let the store's messages reach the client: its rights to listen, and poolers in between",
)


async def _draw(backend: Backend, claim: Claim, *, at_once: bool) -> Place | Busy:
    """Draw as a client does: again where another try may help, such as a write that its replicas confirm too late."""
    for _ in range(_TRIES - 1):
        sent_at = _CLOCK.now()
        try:
            return await backend.draw(claim, only_if_it_holds=at_once)
        except BackendUnavailableError:
            if _CLOCK.now() - sent_at > _STEP_LIMIT / _TRIES:
                raise  # with as many more of these the time would be over, and the report would lack the store's error
        await anyio.sleep(_POLL)
    return await backend.draw(claim, only_if_it_holds=at_once)
