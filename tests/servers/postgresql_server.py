"""A real PostgreSQL server on a port of its own, which a test may stop, kill, pause and start again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Self, TypeAlias
from urllib.parse import quote

import asyncpg
import psycopg
from child_processes import STOP_PATIENCE, ServerProcess, children, end, spawn, state
from local_ports import HOST, free_port
from patience import wait_until
from postgresql_programs import USER, as_user, give, new_folder, program, template
from redis_server import ServerError
from throwaway_certificates import Certificates

Setting: TypeAlias = str | int | float | bool

QUICK: dict[str, Setting] = {
    "fsync": False,  # a killed process loses nothing by it: what was written is the kernel's
    "full_page_writes": False,
    "shared_buffers": "16MB",
    "dynamic_shared_memory_type": "mmap",  # in the data folder, so that nothing is left after kill -9
    "max_connections": 150,
    "wal_level": "replica",
    "jit": False,
    "log_line_prefix": "%m %p %a ",
}

FORGETFUL: dict[str, Setting] = {
    "synchronous_commit": False,
    "wal_writer_delay": "10s",
    "wal_writer_flush_after": "1GB",  # 0 wakes the writer at each commit, from PostgreSQL 17 on
    "bgwriter_lru_maxpages": 0,
}
"""An operator who prefers speed: a crash loses ten seconds of commits, unless a transaction says otherwise."""

BENCH_NAME = "bench"
"""What the sessions of the bench are called: the process of one that was closed may take its time to end."""


class PostgresqlServer(ServerProcess):
    """
    One server; settings are keyword arguments in the words of ``postgresql.conf``.

    ``PostgresqlServer(max_connections=10, ssl=False)``: True and False become ``on`` and ``off``. *hba* are lines of
    ``pg_hba.conf``; without them the server trusts every client. The bench itself always gets in, by the Unix socket.

    The methods that are not async take milliseconds; in a test whose loop must not be held up even for that,
    call them with ``asyncio.to_thread``.
    """

    def __init__(
        self, *, tls: Certificates | None = None, hba: Sequence[str] | None = None, **settings: Setting
    ) -> None:
        self.certificates = tls
        self.hba = hba
        self.settings: dict[str, Setting] = QUICK | settings
        self.folder = new_folder("postgresql-")
        self.data = self.folder / "data"
        self.port = 0
        self.database = "postgres"
        """Which database `url`, `ask`, `fetch` and `execute` mean."""

    # Addresses

    @property
    def url(self) -> str:
        return self.url_as(USER)

    def url_as(self, user: str, password: str = "", *, port: int = 0, **options: Setting) -> str:
        """The address for another user, through a proxy's *port*, with *options* behind the question mark."""
        login = quote(user, safe="") + (f":{quote(password, safe='')}" if password else "")
        query = "&".join(f"{name}={quote(str(value), safe='')}" for name, value in options.items())
        address = f"postgresql://{login}@{HOST}:{port or self.port}/{quote(self.database, safe='')}"
        return f"{address}?{query}" if query else address

    # Life and death

    def start(self) -> Self:
        """Start, or start again where it was, and return when it takes connections."""
        assert not self.running, "the server is running"
        for _ in range(10):
            self._configure()
            logged = len(self.log())
            command = as_user([program("postgres"), "-D", str(self.data)])
            self._process = spawn(command, folder=self.folder, log=self.folder / "log")
            wait_until(lambda: not self.running or self._ready(), what="PostgreSQL is ready")
            if self.running:
                return self
            if "Address already in use" not in self.log()[logged:]:
                break
            self.port = 0
        raise ServerError(f"PostgreSQL does not start:\n{self.log()}")

    def stop(self, *, immediate: bool = False) -> None:
        """Shut down as an administrator does: fast, or *immediate*, after which the next start has to recover."""
        if self._process is not None and self.running:
            self.resume()
            self._process.send_signal(signal.SIGQUIT if immediate else signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_PATIENCE)
        self._collect()

    def kill(self) -> None:
        """``kill -9`` of every process at once: shared memory is gone, what was written to files is not."""
        if self.running:
            self.pause()  # so that no process is started while we look
            victims = children(self.pid)
            for pid in [*victims, self.pid]:
                _signal(pid, signal.SIGKILL)
            wait_until(lambda: all(state(pid) in {"", "Z"} for pid in victims), what="the processes are gone")
        self._collect()

    def restart(self, *, immediate: bool = False) -> None:
        """Stop and start on the same port with the same data; for a crash: `kill`, then `start`."""
        self.stop(immediate=immediate)
        self.start()

    def pause(self) -> None:
        """Stop all processes with SIGSTOP: the kernel accepts connections and bytes, and the server never answers."""
        _stop([self.pid])  # first: it starts the others
        _stop(children(self.pid))

    def resume(self) -> None:
        for pid in [*children(self.pid), self.pid]:
            _signal(pid, signal.SIGCONT)

    def close(self) -> None:
        """End it and remove its folder."""
        self.stop(immediate=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    # Questions, as the superuser through the Unix socket, each on a connection of its own

    def ask(self, statement: str, *arguments: Any) -> list[tuple[Any, ...]]:
        """The rows of one statement, with ``$1`` for an argument; blocks."""
        with psycopg.connect(
            host=str(self.folder),
            port=self.port,
            user=USER,
            dbname=self.database,
            autocommit=True,
            application_name=BENCH_NAME,
        ) as connection:
            found = psycopg.RawCursor(connection).execute(statement, arguments or None)
            return list(found.fetchall()) if found.description else []

    @contextlib.asynccontextmanager
    async def connected(self, **options: Any) -> AsyncIterator[Any]:
        """An asyncpg connection of the superuser, or of ``user="app"``."""
        address = {"host": str(self.folder), "port": self.port, "user": USER, "database": self.database}
        named = {"server_settings": {"application_name": BENCH_NAME}}
        connection = await asyncpg.connect(**address | named | options)
        try:
            yield connection
        finally:
            connection.terminate()
            await asyncio.sleep(0)

    async def fetch(self, statement: str, *arguments: Any) -> list[Any]:
        """The records of one statement."""
        async with self.connected() as connection:
            return list(await connection.fetch(statement, *arguments))

    async def value(self, statement: str, *arguments: Any) -> Any:
        """The first column of the first row; None without rows."""
        async with self.connected() as connection:
            return await connection.fetchval(statement, *arguments)

    async def execute(self, script: str) -> None:
        """One or several statements, in one transaction unless they say otherwise."""
        async with self.connected() as connection:
            await connection.execute(script)

    # The inside

    def _ready(self) -> bool:
        """As ``pg_ctl --wait`` finds out."""
        try:
            lines = (self.data / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        return len(lines) > 7 and lines[0] == str(self.pid) and lines[7].strip() in {"ready", "standby"}

    def _collect(self) -> None:
        if self._process is not None:
            end(self._process, politely=False)

    def _make_data(self) -> None:
        subprocess.run(["cp", "--archive", "--reflink=auto", str(template()), str(self.data)], check=True)

    def _configure(self) -> None:
        """Make the data folder, once, and write its configuration when there is no port yet."""
        if not self.data.exists():
            self._make_data()
        if not self.port:
            self.port = free_port()
            self._write("postgresql.conf", [f"{name} = {_quoted(value)}" for name, value in self._all().items()])
            self._write("pg_hba.conf", [*BENCH, *(TRUSTING if self.hba is None else self.hba)])

    def _all(self) -> dict[str, Setting]:
        own: dict[str, Setting] = {
            "listen_addresses": HOST,
            "port": self.port,
            "unix_socket_directories": str(self.folder),
        }
        if self.certificates is not None:
            own |= {"ssl": True}
            files = {"ssl_ca_file": self.certificates.authority, "ssl_cert_file": self.certificates.certificate}
            for name, path in (files | {"ssl_key_file": self.certificates.key}).items():
                own[name] = str(self._private_copy(path))
        return own | self.settings

    def _private_copy(self, path: Path) -> Path:
        """A copy that only the server can read: it refuses a key that other users could read."""
        copy = self.folder / path.name
        shutil.copyfile(path, copy)
        copy.chmod(0o600)
        give(copy)
        return copy

    def _write(self, name: str, lines: Sequence[str]) -> None:
        path = self.data / name
        path.write_text("".join(f"{line}\n" for line in lines))
        give(path)


BENCH = (f"local all {USER} trust", f"local replication {USER} trust")
TRUSTING = (f"host all all {HOST}/32 trust", f"host replication all {HOST}/32 trust", "local all all trust")


def _quoted(value: Setting) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "'" + str(value).replace("'", "''") + "'"


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _stop(pids: Sequence[int]) -> None:
    for pid in pids:
        _signal(pid, signal.SIGSTOP)
    wait_until(lambda: all(state(pid) in {"T", "Z", ""} for pid in pids), what="the processes stand still")
