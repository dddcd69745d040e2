"""Clients do what a simple model of them says, on every backend that runs here; and the model would notice if not."""

import itertools
from pathlib import Path

import pytest
from client_model import SteppedClock, Store, check

from fencing_sdk._claim import Grant, Renewal
from fencing_sdk.backends import from_url, sqlite
from fencing_sdk.backends._table import LockTable
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.backends.sqlite import SqliteBackend
from fencing_sdk.errors import StaleTokenError

pytest_plugins = ["redis_fixtures"]


def in_memory(clock: SteppedClock, kind: type[MemoryBackend] = MemoryBackend):
    shared = kind(clock=clock, tokens="counter")
    return lambda: shared


def test_memory():
    check(Store(in_memory, examples=40, steps=40))


def test_sqlite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = itertools.count()

    def make(clock: SteppedClock):
        monkeypatch.setattr(sqlite, "BootClock", lambda: clock)
        file = tmp_path / f"{next(files)}.db"
        return lambda: SqliteBackend(file, synchronous="normal")

    check(Store(make, examples=12, steps=25))


def test_redis(redis_server):
    def make(_: SteppedClock):
        redis_server.ask_all(["FLUSHALL"])
        return lambda: from_url(redis_server.url)

    check(Store(make, follows=False, examples=8, steps=20))


# The model would notice.


class ReleasesAnybodys(MemoryBackend):
    async def release(self, claim):
        self._table.revoke(claim.name, self._clock.now())


class RenewsWithoutEffect(MemoryBackend):
    async def renew(self, claims):
        return [Renewal.RENEWED for _ in claims]


class NeverExpires(MemoryBackend):
    async def acquire(self, claim):
        self._clock.at, now = 0.0, self._clock.at
        try:
            return await super().acquire(claim)
        finally:
            self._clock.at = now


class GrantsEverybody(MemoryBackend):
    async def acquire(self, claim):
        self._table.revoke(claim.name, self._clock.now())
        return await super().acquire(claim)


class RepeatsTokens(MemoryBackend):
    async def acquire(self, claim):
        outcome = await super().acquire(claim)
        return Grant(1) if isinstance(outcome, Grant) else outcome


class ForgetsItsCounter(MemoryBackend):
    async def release(self, claim):
        await super().release(claim)
        if not self._table._rows:
            self._table = LockTable(lambda last: last + 1)


class LosesReleases(MemoryBackend):
    async def release(self, claim): ...


@pytest.mark.parametrize(
    "broken",
    [
        ReleasesAnybodys,
        RenewsWithoutEffect,
        NeverExpires,
        GrantsEverybody,
        RepeatsTokens,
        ForgetsItsCounter,
        LosesReleases,
    ],
)
def test_a_broken_store_is_noticed(broken: type[MemoryBackend]):
    with pytest.raises((AssertionError, StaleTokenError)):
        check(Store(lambda clock: in_memory(clock, broken), examples=100, steps=30), shrink=False)
