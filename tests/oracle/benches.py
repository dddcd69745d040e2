"""The stores under a history: how each lets time pass, what counts as a sign of life, and how a call is cut off."""

from __future__ import annotations

import hashlib
import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import asyncmy.errors
import pytest
from inside import BootClock, memory_on
from mysql_server import MysqlServer
from postgresql_server import PostgresqlServer
from redis_server import RedisServer

from fencing_sdk._mysql import driver
from fencing_sdk.abc import Claim
from fencing_sdk.backends import from_url
from fencing_sdk.backends.mysql import store
from fencing_sdk.backends.postgresql import schema
from fencing_sdk.backends.redis import scripts
from fencing_sdk.backends.redis.quorum import requests as quorum_requests
from fencing_sdk.backends.redis.scripts import RedisScript
from tests.oracle.histories import MODES, Cast

Change = Callable[[str], str]
"""Changes the SQL or the Lua of a store."""

_SQL_CLOCK = re.compile(r"(pg_catalog\.)?clock_timestamp\(\)")
_OWN_SQL_CLOCK = """
CREATE TABLE IF NOT EXISTS :"schema".oracle_clock AS SELECT pg_catalog.now() AS at;
CREATE OR REPLACE FUNCTION :"schema".oracle_now() RETURNS timestamptz LANGUAGE sql VOLATILE
AS $fencing$ SELECT at FROM :"schema".oracle_clock $fencing$;
"""
_LUA_CLOCK = "redis.call('TIME')"
_OWN_LUA_CLOCK = "({redis.call('GET', 'oracle:s'), redis.call('GET', 'oracle:us')})"
_AGE_KEYS = """
for _, key in ipairs(redis.call('KEYS', '*')) do
  local left = redis.call('PTTL', key)
  if left > 0 then redis.call('PEXPIRE', key, left - ARGV[1]) end
end
"""
"""Lets every key expire so much earlier."""


class StillClock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time


class EveryBench:
    """What most stores have in common."""

    cast: Cast = MappingProxyType({"a": MODES, "b": MODES, "c": MODES})
    hands = False
    timed = True
    first_holds = notices = lags = False
    stirs = False
    describes = elsewhere = True
    exact = operated = True
    margin = 0.01

    async def advance(self, seconds: float) -> None: ...

    def signs(self, claim: Claim, what: str) -> bool:
        return False

    def cut(self, statement: int) -> Any:
        return nullcontext()


class LocalBench(EveryBench):
    """A store that runs in this process, and reads the clock of this process."""

    def __init__(self) -> None:
        self.clock = StillClock()

    async def advance(self, seconds: float) -> None:
        self.clock.time += seconds


class MemoryOracle(LocalBench):
    hands = True

    def __init__(self) -> None:
        super().__init__()
        self._store = memory_on(self.clock)

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


class PostgresqlOracle(EveryBench):
    """The functions of the schema read a clock that stands in a table. A try is a sign of life."""

    stirs = True

    def __init__(
        self, server: PostgresqlServer, monkeypatch: pytest.MonkeyPatch, change: Change = lambda text: text
    ) -> None:
        self._server = server
        text = change(schema._TEXT)
        assert _SQL_CLOCK.search(text)
        monkeypatch.setattr(schema, "_TEXT", _OWN_SQL_CLOCK + _SQL_CLOCK.sub(':"schema".oracle_now()', text))

    def open(self) -> Any:
        return from_url(self._server.url)

    async def advance(self, seconds: float) -> None:
        self._server.ask(f"UPDATE fencing.oracle_clock SET at = at + interval '{seconds} seconds'")

    def signs(self, claim: Claim, what: str) -> bool:
        return what == "try"


class MysqlOracle(EveryBench):
    """
    The texts read a clock that stands in a table. All waiters of one client share their sign of life.

    A call is cut off by a statement for which the server refuses to wait: those before it have run.
    """

    def __init__(self, server: MysqlServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self._server = server
        self._left = 0
        self._clients = StillClock()  # a waiter is refused for a while without a question
        monkeypatch.setattr(BootClock, "now", staticmethod(self._clients.now))
        server.ask(f"CREATE TABLE oracle_clock AS SELECT {store.NOW} AS at")
        monkeypatch.setattr(store, "NOW", "(SELECT at FROM oracle_clock)")
        self._ask = driver.ask
        monkeypatch.setattr(driver, "ask", self._ask_or_fail)

    def open(self) -> Any:
        return from_url(self._server.url)

    async def advance(self, seconds: float) -> None:
        self._clients.time += seconds
        self._server.ask(f"UPDATE oracle_clock SET at = at + {round(seconds * 1_000_000)}")

    def signs(self, claim: Claim, what: str) -> bool:
        return what in {"tick", "join"}

    @contextmanager
    def cut(self, statement: int) -> Iterator[None]:
        self._left = statement
        try:
            yield
        finally:
            self._left = 0

    async def _ask_or_fail(self, connection: Any, text: str) -> Any:
        statements = text.split("; ")
        counted = [n for n, one in enumerate(statements) if not one.startswith(("SET", "START", "ROLLBACK", "COMMIT"))]
        if not self._left or "fencing_lock" not in text:
            return await self._ask(connection, text)
        if self._left > len(counted):
            self._left -= len(counted)
            return await self._ask(connection, text)
        if before := "; ".join(statements[: counted[self._left - 1]]):
            await self._ask(connection, before)
        self._left = 0
        raise asyncmy.errors.OperationalError(1205, "Lock wait timeout exceeded")


class RedisOracle(EveryBench):
    """The scripts read a clock that stands in two keys; leases expire by that of the server, which is set back."""

    hands = True
    exact = False
    margin = 5.0

    scripts: ModuleType = scripts

    def __init__(
        self,
        url: str,
        servers: Sequence[RedisServer],
        monkeypatch: pytest.MonkeyPatch,
        change: Change = lambda text: text,
    ) -> None:
        self._url, self._servers = url.replace("//", "//oracle:oracle@"), servers
        self._time = time.time()
        for server in servers:
            server.ask("ACL", "SETUSER", "oracle", "on", ">oracle", "~*", "&*", "+@all", "-client")
        self._set_clock()
        for script in {one for one in vars(self.scripts).values() if isinstance(one, RedisScript)}:
            text = change(script.text).replace(_LUA_CLOCK, _OWN_LUA_CLOCK)
            monkeypatch.setattr(script, "text", text)
            monkeypatch.setattr(script, "sha", hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())

    def _set_clock(self) -> None:
        for server in self._servers:
            server.ask("MSET", "oracle:s", int(self._time), "oracle:us", int(self._time % 1 * 1_000_000))

    def close(self) -> None:
        for server in self._servers:
            server.ask("ACL", "DELUSER", "oracle")

    def open(self) -> Any:
        """Without client tracking: a client that hears of a changed lease renews it."""
        return from_url(self._url)

    async def advance(self, seconds: float) -> None:
        self._time += seconds
        self._set_clock()
        for server in self._servers:
            server.ask("EVAL", _AGE_KEYS, 0, int(seconds * 1000))

    def signs(self, claim: Claim, what: str) -> bool:
        return what == "tick"


class QuorumOracle(RedisOracle):
    """Three nodes; plain locks alone. No time passes: a node that is slow keeps a silent waiter for longer."""

    cast: Cast = MappingProxyType({"a": ("lock",)})
    hands = describes = timed = False
    stirs = lags = True
    scripts = quorum_requests

    def signs(self, claim: Claim, what: str) -> bool:
        return what == "try"


class NodesOracle(EveryBench):
    """
    A store whose leases or sessions are real, so that no time passes in a history. Nobody gives signs of life.

    The first node of a line holds before its owner has asked again (`first_holds`), a waiter looks again when the node
    before its own has changed (`stirs`), and a client refuses its own claims by what it knows, which is old where
    another client goes on with one of them (`elsewhere`).
    """

    timed = exact = elsewhere = False
    first_holds = notices = stirs = True

    def __init__(self, url: str) -> None:
        self._url = url

    def open(self) -> Any:
        return from_url(f"{self._url}?connect_timeout=20")  # a machine may stand still


class KahunaOracle(EveryBench):
    """
    A cluster with plain locks alone, and without a line of its own. No time passes.

    A client refuses claims by the grants that it knows, so another client does not go on with them (`elsewhere`).
    """

    cast: Cast = MappingProxyType({"a": ("lock",)})
    timed = exact = describes = elsewhere = operated = False

    def __init__(self, url: str) -> None:
        self._url = url

    def open(self) -> Any:
        return from_url(self._url)
