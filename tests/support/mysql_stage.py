"""Stage of the scenarios on MySQL and MariaDB: users, rows that someone else locks, and what clients leave behind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pymysql
from local_ports import HOST
from mysql_server import MysqlServer
from stays import PATIENCE, eventually, none_left

NEEDED = "SELECT, INSERT, UPDATE, DELETE"
"""Rights that a user needs in a database that has the tables."""

OTHERS = "db = DATABASE() AND id <> CONNECTION_ID() AND command <> 'Killed'"
SESSIONS = f"SELECT id, info FROM information_schema.processlist WHERE {OTHERS}"
SLEEPERS = f"SELECT id FROM information_schema.processlist WHERE {OTHERS} AND info LIKE 'SELECT SLEEP(%'"

SEVERAL: dict[str, tuple[dict[str, Any], str]] = {
    "mariadb": ({"wsrep_on": True}, "the server is a node of Galera"),
    "mysql": (
        {"plugin_load_add": "group_replication.so", "group_replication_single_primary_mode": False},
        "group replication runs with several primaries",
    ),
}
"""Settings of one of several servers that take writes, and what a refusal says. The others are not started."""


def user(
    server: MysqlServer,
    *,
    name: str = "peter",
    password: str = "",
    rights: str = NEEDED,
    limit: int = 0,
    on: str = "",
) -> str:
    """Make a user, by TCP and by the socket, with *rights* in the database of the test; return its URL."""
    for host in (HOST, "localhost"):
        server.ask(f"CREATE USER '{name}'@'{host}' IDENTIFIED BY '{password}' WITH MAX_USER_CONNECTIONS {limit}")
        if rights:
            server.ask(f"GRANT {rights} ON {on or server.database}.* TO '{name}'@'{host}'")
    return server.url_as(name, password)


async def sessions(server: MysqlServer) -> list[int]:
    """The server's numbers of the connections to the database of the test, without those of the bench."""
    return [number for number, _ in await server.fetch(SESSIONS)]


async def sleepers(server: MysqlServer) -> list[int]:
    """The numbers of the connections that wait for a ring."""
    return [number for (number,) in await server.fetch(SLEEPERS)]


async def asleep(server: MysqlServer, number: int = 1) -> list[int]:
    """Wait until so many connections wait for a ring; return their numbers."""

    async def found() -> list[int]:
        those = await sleepers(server)
        return those if len(those) == number else []

    sleeping: list[int] = await eventually(found, what=f"{number} sleep")
    return sleeping


async def running(server: MysqlServer, text: str) -> list[int]:
    """Wait until a statement that contains *text* runs; return the numbers of its connections."""
    where = "db = DATABASE() AND id <> CONNECTION_ID() AND info LIKE %s"

    async def found() -> Any:
        return await server.fetch(f"SELECT id FROM information_schema.processlist WHERE {where}", f"%{text}%")

    return [number for (number,) in await eventually(found, what=f"{text} runs")]


async def kill(server: MysqlServer, *numbers: int, what: str = "") -> None:
    """End connections, or only the statement of each: ``what="QUERY"``."""
    for number in numbers:
        with contextlib.suppress(pymysql.err.Error):  # it has ended by itself
            await asyncio.to_thread(server.ask, f"KILL {what} {number}")


async def line(server: MysqlServer, name: str = "a") -> int:
    """Count those who wait for a lock."""
    if not await server.fetch("SHOW TABLES LIKE 'fencing_ticket'"):
        return 0
    waits = "token IS NULL AND dies > UNIX_TIMESTAMP(NOW(6)) * 1000000"
    return int(await server.value(f"SELECT count(*) FROM fencing_ticket WHERE name = %s AND {waits}", name))


async def waiting(server: MysqlServer, number: int, name: str = "a", *, within: float = PATIENCE) -> None:
    async def all_wait() -> bool:
        return await line(server, name) == number

    await eventually(all_wait, what=f"{number} wait", within=within)


async def leavings(server: MysqlServer) -> list[object]:
    """Tickets and connections."""
    found: list[object] = list(await server.fetch(SESSIONS))
    if await server.fetch("SHOW TABLES LIKE 'fencing_ticket'"):
        lives = "dies > UNIX_TIMESTAMP(NOW(6)) * 1000000"
        found += await server.fetch(f"SELECT name FROM fencing_line WHERE {lives}")
        found += await server.fetch(f"SELECT name FROM fencing_ticket WHERE {lives} AND ended IS NULL")
    return found


async def nothing_left(server: MysqlServer) -> None:
    """See that no lease, no line and no connection remains."""
    await none_left(lambda: leavings(server))


@asynccontextmanager
async def in_transaction(server: MysqlServer, *statements: str) -> AsyncIterator[Any]:
    """A connection that ran *statements* in a transaction and then idles."""
    async with server.connected(user="root", unix_socket=server.socket) as connection:
        cursor = connection.cursor()
        await cursor.execute("SET innodb_lock_wait_timeout = 50")
        await cursor.execute("START TRANSACTION")
        for statement in statements:
            await cursor.execute(statement)
            await cursor.fetchall()
        yield cursor
        await cursor.execute("ROLLBACK")
