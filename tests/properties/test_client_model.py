"""Clients do what a simple model of them says, in memory and on a file; the model would notice if not."""

import contextlib
import itertools
import sqlite3
from pathlib import Path

import client_model
import pytest
from campaigns import amount
from client_model import PATIENCE, Bench, SteppedClock, Store, check
from hypothesis.errors import FlakyFailure
from inside import memory_on

from fencing_sdk.abc import HELD, Place
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.backends.sqlite import SqliteBackend
from fencing_sdk.errors import BackendRefusedError, StaleTokenError

pytestmark = [pytest.mark.campaign, pytest.mark.slow]


def in_memory(clock: SteppedClock, kind: type[MemoryBackend] = MemoryBackend):
    shared = memory_on(clock, kind, tokens="counter")

    async def revoke(name: str) -> None:
        shared.take_away(name)

    return Bench(lambda: shared, revoke)


def test_clients_of_memory_behave_as_the_model():
    check(Store(in_memory, examples=amount(200, short=20), steps=40))


def test_clients_of_sqlite_behave_as_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = itertools.count()

    def make(clock: SteppedClock):
        monkeypatch.setattr("fencing_sdk.backends.sqlite.BootClock", lambda: clock)
        file = tmp_path / f"{next(files)}.db"

        async def revoke(name: str) -> None:
            with contextlib.closing(sqlite3.connect(file, isolation_level=None, timeout=PATIENCE)) as operator:
                operator.execute("DELETE FROM fencing_line WHERE name = ?", (name,))

        return Bench(lambda: SqliteBackend(file, synchronous="normal"), revoke)

    check(Store(make, examples=amount(60, short=6), steps=25))


# The model would notice.


class KeepsWithoutEffect(MemoryBackend):
    async def keep(self, tickets):
        return [HELD for _ in tickets]


class GrantsEverybody(MemoryBackend):
    async def draw(self, claim, **options):
        self.take_away(claim.name)
        return await super().draw(claim, **options)


class RepeatsTokens(MemoryBackend):
    async def draw(self, claim, **options):
        outcome = await super().draw(claim, **options)
        return outcome._replace(token=1) if isinstance(outcome, Place) and outcome.token is not None else outcome


class LosesReleases(MemoryBackend):
    async def give_back(self, claim, **options): ...


@pytest.mark.parametrize("broken", [KeepsWithoutEffect, GrantsEverybody, RepeatsTokens, LosesReleases])
def test_a_broken_store_is_noticed(broken: type[MemoryBackend], monkeypatch: pytest.MonkeyPatch):
    """A false alarm does no harm here, so that waiting for a lock that stays held need not take long."""
    monkeypatch.setattr(client_model, "PATIENCE", 1.0)
    with pytest.raises((AssertionError, BackendRefusedError, StaleTokenError, FlakyFailure)):
        check(Store(lambda clock: in_memory(clock, broken), examples=100, steps=30), shrink=False)
