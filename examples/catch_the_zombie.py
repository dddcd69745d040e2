"""
A service with a bug that no quiet test shows, and the tests that catch it.

Both ways to sell a seat look alike, and both pass the test that a team writes first. One of them
sells a seat twice when its process is stopped at the wrong moment for longer than its lease lasts.

    uv run python examples/catch_the_zombie.py

The script runs its own tests with pytest. In a project they stand in a file of their own, and the
line with ``pytest_plugins`` in conftest.py.
"""

import asyncio
import contextlib
import os
import sys

import pytest

from fencing_sdk import FencingError, LeaseLostError, LockClient
from fencing_sdk.guards.memory import MemoryGuard

pytest_plugins = ["fencing_sdk.testing.plugin"]


class Seats:
    """What the lock protects: one seat, to be sold once."""

    def __init__(self) -> None:
        self.buyers: list[str] = []
        self.guard = MemoryGuard()


async def sell_carelessly(locks: LockClient, seats: Seats, buyer: str) -> None:
    async with locks.lock("seats/42", ttl=10):
        if not seats.buyers:
            await asyncio.sleep(3)  # the payment
            seats.buyers.append(buyer)  # by the lock that was held 3 s ago


async def sell(locks: LockClient, seats: Seats, buyer: str) -> None:
    async with locks.lock("seats/42", ttl=10) as lease:
        if not seats.buyers:
            await asyncio.sleep(3)
            seats.guard.write("seats/42", lease.token, seats.buyers.append, buyer)  # by the token of this moment


both_ways = pytest.mark.parametrize("sell", [sell_carelessly, sell])


@both_ways
def test_a_seat_is_sold_once(lock_world, sell):
    ada, bob, seats = lock_world.client("Ada"), lock_world.client("Bob"), Seats()
    sale = ada.start(sell, ada.locks, seats, "Ada")
    bob.run(sell, bob.locks, seats, "Bob")
    lock_world.finish(sale)
    assert seats.buyers == ["Ada"]


@both_ways
def test_a_seat_is_sold_once_although_ada_is_stopped_while_she_pays(lock_world, pause, sell):
    ada, bob, seats = lock_world.client("Ada"), lock_world.client("Bob"), Seats()
    sale = ada.start(sell, ada.locks, seats, "Ada")
    lock_world.sleep(1)
    with pause(ada):
        bob.run(sell, bob.locks, seats, "Bob")
    with contextlib.suppress(LeaseLostError):
        lock_world.finish(sale)
    assert seats.buyers == ["Bob"]


@both_ways
def test_a_seat_is_sold_once_wherever_ada_is_stopped(pause_anywhere, sell):
    for world, pause in pause_anywhere():
        ada, bob, seats = world.client("Ada"), world.client("Bob"), Seats()
        sale = ada.start(sell, ada.locks, seats, "Ada")
        with pause(ada):
            bob.run(sell, bob.locks, seats, "Bob")
        with contextlib.suppress(FencingError):  # stopped under the lock, or on the way to it
            world.finish(sale)
        assert len(seats.buyers) == 1


class Outcomes:
    """What became of the tests."""

    def __init__(self) -> None:
        self.failed: set[str] = set()
        self.passed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            (self.passed if report.passed else self.failed).add(report.nodeid.partition("::")[2])


if __name__ == "__main__":
    outcomes = Outcomes()
    alone = ["--disable-plugin-autoload", "-p", "no:cacheprovider", "-c", os.devnull]  # whatever is installed here
    pytest.main(["-q", "--tb=short", *alone, __file__], plugins=[outcomes])
    assert all("[sell_carelessly]" in test for test in outcomes.failed), outcomes.failed
    assert len(outcomes.failed) == 2, "the bug was not caught"
    assert len(outcomes.passed) == 4, "what is mended, and what is quiet, passes"
    sys.stdout.write("the careless sale was caught twice, as it should be; the careful one never fails\n")
