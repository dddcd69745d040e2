"""Memory and SQLite beside the rules, on a clock that is set by hand."""

import os

import pytest
from campaigns import amount

from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.backends.sqlite import SqliteBackend
from fencing_sdk.testing import Comparison

HISTORIES = int(os.environ.get("FENCING_TEST_HISTORIES", "0")) or amount(800, short=50)


class HandClock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.time = 500_000.0

    def now(self) -> float:
        return self.time

    def set(self, time: float) -> None:
        self.time = time


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.mark.campaign
async def test_memory_answers_as_the_rules(clock):
    store = MemoryBackend()
    store._lines.clock = clock
    for seed in range(HISTORIES):
        clock.set(500_000.0)
        await Comparison([store], seed, clock.set).play()


@pytest.mark.campaign
async def test_sqlite_answers_as_the_rules(clock, tmp_path, monkeypatch):
    monkeypatch.setattr("fencing_sdk.backends.sqlite.BootClock", lambda: clock)
    stores = [SqliteBackend(tmp_path / "locks.db") for _ in range(2)]
    for seed in range(HISTORIES):
        clock.set(500_000.0)
        await Comparison(stores, seed, clock.set).play()
    for store in stores:
        await store.aclose()
