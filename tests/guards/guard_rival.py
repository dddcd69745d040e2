"""
A process that competes for a resource: raises the fence, reads, and writes what it read plus one.

    python guard_rival.py KIND PATH SEED TURNS

Starts at a line on stdin; prints every accepted token at once, and "end". Also imported by tests.
"""

import asyncio
import sqlite3
import sys
from contextlib import closing

import psycopg

from fencing_sdk import StaleTokenError, Token
from fencing_sdk.guards.files import FileGuard
from fencing_sdk.guards.sql import SqlGuard

RESOURCE = "counter"
DATA = "CREATE TABLE IF NOT EXISTS data (resource TEXT PRIMARY KEY, value TEXT)"
PUT = "INSERT OR REPLACE INTO data VALUES (?, ?)"
GET = "SELECT value FROM data WHERE resource = ?"


class SqlDesk:
    """The counter in a table, guarded in its transaction."""

    def __init__(self, path):
        self.path = path
        self.guard = SqlGuard(path)
        with self.connect() as connection:
            connection.execute("PRAGMA journal_mode = wal")
            connection.execute(DATA)

    def connect(self):
        return closing(sqlite3.connect(self.path, timeout=30))

    def write(self, resource, token, value):
        with self.connect() as connection, connection:
            self.guard.admit_sync(connection, resource, token)
            connection.execute(PUT, (resource, value))

    def read(self, resource):
        with self.connect() as connection:
            row = connection.execute(GET, (resource,)).fetchone()
        return None if row is None else row[0]


class PostgresqlDesk:
    """The counter in a table of a server, guarded in its transaction."""

    def __init__(self, url):
        self.url = str(url)
        self.guard = SqlGuard(self.url)

    def prepare(self):
        with psycopg.connect(self.url) as connection:
            connection.execute(DATA)

    def write(self, resource, token, value):
        with psycopg.connect(self.url) as connection:
            self.guard.admit_sync(connection, resource, token)
            put = "INSERT INTO data VALUES (%s, %s) ON CONFLICT (resource) DO UPDATE SET value = excluded.value"
            connection.execute(put, (resource, value))

    def read(self, resource):
        with psycopg.connect(self.url) as connection:
            row = connection.execute("SELECT value FROM data WHERE resource = %s", (resource,)).fetchone()
        return None if row is None else row[0]


class FileDesk:
    """The counter in a file."""

    def __init__(self, path):
        self.guard = FileGuard(path)

    def write(self, resource, token, value):
        self.guard.write_sync(resource, token, value.encode())

    def read(self, resource):
        data = self.guard.read_sync(resource)
        return None if data is None else data.decode()


DESKS = {"sql": SqlDesk, "files": FileDesk, "postgresql": PostgresqlDesk}


async def count_up(desk, seed: int, turns: int, accepted=lambda token: None):
    for _ in range(turns):
        highest = await desk.guard.highest(RESOURCE)
        token = Token(0 if highest is None else highest + 1, f"{seed:08x}")
        try:
            await desk.guard.raise_to(RESOURCE, token)
            value = int(desk.read(RESOURCE) or 0)
            desk.write(RESOURCE, token, str(value + 1))
        except StaleTokenError:
            continue
        accepted(token)


def say(word: object) -> None:
    print(word, flush=True)  # noqa: T201  (how a process talks to its test)


def main(kind: str, path: str, seed: str, turns: str) -> None:
    desk = DESKS[kind](path)
    say("ready")
    sys.stdin.readline()
    asyncio.run(count_up(desk, int(seed), int(turns), lambda token: say(int(token))))
    say("end")


if __name__ == "__main__":
    main(*sys.argv[1:])
