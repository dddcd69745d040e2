"""What is measured, and what is common to all stores: pauses, clocks, the self-test, and the advice."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from diagnosing import ERROR, NOTE, WARNING, by_check
from inside import LoopClock
from virtual_time import in_virtual_time

from fencing_sdk import BackendUnavailableError, ConfigurationError, connect
from fencing_sdk.abc import Busy, Grant, Renewal
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.diagnosis import Diagnosis, Measurements, examine, measuring, self_test
from fencing_sdk.diagnosis.report import advise
from fencing_sdk.errors import LossReason
from fencing_sdk.guards.memory import MemoryGuard

PLAIN = Measurements(
    seconds=5.0,
    loop_pause=0.02,
    process_pause=0.01,
    clock_source="tsc",
    renewals=50,
    renewal_p50=0.001,
    renewal_p99=0.002,
    renewal_max=0.003,
    clock_difference=0.0,
    clock_drift=0.0,
    tokens=(1, 2, 3),
    handed_on=0.001,
    loss_noticed=0.001,
)


async def examined(backend: MemoryBackend, **options) -> Diagnosis:
    return await examine(backend, **{"over": 0.05, "other": sibling_of(backend), **options})


def sibling_of(backend: MemoryBackend) -> MemoryBackend:
    """Another connection to the same table. From Python 3.12 on, a proxy would be no `SupportsLine`."""
    twin = object.__new__(type(backend))
    twin.__dict__ = backend.__dict__
    return twin


class Telling(MemoryBackend):
    """Tells its holder when another connection takes the lock away, and how its clock runs."""

    offset = 0.0
    rate = 1.0

    async def release(self, claim):
        await super().release(claim)
        self._loss_notices.notify(claim, LossReason.REVOKED)

    async def diagnose(self, _ttl):
        return ()

    async def server_time(self):
        return time.time() * self.rate + self.offset


async def test_nothing_is_found_on_a_sound_store():
    diagnosis = await examined(Telling())
    assert by_check(diagnosis) == {}
    assert diagnosis.worst in {None, WARNING, ERROR}  # of a busy machine
    assert diagnosis.measurements.loss_noticed is not None
    assert len(set(diagnosis.measurements.tokens)) >= 3


async def test_a_blocked_event_loop_is_found_and_advice_fits_it():
    asyncio.get_running_loop().call_later(0.1, time.sleep, 0.4)
    diagnosis = await examined(Telling(), over=0.8, ttl=1.5)
    finding = next(finding for finding in diagnosis.findings if finding.check == "machine.pause")
    assert finding.severity == ERROR
    assert diagnosis.measurements.loop_pause >= 0.39
    assert diagnosis.advice.safety_buffer >= 3 * diagnosis.measurements.longest_pause


async def test_a_stopped_process_is_found(tmp_path: Path):
    script = (
        "import asyncio, signal\nfrom fencing_sdk import connect\n"
        "async def main():\n"
        f"    async with connect('sqlite:///{tmp_path}/a.db') as locks:\n"
        "        asyncio.get_running_loop().call_later(0.5, signal.raise_signal, signal.SIGSTOP)\n"
        "        print((await locks.diagnose(over=1.5)).measurements.process_pause)\n"
        "asyncio.run(main())"
    )
    process = await asyncio.to_thread(
        subprocess.Popen, [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    )
    try:
        _, status = await asyncio.to_thread(os.waitpid, process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        await asyncio.sleep(0.5)
        os.kill(process.pid, signal.SIGCONT)
        assert float(await asyncio.to_thread(process.stdout.readline)) > 0.4
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize(
    ("measured", "ttl"),
    [
        (PLAIN, 15.0),
        (replace(PLAIN, loop_pause=2.0), 30.0),
        (replace(PLAIN, process_pause=2.01), 31.0),
        (replace(PLAIN, renewal_max=1.2), 24.0),
        (replace(PLAIN, renewals=0, renewal_max=None, loop_pause=0.0, process_pause=0.0), 15.0),
        (replace(PLAIN, loop_pause=1e6), 86_400.0),
    ],
)
def test_the_advice_fits_what_was_measured(measured: Measurements, ttl: float):
    advice = advise(measured)
    assert advice.ttl == ttl
    if ttl < 86_400:
        assert advice.safety_buffer >= 3 * measured.longest_pause
        assert advice.heartbeat_interval >= 4 * (measured.renewal_max or 0)
    connect("memory://").lock("a", ttl=advice.ttl, safety_buffer=advice.safety_buffer)
    assert f"{15 * measured.longest_pause:.2f} s" in advice.arithmetic[0]


@pytest.mark.parametrize(
    ("offset", "rate", "check"),
    [(60.0, 1.0, "machine.clock"), (-60.0, 1.0, "machine.clock"), (0.0, 1.3, "machine.drift")],
)
async def test_a_clock_that_is_wrong_is_found(offset: float, rate: float, check: str):
    backend = Telling()
    backend.rate = rate
    backend.offset = offset - (rate - 1) * time.time()
    diagnosis = await examined(backend, over=0.5)
    assert check in {finding.check for finding in diagnosis.findings}


@pytest.mark.parametrize(("source", "found"), [("tsc", False), ("refined-jiffies", True)])
async def test_a_coarse_clock_source_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, found: bool
):
    monkeypatch.setattr("fencing_sdk.diagnosis.clock_source", lambda: source)
    diagnosis = await examined(Telling())
    assert ("machine.clock-source" in {finding.check for finding in diagnosis.findings}) == found


def test_the_clock_source_is_read(tmp_path: Path):
    (tmp_path / "source").write_text("hpet\n")
    assert measuring.clock_source(tmp_path / "source") == "hpet"
    assert measuring.clock_source(tmp_path / "none") is None


class Generous(Telling):
    async def acquire(self, claim):
        return Grant(7)


class Repeating(Telling):
    async def acquire(self, claim):
        outcome = await super().acquire(claim)
        return Grant(7) if isinstance(outcome, Grant) else outcome


class Forgetful(Telling):
    async def renew(self, claims):
        return [Renewal.REFUSED for _ in claims]


class Clinging(Telling):
    """Forgets to release what was handed on."""

    async def inspect(self, name):
        await super().acquire(self.claim)
        return await super().inspect(name)

    async def acquire(self, claim):
        self.claim = claim
        return await super().acquire(claim)


class Taken(Telling):
    async def acquire(self, claim):
        return Busy(1.0)


class Deaf(Telling):
    async def release(self, claim):
        await MemoryBackend.release(self, claim)

    async def revoke(self, name, token, reason):
        return False


class Failing(Telling):
    async def renew(self, claims):
        raise BackendUnavailableError("Failing", "renew", "the disk is full")


@pytest.mark.parametrize(
    ("backend", "check", "severity"),
    [
        (Generous, "self-test.exclusion", ERROR),
        (Repeating, "self-test.tokens", ERROR),
        (Forgetful, "self-test.renew", ERROR),
        (Clinging, "self-test.release", ERROR),
        (Deaf, "self-test.notice", WARNING),
        (Failing, "self-test.renew", ERROR),
    ],
)
async def test_a_store_that_breaks_its_contract_is_found(backend: type[Telling], check: str, severity):
    findings = by_check(await examined(backend()))
    assert findings[check].severity == severity


class Slow(Telling):
    async def renew(self, claims):
        await asyncio.sleep(0.15)
        return await super().renew(claims)


class Fading(Telling):
    """Fails from the second renewal on: after the self-test."""

    asked = 0

    async def renew(self, claims):
        self.asked += 1
        if self.asked > 1:
            raise BackendUnavailableError("Fading", "renew", "the disk is full")
        return await super().renew(claims)


async def test_a_store_that_is_slow_for_the_ttl_is_found():
    found = {finding.check: finding.severity for finding in (await examined(Slow(), ttl=1.0)).findings}
    assert found["store.latency"] == WARNING


async def test_a_store_that_fails_while_it_is_measured_is_found():
    assert by_check(await examined(Fading()))["store.renewals"].severity == WARNING


class Stumbling(Telling):
    """Hands the lock on late once, as any store does on a busy machine."""

    late = True

    async def release(self, claim):
        if self.late:
            self.late = False
            await asyncio.sleep(0.8)
        await super().release(claim)


async def test_a_waiter_that_is_woken_late_once_does_not_poll():
    diagnosis = await examined(Stumbling())
    assert "self-test.wake" not in by_check(diagnosis)
    assert diagnosis.measurements.handed_on < 0.8


class Polling(MemoryBackend):
    """Sends no messages, and has waiters ask again four times a second, as PostgreSQL behind PgBouncer."""

    async def acquire(self, claim):
        outcome = await super().acquire(claim)
        return Busy(0.25) if isinstance(outcome, Busy) else outcome

    def _wake_next(self, name):
        pass

    def on_loss(self, notice):
        return lambda: None


@in_virtual_time
async def test_the_time_of_a_hand_over_is_that_of_a_waiter_that_polls(monkeypatch):
    monkeypatch.setattr(self_test, "_CLOCK", LoopClock())
    backend = Polling(clock=LoopClock())
    test, begun = self_test.SelfTest(backend, sibling_of(backend), "scratch"), LoopClock().now()
    await test.run()
    assert test.woken is False
    assert test.handed_on == pytest.approx(0.25)
    assert [finding.check for finding in test.findings] == ["self-test.notice"]
    assert LoopClock().now() - begun < 3  # where nothing is told, nothing is waited for in vain


async def test_a_waiter_that_is_not_woken_is_found_however_short_its_pauses_are():
    assert by_check(await examined(Polling()))["self-test.wake"].severity == WARNING


class Unsteady(Telling):
    """Answers every second try to acquire."""

    answers = True

    async def acquire(self, claim):
        self.answers = not self.answers
        if not self.answers:
            raise BackendUnavailableError("Unsteady", "acquire", "too few replicas confirmed the write")
        return await super().acquire(claim)


async def test_a_try_that_fails_once_is_made_again_as_a_lock_does():
    assert not {"self-test.acquire", "self-test.hand on"} & set(by_check(await examined(Unsteady())))


class Overloaded(Telling):
    """Says after a while why it grants nothing."""

    async def acquire(self, claim):
        await asyncio.sleep(9)
        raise BackendUnavailableError("Overloaded", "acquire", "too few replicas confirmed the write")


@in_virtual_time
async def test_what_a_slow_store_says_is_told_instead_of_the_time_it_took(monkeypatch):
    monkeypatch.setattr(self_test, "_CLOCK", LoopClock())
    backend = Overloaded(clock=LoopClock())
    test = self_test.SelfTest(backend, backend, "scratch")
    await test.run()
    (finding,) = test.findings
    assert (finding.check, "too few replicas" in finding.what) == ("self-test.acquire", True)


@pytest.mark.parametrize("kind", [Telling, Failing, Fading])
async def test_no_lock_stays_held_whatever_fails(kind: type[Telling]):
    backend = kind()
    await examined(backend)
    assert not (await backend.list_holders("", None, 10)).holders


class Credulous(MemoryGuard):
    async def raise_to(self, resource, token):
        pass


async def test_guards_are_tested_with_the_tokens():
    assert "self-test.guard" not in by_check(await examined(Telling(), guards=[MemoryGuard()]))
    assert by_check(await examined(Telling(), guards=[Credulous()]))["self-test.guard"].severity == ERROR


async def test_a_counter_in_memory_is_found():
    assert by_check(await examined(MemoryBackend(tokens="counter")))["memory.tokens"].severity == WARNING


async def test_a_store_that_cannot_tell_its_settings_is_noted():
    class Silent:
        def __init__(self) -> None:
            self._backend = MemoryBackend()
            for name in ("acquire", "renew", "release", "inspect", "aclose"):
                setattr(self, name, getattr(self._backend, name))

    findings = by_check(await examine(Silent(), over=0.05))
    assert {check: finding.severity for check, finding in findings.items()} == {"store.settings": NOTE}


async def test_a_client_diagnoses_under_its_namespace_and_leaves_nothing():
    backend = MemoryBackend()
    names = set()
    acquire = backend.acquire

    async def noted(claim):
        names.add(claim.name)
        return await acquire(claim)

    backend.acquire = noted
    events = []
    async with connect(backend, namespace="shop", observers=[events.append]) as locks:
        diagnosis = await locks.diagnose(over=0.05)
        assert by_check(diagnosis) == {}
        (name,) = names
        assert name.startswith("shop")
        assert await backend.inspect(name) is None
        assert not events


@pytest.mark.parametrize("bad", [{"over": -1}, {"over": 1e9}, {"ttl": 0}, {"other": "redis://"}, {"guards": [3]}])
async def test_bad_arguments_are_refused(bad: dict[str, object]):
    async with connect("memory://") as locks:
        with pytest.raises(ConfigurationError, match=next(iter(bad))):
            await locks.diagnose(**bad)
