"""A real PgBouncer before a server: many clients share a few connections, each for one transaction at a time."""

from __future__ import annotations

import shutil
import socket
import subprocess
from types import TracebackType
from typing import Self
from urllib.parse import quote

from child_processes import end, spawn
from local_ports import HOST, free_port
from patience import wait_until
from postgresql_programs import USER, as_user, give, new_folder
from postgresql_server import PostgresqlServer, Setting


class PgBouncer:
    """``with PgBouncer(server, binary=..., default_pool_size=2) as bouncer``: settings as in ``pgbouncer.ini``."""

    def __init__(self, server: PostgresqlServer, *, binary: str = "pgbouncer", **settings: Setting) -> None:
        self.server = server
        self.binary = binary
        self.settings: dict[str, Setting] = {"pool_mode": "transaction", "default_pool_size": 2} | settings
        self.folder = new_folder("pgbouncer-")
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"postgresql://{USER}@{HOST}:{self.port}/{quote(self.server.database, safe='')}"

    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def __enter__(self) -> Self:
        self.port = free_port()
        own = {"listen_addr": HOST, "listen_port": self.port, "unix_socket_dir": "", "auth_type": "any"}
        lines = [
            "[databases]",
            f"* = host={HOST} port={self.server.port} user={USER}",
            "[pgbouncer]",
            *(f"{name} = {value}" for name, value in {**own, **self.settings}.items()),
        ]
        ini = self.folder / "ini"
        ini.write_text("\n".join(lines) + "\n")
        give(ini)
        self._process = spawn(as_user([self.binary, str(ini)]), folder=self.folder, log=self.folder / "log")
        wait_until(lambda: self._process.poll() is not None or self._listens(), what="PgBouncer listens")
        assert self._process.poll() is None, f"PgBouncer does not start:\n{self.log()}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            end(self._process, politely=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _listens(self) -> bool:
        with socket.socket() as connection:
            return connection.connect_ex((HOST, self.port)) == 0
