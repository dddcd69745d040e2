"""
A pytest plugin for code that uses locks: stop it where it hurts, take its lease away, and look what it does.

Load it in conftest.py and ask for its fixtures::

    pytest_plugins = ["fencing_sdk.testing.plugin"]  # in conftest.py

    def test_a_worker_that_was_paused_does_not_write(lock_world, pause):
        ada, bob, seats = lock_world.client("Ada"), lock_world.client("Bob"), Seats()
        sale = ada.start(sell, ada.locks, seats, "Ada")
        lock_world.sleep(1)  # Ada holds the lock, and waits for the payment
        with pause(ada):  # for longer than her lease lasts
            bob.run(sell, bob.locks, seats, "Bob")
        with pytest.raises(LeaseLostError):
            lock_world.finish(sale)
        assert seats.buyer == "Bob"

The fixtures are plain: they need no plugin for asynchronous tests, and get along with any. A test
that fails shows the history of its worlds. Nothing but pytest is imported before a test uses a fixture.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fencing_sdk.testing._plugin_worlds import LeaseEnder, Pause, PauseAnywhere, Worlds
    from fencing_sdk.testing.faults import FaultyBackend
    from fencing_sdk.testing.world import World

# ruff: noqa: PLC0415  (a plugin that is loaded for every test must not cost the tests without locks anything)

_WORLDS = pytest.StashKey["Worlds"]()
_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the history of a world under the test that failed in it."""
    report = yield
    worlds = item.stash.get(_WORLDS, None)
    if report.when == "call" and report.failed and worlds is not None:
        item.stash[_FAILED] = True
        report.sections.extend(worlds.histories())
    return report


@pytest.fixture
def _lock_worlds(request: pytest.FixtureRequest) -> Iterator[Worlds]:
    from fencing_sdk.testing._plugin_worlds import Worlds

    worlds = request.node.stash[_WORLDS] = Worlds()
    yield worlds
    try:
        worlds.close()
    except Exception as unseen:
        if not request.node.stash.get(_FAILED, False):
            raise
        sys.stdout.write(f"and when the world ended: {unseen!r}\n")  # shown with the failure, and no second one
    finally:
        del request.node.stash[_WORLDS]


@pytest.fixture
def lock_world(_lock_worlds: Worlds) -> World:
    """
    A `World` on virtual time: a lock service in memory, and clients that can be paused.

    Coroutines use ``client.locks``. Plain code, such as a view of Django, uses ``client.sync_locks``.
    The world ends after the test. If work failed and was never awaited, its error fails the test then.
    """
    return _lock_worlds.make()


@pytest.fixture
def pause(_lock_worlds: Worlds) -> Pause:
    """
    Freeze a client for longer than its leases last.

    When the block of ``with pause(client):`` begins, the store has given away every lock that the
    client held. Nothing runs in the client until the block ends. With ``seconds=`` it is frozen for
    that long instead.

    Raises:
        UsageError: the client holds no lock, so the test would show nothing; let time go on first.
    """
    return _lock_worlds.pause


@pytest.fixture
def pause_anywhere(_lock_worlds: Worlds) -> PauseAnywhere:
    """
    Play one story again and again, with a pause one step later each time, until it has no more steps.

        for world, pause in pause_anywhere():
            ...  # as with `lock_world` and `pause`, from the beginning

    A step is one turn of the client's event loop. So code that never awaits is one step: what a pause
    in the middle of it does is seen by `World.sleep`, called from there.

    Raises:
        UsageError: a round was without a pause, or there were more steps than ``at_most=``.
    """
    return _lock_worlds.pause_anywhere


@pytest.fixture
def expire(_lock_worlds: Worlds) -> LeaseEnder:
    """
    Let a lease run out now, in the middle of the work.

    Call ``expire(lease)``, or in a world ``expire("seats/42")``. Afterwards the lock is free, and the
    work of a task is being cancelled. The lease is one of ``fencing_sdk`` or of ``fencing_sdk.sync``, and any
    thread may call. Outside a world its client is on a `MemoryBackend`, with or without a `FaultyBackend`
    in front. Code that is called under the lock, such as a test's double, has `fencing_sdk.current_lease`
    or `fencing_sdk.sync.current_lease`.

    Raises:
        UsageError: the lease is over already, no client holds such a lock, the backend is another, or the
            event loop of the lease does not run.
    """
    return _lock_worlds.expire


@pytest.fixture
def lose(_lock_worlds: Worlds) -> LeaseEnder:
    """
    Take a lock away from its holder, as an operator does; the reason is "revoked".

    Call ``lose(lease)``, or in a world ``lose("seats/42")``. What `expire` says holds here too.
    """
    return _lock_worlds.lose


@pytest.fixture
def faulty_backend() -> FaultyBackend:
    """A `MemoryBackend` with tokens 1, 2, 3 behind a bad network, for ``connect(faulty_backend)`` of either world."""
    from fencing_sdk.backends.memory import MemoryBackend
    from fencing_sdk.testing.faults import FaultyBackend

    return FaultyBackend(MemoryBackend(tokens="counter"))
