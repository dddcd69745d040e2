"""A real server of MariaDB or MySQL on a port of its own, which a test may stop, kill, pause and start again."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, TypeAlias
from urllib.parse import quote

import asyncmy
import pymysql
from child_processes import STOP_PATIENCE, ServerProcess, end, spawn, state
from local_ports import HOST, free_port
from mysql_programs import SIZES, as_root, program, template
from patience import wait_until
from pymysql.constants import CLIENT
from quick_folder import quick_folder
from redis_server import ServerError
from throwaway_certificates import Certificates

Setting: TypeAlias = str | int | float | bool

USER = "app"
"""Who `MysqlServer.url` names: may do everything in the databases of the tests, and nothing elsewhere."""

QUICK: dict[str, Setting] = {
    "skip_name_resolve": True,
    "max_connections": 150,
    "innodb_buffer_pool_size": "16M",
    "innodb_log_buffer_size": "2M",
    "innodb_buffer_pool_dump_at_shutdown": False,
    "innodb_buffer_pool_load_at_startup": False,
    "innodb_doublewrite": False,  # a killed process leaves no half-written page: that is for a loss of power
    "key_buffer_size": "1M",
    "table_open_cache": 200,
    "skip_log_bin": True,
}
"""Small and without names; what is committed is flushed, as by default, because the store asks for that."""

QUICK_OF: dict[str, dict[str, Setting]] = {
    "mariadb": {"innodb_log_file_size": "4M", "aria_pagecache_buffer_size": "2M"},
    "mysql": {"innodb_redo_log_capacity": "16M", "mysqlx": False, "secure_file_priv": "NULL"},
}

_numbers = itertools.count(1)

FIRST_STATEMENTS = rf"""
CREATE DATABASE IF NOT EXISTS test;
CREATE USER IF NOT EXISTS '{USER}'@'{HOST}';
GRANT ALL PRIVILEGES ON `test%`.* TO '{USER}'@'{HOST}';
"""


class MysqlServer(ServerProcess):
    """
    One server; settings are keyword arguments in the words of the server.

    ``MysqlServer("mariadb", max_connections=10, log_bin=True)``: True and False become ``ON`` and ``OFF``. The bench
    itself comes as `root`, by the Unix socket; what the tests start comes as `USER`, who has no password.

    The data is in memory unless *folder* says where. There MariaDB maps its log, so that `kill` loses nothing, whatever
    the settings say: a test of what is lost needs a folder on a disk.

    The methods that are not async take milliseconds; in a test whose loop must not be held up even for that,
    call them with ``asyncio.to_thread``.
    """

    def __init__(
        self,
        flavour: str = "mariadb",
        *,
        tls: Certificates | None = None,
        folder: Path | None = None,
        **settings: Setting,
    ) -> None:
        self.flavour = flavour
        self.certificates = tls
        self.settings: dict[str, Setting] = QUICK | QUICK_OF[flavour] | settings
        self.folder = folder or quick_folder("mysql-")
        self.data = self.folder / "data"
        self.socket = str(self.folder / "socket")
        self.port = 0
        self.database = "test"
        """Which database `url`, `ask`, `fetch` and `execute` mean."""

    # Addresses

    @property
    def url(self) -> str:
        return self.url_as(USER)

    def url_as(self, user: str, password: str = "", *, port: int = 0, **options: Setting) -> str:
        """The address for another user, through a proxy's *port*, with *options* behind the question mark."""
        login = quote(user, safe="") + (f":{quote(password, safe='')}" if password else "")
        query = "&".join(f"{name}={quote(str(value), safe='')}" for name, value in options.items())
        address = f"mysql://{login}@{HOST}:{port or self.port}/{quote(self.database, safe='')}"
        return f"{address}?{query}" if query else address

    # Life and death

    def start(self) -> Self:
        """Start, or start again where it was, and return when it takes connections."""
        assert not self.running, "the server is running"
        if not self.data.exists():
            subprocess.run(
                ["cp", "--archive", "--reflink=auto", str(template(self.flavour)), str(self.data)], check=True
            )
            (self.folder / "first.sql").write_text(FIRST_STATEMENTS)
        for _ in range(10):
            self.port = self.port or free_port()
            logged = len(self.log())
            self._process = spawn(self._command(), folder=self.folder, log=self.folder / "log")
            wait_until(lambda: not self.running or self._ready(), what=f"{self.flavour} is ready")
            if self.running:
                return self
            if "Address already in use" not in self.log()[logged:]:
                break
            self.port = 0
        raise ServerError(f"{self.flavour} does not start:\n{self.log()}")

    def stop(self) -> None:
        """Shut down as an administrator does."""
        if self._process is not None and self.running:
            self.resume()
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_PATIENCE)
        self._collect()

    def kill(self) -> None:
        """``kill -9``: what was written to files is there at the next start, and nothing else."""
        self._collect()

    def restart(self) -> None:
        """Stop and start on the same port with the same data; for a crash: `kill`, then `start`."""
        self.stop()
        self.start()

    def restart_as_reader(self) -> Self:
        """Start again as a reader of Aurora is: ``innodb_read_only`` is on, and ``read_only`` is off."""
        self.stop()
        (self.folder / "none.sql").touch()
        self.settings |= {"innodb_read_only": True, "init_file": str(self.folder / "none.sql")}
        return self.start()

    def pause(self) -> None:
        """Stop the process with SIGSTOP: the kernel accepts connections and bytes, and the server never answers."""
        self._signal(signal.SIGSTOP)
        wait_until(lambda: state(self.pid) in {"T", "Z", ""}, what="the process stands still")

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """End it and remove its folder."""
        self._collect()
        shutil.rmtree(self.folder, ignore_errors=True)

    # Questions, as the superuser through the Unix socket, each on a connection of its own

    def ask(self, statement: str, *arguments: Any) -> list[tuple[Any, ...]]:
        """The rows of one statement, with ``%s`` for an argument; blocks."""
        with self._bench() as connection, connection.cursor() as cursor:
            cursor.execute(statement, arguments or None)
            return list(cursor.fetchall())

    async def fetch(self, statement: str, *arguments: Any) -> list[tuple[Any, ...]]:
        """The rows of one statement."""
        return await asyncio.to_thread(self.ask, statement, *arguments)

    async def value(self, statement: str, *arguments: Any) -> Any:
        """The first column of the first row; None without rows."""
        rows = await self.fetch(statement, *arguments)
        return rows[0][0] if rows else None

    async def execute(self, script: str) -> None:
        """One or several statements."""

        def run() -> None:
            with self._bench(client_flag=CLIENT.MULTI_STATEMENTS) as connection, connection.cursor() as cursor:
                cursor.execute(script)
                while cursor.nextset():
                    pass

        await asyncio.to_thread(run)

    @contextlib.asynccontextmanager
    async def connected(self, **options: Any) -> AsyncIterator[Any]:
        """An asyncmy connection of `USER` over TCP, or of ``user="root", unix_socket=server.socket``."""
        address = {"host": HOST, "port": self.port, "user": USER, "database": self.database}
        connection = await asyncmy.connect(**address | options)
        try:
            yield connection
        finally:
            connection.close()
            await asyncio.sleep(0)

    def end_connections(self) -> None:
        """End every connection but those of the server itself; their transactions are rolled back."""
        mine = (
            "SELECT id FROM information_schema.processlist WHERE user NOT IN ('root', 'system user', 'event_scheduler')"
        )
        for (connection,) in self.ask(mine):
            with contextlib.suppress(pymysql.OperationalError, pymysql.InternalError):  # it has ended by itself
                self.ask(f"KILL {connection}")

    async def waiters(self) -> set[int]:
        """The numbers of the connections whose transactions wait for the locks of others."""
        found = "SELECT trx_mysql_thread_id FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'"
        return {number for (number,) in await self.fetch(found)}

    async def has_a_waiter(self, *, besides: Collection[int] = ()) -> None:
        """Wait until a transaction waits for the lock of another one, on a connection *besides* some."""
        for _ in range(300):
            if (await self.waiters()).difference(besides):
                return
            await asyncio.sleep(0.12)  # the server looks anew only if it was not asked for 0.1 s
        raise AssertionError("no transaction waits for another one")

    async def has_a_waiter_for(self, name: str) -> None:
        """Wait until a connection waits for the lock *name* of GET_LOCK."""
        waiting = (
            f"SELECT 1 FROM information_schema.processlist WHERE state = 'User lock' AND info LIKE '%GET_LOCK(_{name}%'"
        )
        for _ in range(600):
            if await self.fetch(waiting):
                return
            await asyncio.sleep(0.05)
        raise AssertionError("no connection waits for the lock")

    @contextlib.contextmanager
    def fresh_database(self) -> Iterator[Self]:
        """An empty database, which `url` names; it is gone afterwards, with the users that were created meanwhile."""
        before, database = self.database, f"test_{next(_numbers)}"
        self.database = ""
        self.ask(f"CREATE DATABASE {database}")
        self.database = database
        yield self
        if not self.running:
            self.start()
        self.resume()
        self.database = ""
        self.end_connections()  # a transaction that was left open would keep the database
        self.ask(f"DROP DATABASE {database}")
        known = ("root", USER, "mariadb.sys", "mysql.sys", "mysql.session", "mysql.infoschema")
        for user, host in self.ask("SELECT user, host FROM mysql.user WHERE user NOT IN %s", known):
            self.ask("DROP USER %s@%s", user, host)
        self.database = before

    # The inside

    def _bench(self, **options: Any) -> pymysql.Connection[Any]:
        return pymysql.connect(
            unix_socket=self.socket, user="root", database=self.database, autocommit=True, read_timeout=60, **options
        )

    def _command(self) -> Sequence[str]:
        own: dict[str, Setting] = {
            "datadir": str(self.data),
            "socket": self.socket,
            "tmpdir": str(self.folder),  # at its start MariaDB empties the one that it shares with other servers
            "pid_file": str(self.folder / "pid"),
            "bind_address": HOST,
            "port": self.port,
            "init_file": str(self.folder / "first.sql"),
        }
        if self.certificates is not None:
            files = {"ssl_ca": self.certificates.authority, "ssl_cert": self.certificates.certificate}
            own |= {name: str(path) for name, path in (files | {"ssl_key": self.certificates.key}).items()}
        server = program(self.flavour)
        assert server is not None, f"{self.flavour} is missing"
        settings = [f"--{name}={_written(value)}" for name, value in (own | self.settings).items()]
        return [server, "--no-defaults", *as_root(), *SIZES, *settings]

    def _ready(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:  # the driver would leave one open at each refusal
            if probe.connect_ex(self.socket):
                return False
        return self.ask("SELECT 1") == [(1,)]

    def _collect(self) -> None:
        if self._process is not None:
            end(self._process, politely=False)


def _written(value: Setting) -> str:
    return {True: "ON", False: "OFF"}[value] if isinstance(value, bool) else str(value)
