"""
What this process and its store can promise, and what to change: `LockClient.diagnose` and ``fencing doctor``.

    __init__.py     the diagnosis, step by step
    report.py       what it returns
    measuring.py    pauses of this process, times of the store, and its clock
    self_test.py    a lock is taken, handed on, taken away and released

    checks.py       what a check is; those that several stores have
    <store>.py      what the diagnosis asks of each store, and the table of its checks

A store's checks look at its backend from the inside. No backend imports this room, so a program that takes locks never
loads it. The backend of another package brings its own checks, as a `fencing_sdk.abc.SupportsDiagnosis`.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from fencing_sdk._values.claim import in_namespace, new_owner
from fencing_sdk._values.clock import BootClock
from fencing_sdk._values.reports import Finding, Severity, error, note, warning
from fencing_sdk._values.timing import DEFAULT_TTL, DRIFT, Timing
from fencing_sdk.abc import Backend, Guard, SupportsDiagnosis, SupportsOpen
from fencing_sdk.diagnosis.checks import diagnosis_of, too_slow
from fencing_sdk.diagnosis.measuring import PauseWatch, StoreTimes, clock_source, time_renewals, watching_pauses
from fencing_sdk.diagnosis.report import Advice, Diagnosis, Measurements, advise, in_order
from fencing_sdk.diagnosis.self_test import WOKEN_WITHIN, SelfTest
from fencing_sdk.errors import BackendError, BackendRefusedError

__all__ = ["Advice", "Diagnosis", "Finding", "Measurements", "Severity", "examine"]

_CLOCK = BootClock()
_OPEN_LIMIT = 8.0
_FACTS_LIMIT = 15.0
"""Seconds after which a store that does not answer is a finding."""
_COARSE_CLOCKS = {"jiffies", "refined-jiffies"}
_LARGEST_DIFFERENCE = 2.0


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
    Diagnose the store behind *backend*, and this process. It lasts *over* seconds, and a bounded time more.

    The store need not answer: that is a finding too, and no error.

    Args:
        backend: The store. It is opened if it is not open.

        other: Another backend object for the same store, to which the self-test hands the lock on.

        guards: Guards to test with the tokens of the self-test. Each keeps the fence of a scratch resource.

        namespace: The prefix of the scratch name.

        over: Seconds for which pauses and renewals are measured.

        ttl: Seconds of the locks in use: what is measured is judged by them.
    """
    store = diagnosis_of(backend)
    name = in_namespace(namespace, f"fencing-doctor/{new_owner()[:12]}")
    test = SelfTest(backend, backend if other is None else other, name, guards)
    times = StoreTimes()
    begun = _CLOCK.now()
    async with watching_pauses() as pauses:
        findings = await _reach(backend)
        reachable = not findings
        findings += await _facts(backend, store, ttl)
        if reachable:
            await test.run()
            findings += test.findings
        if test.tokens:  # else the self-test has reported why no lock can be taken
            findings += await time_renewals(backend, store, name, over, times)
    measured = _measurements(_CLOCK.now() - begun, pauses, times, test)
    findings += _judged(measured, times, Timing.build(ttl=ttl), woken=test.woken)
    return Diagnosis(in_order(findings), measured, advise(measured))


async def _reach(backend: Backend) -> list[Finding]:
    """Open the backend; the one finding says why that failed."""
    if not isinstance(backend, SupportsOpen):
        return []
    try:
        with anyio.fail_after(_OPEN_LIMIT):
            await backend.open()
    except BackendRefusedError as failure:
        fix = "correct the URL, the login or the role; another try does not help"
        return [error("store.reachable", str(failure), "no lock can be taken", fix)]
    except BackendError as failure:
        fix = "start the store, correct its address, or name one that takes writes; look for a firewall on the way"
        return [error("store.reachable", str(failure), "no lock can be taken", fix)]
    except TimeoutError:
        return [
            too_slow(
                "store.reachable",
                _OPEN_LIMIT,
                "it accepts connections and answers nothing; no lock can be taken",
            )
        ]
    return []


async def _facts(backend: Backend, store: SupportsDiagnosis | None, ttl: float) -> list[Finding]:
    """Return the findings of the store about itself."""
    if store is None:
        what = f"{type(backend).__name__} does not report how its store is set up"
        return [note("store.settings", what, "its settings were not checked", "compare them with the store's page")]
    try:
        with anyio.fail_after(_FACTS_LIMIT):
            return list(await store.diagnose(ttl))
    except BackendError as failure:
        what, fix = str(failure), "fix what the store reports, and run the diagnosis again"
    except TimeoutError:
        what, fix = f"no answer within {_FACTS_LIMIT:g} s", "look at the store's load and log"
    return [warning("store.settings", what, "its settings could not be read", fix)]


def _measurements(elapsed: float, pauses: PauseWatch, times: StoreTimes, test: SelfTest) -> Measurements:
    return Measurements(
        seconds=elapsed,
        loop_pause=pauses.loop,
        process_pause=pauses.process,
        clock_source=clock_source(),
        renewals=len(times.renewals),
        renewal_p50=times.quantile(0.5),
        renewal_p99=times.quantile(0.99),
        renewal_max=times.quantile(1.0),
        clock_difference=times.difference,
        clock_drift=times.drift,
        tokens=tuple(test.tokens),
        handed_on=test.handed_on,
        loss_noticed=test.loss_noticed,
    )


def _judged(measured: Measurements, times: StoreTimes, timing: Timing, *, woken: bool | None) -> list[Finding]:
    """Compare what was measured with the numbers of a lock."""
    found: list[Finding] = []
    pause, slowest, buffer = measured.longest_pause, measured.renewal_max or 0.0, timing.safety_buffer
    advised = advise(measured).ttl
    if pause > buffer / 3:
        what = f"this process stood still for {pause:.2f} s, and the safety buffer is {buffer:g} s"
        reason = "a cancellation that is late by more than the buffer comes after the store has handed the lock on"
        fix = f"move blocking code out of the event loop, or use ttl={advised:g} or more"
        found.append((error if pause > buffer else warning)("machine.pause", what, reason, fix))
    if slowest > timing.heartbeat_interval / 4:
        what = (
            f"the slowest renewal took {slowest:.2f} s, and the heartbeat interval is {timing.heartbeat_interval:g} s"
        )
        fix = f"bring the store nearer, or use ttl={advised:g} or more"
        found.append(warning("store.latency", what, "few failed renewals are left before a lease is lost", fix))
    if woken is False or (measured.handed_on or 0.0) > WOKEN_WITHIN + 2 * (pause + slowest):
        what, reason = f"a waiter got a free lock after {measured.handed_on:.2f} s", "waiters poll, and are not woken"
        fix = "let the store's messages reach the client: its rights to listen, and poolers in between"
        found.append(warning("self-test.wake", what, reason, fix))
    if measured.clock_source in _COARSE_CLOCKS:
        what, reason = f"the clock source is {measured.clock_source}", "the clock may stand still, or run unevenly"
        fix = "choose another of /sys/devices/system/clocksource/clocksource0/available_clocksource"
        found.append(warning("machine.clock-source", what, reason, fix))
    return [*found, *_clocks(times)]


def _clocks(times: StoreTimes) -> list[Finding]:
    found: list[Finding] = []
    if times.drift is not None and abs(times.drift) - times.drift_error > DRIFT:
        what = (
            f"the store's clock runs {100 * times.drift:+.2f} % against this machine's; {100 * DRIFT:g} % are allowed"
        )
        reason = "the store may hand a lock on before its holder's deadline"
        found.append(error("machine.drift", what, reason, "fix the clock that is wrong"))
    if times.difference is not None and abs(times.difference) > _LARGEST_DIFFERENCE:
        what = f"the store's clock is {times.difference:+.1f} s from this machine's"
        reason = "one of the two is not synchronised; after a failover to a clock that is behind, tokens could fall"
        found.append(warning("machine.clock", what, reason, "run chronyd or systemd-timesyncd on both machines"))
    return found
