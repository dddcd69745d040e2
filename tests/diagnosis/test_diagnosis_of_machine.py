"""The checks that all stores share: pauses, clocks, the self-test, and the advice."""

import asyncio
import time

import pytest
from diagnosing import ERROR, WARNING, by_check
from inside import LoopClock, memory_on
from looking import holder
from virtual_time import in_virtual_time

from fencing_sdk import BackendUnavailableError, ConfigurationError, connect, diagnosis
from fencing_sdk._values.timing import Timing
from fencing_sdk.abc import Busy, Gone, Place
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.diagnosis import Diagnosis, examine, self_test
from fencing_sdk.guards.memory import MemoryGuard


async def examined(backend: MemoryBackend, **options) -> Diagnosis:
    return await examine(backend, **{"over": 0.05, "other": sibling_of(backend), **options})


def sibling_of(backend: MemoryBackend) -> MemoryBackend:
    """Another connection to the same lines."""
    twin = object.__new__(type(backend))
    twin.__dict__ = backend.__dict__
    return twin


class Telling(MemoryBackend):
    """A store with a clock."""

    offset = 0.0
    rate = 1.0

    async def diagnose(self, _ttl):
        return ()

    async def server_time(self):
        return time.time() * self.rate + self.offset


async def test_nothing_is_found_on_a_sound_store():
    diagnosis = await examined(Telling())
    assert by_check(diagnosis) == {}
    assert diagnosis.worst in {None, WARNING, ERROR}  # of a busy machine


async def test_a_blocked_event_loop_is_found_and_advice_fits_it():
    asyncio.get_running_loop().call_later(0.1, time.sleep, 0.4)
    diagnosis = await examined(Telling(), over=0.8, ttl=1.5)
    finding = next(finding for finding in diagnosis.findings if finding.check == "machine.pause")
    assert finding.severity == ERROR
    assert diagnosis.advice.longest_pause >= 0.39
    assert diagnosis.advice.safety_buffer >= 3 * diagnosis.advice.longest_pause


@pytest.mark.parametrize(
    ("pause", "renewal", "ttl"),
    [(0.02, 0.003, 15.0), (2.0, 0.003, 30.0), (2.01, 0.003, 31.0), (0.02, 1.2, 24.0), (0.0, None, 15.0)],
)
def test_the_advice_fits_what_was_measured(pause: float, renewal: float | None, ttl: float):
    advice = diagnosis._Measured(Timing.build(), pause, renewal).advise()
    assert advice.ttl == ttl
    assert advice.safety_buffer >= 3 * pause
    assert advice.heartbeat_interval >= 4 * (renewal or 0)
    connect("memory://").lock("a", ttl=advice.ttl, safety_buffer=advice.safety_buffer)


def test_the_advised_ttl_is_one_that_a_lock_may_have():
    assert diagnosis._Measured(Timing.build(), pause=1e6).advise().ttl == 86_400


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


class Generous(Telling):
    async def draw(self, claim, **_):
        return Place(7)


class Repeating(Telling):
    async def draw(self, claim, **options):
        place = await super().draw(claim, **options)
        return place._replace(token=7) if isinstance(place, Place) and place.token is not None else place


class Forgetful(Telling):
    async def keep(self, tickets):
        return [Gone() for _ in tickets]


class Clinging(Telling):
    """Forgets that a ticket was given back that was handed on."""

    async def tickets(self, names):
        await super().draw(self.claim)
        return await super().tickets(names)

    async def draw(self, claim, **options):
        self.claim = claim
        return await super().draw(claim, **options)


class Taken(Telling):
    async def draw(self, claim, **_):
        return Busy(1.0)


class Failing(Telling):
    async def keep(self, tickets):
        raise BackendUnavailableError("Failing", "renew", "the disk is full")


class Sticking(Telling):
    async def pass_on(self, claim, heir):
        return Gone()


class Fading(Telling):
    """Fails from the second renewal on."""

    asked = 0

    async def keep(self, tickets):
        self.asked += 1
        if self.asked > 1:
            raise BackendUnavailableError("Fading", "renew", "the disk is full")
        return await super().keep(tickets)


@pytest.mark.parametrize(
    ("backend", "check", "severity"),
    [
        (Generous, "self-test.exclusion", ERROR),
        (Repeating, "self-test.tokens", ERROR),
        (Forgetful, "self-test.renew", ERROR),
        (Clinging, "self-test.release", ERROR),
        (Taken, "self-test.acquire", ERROR),
        (Failing, "self-test.renew", ERROR),
        (Fading, "self-test.renew", ERROR),
        (Sticking, "self-test.detach", ERROR),
    ],
)
async def test_a_store_that_breaks_its_contract_is_found(backend: type[Telling], check: str, severity):
    findings = by_check(await examined(backend()))
    assert findings[check].severity == severity


class Slow(Telling):
    async def keep(self, tickets):
        await asyncio.sleep(0.15)
        return await super().keep(tickets)


async def test_a_store_that_is_slow_for_the_ttl_is_found():
    found = {finding.check: finding.severity for finding in (await examined(Slow(), ttl=1.0)).findings}
    assert found["store.latency"] == WARNING


class Mute(MemoryBackend):
    """Rings no bell, as PostgreSQL behind PgBouncer."""

    def listen(self, claim, bell):
        return lambda: None


@in_virtual_time
async def test_a_waiter_whose_bell_does_not_ring_is_found(monkeypatch):
    monkeypatch.setattr(self_test, "_CLOCK", LoopClock())
    test = await self_tested(memory_on(LoopClock(), Mute))
    assert [(finding.check, finding.severity) for finding in test.findings] == [("self-test.wake", WARNING)]


async def self_tested(backend: MemoryBackend) -> self_test.SelfTest:
    test = self_test.SelfTest(backend, sibling_of(backend), "scratch")
    await test.run(None, 0.0)
    return test


class Unsteady(Telling):
    """Answers every second draw."""

    answers = True

    async def draw(self, claim, **options):
        self.answers = not self.answers
        if not self.answers:
            raise BackendUnavailableError("Unsteady", "acquire", "too few replicas confirmed the write")
        return await super().draw(claim, **options)


async def test_a_try_that_fails_once_is_made_again_as_a_lock_does():
    assert not {"self-test.acquire", "self-test.hand on"} & set(by_check(await examined(Unsteady())))


class Overloaded(Telling):
    """Says after a while why it grants nothing."""

    async def draw(self, claim, **_):
        await asyncio.sleep(9)
        raise BackendUnavailableError("Overloaded", "acquire", "too few replicas confirmed the write")


@in_virtual_time
async def test_the_error_of_a_slow_store_is_reported_and_not_the_time_it_took(monkeypatch):
    monkeypatch.setattr(self_test, "_CLOCK", LoopClock())
    (finding,) = (await self_tested(memory_on(LoopClock(), Overloaded))).findings
    assert (finding.check, "too few replicas" in finding.what) == ("self-test.acquire", True)


@pytest.mark.parametrize("kind", [Telling, Failing, Fading])
async def test_no_lock_stays_held_whatever_fails(kind: type[Telling]):
    backend = kind()
    await examined(backend)
    assert not backend._lines._lines


class Credulous(MemoryGuard):
    async def raise_to(self, resource, token):
        pass


async def test_guards_are_tested_with_the_tokens():
    assert "self-test.guard" not in by_check(await examined(Telling(), guards=[MemoryGuard()]))
    assert by_check(await examined(Telling(), guards=[Credulous()]))["self-test.guard"].severity == ERROR


async def test_locks_in_memory_and_a_counter_there_are_found():
    found = by_check(await examined(MemoryBackend(tokens="counter")))
    assert found["memory.tokens"].severity == found["memory.process"].severity == WARNING
    assert "memory.tokens" not in by_check(await examined(MemoryBackend()))


async def test_a_store_that_does_not_report_its_settings_is_found():
    class Silent:
        def __init__(self) -> None:
            self._backend = MemoryBackend()
            for name in ("draw", "keep", "give_back", "end", "tickets", "names", "listen", "modes", "rings", "aclose"):
                setattr(self, name, getattr(self._backend, name))

    findings = by_check(await examine(Silent(), over=0.05))
    assert {check: finding.severity for check, finding in findings.items()} == {"store.settings": WARNING}


async def test_a_client_diagnoses_under_its_namespace_and_leaves_nothing():
    backend = MemoryBackend()
    names = set()
    draw = backend.draw

    async def noted(claim, **options):
        names.add(claim.name)
        return await draw(claim, **options)

    backend.draw = noted
    events = []
    async with connect(backend, namespace="shop", observers=[events.append]) as locks:
        diagnosis = await locks.diagnose(over=0.05)
        assert set(by_check(diagnosis)) == {"memory.process"}
        (name,) = names
        assert name.startswith("shop")
        assert await holder(backend, name) is None
        assert not events


@pytest.mark.parametrize("bad", [{"over": -1}, {"over": 1e9}, {"ttl": 0}, {"other": "redis://"}, {"guards": [3]}])
async def test_bad_arguments_are_refused(bad: dict[str, object]):
    async with connect("memory://") as locks:
        with pytest.raises(ConfigurationError, match=next(iter(bad))):
            await locks.diagnose(**bad)
