"""
An exception that the handler of a signal raises leaves no lock behind, wherever it strikes: Celery's limits, an alarm.

Python runs a handler between two steps of its own. A trace function can raise there too, so each step is tried.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from campaigns import amount
from inside import held_here
from patience import wait_until

from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.sync import LockClient, connect
from fencing_sdk.sync._bridge import this_thread

MEASURED = sys.gettrace() is not None
"""Coverage is measured."""

STEPS = 100_000
"""More than any of them takes."""


class Limit(Exception):
    """Error that the handler of a signal raises."""


def enter(locks: LockClient) -> None:
    with locks.lock("a"):
        pass


def shared(locks: LockClient) -> None:
    lock = SHARED.setdefault(locks, locks.lock("a"))
    with lock:
        pass


def fail(locks: LockClient) -> None:
    with contextlib.suppress(ValueError), locks.lock("a"):
        raise ValueError


def handle(locks: LockClient) -> None:
    with locks.lock("a").acquire():
        pass


def several(locks: LockClient) -> None:
    with locks.multilock("a", "b"):
        pass


def permit(locks: LockClient) -> None:
    with locks.semaphore("a", permits=1):
        pass


def lead(locks: LockClient) -> None:
    for term in locks.election("a"):
        with term:
            pass
        break


def nothing() -> None: ...


def job(locks: LockClient) -> None:
    run = SHARED.setdefault(locks, locks.job("a", at_least_for=0.001)(nothing))
    run()


def locked(locks: LockClient) -> None:
    locks.locking("a")(len)("")


SHARED: dict[LockClient, Any] = {}
SHAPES = [enter, shared, fail, handle, several, permit, lead, job, locked]


class Steps:
    """Counts the steps of Python that a function takes, and raises at one of them."""

    def __init__(self, last: int = STEPS) -> None:
        self.last = last
        self.taken = 0

    def run(self, function: Callable[..., object], *args: object) -> None:
        """Call *function*; in a generator, an error that struck an except block does not stay the handled one."""
        list(self._traced(function, *args))

    def _traced(self, function: Callable[..., object], *args: object) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._step)
        try:
            function(*args)
        finally:
            sys.settrace(before)
        yield

    def _step(self, frame: FrameType, event: str, _argument: object) -> Any:
        # Elsewhere lines are the steps: CPython 3.11 crashes now and then where opcodes are traced in a generator
        # of `inspect`, and 3.12 if two tracers want different events of one frame.
        frame.f_trace_opcodes = not MEASURED and str(frame.f_globals.get("__name__")).startswith("fencing_sdk.")
        if event != "return":  # nothing comes between the end of a function and the next step of its caller
            self.taken += 1
            if self.taken == self.last:
                raise Limit
        return self._step


@pytest.fixture(params=["asyncio", "uvloop"])
def locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[LockClient]:
    if request.param == "asyncio":
        monkeypatch.setitem(sys.modules, "uvloop", None)  # as if it were not installed
    else:
        pytest.importorskip("uvloop")
    with connect(MemoryBackend()) as client:
        yield client
    SHARED.clear()


def nothing_is_held(locks: LockClient) -> bool:
    free = locks.inspect("a") is locks.inspect("b") is None
    return free and locks.status().leases == 0 and held_here() == () and this_thread().inside == []


@pytest.mark.campaign
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # some steps are those of a destructor
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # a handle that no statement has owned yet
def test_an_exception_between_any_two_steps_leaves_no_lock_behind(locks, shape):
    shape(locks)
    every = Steps()
    every.run(shape, locks)
    for step in range(1, every.taken, amount(1, short=67)):
        with contextlib.suppress(Limit):
            Steps(step).run(shape, locks)
        wait_until(lambda: nothing_is_held(locks), what=f"nothing is held after step {step}")


def in_coverage(frame: FrameType | None) -> bool:
    """Return whether the measuring of coverage is interrupted: it would keep its own lock for ever."""
    modules = set()
    while frame is not None:
        modules.add(str(frame.f_globals.get("__name__")))
        frame = frame.f_back
    return any(name.startswith("coverage.") for name in modules - {"coverage.cmdline", "coverage.execfile"})


@pytest.mark.campaign
@pytest.mark.parametrize("shape", [enter, handle, several, lead])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_an_alarm_in_each_of_many_blocks_leaves_no_lock_behind(locks, shape):
    armed: list[bool] = []

    def limit(_: int, frame: FrameType | None) -> None:
        if armed and in_coverage(frame):
            signal.setitimer(signal.ITIMER_REAL, 0.0001)
        elif armed:
            armed.clear()
            raise Limit

    def with_an_alarm(seconds: float) -> None:
        armed.append(True)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            shape(locks)
        finally:
            armed.clear()

    began = time.perf_counter()
    for _ in range(20):
        shape(locks)
    usual = (time.perf_counter() - began) / 20
    before = signal.signal(signal.SIGALRM, limit)
    try:
        for number in range(amount(3000, short=100)):
            with contextlib.suppress(Limit):
                with_an_alarm(usual * (0.001 + number * 0.618 % 1.0))
            signal.setitimer(signal.ITIMER_REAL, 0)
            wait_until(lambda: nothing_is_held(locks), what=f"nothing is held after block {number}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
