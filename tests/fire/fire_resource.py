"""A fenced resource behind a Unix socket: rows in an SQLite file, in one transaction with the fence."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sqlite3
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from fencing_sdk import StaleTokenError
from fencing_sdk._recording import Recorder
from fencing_sdk._values.clock import BootClock
from fencing_sdk._values.token import parse_token
from fencing_sdk.guards.sql import SqlGuard

CLOCK = BootClock()


@dataclass(frozen=True)
class Told:
    """Somebody has read a token and will use it later."""

    actor: str
    resource: str
    token: int
    at: float


class Resource:
    """
    Answers JSON lines: ``{"op": ..., "resource": ..., "token": ..., "actor": ...}``.

    It records every write with the moments before and after its transaction. It is in the process that does harm, so
    nobody freezes it.
    """

    def __init__(self, folder: Path, recorder: Recorder, *, guarded: bool = True) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="fire-")  # the path of a socket must be short
        self.socket = str(Path(self._home.name) / "sink")
        self.guarded = guarded
        """False takes the guard out, to see who notices."""
        self.heard: dict[str, Told] = {}
        """What a worker has last said about itself: that it is to ``prepare`` a write, or to ``stay`` for long."""
        self.refused = 0
        self.served: set[tuple[str, int]] = set()
        """Which tokens have written."""
        self.seen: dict[str, int] = {}
        """The highest token that was accepted, for each resource."""
        self.recorder = recorder
        self._path = folder / "resource.db"
        self._guard = SqlGuard(str(self._path))
        self._server: asyncio.Server | None = None
        self._database = sqlite3.connect(self._path)
        self._database.executescript("""
            PRAGMA journal_mode = WAL;
            PRAGMA synchronous = OFF;
            CREATE TABLE done (number INTEGER PRIMARY KEY, resource TEXT, token INTEGER, holder TEXT, actor TEXT);
        """)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._serve, self.socket)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self._database.close()
        self._home.cleanup()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            while (line := await reader.readline()).endswith(b"\n"):
                asked = json.loads(line)
                answer = await self._answer(asked)
                writer.write(json.dumps(answer).encode() + b"\n")
        writer.close()

    async def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        match asked["op"]:
            case "raise":
                return await self._raise(asked)
            case "write":
                return self._write(asked)
        token = int(parse_token(asked["token"]))
        self.heard[asked["op"]] = Told(asked["actor"], asked["resource"], token, CLOCK.now())
        return {"accepted": True}

    async def _raise(self, asked: dict[str, Any]) -> dict[str, Any]:
        resource, token = asked["resource"], parse_token(asked["token"])
        try:
            await self._guard.raise_to(resource, token)
        except StaleTokenError:
            return {"accepted": False}
        self.seen[resource] = max(int(token), self.seen.get(resource, -1))
        return {"accepted": True}

    def _write(self, asked: dict[str, Any]) -> dict[str, Any]:
        resource, token, actor = asked["resource"], parse_token(asked["token"]), asked["actor"]
        sent = CLOCK.now()
        about = {"actor": actor, "resource": resource, "token": int(token), "holder": token.holder, "sent": sent}
        row = (resource, int(token), token.holder, actor)
        try:
            with self._database:
                if self.guarded:
                    self._guard.admit_sync(self._database, resource, token)
                self._database.execute("INSERT INTO done (resource, token, holder, actor) VALUES (?, ?, ?, ?)", row)
        except StaleTokenError as error:
            self.recorder.record("write_refused", **about, fence=int(error.fence))
            self.refused += 1
            return {"accepted": False}
        self.recorder.record("write_accepted", **about)
        self.served.add((resource, int(token)))
        self.seen[resource] = max(int(token), self.seen.get(resource, -1))
        return {"accepted": True}

    def has_seen_more(self, heard: Told) -> bool:
        """Whether somebody has come later with a higher token than *told*."""
        return self.seen.get(heard.resource, -1) > heard.token

    def out_of_order(self) -> list[str]:
        """Neighbours among the rows, in the order of their commits, whose tokens fell. There must be none."""
        rows = self._database.execute("SELECT resource, token, holder, actor FROM done ORDER BY resource, number")
        return [
            f"{earlier} before {later}"
            for earlier, later in itertools.pairwise(rows.fetchall())
            if earlier[0] == later[0] and (later[1] < earlier[1] or (later[1] == earlier[1] and later[2] != earlier[2]))
        ]
