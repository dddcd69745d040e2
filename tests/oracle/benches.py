"""The stores under a history: how each lets time pass, what counts as a sign of life, and how a call is cut off."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from fencing_sdk._values.clock import BootClock
from fencing_sdk.abc import Claim
from fencing_sdk.backends import from_url
from fencing_sdk.backends.memory import MemoryBackend
from tests.oracle.histories import MODES


class StillClock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time


class LocalBench:
    """A store that runs in this process, and reads the clock of this process."""

    modes = MODES
    hands = False
    reasons = True
    silence = True
    exact = True
    margin = 0.01

    def __init__(self) -> None:
        self.clock = StillClock()

    async def advance(self, seconds: float) -> None:
        self.clock.time += seconds

    def cut(self, statement: int) -> Any:
        return nullcontext()


class MemoryOracle(LocalBench):
    hands = True
    reasons = False

    def __init__(self) -> None:
        super().__init__()
        self._store = MemoryBackend(clock=self.clock)

    def open(self) -> Any:
        return self._store

    def signs(self, claim: Claim, what: str) -> bool:
        return what == "try"


class CutConnection(sqlite3.Connection):
    """A connection that breaks a call off at one of its statements."""

    left = 0
    """Statements until then; 0: never."""

    def execute(self, statement: str, *arguments: Any) -> sqlite3.Cursor:
        if CutConnection.left and not statement.startswith(("PRAGMA", "BEGIN")):
            CutConnection.left -= 1
            if not CutConnection.left:
                raise sqlite3.OperationalError("disk I/O error")
        return super().execute(statement, *arguments)


class SqliteOracle(LocalBench):
    """Two clients of one file: all waiters of one share their sign of life."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._url = f"sqlite:///{path}?synchronous=normal"
        connect = sqlite3.connect
        monkeypatch.setattr(BootClock, "now", staticmethod(self.clock.now))
        monkeypatch.setattr(
            sqlite3, "connect", lambda *args, **options: connect(*args, factory=CutConnection, **options)
        )

    def open(self) -> Any:
        return from_url(self._url)

    def signs(self, claim: Claim, what: str) -> bool:
        return what in {"tick", "join"}

    @contextmanager
    def cut(self, statement: int) -> Iterator[None]:
        CutConnection.left = statement
        try:
            yield
        finally:
            CutConnection.left = 0
