"""Events that observers hear, and what a client says of its leases and its store."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import logging
import os
import pickle
import subprocess
import sys
from collections import deque
from functools import partial
from pathlib import Path

import pytest
from inside import LoopClock, on_clock
from virtual_time import in_virtual_time, settle

import fencing_sdk
import fencing_sdk.sync
from fencing_sdk import LeaseLostError, LockClient, LossReason, Status, Token, UsageError
from fencing_sdk._values.observers import Observers
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.errors import BackendUnavailableError, ConfigurationError
from fencing_sdk.events import (
    Acquired,
    Acquiring,
    Event,
    FenceRaised,
    JobEnded,
    JobOutcome,
    Lost,
    NotAcquired,
    NotAcquiredReason,
    Released,
    RenewalFailed,
    RenewalLate,
    Renewed,
    StaleRejected,
    TokenMissing,
)

# Events are frozen plain values, and what an observer does wrong stays with the observer.


EVENTS = [
    Acquiring(name="a", at=1.0, holder="9f8a01c2"),
    Acquired(name="a", at=1.0, holder="9f8a01c2", token=34, ttl=15.0, waited=0.5, deadline=12.0),
    Renewed(name="a", at=1.0, holder="9f8a01c2", token=34, spare=3.0, deadline=12.0),
    RenewalLate(name="a", at=1.0, holder="9f8a01c2", token=34, late=0.5, stack=None),
    RenewalFailed(name="a", at=1.0, holder="9f8a01c2", token=34, error="away", remaining=2.0),
    Lost(name="a", at=1.0, holder="9f8a01c2", token=34, reason=LossReason.EXPIRED),
    Released(name="a", at=1.0, holder="9f8a01c2", token=34, held_for=2.0, confirmed=True),
    JobEnded(name="a", at=1.0, holder=None, outcome=JobOutcome.SKIPPED),
    NotAcquired(name="a", at=1.0, holder="9f8a01c2", reason=NotAcquiredReason.TIMED_OUT, waited=2.0, unanswered=0),
    FenceRaised(name="a", at=1.0, holder="9f8a01c2", token=Token(34, "9f8a01c2"), resource="a"),
    StaleRejected(name="a", at=1.0, holder="9f8a01c2", token=34, resource="a", fence=35, conflict=False),
    TokenMissing(name="a", at=1.0, holder=None, resource="a", required=True),
]
each_event = pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.kind)


def test_every_event_of_the_package_is_tried_here():
    public = [getattr(fencing_sdk.events, name) for name in fencing_sdk.events.__all__]
    shown = {thing for thing in public if isinstance(thing, type) and issubclass(thing, Event)}
    assert {type(event) for event in EVENTS} == shown - {Event}


def test_every_kind_is_its_own_snake_case_word():
    assert len({event.kind for event in EVENTS}) == len(EVENTS)
    for event in EVENTS:
        assert event.kind.replace("_", "") == type(event).__name__.lower()


@each_event
def test_an_event_cannot_be_changed(event):
    for field in dataclasses.fields(event):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(event, field.name, None)
    with pytest.raises((AttributeError, TypeError)):
        event.note = "mine"
    assert not hasattr(event, "__dict__")


@each_event
def test_an_event_is_plain_json_with_its_kind_first(event):
    plain = event.as_dict()
    assert list(plain)[:4] == ["kind", "name", "at", "holder"]
    assert set(plain) == {"kind", *(field.name for field in dataclasses.fields(event))}
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain


@each_event
def test_an_event_survives_pickling_and_copying(event):
    assert pickle.loads(pickle.dumps(event)) == copy.deepcopy(event) == event
    assert hash(event) == hash(copy.copy(event))


@pytest.mark.parametrize(
    "failure", [ValueError, ZeroDivisionError, asyncio.CancelledError, RecursionError, MemoryError]
)
def test_an_observer_that_raises_is_logged_and_the_others_are_still_called(failure, caplog):
    """CancelledError comes from looking at the result of a cancelled task: nobody cancelled the heartbeat."""
    seen = []

    def broken(event: Event) -> None:
        seen.append("broken")
        raise failure

    observers = Observers([lambda event: seen.append("first"), broken, lambda event: seen.append("last")])
    observers.emit(EVENTS[0])
    assert seen == ["first", "broken", "last"]
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("fencing_sdk", logging.ERROR)
    assert record.exc_info[0] is failure
    assert record.getMessage().startswith("observer <function ")
    assert record.getMessage().endswith(" failed on acquiring")


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_observer_may_end_the_program(stop):
    def stopping(event: Event) -> None:
        raise stop

    with pytest.raises(stop):
        Observers([stopping]).emit(EVENTS[0])


def test_an_observer_whose_repr_breaks_lines_or_fails_cannot_forge_the_log(caplog):
    class Forger:
        def __repr__(self) -> str:
            return "x\nCRITICAL forged"

        def __call__(self, event: Event) -> None:
            raise ValueError

    class Mute(Forger):
        def __repr__(self) -> str:
            raise RuntimeError

    Observers([Forger(), Mute()]).emit(EVENTS[0])
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert not any("\n" in message for message in messages)


@pytest.mark.parametrize("make", [list, tuple, deque, set, iter, lambda observers: (each for each in observers)])
def test_every_collection_of_observers_is_heard(make):
    """A generator has one pass only: checking it must not use it up."""
    seen = []
    Observers(make([seen.append])).emit(EVENTS[0])
    assert seen == [EVENTS[0]]


async def an_async_function(event: Event) -> None:
    """Would return a coroutine that nobody awaits."""


class AsyncCall:
    async def __call__(self, event: Event) -> None:
        """The same, as an object."""


@pytest.mark.parametrize(
    "bad", [an_async_function, AsyncCall(), AsyncCall().__call__], ids=["function", "object", "method"]
)
def test_an_async_observer_is_refused_because_it_would_never_run(bad):
    with pytest.raises(ConfigurationError, match=r"^observers must be plain functions, got 'async def'"):
        Observers([bad])


@pytest.mark.parametrize("bad", [None, 5, print, "print", b"", object(), True], ids=lambda bad: type(bad).__name__)
def test_observers_are_a_collection(bad):
    with pytest.raises(ConfigurationError, match=r"^observers must be a sequence such as"):
        Observers(bad)


@pytest.mark.parametrize("bad", [None, 5, "print", {"a": 1}, object()], ids=lambda bad: type(bad).__name__)
def test_every_observer_is_callable(bad):
    with pytest.raises(ConfigurationError, match=r"^observers must be callables that take one event, got "):
        Observers([print, bad])


def test_the_logger_is_left_to_the_application():
    logger = logging.getLogger("fencing_sdk")
    assert (logger.handlers, logger.level, logger.propagate) == ([], logging.NOTSET, True)


# ``client.status()``: for health endpoints, told from what the client knows.


class Store(MemoryBackend):
    """One that can be out of reach."""

    def __init__(self) -> None:
        super().__init__()
        self._clock = LoopClock()
        self.away = False

    async def keep(self, tickets):
        if self.away:
            backend, operation = "Store", "renew"
            raise BackendUnavailableError(backend, operation, "no answer")
        return await super().keep(tickets)


def client() -> LockClient:
    return on_clock(LockClient(Store()), LoopClock())


@in_virtual_time
async def test_a_client_that_was_not_entered_or_was_closed_is_not_open():
    locks = client()
    assert locks.status() == Status(open=False)
    async with locks:
        assert locks.status() == Status(open=True)
    assert locks.status() == Status(open=False)


@in_virtual_time
async def test_leases_and_the_least_time_that_one_has_left():
    async with client() as locks, locks.lock("a", ttl=30), locks.lock("b", ttl=10, heartbeat_interval=2) as lease:
        status = locks.status()
        assert (status.open, status.draining, status.leases, status.leader_of) == (True, False, 2, ())
        assert status.least_remaining == pytest.approx(lease.remaining)
        await asyncio.sleep(1.5)
        assert locks.status().least_remaining == pytest.approx(status.least_remaining - 1.5)
        await asyncio.sleep(1.0)  # a renewal was confirmed half a second ago
        assert locks.status().least_remaining == pytest.approx(status.least_remaining - 0.5)


@in_virtual_time
async def test_when_the_store_last_answered():
    async with client() as locks:
        assert locks.status().since_answer is None
        async with locks.lock("a", ttl=10, heartbeat_interval=2):
            assert locks.status().since_answer == 0
            await asyncio.sleep(1.5)
            assert locks.status().since_answer == 1.5
            await asyncio.sleep(1.5)  # renewed a second ago
            assert locks.status().since_answer == 1
            locks._backend.away = True
            await asyncio.sleep(3)
            assert locks.status().since_answer == 4
        assert locks.status().leases == 0


@in_virtual_time
async def test_a_lease_that_is_lost_counts_no_more():
    async with client() as locks:
        with pytest.raises(LeaseLostError):
            async with locks.lock("a", ttl=3):
                locks._backend.away = True
                try:
                    await asyncio.sleep(60)
                finally:
                    status = locks.status()
        assert (status.open, status.leases, status.least_remaining) == (True, 0, None)


@in_virtual_time
async def test_the_elections_that_this_process_leads():
    async with client() as locks:
        heard = []

        @locks.elected("scheduler/{region}")
        async def schedule(region: str) -> None:
            await settle()
            heard.append(locks.status().leader_of)

        async for term in locks.election("reports"):
            async with term:
                await schedule("eu")
                break
        assert heard == [("reports", "scheduler/eu")]
        async with locks.lock("not an election"):
            assert locks.status().leader_of == ()


async def test_in_a_forked_child_the_client_of_the_parent_is_not_open_and_says_why(monkeypatch):
    async with LockClient(MemoryBackend()) as locks:
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", partial(int, os.getpid() + 1))
            assert not locks.status().open
            with pytest.raises(UsageError, match="before a fork"):
                await asyncio.to_thread(lambda: asyncio.run(locks.inspect("a")))
        assert locks.status().open


# Readiness, as docs/operations.md has it

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
READY = next(block for block in PAGE.split("```") if "def ready(" in block).removeprefix("python")
TASKS = """
import asyncio
import os
from fencing_sdk import connect

async def main():
    locks = connect("memory://")
    print("made", ready(locks))
    async with locks:
        print("entered", ready(locks))
        async with locks.lock("a"):
            print("held", ready(locks))
        await locks.drain(within=1)
        print("drained", ready(locks))
    print("left", ready(locks))
    async with locks:
        print("entered again", ready(locks))

asyncio.run(main())
"""
THREADS = """
import os
from fencing_sdk.sync import connect

locks = connect("memory://")
print("made", ready(locks))
with locks.lock("a"):
    print("held", ready(locks), flush=True)
if not (child := os.fork()):
    print("forked", ready(locks), flush=True)
    os._exit(0)
os.waitpid(child, 0)
locks.drain(within=1)
print("drained", ready(locks))
locks.close()
print("closed", ready(locks))
with locks.lock("a"):
    print("used again", ready(locks))
locks.close()
with locks:
    print("entered", ready(locks))
print("left", ready(locks))
unused = connect("memory://")
unused.close()
print("closed before its first call", ready(unused))
"""


@pytest.mark.parametrize(
    ("script", "steps"),
    [
        (TASKS, "made - entered + held + drained - left - entered again +"),
        (
            THREADS,
            "made + held + forked + drained - closed - used again + entered + left - closed before its first call -",
        ),
    ],
    ids=["tasks", "threads"],
)
def test_a_fresh_process_becomes_ready_and_stays_it_until_it_drains_or_closes(script, steps):
    quiet = "ignore::DeprecationWarning"  # Python 3.12 warns of a fork beside threads
    done = subprocess.run(
        [sys.executable, "-W", quiet, "-c", READY + script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout.replace("True", "+").replace("False", "-")
    assert " ".join(said.split()) == steps


@pytest.mark.parametrize("open_wait", [0, None])
def test_a_worker_whose_store_is_away_is_ready(open_wait):
    """A store that is away is no reason to restart a worker."""

    class Away(MemoryBackend):
        async def open(self):
            raise BackendUnavailableError("Away", "open")

    locks = fencing_sdk.sync.connect(Away(), open_wait=open_wait)
    for _ in range(2):
        assert locks.status() == Status(open=True)
        with pytest.raises(BackendUnavailableError):
            locks.inspect("a")
    locks.close()
    assert locks.status() == Status(open=False)
