"""Stores of one server, or of one file, and what is done to them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from child_processes import end, spawn
from fire_ports import kept
from fire_store import Harm, Store, call
from kahuna_server import KahunaServer
from local_ports import HOST
from mysql_programs import flavours
from mysql_server import USER as MYSQL_USER
from mysql_server import MysqlServer
from patience import wait_until
from postgresql_programs import USER
from postgresql_server import PostgresqlServer
from redis_server import RedisServer

FAILOVER = (0.26, 0.43)
"""Seconds until another node of Kahuna leads: a tenth of what a real cluster needs."""


class Alone(Store):
    """One server."""

    server: Any

    @property
    def harms(self) -> dict[str, Harm]:
        return {"server frozen": self._freeze, "server killed": self._kill}

    async def _freeze(self, seconds: float) -> bool:
        await call(self.server.pause)
        await asyncio.sleep(seconds)
        await call(self.server.resume)
        return True

    async def _kill(self, seconds: float) -> bool:
        """``kill -9``, and started again on its data."""
        before = getattr(self.server, "pid", None)
        await call(self.server.kill)
        with kept(self.ports):
            await asyncio.sleep(min(seconds, 0.5))
            await call(self.server.start)
        return before is None or self.server.pid != before

    def start(self) -> None:
        self.server.start()

    def heal(self) -> None:
        if not self.server.running:
            self.server.start()
        self.server.resume()

    def close(self) -> None:
        self.server.close()

    def log(self) -> str:
        return str(self.server.log())


class Redis(Alone):
    name = "redis"

    def __init__(self, folder: Path, chance: random.Random) -> None:
        super().__init__(folder, chance)
        self.server = RedisServer(appendonly=True, appendfsync="everysec")  # a killed process loses nothing by it

    @property
    def ports(self) -> list[int]:
        return [self.server.port]

    def url(self, ports: Sequence[int] = ()) -> str:
        return f"redis://{HOST}:{(ports or self.ports)[0]}"


class Postgresql(Alone):
    name = "postgresql"

    def __init__(self, folder: Path, chance: random.Random) -> None:
        super().__init__(folder, chance)
        self.server = PostgresqlServer()

    @property
    def harms(self) -> dict[str, Harm]:
        return {**super().harms, "sessions terminated": self._terminate}

    async def _terminate(self, _seconds: float) -> bool:
        """What ``pg_terminate_backend`` does to all clients."""
        statement = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
        statement += " AND backend_type = 'client backend'"
        return bool(await asyncio.to_thread(self.server.ask, statement))

    @property
    def ports(self) -> list[int]:
        return [self.server.port]

    def url(self, ports: Sequence[int] = ()) -> str:
        return str(self.server.url_as(USER, port=(ports or self.ports)[0]))


class Mysql(Alone):
    """MySQL where this machine has it, else MariaDB; on a disk, because a log in memory would survive `kill -9`."""

    name = "mysql"

    def __init__(self, folder: Path, chance: random.Random) -> None:
        super().__init__(folder, chance)
        self.server = MysqlServer(flavours()[-1], folder=folder)

    @property
    def harms(self) -> dict[str, Harm]:
        return {**super().harms, "connections ended": self._end_connections, "table locked": self._lock_table}

    async def _end_connections(self, _seconds: float) -> bool:
        """What an operator does with KILL to all clients."""
        await call(self.server.end_connections)
        return True

    async def _lock_table(self, seconds: float) -> bool:
        """An operator has the table of the locks to itself."""
        async with self.server.connected() as session:
            cursor = session.cursor()
            await cursor.execute("LOCK TABLES fencing_line WRITE")
            await asyncio.sleep(seconds)
            await cursor.execute("UNLOCK TABLES")
        return True

    @property
    def ports(self) -> list[int]:
        return [self.server.port]

    def url(self, ports: Sequence[int] = ()) -> str:
        return str(self.server.url_as(MYSQL_USER, port=(ports or self.ports)[0]))


class Kahuna(Alone):
    """Three nodes of the stand-in, which are one process, with leaders and the troubles of a real cluster."""

    name = "kahuna"

    def __init__(self, folder: Path, chance: random.Random) -> None:
        super().__init__(folder, chance)
        self.server = KahunaServer(folder, nodes=3)

    @property
    def ports(self) -> list[int]:
        return list(self.server.ports)

    @property
    def harms(self) -> dict[str, Harm]:
        return {
            **super().harms,
            "node down": self._down,
            "node stopped": self._stopped,
            "node cut off": self._cut_off,
            "answers spoilt": self._chaos,
        }

    async def _stopped(self, seconds: float) -> bool:
        """The node says nothing, and MustRetry for ever when it goes on, until it is started again."""
        return await self._in_trouble(self.server.stop, self.server.go_on, seconds)

    async def _cut_off(self, seconds: float) -> bool:
        """The node answers by what it knew last; clients that believe its refusals lose leases."""
        return await self._in_trouble(self.server.cut, self.server.join, seconds)

    async def _in_trouble(self, begin: Callable[[int], None], end: Callable[[int], None], seconds: float) -> bool:
        node = self.random.randrange(3)
        await call(lambda: self.server.cluster(failover=FAILOVER))
        await call(lambda: self.server.habits(grants_in_error=0.01))
        await call(begin, node)
        await asyncio.sleep(seconds)
        await call(end, node)
        await call(self.server.down, node)
        await call(self.server.up, node)
        return True

    async def _down(self, seconds: float) -> bool:
        node = self.random.randrange(3)
        await call(self.server.down, node)
        await asyncio.sleep(seconds)
        await call(self.server.up, node)
        return True

    async def _chaos(self, seconds: float) -> bool:
        """A part of the requests is answered wrongly, in pieces, or not at all; half of these are carried out."""
        before = len(await asyncio.to_thread(self.server.seen))
        await call(self.server.chaos, 0.3)
        await asyncio.sleep(seconds)
        await call(self.server.heal)
        return len(await asyncio.to_thread(self.server.seen)) > before

    def url(self, ports: Sequence[int] = ()) -> str:
        return "kahuna://" + ",".join(f"{HOST}:{port}" for port in ports or self.ports)

    def close(self) -> None:
        self.server.kill()

    def log(self) -> str:
        return ""


class Sqlite(Store):
    """A file; its servers are the workers themselves, so it is harmed by other processes that have it open."""

    name = "sqlite"

    @property
    def path(self) -> Path:
        return self.folder / "locks.db"

    @property
    def harms(self) -> dict[str, Harm]:
        return {"file locked": self._lock, "writer frozen": self._freeze_writer, "writer killed": self._kill_writer}

    async def _lock(self, seconds: float) -> bool:
        """Somebody has a transaction open for too long."""
        with contextlib.closing(
            sqlite3.connect(self.path, timeout=20.0, isolation_level=None, check_same_thread=False)
        ) as database:
            await call(database.execute, "BEGIN IMMEDIATE")
            await asyncio.sleep(seconds)
            database.execute("ROLLBACK")
        return True

    async def _freeze_writer(self, seconds: float) -> bool:
        """A process is stopped in the middle of a transaction, which it never ends."""
        writer = await asyncio.to_thread(self._writer)
        writer.send_signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        await call(_kill, writer)
        return True

    async def _kill_writer(self, _seconds: float) -> bool:
        """A process is killed in the middle of a transaction that frees all locks; it must never have happened."""
        await call(_kill, await asyncio.to_thread(self._writer))
        return True

    def _writer(self) -> subprocess.Popen[bytes]:
        ready = self.folder / "ready"
        ready.unlink(missing_ok=True)
        command = [sys.executable, "-c", _WRITER, str(self.path), str(ready)]
        writer = spawn(command, folder=self.folder, log=self.folder / "log")
        wait_until(ready.exists, what="a process is in the middle of a transaction")
        return writer

    def url(self, ports: Sequence[int] = ()) -> str:
        return f"sqlite:///{self.path}"

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass


def _kill(process: subprocess.Popen[bytes]) -> None:
    end(process, politely=False)


_WRITER = """
import pathlib, sqlite3, sys, time
database = sqlite3.connect(sys.argv[1], timeout=20, isolation_level=None)
database.execute("BEGIN IMMEDIATE")
database.execute("DELETE FROM fencing_line")
pathlib.Path(sys.argv[2]).touch()
time.sleep(60)
"""
