"""How long the store takes to answer, and how its clock runs, measured with the renewals of a scratch lock."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

import anyio

from fencing_sdk._values.claim import Claim, Grant, Renewal
from fencing_sdk._values.clock import BootClock, wall_seconds
from fencing_sdk._values.findings import Finding, error, warning
from fencing_sdk._values.scopes import move_on_after
from fencing_sdk.abc import Backend, SupportsDiagnosis
from fencing_sdk.diagnosis.self_test import TTL
from fencing_sdk.errors import BackendError

_STEP = 0.1
"""Seconds between two renewals: ten calls a second are no load for any store."""
_LIMIT = 5.0
_CLOCK = BootClock()


@dataclass(frozen=True, slots=True)
class _Reading:
    """One reading of the store's clock, and of ours in the middle of the call."""

    store: float
    ours: float
    wall: float
    error: float


@dataclass(slots=True)
class StoreTimes:
    """Seconds that renewals took, and readings of the store's clock."""

    renewals: list[float] = field(default_factory=list)
    readings: list[_Reading] = field(default_factory=list)

    def quantile(self, part: float) -> float | None:
        """The time within which so large a *part* of the renewals was answered."""
        in_order = sorted(self.renewals)
        return in_order[min(int(part * len(in_order)), len(in_order) - 1)] if in_order else None

    @property
    def difference(self) -> float | None:
        """How far the store's clock is ahead of this machine's."""
        if not self.readings:
            return None
        best = min(self.readings, key=lambda reading: reading.error)
        return best.store - best.wall

    @property
    def drift(self) -> float | None:
        """How much faster the store's clock runs, as a fraction; None without two readings."""
        if (elapsed := self._elapsed()) is None:
            return None
        return (self.readings[-1].store - self.readings[0].store) / elapsed - 1

    @property
    def drift_error(self) -> float:
        """By how much `drift` may be wrong, because it is not known when within a call the clock was read."""
        elapsed = self._elapsed()
        return 0.0 if elapsed is None else (self.readings[0].error + self.readings[-1].error) / elapsed

    def _elapsed(self) -> float | None:
        elapsed = self.readings[-1].ours - self.readings[0].ours if self.readings else 0.0
        return elapsed if elapsed > 0 else None


async def time_renewals(backend: Backend, name: str, over: float, times: StoreTimes) -> list[Finding]:
    """Hold the lock *name* for *over* seconds, and time its renewals. A failed one is a finding."""
    claim = Claim(name, TTL)
    end = _CLOCK.now() + over
    try:
        with anyio.fail_after(over + _LIMIT):
            await _read_clock(backend, times)
            if isinstance(await backend.acquire(claim), Grant):
                await _renew_until(end, backend, claim, times)
            await _read_clock(backend, times)
    except BackendError as failure:
        mend = "look at the store's log and at the network; a client rides out faults until the deadline of a lease"
        return [warning("store.renewals", str(failure), "the store failed while it was measured", mend)]
    except TimeoutError:
        what, mend = f"a renewal was not answered within {_LIMIT:g} s", "look at the store's load and log"
        return [error("store.renewals", what, "leases would be lost", mend)]
    finally:
        with move_on_after(2.0, shield=True), suppress(BackendError):
            await backend.release(claim)
    return _failed_renewals(times)


async def _renew_until(end: float, backend: Backend, claim: Claim, times: StoreTimes) -> None:
    while True:
        before = _CLOCK.now()
        (outcome,) = await backend.renew([claim])
        if outcome is not Renewal.RENEWED:
            return
        times.renewals.append(_CLOCK.now() - before)
        left = end - _CLOCK.now()
        if left <= 0:
            return
        await anyio.sleep(min(_STEP, left))


async def _read_clock(backend: Backend, times: StoreTimes) -> None:
    if not isinstance(backend, SupportsDiagnosis):
        return
    before, wall = _CLOCK.now(), wall_seconds()
    store = await backend.server_time()
    half = (_CLOCK.now() - before) / 2
    if store is not None:
        times.readings.append(_Reading(store, before + half, wall + half, half))


def _failed_renewals(times: StoreTimes) -> list[Finding]:
    if times.renewals:
        return []
    what = "a lease was not renewed right after its grant"
    return [error("store.renewals", what, "leases would be lost", "look at the store's log")]
