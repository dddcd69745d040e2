"""
Diagnoses whether this process and its store keep the promises: `LockClient.diagnose` and ``fencing doctor``.

    __init__.py     what a diagnosis returns, and its steps
    self_test.py    takes a scratch lock, hands it on, renews and releases it
    checks.py       the form of a check
    <store>.py      the table of a store's checks

No backend imports this room, so a program that takes locks never loads it. The backend of another package brings its
own checks, as a `fencing_sdk.abc.SupportsDiagnosis`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import anyio

from fencing_sdk._values.claim import in_namespace, new_owner
from fencing_sdk._values.clock import BootClock
from fencing_sdk._values.reports import Finding, Severity
from fencing_sdk._values.timing import DEFAULT_TTL, DRIFT, MAX_TTL, Timing
from fencing_sdk.abc import Backend, Guard, SupportsDiagnosis, SupportsOpen
from fencing_sdk.diagnosis.checks import ERROR, WARNING, Check, diagnosis_of, judged
from fencing_sdk.diagnosis.self_test import SelfTest
from fencing_sdk.errors import BackendError, BackendRefusedError

__all__ = ["Advice", "Diagnosis", "Finding", "Severity", "examine"]

_CLOCK = BootClock()
_OPEN_LIMIT = 8.0
_SETTINGS_LIMIT = 15.0
_LOOP_STEP = 0.005
_LARGEST_DIFFERENCE = 2.0
_PAUSES_IN_BUFFER = 3
_RENEWALS_IN_INTERVAL = 4
_FIFTH = 5
"""The safety buffer is a fifth of the ttl by default, and so is the interval: a quarter of the rest."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Timing of a lock that fits what was measured. Times are in seconds."""

    ttl: float
    safety_buffer: float
    heartbeat_interval: float
    longest_pause: float
    """The longest time for which the event loop stood still."""
    slowest_renewal: float | None
    """None if no renewal of the scratch lock was answered."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Findings about this process and its store, and the timing that fits them."""

    findings: tuple[Finding, ...]
    """The worst come first."""
    advice: Advice

    @property
    def worst(self) -> Severity | None:
        """The highest severity of all findings; None without any."""
        return max((finding.severity for finding in self.findings), default=None)

    def as_dict(self) -> dict[str, Any]:
        """The diagnosis in types that JSON knows; severities are words."""
        plain = asdict(self)
        for finding in plain["findings"]:
            finding["severity"] = str(finding["severity"])
        return plain


@dataclass(slots=True)
class _Measured:
    """The facts for the checks of every store."""

    timing: Timing
    pause: float = 0.0
    renewal: float | None = None
    difference: float | None = None
    drift: float | None = None
    drift_error: float = 0.0
    advised: float = DEFAULT_TTL

    def advise(self) -> Advice:
        """Choose the shortest ttl, from the default on, whose default buffer and interval fit what was measured."""
        for_pauses = _FIFTH * _PAUSES_IN_BUFFER * self.pause
        for_renewals = _FIFTH * _RENEWALS_IN_INTERVAL * (self.renewal or 0.0)
        ttl = min(MAX_TTL, float(-(-max(DEFAULT_TTL, for_pauses, for_renewals) // 1)))
        fit = Timing.build(ttl=ttl)
        return Advice(fit.ttl, fit.safety_buffer, fit.heartbeat_interval, self.pause, self.renewal)


# A row reads: the check, how severe, when; what, why; what to do.
# fmt: off
CHECKS: tuple[Check[_Measured], ...] = (
    Check("machine.pause", lambda it: ERROR if it.pause > it.timing.safety_buffer else WARNING,
        lambda it: it.pause > it.timing.safety_buffer / _PAUSES_IN_BUFFER,
        "this process stood still for {it.pause:.2f} s, and the safety buffer is {it.timing.safety_buffer:g} s",
        "a cancellation that is late by more than the buffer comes after the store has handed the lock on",
        "move blocking code out of the event loop, or use ttl={it.advised:g} or more"),
    Check("store.latency", WARNING,
        lambda it: (it.renewal or 0.0) > it.timing.heartbeat_interval / _RENEWALS_IN_INTERVAL,
        "the slowest renewal took {it.renewal:.2f} s, and the heartbeat interval is "
        "{it.timing.heartbeat_interval:g} s", "few failed renewals are left before a lease is lost",
        "bring the store nearer, or use ttl={it.advised:g} or more"),
    Check("machine.drift", ERROR,
        lambda it: it.drift is not None and abs(it.drift) - it.drift_error > DRIFT,
        f"the store's clock runs {{it.drift:+.2%}} against this machine's; {DRIFT:.0%} are allowed",
        "the store may hand a lock on before its holder's deadline", "fix the clock that is wrong"),
    Check("machine.clock", WARNING,
        lambda it: it.difference is not None and abs(it.difference) > _LARGEST_DIFFERENCE,
        "the store's clock is {it.difference:+.1f} s from this machine's",
        "one of the two is not synchronised; after a failover to a clock that is behind, tokens could fall",
        "run chronyd or systemd-timesyncd on both machines"),
)
# fmt: on


async def examine(
    backend: Backend,
    *,
    other: Backend | None = None,
    guards: Sequence[Guard] = (),
    namespace: str = "",
    over: float = 5.0,
    ttl: float = DEFAULT_TTL,
) -> Diagnosis:
    """
    Diagnose the store behind *backend*, and this process, for *over* seconds and a bounded time more.

    A store that does not answer is a finding, not an error.

    Args:
        backend: The store. It is opened if it is not open.

        other: Another backend object for the same store, to which the self-test hands the lock on.

        guards: Guards to test with the tokens of the self-test. Each keeps the fence of a scratch resource.

        namespace: The prefix of the scratch name.

        over: Seconds for which pauses and renewals are measured.

        ttl: Seconds of the locks in use, by which the measurements are judged.
    """
    store = diagnosis_of(backend)
    name = in_namespace(namespace, f"fencing-doctor/{new_owner()[:12]}")
    test = SelfTest(backend, backend if other is None else other, name, guards)
    measured = _Measured(Timing.build(ttl=ttl))
    async with _watching_pauses(measured):
        findings = await _reach(backend)
        reachable = not findings
        findings += await _ask_store(store, type(backend).__name__, ttl)
        if reachable:
            await test.run(store, over)
            findings += test.findings
    measured.renewal = max(test.renewals, default=None)
    if test.readings:
        first, last = test.readings[0], test.readings[-1]
        best = min(test.readings, key=lambda each: each.error)
        measured.difference = best.store - best.wall
        if elapsed := last.ours - first.ours:
            measured.drift = (last.store - first.store) / elapsed - 1
            measured.drift_error = (first.error + last.error) / elapsed
    advice = measured.advise()
    measured.advised = advice.ttl
    findings += judged(CHECKS, measured)
    return Diagnosis(tuple(sorted(dict.fromkeys(findings), key=lambda finding: -finding.severity)), advice)


@asynccontextmanager
async def _watching_pauses(measured: _Measured) -> AsyncIterator[None]:
    async def watch() -> None:
        while True:
            before = _CLOCK.now()
            await asyncio.sleep(_LOOP_STEP)
            measured.pause = max(measured.pause, _CLOCK.now() - before - _LOOP_STEP)

    task = asyncio.create_task(watch(), name="fencing-doctor")
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _reach(backend: Backend) -> list[Finding]:
    """Open the backend; the one finding says why that failed."""
    if not isinstance(backend, SupportsOpen):
        return []
    try:
        with anyio.fail_after(_OPEN_LIMIT):
            await backend.open()
    except BackendRefusedError as failure:
        what, fix = str(failure), "correct the URL, the login or the role; another try does not help"
    except BackendError as failure:
        what = str(failure)
        fix = "start the store, correct its address, or name one that takes writes; look for a firewall on the way"
    except TimeoutError:
        what, fix = f"no answer within {_OPEN_LIMIT:g} s", "look at the store's load and log"
    else:
        return []
    return [Finding("store.reachable", ERROR, what, "no lock can be taken", fix)]


async def _ask_store(store: SupportsDiagnosis | None, backend: str, ttl: float) -> list[Finding]:
    """Return the findings of the store about its settings."""
    if store is None:
        what, fix = f"{backend} does not report how its store is set up", "compare its settings with the store's page"
        return [Finding("store.settings", WARNING, what, "its settings were not checked", fix)]
    try:
        with anyio.fail_after(_SETTINGS_LIMIT):
            return list(await store.diagnose(ttl))
    except BackendError as failure:
        what, fix = str(failure), "fix what the store reports, and run the diagnosis again"
    except TimeoutError:
        what, fix = f"no answer within {_SETTINGS_LIMIT:g} s", "look at the store's load and log"
    return [Finding("store.settings", WARNING, what, "its settings could not be read", fix)]
